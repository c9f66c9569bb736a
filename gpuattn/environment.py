"""Environment variables that libraries read while they load (imported before NumPy); CPU cores.

OpenBLAS lets idle threads spin for 2^26 cycles, some 20 ms, before they sleep. In a training step
that holds many small products they take the cores that other threads could use: a step on two
cores took 47 ms, and takes 43 ms where they spin for 2^12 (measured in November 2026).
"""

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "12")


def usable_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
