"""Calls of several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor


def in_threads(work, arguments):
    """Call ``work(argument)`` in a thread for each argument, all at once; raise what one raises."""
    start = threading.Barrier(len(arguments))

    def one(argument):
        start.wait()
        work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(one, arguments))
