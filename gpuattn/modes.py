"""The mode of a context: what ``no_grad``, ``use_impl`` and others say of the calls in a block.

All of it is in one context variable, so that a call, which takes microseconds, asks once.
"""

import contextlib
import contextvars
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


class with_mode(contextlib.ContextDecorator):
    """Change a field of the mode in a block, in this thread and context.

    A class, as a generator would take 0.6 us more.
    """

    def __init__(self, field: str, value: Any) -> None:
        self.field, self.value, self.before = field, value, list[Any]()

    def _recreate_cm(self) -> "with_mode":  # for each call of a decorated function, see contextlib
        return with_mode(self.field, self.value)

    def __enter__(self) -> None:
        now = mode.get()
        self.before.append(getattr(now, self.field))
        mode.set(now.but(self.field, self.value))

    def __exit__(self, *_: object) -> None:
        # this field alone: blocks may end in another order than they began
        mode.set(mode.get().but(self.field, self.before.pop()))


def without_plans() -> contextlib.AbstractContextManager[None]:
    """Let every op of a block check its arguments, choose and run as if called the first time."""
    return with_mode("planned", False)
