"""What the optimizer updates share: checks of flat buffers, rounding of weights, launches.

A rule is written twice: for one element in ``rawkernels/<op>.cu``, and for blocks of float32 arrays
in ``gpuattn/ops/update/<op>.py``, which this file calls as ``common/optimizer.cuh`` does the first.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_together, ctype, for_each, get_xp, is_array, on_gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.ops.arguments import described, number
from gpuattn.ops.update.gradient_statistics import (
    OptimizerState,
    check_flat,
    check_state,
    field,
    refuse_buffers,
)
from gpuattn.rng import Key, lanes
from gpuattn.typing import Array, Xp

DECAY_BLOCK = 128  # elements that share one byte of the decay table
CPU_BLOCK = 1 << 17  # elements at a time on NumPy; with fewer, two threads are not kept busy
BLOCK = 256
PER_THREAD = 4
ROUNDING = 0xFFFFFFFE  # the Philox stream for stochastic rounding of bfloat16 weights
FLOAT32, BFLOAT16 = np.dtype("float32"), arrays.BFLOAT16
MODEL_DTYPES = (np.dtype("float16"), BFLOAT16)


def check(
    function: str,
    params: Array,
    grads: Array,
    moments: dict[str, Array],
    state: OptimizerState,
    model: Array | None,
    decay: Array | None = None,
) -> None:
    """Raise TypeError or ValueError unless dtypes, sizes and devices of the buffers fit together.

    ``moments``: {name: array}.
    """
    check_flat(function, grads)
    check_state(function, state)
    given = {"params": params, "grads": grads, **moments}
    check_together(function, **given, state=state.array, model=model, decay=decay)
    size = grads.size
    wanted: list[tuple] = [("params", params, (FLOAT32, BFLOAT16), size)]
    wanted += [(name, array, (FLOAT32,), size) for name, array in moments.items()]
    if model is not None:
        wanted += [("model", model, MODEL_DTYPES, size)]
    if decay is not None:
        wanted += [("decay", decay, (np.dtype("uint8"),), size // DECAY_BLOCK)]
    for name, array, dtypes, length in wanted:
        _check_buffer(function, name, array, dtypes, length)
    if size % DECAY_BLOCK:
        accepted = f"a multiple of {DECAY_BLOCK}"
        raise ValueError(problem(function, "the size", size, accepted, "Pad with zeros."))
    if model is not None and params.dtype != FLOAT32:
        accepted = "None: bfloat16 params are the model's own"
        raise ValueError(problem(function, "model", f"a {model.dtype} copy", accepted))
    kinds = {a.dtype for a in (grads, params, model) if a is not None} - {FLOAT32}
    if len(kinds) > 1:
        got = f"{grads.dtype}, but the weights have another 16-bit dtype"
        raise TypeError(problem(function, "grads", got, "float32, or that dtype"))


def _check_buffer(function, name, array, dtypes, length):
    accepted = " or ".join(map(str, dtypes))
    if not is_array(array):
        accepted = f"a NumPy or CuPy array of {accepted}"
        raise TypeError(problem(function, name, described(array), accepted))
    if array.dtype not in dtypes:
        raise TypeError(problem(function, f"{name}.dtype", array.dtype, accepted))
    if array.shape != (length,) or not array.flags.c_contiguous:
        got = f"{array.shape} with strides {array.strides}"
        raise ValueError(problem(function, name, got, f"a contiguous ({length},)"))


def check_betas(function: str, betas: tuple[float, float]) -> None:
    """Raise TypeError or ValueError unless ``betas`` are two numbers, 0 <= beta < 1."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(problem(function, "betas", described(betas), "two numbers, 0 <= beta < 1"))
    for beta in betas:
        number(function, "betas", beta, "0 <= beta < 1", lambda beta: 0 <= beta < 1)


def check_numbers(function: str, weight_decay: float, eps: float = 1.0) -> None:
    """Raise TypeError or ValueError unless ``weight_decay`` >= 0 and ``eps`` > 0, both finite."""
    number(function, "weight_decay", weight_decay, "0 or more", lambda w: 0 <= w < math.inf)
    number(function, "eps", eps, "a positive number", lambda e: 0 < e < math.inf)


