"""Statistics before an update: gradient norm, clipping, whether to skip the update, loss scale.

One launch, and nothing is read back to the host. Clipping by the global norm as in Pascanu et al.,
"On the difficulty of training recurrent neural networks" (ICML 2013); loss scaling as in
Micikevicius et al., "Mixed precision training" (ICLR 2018).
Device code: ``rawkernels/update/gradient_statistics.cu``.
"""

import math
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_together, ctype, get_xp, on_gpu, to_cpu
from gpuattn.autodiff.tape import op
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import described, integer, number
from gpuattn.typing import Array, Xp

MIN_LOSS_SCALE, MAX_LOSS_SCALE = 1.0, 2.0**32
CPU_DOT = 8192  # elements per dot product: BLAS uses one thread for so few, so one order of sums
BLOCK = 256
MAX_BLOCKS = 1024  # of the first stage of the norm
MIN_PER_THREAD = 32  # elements, before there are more blocks

FIELDS = {  # in this order in memory, four bytes each; as in update/optimizer_state.cuh
    "learning_rate": np.float32,
    "step": np.uint32,  # updates done, without skipped ones: for the bias correction
    "divisor": np.float32,  # gradients are sums over this many tokens (or 1)
    "loss_scale": np.float32,  # what the loss was multiplied by before backward
    "norm": np.float32,  # of the gradient without divisor and loss scale, before clipping
    "coefficient": np.float32,  # what the update multiplies gradients by
    "skip": np.uint32,  # 1 where this update's gradients hold inf or NaN
    "clean_steps": np.uint32,  # since the loss scale last changed
    "skipped": np.uint32,
    "skipped_in_a_row": np.uint32,
    "clamped": np.uint32,  # how often the loss scale was at its bound and could not change
    "blocks_done": np.uint32,  # scratch of the kernel; zero between launches
}


class OptimizerState:
    """All scalars of an optimizer, in one small array on the device of the parameters.

    Attributes are the names in ``FIELDS``: setting one is asynchronous, reading one synchronizes
    with the device. ``array``: uint32 (12,), floats by their bits.
    """

    __slots__ = ("array",)
    signed_by = "array"  # see ``autodiff.signatures``

    def __init__(self, like: Array, **values: float) -> None:
        host = np.zeros(len(FIELDS), np.uint32)
        for name, value in {"divisor": 1.0, "loss_scale": 1.0, **values}.items():
            _checked_field(host, name)[...] = value
        object.__setattr__(self, "array", get_xp(like).asarray(host))

    def field(self, name: str) -> Array:
        """Return the live zero-dimensional array that holds one field, on the device."""
        return field(self.array, name)

    def read(self) -> dict[str, Any]:
        """Return every field as a Python number, with one copy to the host."""
        return read_state(to_cpu(self.array))

    def __repr__(self):
        fields = [f"{name}={value:.6g}" for name, value in self.read().items()]
        return f"OptimizerState({', '.join(fields[:-1])})"  # the last is scratch of the kernel

    def __getattr__(self, name):
        if name not in FIELDS:
            raise AttributeError(name)
        return self.field(name).item()

    def __setattr__(self, name, value):
        _checked_field(self.array, name)[...] = value


def _checked_field(array, name):
    if name not in FIELDS:
        raise AttributeError(problem("OptimizerState", "the name", repr(name), ", ".join(FIELDS)))
    return field(array, name)


def read_state(host: Array) -> dict[str, Any]:
    """Return every field of an ``OptimizerState.array`` on the host as a Python number."""
    return {name: field(host, name).item() for name in FIELDS}


def field(array: Array, name: str) -> Array:
    """Return the live zero-dimensional array of one field of ``OptimizerState.array``."""
    at = list(FIELDS).index(name)
    return array[at : at + 1].view(FIELDS[name]).reshape(())


