"""Public functions have annotations, but for the rooms that pyproject.toml lists."""

import ast
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
(UNTYPED,) = (part["module"] for part in PROJECT["tool"]["mypy"]["overrides"])
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "gpuattn").rglob("*.py"))
}


def untyped(name):
    return any(fnmatch(name, pattern) for pattern in UNTYPED)


def public(node):
    """Yield (name, definition) of public functions, and of what public classes have of them."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and is_public(child.name):
            yield child.name, child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            for name, method in public(child):
                yield f"{child.name}.{name}", method


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def lacks(function):
    """Return what has no annotation."""
    asked = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    asked += filter(None, (function.args.vararg, function.args.kwarg))
    names = [a.arg for a in asked if a.annotation is None and a.arg not in ("self", "cls")]
    return names + ["return"] * (function.returns is None)


@pytest.mark.parametrize("module", [name for name in MODULES if not untyped(name)])
def test_public_functions_are_annotated(module):
    found = {name: lacks(node) for name, node in public(ast.parse(MODULES[module].read_text()))}
    assert {name: names for name, names in found.items() if names} == {}


def test_every_room_without_types_exists():
    """So that the list only ever gets shorter."""
    unused = [p for p in UNTYPED if not any(fnmatch(name, p) for name in MODULES)]
    assert unused == []
