"""AdamW over flat buffers, in two launches and without reading anything back to the host.

Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019), with the bias
correction of Kingma and Ba, "Adam" (ICLR 2015); clipping by the global norm as in Pascanu et al.,
"On the difficulty of training recurrent neural networks" (ICML 2013); loss scaling as in
Micikevicius et al., "Mixed precision training" (ICLR 2018).
Device code: ``rawkernels/adamw.cu``.
"""

import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_together, ctype, for_each, get_xp, on_gpu, to_cpu
from gpuattn.autodiff import tape
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import kernel

DECAY_BLOCK = 128  # elements that share one byte of the decay table
MIN_LOSS_SCALE, MAX_LOSS_SCALE = 1.0, 2.0**32
CPU_BLOCK = 1 << 17  # elements updated at a time on NumPy; shorter calls keep no two threads busy
CPU_DOT = 8192  # elements squared at a time: short enough that BLAS keeps to one thread, one order
BLOCK = 256
PER_THREAD = 8
STATISTICS_BLOCKS = 512  # of the first stage of the norm, at most
MODEL_DTYPES = (np.dtype("float16"), arrays.BFLOAT16)

FIELDS = {  # in this order in memory, four bytes each; `enum Field` in adamw.cu is the same list
    "learning_rate": np.float32,
    "step": np.uint32,  # updates done, those skipped aside: what bias correction counts
    "divisor": np.float32,  # gradients are sums over this many tokens (or 1)
    "loss_scale": np.float32,  # what the loss was multiplied by before backward
    "norm": np.float32,  # of the gradient, divisor and loss scale removed; before clipping
    "coefficient": np.float32,  # what the update multiplies gradients by
    "skip": np.uint32,  # 1 where this update's gradients hold inf or NaN
    "clean_steps": np.uint32,  # since the loss scale last changed
    "skipped": np.uint32,
    "skipped_in_a_row": np.uint32,
    "clamped": np.uint32,  # times the loss scale could not move further
    "blocks_done": np.uint32,  # for the kernel's own use; zero between launches
}


class AdamWState:
    """Every scalar of the optimizer, in one small array where the parameters live.

    Attributes are the names in ``FIELDS``: setting one writes to the device without waiting,
    reading one waits for it. ``array``: uint32 (12,), floats by their bits.
    """

    __slots__ = ("array",)

    def __init__(self, like, **values):
        object.__setattr__(self, "array", arrays.zeros(like, (len(FIELDS),), np.uint32))
        for name, value in {"divisor": 1.0, "loss_scale": 1.0, **values}.items():
            setattr(self, name, value)

    def field(self, name):
        """Return the live zero-dimensional array that holds one field, on the device."""
        return _field(self.array, name)

    def read(self):
        """Return every field as a Python number, with one copy to the host."""
        host = to_cpu(self.array)
        return {name: _field(host, name).item() for name in FIELDS}

    def __getattr__(self, name):
        if name not in FIELDS:
            raise AttributeError(name)
        return self.field(name).item()

    def __setattr__(self, name, value):
        if name not in FIELDS:
            accepted = ", ".join(FIELDS)
            raise AttributeError(problem("AdamWState", "the name", repr(name), accepted))
        self.field(name)[...] = value


def _field(array, name):
    at = list(FIELDS).index(name)
    return array[at : at + 1].view(FIELDS[name]).reshape(())


def gradient_statistics(grads, state, *, max_norm=None, growth_interval=0, impl=None):
    """Prepare an update: norm, clipping, whether to skip it, and the next loss scale. In ``state``.

    ``grads``: flat (n,) float32, float16 or bfloat16: gradients times ``state.loss_scale`` times
    ``state.divisor``. ``max_norm``: the norm to clip at, or None. ``growth_interval``: clean
    updates after which the loss scale doubles; 0 keeps the scale as it is.
    A gradient with inf or NaN (or a norm beyond float32) sets ``skip``, leaves ``step``, and halves
    a moving loss scale.
    Raises TypeError for other arrays, ValueError for parameters out of range.
    """
    _check_flat("gradient_statistics", grads=grads)
    check_together("gradient_statistics", grads=grads, state=state.array)
    if max_norm is not None and not max_norm > 0:
        raise ValueError(problem("gradient_statistics", "max_norm", max_norm, "> 0, or None"))
    if growth_interval < 0:
        accepted = "a count of updates, or 0 for a fixed loss scale"
        got = problem("gradient_statistics", "growth_interval", growth_interval, accepted)
        raise ValueError(got)
    params = {"max_norm": max_norm or math.inf, "growth_interval": growth_interval}
    tape.apply(STATISTICS, (grads, state.array), impl, **params)