def update_impls(op: str, rule: Callable, numbers: Callable) -> Impls:
    """Return the Impls of an elementwise update.

    Its arrays: params, grads, the moments, state, model, decay. Its params: ``seed`` and those of
    ``rule(p, g, moments, learning_rate, step, decays, **params)``, which edits float32 arrays in
    place; ``decays`` is 0 or 1 for each row of 128 elements, or for all.
    ``numbers(**params)``: the arguments of the kernel ``<op>_update`` after the seed.
    """
    return Impls(
        op,
        Impl("raw-simt", partial(_raw, op, numbers), refuse=_refuse_raw),
        Impl("reference", partial(_reference, rule)),
    )


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(rule, params, grads, *rest, needs, seed, **constants):
    *moments, state, model, decay = rest
    xp = get_xp(params)
    skip = field(state, "skip") != 0
    if xp is np and skip:
        return None, None
    learning_rate, coefficient = field(state, "learning_rate"), field(state, "coefficient")
    step = field(state, "step")
    key, counted = Key(seed, ROUNDING, step), step.astype(np.float32)

    def update(block):
        mine = [a[block] for a in (params, *moments) if a is not None]
        p, *m = new = [working_copy(xp, x) for x in mine]
        g = grads[block].astype(np.float32, copy=False) * coefficient
        decays = np.float32(1)
        if decay is not None:
            rows = decay[block.start // DECAY_BLOCK : block.stop // DECAY_BLOCK]
            decays = (rows != 0).astype(np.float32)[:, None]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            rule(p, g, m, learning_rate, counted, decays, **constants)
        for x, y in zip(mine, new, strict=True):
            put(xp, x, y, skip, key, block.start)
        if model is not None:
            put(xp, model[block], p, skip)

    for_each(update, _blocks(params, CPU_BLOCK))
    return None, None


def working_copy(xp: Xp, x: Array) -> Array:
    """Return the float32 array that a rule edits for ``x``: on NumPy ``x`` itself if it is one."""
    return x if xp is np and x.dtype == FLOAT32 else x.astype(np.float32)


def put(xp: Xp, x: Array, new: Array, skip: Array, key: Key | None = None, first: int = 0) -> None:
    """Write float32 numbers to ``x``, unless ``skip``, a flag on the device, is set.

    bfloat16 weights are rounded stochastically by ``key``. ``first``: the index of ``x[0]`` in its
    buffer.
    """
    if key is not None and x.dtype == BFLOAT16:
        new = round_at_random(xp, new, key, first)
    if xp is not np:
        x[...] = xp.where(skip, x, new.astype(x.dtype, copy=False))
    elif new is not x:
        x[...] = new


def round_at_random(xp: Xp, x: Array, key: Key, first: int = 0) -> Array:
    """Return float32 ``x`` as bfloat16, rounded stochastically to one of its two neighbours.

    The mean over keys is ``x``: the 16 bits that are cut off are the probability, in 65536ths, of
    rounding away from zero. Element i uses the random number ``first + i``.
    """
    drawn = lanes(xp, key, first, x.size).astype(np.uint32)
    cut = (x.view(np.uint32) + drawn) & np.uint32(0xFFFF0000)
    with np.errstate(invalid="ignore", over="ignore"):
        return xp.where(xp.isfinite(x), cut.view(np.float32), x).astype(BFLOAT16)


def scale_rows(x: Array, factors: Any) -> None:
    """Multiply each DECAY_BLOCK of a flat array in place by its factor, or all by one."""
    rows = x.reshape(-1, DECAY_BLOCK)
    rows *= factors


def log(beta: float) -> np.float32:
    """Return the natural logarithm; -inf for 0."""
    return np.float32(math.log(beta) if beta else -math.inf)


def _blocks(flat, size):
    """Return slices over ``flat``: of ``size`` on NumPy, all of it on a GPU."""
    size = max(flat.size, 1) if on_gpu(flat) else size
    return [slice(at, min(at + size, flat.size)) for at in range(0, flat.size, size)]


# ---- raw: rawkernels/update/<op>.cu -------------------------------------------------------------


def _refuse_raw(params, grads, *rest, **_):
    *moments, _, model, _ = rest
    first, second = (*moments, None, None)[:2]
    return refuse_buffers(params=params, grads=grads, exp_avg=first, exp_avg_sq=second, model=model)


def constants_of(params: Array, grads: Array, model: Array | None) -> dict[str, Any]:
    """Return the constants that kernels of ``common/optimizer.cuh`` are compiled for."""
    weight = ctype(params.dtype)
    copied = weight if model is None else ctype(model.dtype)
    return {"scalar": ctype(grads.dtype), "weight": weight, "copied": copied, "BLOCK": BLOCK}


def _raw(op, numbers, params, grads, *rest, needs, seed, **constants):
    *moments, state, model, decay = rest
    launch = kernel(f"update/{op}.cu", f"{op}_update", **constants_of(params, grads, model))
    grid = (-(-params.size // (BLOCK * PER_THREAD)),)
    buffers = (params, grads, *moments, model, decay, state)
    seeds = seed & 0xFFFFFFFF, seed >> 32
    launch(grid, (BLOCK,), *buffers, params.size, *seeds, *numbers(**constants))
    return None, None
