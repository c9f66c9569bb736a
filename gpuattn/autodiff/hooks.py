"""Hooks that observe every op call: ``profile`` times ops with them."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from gpuattn.modes import without_plans

_hook: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "gpuattn_hook", default=None
)


@contextlib.contextmanager
def hooked(hook: Callable | None) -> Iterator[None]:
    """Call, in a block, what ``hook(op, direction, function)`` returns in place of each function.

    ``op``: the op's name. ``function``: the ``forward`` or ``backward`` of its ``impls.Impl``, as
    ``direction`` says. ``hook`` None removes the hook, such as while a hook itself computes.
    """
    token = _hook.set(hook)
    try:
        with without_plans():
            yield
    finally:
        _hook.reset(token)


def with_hook(op: str, direction: str, function: Callable) -> Callable:
    """Return ``function``, or what the hook returns for it."""
    hook = _hook.get()
    return function if hook is None else hook(op, direction, function)


def is_hooked() -> bool:
    """Return whether a hook is set. Then each op runs by itself, so that it can be timed."""
    return _hook.get() is not None
