"""Public functions have annotations."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "gpuattn").rglob("*.py"))
    if path.parent.name != "lecture"  # chapters are scripts for readers
}


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


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_are_annotated(module):
    found = {name: lacks(node) for name, node in public(ast.parse(MODULES[module].read_text()))}
    assert {name: names for name, names in found.items() if names} == {}
