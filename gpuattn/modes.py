"""The mode of a context: what ``no_grad``, ``use_impl`` and others say of the calls in a block.

All of it is in one context variable, so that a call, which takes microseconds, asks once.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


class Names(dict[str, str]):
    """{op: implementation}, never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class Mode:
    """How calls are made. There is one Mode with the same values, so that plans are found by it.

    ``recorded``: calls of Tensors that require a gradient are recorded. ``planned``: plans are
    made and used, see ``autodiff.plans``. ``impls``: what ``use_impl`` asks for.
    ``batch_invariant``: a sequence is the same bits whatever else is in its batch.
    """

    FIELDS = "recorded", "planned", "impls", "batch_invariant"
    __slots__ = (*FIELDS, "_others")

    def __init__(self, recorded: bool, planned: bool, impls: Names, batch_invariant: bool) -> None:
        self.recorded, self.planned, self.impls = recorded, planned, impls
        self.batch_invariant = batch_invariant
        self._others: dict[tuple[str, Any], Mode] = {}

    def but(self, field: str, value: Any) -> "Mode":
        """Return the Mode that differs in one field."""
        found = self._others.get((field, value))
        if found is None:
            values = [value if name == field else getattr(self, name) for name in self.FIELDS]
            found = _all.setdefault((*values,), Mode(*values))
            self._others[field, value] = found
        return found


_default = True, True, Names(), False
_all = {_default: Mode(*_default)}  # by their values
mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("gpuattn_mode", default=_all[_default])


@contextlib.contextmanager
def with_mode(field: str, value: Any) -> Iterator[None]:
    """Change a field of the mode in a block, in this thread and context."""
    before = getattr(mode.get(), field)
    mode.set(mode.get().but(field, value))
    try:
        yield
    finally:
        mode.set(mode.get().but(field, before))  # blocks may end in another order than they began


def without_plans() -> contextlib.AbstractContextManager[None]:
    """Let every op of a block check its arguments, choose and run as if called the first time."""
    return with_mode("planned", False)
