"""A plugin of pytest for ``.ci/run``: a test that passed in one part can be left out of another.

``ONCE_WRITE`` names a file for the ids of the tests that pass, ``ONCE_READ`` such a file, whose
tests are deselected, and counted so. A test that was skipped or left out there is not in it.
"""

import os
from pathlib import Path

import pytest

WRITE, READ = os.environ.get("ONCE_WRITE"), os.environ.get("ONCE_READ")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items, config):
    passed = set(Path(READ).read_text().splitlines()) if READ else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report):
    if WRITE and report.when == "call" and report.passed:
        with Path(WRITE).open("a") as file:
            file.write(f"{report.nodeid}\n")
