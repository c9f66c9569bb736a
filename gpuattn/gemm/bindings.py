"""Importing nvmath's bindings of cuBLASLt, and nothing else of nvmath."""

import contextlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

NAMES = {"nvmath": "", "nvmath.bindings": "bindings"}  # packages, and their folders in nvmath's


def bindings() -> Any:
    """Return ``nvmath.bindings.cublasLt``. Raises ImportError where it cannot be imported.

    nvmath imports all that it has: 0.4 s, many times the first call of a kernel. So its packages
    are empty ones while the module is imported. A later ``import nvmath`` finds the real ones, and
    this module in them. If the module does need the rest, it is imported as usual.
    """
    found = None if "nvmath" in sys.modules else importlib.util.find_spec("nvmath")
    if found is not None and found.submodule_search_locations:
        for name, folder in NAMES.items():
            empty = ModuleType(name)
            places = found.submodule_search_locations
            empty.__path__ = [os.path.join(place, folder) for place in places]
            sys.modules[name] = empty
        try:
            with contextlib.suppress(ImportError, AttributeError):
                return importlib.import_module("nvmath.bindings.cublasLt")
        finally:
            for name in NAMES:
                del sys.modules[name]
    return importlib.import_module("nvmath.bindings.cublasLt")