def adamw(
    params,
    grads,
    exp_avg,
    exp_avg_sq,
    state,
    *,
    model=None,
    decay=None,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    impl=None,
):
    """Update ``params``, ``exp_avg`` and ``exp_avg_sq`` in place, as ``state`` says.

    With g = ``state.coefficient`` * grads: m += (1 - b1) (g - m); v += (1 - b2) (g^2 - v);
    p -= learning_rate (weight_decay p + m' / (sqrt(v') + eps)), where m' = m / (1 - b1^step) and
    v' = v / (1 - b2^step). Nothing is touched where ``state.skip`` is set.
    ``gradient_statistics`` comes before.

    ``params``, ``exp_avg``, ``exp_avg_sq``: flat (n,) float32, n a multiple of 128.
    ``grads``: (n,) float32, float16 or bfloat16. ``model``: (n,) float16 or bfloat16, gets a copy
    of the new parameters. ``decay``: uint8 (n / 128,), one where the block's weights decay; None is
    everywhere. Raises TypeError for other dtypes, ValueError for other shapes, strides or
    parameters out of range.
    """
    _check_flat("adamw", grads=grads)
    check_together(
        "adamw",
        params=params,
        grads=grads,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        state=state.array,
        model=model,
        decay=decay,
    )
    size = grads.size
    float32 = (np.dtype("float32"),)
    for name, array, dtypes, length in (
        ("params", params, float32, size),
        ("exp_avg", exp_avg, float32, size),
        ("exp_avg_sq", exp_avg_sq, float32, size),
        ("model", model, MODEL_DTYPES, size),
        ("decay", decay, (np.dtype("uint8"),), size // DECAY_BLOCK),
    ):
        if array is not None:
            _check_buffer(name, array, dtypes, length)
    if size % DECAY_BLOCK:
        accepted = f"a multiple of {DECAY_BLOCK}"
        raise ValueError(problem("adamw", "the size", size, accepted, "Pad with zeros."))
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(problem("adamw", "betas", betas, "0 <= beta < 1"))
    if not (0 < eps < math.inf and 0 <= weight_decay < math.inf):
        got = f"{eps}, weight_decay {weight_decay}"
        raise ValueError(problem("adamw", "eps", got, "eps > 0 and weight_decay >= 0"))
    inputs = (params, grads, exp_avg, exp_avg_sq, state.array, model, decay)
    tape.apply(ADAMW, inputs, impl, betas=tuple(betas), eps=eps, weight_decay=weight_decay)


def _check_flat(function, *, grads):
    if not arrays.is_array(grads) or ctype(grads.dtype) is None:
        got = f"{grads.dtype}" if arrays.is_array(grads) else f"a {type(grads).__name__}"
        accepted = "a flat array of float32, float16 or bfloat16"
        raise TypeError(problem(function, "grads", got, accepted))
    if grads.ndim != 1 or not grads.flags.c_contiguous:
        got = f"{grads.shape} with strides {grads.strides}"
        raise ValueError(problem(function, "grads", got, "one flat contiguous buffer"))


def _check_buffer(name, array, dtypes, length):
    if array.dtype not in dtypes:
        accepted = " or ".join(map(str, dtypes))
        raise TypeError(problem("adamw", f"{name}.dtype", array.dtype, accepted))
    if array.shape != (length,) or not array.flags.c_contiguous:
        got = f"{array.shape} with strides {array.strides}"
        raise ValueError(problem("adamw", name, got, f"a contiguous ({length},)"))


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _statistics_reference(grads, state, *, needs, max_norm, growth_interval):
    xp = get_xp(grads)
    at = {name: _field(state, name) for name in FIELDS}
    with np.errstate(over="ignore", invalid="ignore"):
        unscale = 1 / (at["loss_scale"] * at["divisor"])
        norm = xp.sqrt(_square_sum(xp, grads.astype(np.float32, copy=False))) * unscale
        good = xp.isfinite(norm)
        at["norm"][...] = norm
        at["coefficient"][...] = unscale * xp.minimum(1, max_norm / (norm + 1e-6))
    at["skip"][...] = ~good
    at["step"][...] += good
    at["skipped"][...] += ~good
    at["skipped_in_a_row"][...] = xp.where(good, 0, at["skipped_in_a_row"] + 1)
    if growth_interval:
        clean = xp.where(good, at["clean_steps"] + 1, 0)
        grow = clean >= growth_interval
        old = at["loss_scale"]
        wanted = xp.where(grow, old * 2, xp.where(good, old, old * 0.5))
        scale = xp.clip(wanted, MIN_LOSS_SCALE, MAX_LOSS_SCALE)
        at["clamped"][...] += scale != wanted
        at["clean_steps"][...] = xp.where(grow, 0, clean)
        at["loss_scale"][...] = scale
    return state, None


def _adamw_reference(
    params, grads, exp_avg, exp_avg_sq, state, model, decay, *, needs, betas, eps, weight_decay
):
    xp = get_xp(params)
    skip = _field(state, "skip") != 0
    if xp is np and skip:
        return params, None
    lr, step = _field(state, "learning_rate"), _field(state, "step").astype(np.float32)
    coefficient = _field(state, "coefficient")
    with np.errstate(divide="ignore", invalid="ignore"):
        unbias1, unbias2 = (-xp.expm1(step * _log(beta)) for beta in betas)
        root2 = xp.sqrt(unbias2)
        size, floor = lr * root2 / unbias1, root2 * eps
    # on a GPU nothing is read back: a skipped update is one that changes everything by zero
    rates = [xp.where(skip, 0, 1 - beta).astype(np.float32) for beta in betas]
    size = xp.where(skip, 0, size).astype(np.float32)
    floor = xp.where(skip, 1, floor).astype(np.float32)  # or 0 / 0 where nothing was seen yet
    keep = 1 - xp.where(skip, 0, lr * weight_decay).astype(np.float32)
    factors = keep if decay is None else xp.where(decay[:, None] != 0, keep, 1).astype(np.float32)

    def update(block):
        p, m, v = params[block], exp_avg[block], exp_avg_sq[block]
        g = grads[block].astype(np.float32, copy=False) * coefficient
        if xp is not np:
            g = xp.where(skip, np.float32(0), g)
        step = g - m
        step *= rates[0]
        m += step
        g *= g
        g -= v
        g *= rates[1]
        v += g
        xp.sqrt(v, out=g)
        g += floor
        xp.divide(m, g, out=g)
        g *= size
        if weight_decay:
            rows = slice(block.start // DECAY_BLOCK, block.stop // DECAY_BLOCK)
            p2 = p.reshape(-1, DECAY_BLOCK)
            p2 *= factors if decay is None else factors[rows]
        p -= g
        if model is not None:
            model[block] = p if xp is np else xp.where(skip, model[block], p.astype(model.dtype))

    for_each(update, _blocks(params, CPU_BLOCK))
    return params, None


def _square_sum(xp, x):
    if xp is not np:
        return xp.dot(x, x)
    whole = x[: x.size - x.size % CPU_DOT].reshape(-1, CPU_DOT)
    rest = x[whole.size :]
    return np.vecdot(whole, whole).sum() + np.dot(rest, rest)


def _log(beta):
    return np.float32(math.log(beta) if beta else -math.inf)


def _blocks(flat, size):
    """Return slices over ``flat``: of ``size`` on NumPy, all of it on a GPU."""
    size = max(flat.size, 1) if on_gpu(flat) else size
    return [slice(at, min(at + size, flat.size)) for at in range(0, flat.size, size)]


# ---- raw: rawkernels/adamw.cu -------------------------------------------------------------------


def _refuse_raw(x, *_, **__):
    return None if on_gpu(x) else "the buffers are NumPy arrays; move them with gpuattn.to_gpu(x)"


def _statistics_raw(grads, state, *, needs, max_norm, growth_interval):
    blocks = max(1, min(STATISTICS_BLOCKS, -(-grads.size // (BLOCK * PER_THREAD))))
    partial = arrays.empty(grads, (blocks,), np.float32)
    launch = kernel(
        "adamw.cu",
        "gradient_statistics",
        scalar=ctype(grads.dtype),
        model_scalar="float",
        BLOCK=BLOCK,
    )
    launch((blocks,), (BLOCK,), grads, partial, state, grads.size, max_norm, growth_interval)
    return state, None


def _adamw_raw(
    params, grads, exp_avg, exp_avg_sq, state, model, decay, *, needs, betas, eps, weight_decay
):
    model_type = "float" if model is None else ctype(model.dtype)
    launch = kernel(
        "adamw.cu",
        "adamw_update",
        scalar=ctype(grads.dtype),
        model_scalar=model_type,
        BLOCK=BLOCK,
    )
    grid = (-(-params.size // (BLOCK * PER_THREAD)),)
    rates = [number for beta in betas for number in (_log(beta), 1 - beta)]
    buffers = (params, grads, exp_avg, exp_avg_sq, model, decay, state)
    launch(grid, (BLOCK,), *buffers, params.size, *rates, eps, weight_decay)
    return params, None


STATISTICS = Impls(
    "gradient_statistics",
    Impl("raw-simt", _statistics_raw, refuse=_refuse_raw),
    Impl("reference", _statistics_reference),
)
ADAMW = Impls(
    "adamw",
    Impl("raw-simt", _adamw_raw, refuse=_refuse_raw),
    Impl("reference", _adamw_reference),
)
