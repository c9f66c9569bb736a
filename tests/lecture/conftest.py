"""All chapters with small sizes on NumPy, run once; and folders of chapters made up by a test."""

import pytest

from gpuattn.lecture.harness import chapters, record
from gpuattn.lecture.harness.say import Say
from gpuattn.runtime.device import array_module


@pytest.fixture(scope="session")
def smoke():
    """The record of a smoke run. Tests must not change it."""
    found = record.new("NumPy, in a test", "gpuattn lecture", array_module("numpy"), True, False)
    for chapter in chapters.chapters().values():
        record.put(found, chapters.run(chapter, Say(smoke=True, tell=lambda text: None)))
    return found
