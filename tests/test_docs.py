"""Examples in docstrings do what they say, on NumPy."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "gpuattn").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


def test_the_package_begins_with_an_example():
    assert {"gpuattn", "gpuattn.nn.module"} <= set(MODULES)
