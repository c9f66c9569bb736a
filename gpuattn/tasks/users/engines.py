"""Engines whose kernels compile all at the same time."""

from collections.abc import Callable
from typing import Any

from gpuattn.arrays import on_gpu
from gpuattn.engine import Engine
from gpuattn.errors import ConfigError, problem
from gpuattn.runtime.cold_start import rehearse


def check_cache(kv_cache: bool, batch_invariant: bool) -> None:
    """Raise ConfigError for ``batch_invariant`` without a key-value cache."""
    if batch_invariant and not kv_cache:
        accepted = "False without a key-value cache"
        raise ConfigError(problem("Engine", "batch_invariant", True, accepted))


def engine_for(
    known: Engine | None, model: Any, first: Callable[[Engine], Any], *, batch_invariant: bool
) -> Engine:
    """Return ``known``, or another Engine if that is None or of the other kind.

    On a GPU ``first(engine)``, the first work of a new one, is rehearsed. Another engine does it,
    so the memory of this one holds nothing but what kernels computed.
    """
    if known is not None and known.batch_invariant == batch_invariant:
        return known
    settings: dict[str, Any] = {"batch_invariant": batch_invariant}
    if on_gpu(model.parameters()[0].data):
        rehearse(lambda: first(Engine(model, notify=lambda sentence: None, **settings)))
    return Engine(model, **settings)
