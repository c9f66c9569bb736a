"""LAMB over flat buffers, in one launch after ``gradient_statistics``.

You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (ICLR 2020).
Device code: ``rawkernels/update/lamb.cu``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.tape import op
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import described, seed_key
from gpuattn.ops.update.adamw import adam_direction, moment_numbers
from gpuattn.ops.update.flat_update import (
    BLOCK,
    DECAY_BLOCK,
    ROUNDING,
    check,
    check_betas,
    check_numbers,
    constants_of,
    put,
    working_copy,
)
from gpuattn.ops.update.gradient_statistics import OptimizerState, field, refuse_buffers, square_sum
from gpuattn.rng import Key
from gpuattn.typing import Array

TILE = 4096 // DECAY_BLOCK  # decay blocks that a block of threads processes at a time
NORMS, WEIGHTS, BOTH = range(3)  # `enum Pass` in lamb.cu
RESIDENT_BLOCKS = 6  # per multiprocessor


class TensorTable:
    """Where the tensors of a flat buffer start, and which of them LAMB adapts.

    ``like``: an array where the buffers are. ``starts``: the first element of each tensor, in
    order, multiples of 128, the first one 0. ``size``: of the buffers. ``adapted``: for each tensor
    whether it decays and its update is scaled by its norm; others (biases, weights of norms) are
    updated as by Adam. A table serves one launch at a time: it holds the kernel's scratch memory.
    Raises ValueError for other starts.
    """

    def __init__(
        self, like: Array, starts: Sequence[int], size: int, adapted: Sequence[bool]
    ) -> None:
        self.starts, self.size, self.adapted = tuple(starts), size, tuple(map(bool, adapted))
        bounds = [*self.starts, size]
        rising = all(a < b for a, b in zip(bounds, bounds[1:], strict=False))
        if not (rising and bounds[0] == 0 and all(b % DECAY_BLOCK == 0 for b in bounds)):
            accepted = f"rising multiples of {DECAY_BLOCK} from 0 on, below {size}"
            raise ValueError(problem("TensorTable", "starts", list(self.starts), accepted))
        if len(self.adapted) != len(self.starts):
            accepted = f"one for each of {len(self.starts)} tensors"
            raise ValueError(problem("TensorTable", "adapted", list(self.adapted), accepted))
        if on_gpu(like):
            items, tensors, tiles = plan([b // DECAY_BLOCK for b in bounds], self.adapted)
            self.items, self.tensors = (
                arrays.to_gpu(np.array(x, np.int32)) for x in (items, tensors)
            )
            self.sums = arrays.zeros(like, (tiles, 2), np.float32)
            self.ratios = arrays.zeros(like, (len(tensors),), np.float32)
            self.control = arrays.zeros(like, (3 + 2 * len(tensors),), np.uint32)


def plan(bounds: Sequence[int], adapted: Sequence[bool]) -> tuple[list, list, int]:
    """Return (items, tensors, tiles) for the kernel: its work, in order.

    ``bounds``: the starts of the tensors and the end of the last one, in decay blocks. All norms
    come first; weights follow in reverse order, so that those read last are still in L2.
    """
    norms: list[tuple] = []
    weights: list[tuple] = []
    tensors: list[tuple] = []
    for tensor, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        tiles = [(at, min(TILE, end - at), tensor) for at in range(begin, end, TILE)]
        tensors.append((begin, len(norms), len(tiles)))
        if adapted[tensor]:
            norms += [(*tile, NORMS) for tile in tiles]
        weights += [(*tile, WEIGHTS if adapted[tensor] else BOTH) for tile in tiles]
    return norms + weights[::-1], tensors, max(len(norms), 1)


@op
def lamb(
    params: Array,
    grads: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    state: OptimizerState,
    tensors: TensorTable,
    *,
    model: Array | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    seed: Any = 0,
    impl: str | None = None,
) -> Call[None]:
    """Update ``params``, ``exp_avg`` and ``exp_avg_sq`` in place, by the scalars of ``state``.

    With the moments of ``gpuattn.adamw`` and r = m' / (sqrt(v') + eps), for each tensor that is
    ``adapted`` in ``tensors``, a ``TensorTable``: u = r + weight_decay p;
    p -= learning_rate |p| / |u| u (or u alone where a norm is 0). For others p -= learning_rate r.
    Other arguments are as in ``gpuattn.adamw``. Raises ValueError for a table of buffers of another
    size.
    """
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check("lamb", params, grads, moments, state, model)
    check_betas("lamb", betas)
    check_numbers("lamb", weight_decay, eps)
    if not isinstance(tensors, TensorTable):
        raise TypeError(problem("lamb", "tensors", described(tensors), "a gpuattn.TensorTable"))
    if tensors.size != grads.size:
        accepted = f"one of buffers of {grads.size}"
        raise ValueError(problem("lamb", "tensors", f"a table of {tensors.size}", accepted))
    inputs = (params, grads, exp_avg, exp_avg_sq, state.array, model)
    numbers: dict[str, Any] = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return Call(IMPLS, inputs, impl, tensors=tensors, **numbers, seed=seed_key("lamb", seed).seed)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(
    params, grads, exp_avg, exp_avg_sq, state, model, *,
    needs, tensors, betas, eps, weight_decay, seed,
):  # fmt: skip
    xp = get_xp(params)
    skip = field(state, "skip") != 0
    if xp is np and skip:
        return None, None
    learning_rate, coefficient = field(state, "learning_rate"), field(state, "coefficient")
    step = field(state, "step")
    key, counted = Key(seed, ROUNDING, step), step.astype(np.float32)
    bounds = [*tensors.starts, tensors.size]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for begin, end, adapted in zip(bounds, bounds[1:], tensors.adapted, strict=False):
            mine = [a[begin:end] for a in (params, exp_avg, exp_avg_sq)]
            p, m, v = new = [working_copy(xp, x) for x in mine]
            g = grads[begin:end].astype(np.float32, copy=False) * coefficient
            direction = adam_direction(g, m, v, counted, betas, eps)
            if adapted:
                direction += np.float32(weight_decay) * p
                lengths = xp.sqrt(square_sum(xp, p)), xp.sqrt(square_sum(xp, direction))
                ratio = lengths[0] / lengths[1]
                direction *= xp.where((lengths[0] > 0) & (lengths[1] > 0), ratio, 1)
            direction *= learning_rate
            p -= direction
            for x, y in zip(mine, new, strict=True):
                put(xp, x, y, skip, key, begin)
            if model is not None:
                put(xp, model[begin:end], p, skip)
    return None, None


# ---- raw: rawkernels/update/lamb.cu -------------------------------------------------------------


def _refuse_raw(params, grads, exp_avg, exp_avg_sq, state, model, **_):
    buffers = {"params": params, "grads": grads, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return refuse_buffers(**buffers, model=model)


def _raw(
    params, grads, exp_avg, exp_avg_sq, state, model, *,
    needs, tensors, betas, eps, weight_decay, seed,
):  # fmt: skip
    launch = kernel("update/lamb.cu", "lamb_update", **constants_of(params, grads, model))
    count = len(tensors.items)
    grid = (min(count, RESIDENT_BLOCKS * gpu(params.device.id).multiprocessors),)
    launch(
        grid, (BLOCK,), params, grads, exp_avg, exp_avg_sq, model,
        tensors.items, tensors.tensors, tensors.sums, tensors.ratios, tensors.control, state,
        count, seed & 0xFFFFFFFF, seed >> 32, *moment_numbers(betas, eps), weight_decay,
    )  # fmt: skip
    return None, None


IMPLS = Impls(
    "lamb",
    Impl("raw-simt", _raw, refuse=_refuse_raw),
    Impl("reference", _reference),
)