@op
def gradient_statistics(
    grads: Array,
    state: OptimizerState,
    *,
    max_norm: float | None = None,
    growth_interval: int = 0,
    impl: str | None = None,
) -> Call[None]:
    """Write to ``state``: gradient norm, clip coefficient, whether to skip, the next loss scale.

    ``grads``: flat (n,) float32, float16 or bfloat16: gradients times ``state.loss_scale`` times
    ``state.divisor``. ``max_norm``: the norm to clip at, or None. ``growth_interval``: updates
    without inf or NaN after which the loss scale doubles; 0 keeps the scale constant.
    A gradient with inf or NaN (or a norm beyond float32) sets ``skip``, does not advance ``step``,
    and halves the loss scale unless it is constant.
    Raises TypeError for other arrays, ValueError for parameters out of range.
    """
    name, accepted = "gradient_statistics", "a count of updates, or 0 for a fixed loss scale"
    check_flat(name, grads)
    check_state(name, state)
    check_together(name, grads=grads, state=state.array)
    if max_norm is not None:
        max_norm = number(name, "max_norm", max_norm, "> 0, or None", lambda norm: norm > 0)
    growth_interval = integer(name, "growth_interval", growth_interval, accepted)
    params: dict[str, Any] = {"max_norm": max_norm or math.inf, "growth_interval": growth_interval}
    return Call(IMPLS, (grads, state.array), impl, **params)


def check_state(function: str, state: Any) -> None:
    """Raise TypeError unless ``state`` is an OptimizerState."""
    if not isinstance(state, OptimizerState):
        accepted = "a gpuattn.OptimizerState"
        raise TypeError(problem(function, "state", described(state), accepted))


def check_flat(function: str, grads: Any) -> None:
    """Raise TypeError or ValueError unless ``grads`` is one flat contiguous buffer."""
    if not arrays.is_array(grads) or ctype(grads.dtype) is None:
        got = f"{grads.dtype}" if arrays.is_array(grads) else described(grads)
        accepted = "a flat array of float32, float16 or bfloat16"
        raise TypeError(problem(function, "grads", got, accepted))
    if grads.ndim != 1 or not grads.flags.c_contiguous:
        got = f"{grads.shape} with strides {grads.strides}"
        raise ValueError(problem(function, "grads", got, "one flat contiguous buffer"))


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(grads, state, *, needs, max_norm, growth_interval):
    xp = get_xp(grads)
    at = {name: field(state, name) for name in FIELDS}
    with np.errstate(over="ignore", invalid="ignore"):
        unscale = 1 / (at["loss_scale"] * at["divisor"])
        norm = xp.sqrt(square_sum(xp, grads.astype(np.float32, copy=False))) * unscale
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
    return None, None


def square_sum(xp: Xp, x: Array) -> Array:
    """Return the sum of squares of a flat float32 array, in an order set by its size alone."""
    if xp is not np:
        return xp.dot(x, x)
    whole = x[: x.size - x.size % CPU_DOT].reshape(-1, CPU_DOT)
    rest = x[whole.size :]
    return np.vecdot(whole, whole).sum() + np.dot(rest, rest)


# ---- raw: rawkernels/update/gradient_statistics.cu ----------------------------------------------


def refuse_buffers(**buffers: Array | None) -> str | None:
    """Return why kernels do not take these flat buffers, or None. Buffers may be None."""
    for name, array in buffers.items():
        if array is None:
            continue
        if not on_gpu(array):
            return "the buffers are NumPy arrays; move them with gpuattn.to_gpu(x)"
        if array.data.ptr % 16 and array.size:
            return f"{name} does not start at a multiple of 16 bytes; try a copy"
    return None


def _refuse_raw(grads, state, **_):
    return refuse_buffers(grads=grads)


def _raw(grads, state, *, needs, max_norm, growth_interval):
    blocks = max(1, min(MAX_BLOCKS, -(-grads.size // (BLOCK * MIN_PER_THREAD))))
    partial = arrays.empty(grads, (blocks,), np.float32)
    constants = {"scalar": ctype(grads.dtype), "BLOCK": BLOCK}
    launch = kernel("update/gradient_statistics.cu", "gradient_statistics", **constants)
    launch((blocks,), (BLOCK,), grads, partial, state, grads.size, max_norm, growth_interval)
    return None, None


IMPLS = Impls(
    "gradient_statistics",
    Impl("raw-simt", _raw, refuse=_refuse_raw),
    Impl("reference", _reference),
)
