"""Training steps of whole models, one ladder of a chapter after the other."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuattn.bench import timing
from gpuattn.bench.train.cases import Step, small
from gpuattn.bench.train.measure import Ours, Updates
from gpuattn.impls import use_impl
from gpuattn.lecture.harness.say import Say

SAMPLES = 12  # of a step on a GPU


@dataclass(frozen=True)
class Rung:
    """A model's step: ``impls`` as for ``use_impl``, by launches or as a CUDA graph."""

    case: Step
    impls: Mapping[str, str] = field(default_factory=dict)
    graphs: bool = True


@dataclass(frozen=True)
class Found:
    """Of a rung: microseconds of its step, the bytes that it holds, and the loss of the first.

    ``peak``: always of steps op by op, so that rungs with and without a graph can be compared.
    """

    us: list[float]
    peak: float
    loss: float


def climb(say: Say, rungs: Mapping[str, Rung], **smaller: Any) -> dict[str, Found]:
    """Return what steps take. On NumPy of a small case of the family, with fields ``smaller``.

    All begin with the same parameters and repeat one batch; those of equal cases share a model.
    If a rung cannot be captured as it asks for, all of them run op by op, and a line says why.
    """
    if say.device != "cuda":
        return {
            name: _here(say, replace(rung, case=replace(small(rung.case), **smaller)))
            for name, rung in rungs.items()
        }
    found: dict[str, Found] = {}
    refusals: list[str] = []
    xp, pool, case, ours = say.xp, say.xp.cuda.MemoryPool(), None, None
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True), xp.cuda.using_allocator(pool.malloc):
        for name, rung in rungs.items():
            if case != rung.case:
                case, ours = rung.case, None  # frees the model before
                ours = Ours(case, xp)
            gc.collect()  # the steps of the rung before
            pool.free_all_blocks()
            found[name] = _on_gpu(rung, ours, pool, refusals)
            if refusals:
                break
    del ours
    gc.collect()
    pool.free_all_blocks()
    if refusals:
        say.tell(f"  (all steps op by op, because of {name!r}: {refusals[0]})")
        apart = {name: replace(rung, graphs=False) for name, rung in rungs.items()}
        return climb(say, apart, **smaller)
    return found


def _on_gpu(rung, ours, pool, refusals):
    with use_impl(**rung.impls):
        updates = Updates(ours, graphs=False, tuned=False)
        updates.restart()
        updates()
        loss = updates.loss()
        updates()
        peak = pool.total_bytes()
        if rung.graphs:
            updates = Updates(ours, tuned=False, notify=refusals.append)
            pool.free_all_blocks()
            for _ in range(2):  # the second is captured
                updates()
            pool.free_all_blocks()
        return Found([] if refusals else timing.sample(updates, SAMPLES), peak, loss)


def _here(say, rung):
    ours = Ours(rung.case, say.xp)
    updates = Updates(ours)
    with use_impl(**rung.impls):
        updates.restart()
        updates()
        loss = updates.loss()
        return Found(say.times({"step": updates})["step"], say.peak(updates), loss)
