"""Matrix products: the only module that calls libraries for them.

On the CPU that is NumPy's BLAS. On a GPU it is cuBLASLt (``cublaslt.py``), or cuBLAS through CuPy
where cuBLASLt cannot do a product: then a SlowPathWarning says why. Sums are kept in float32 for
16-bit operands, and are TF32 only if the process asks CuPy for it.
"""

import math
from typing import Any

import numpy as np

from gpuattn.arrays import (
    check_floats,
    check_together,
    get_xp,
    on_gpu,
    unrecorded_write,
    wide,
)
from gpuattn.errors import warn_slow_path
from gpuattn.gemm import cublaslt
from gpuattn.gemm.cublaslt import Reason
from gpuattn.modes import mode

Array = Any
BLOCK_ROWS = 16  # of a product on NumPy where ``Mode.batch_invariant`` is set


def matmul(
    a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False,
    out: Array | None = None, accumulate: bool = False, share: int = 1,
) -> Array:  # fmt: skip
    """Return ``a @ b`` for ``a`` (M, K) and ``b`` (K, N), in their dtype.

    On a GPU that is one launch of cuBLASLt, unless ``fallback_reason`` says why not.
    ``transpose_a``, ``transpose_b``: the operand is stored as (K, M), or as (N, K).
    ``out``: (M, N) of any float dtype, such as a slice of a flat gradient buffer; it is written
    (or added to, with ``accumulate``) and returned. Operands of which neither rows nor columns are
    contiguous are copied first. ``share``: on a GPU, it may expect 1 / ``share`` of the
    multiprocessors. Raises TypeError for mixed dtypes or backends and ValueError for shapes that do
    not fit.
    """
    if on_gpu(a) and on_gpu(b) and (out is None or on_gpu(out)) and a.ndim == 2:
        done = cublaslt.multiply(
            a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate,
            share=share,
        )  # fmt: skip
        if type(done) is not Reason:
            return done
    unrecorded_write()
    check_together("matmul", a=a, b=b, out=out)
    check_floats("matmul", a=a, b=b)
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul: {a.shape} @ {b.shape}; accepted: (M, K) @ (K, N)")
    if out is None:
        return _product(a, b).astype(a.dtype, copy=False)
    if out.shape != (a.shape[0], b.shape[1]):
        wants = (a.shape[0], b.shape[1])
        raise ValueError(f"matmul: out has shape {out.shape}; {a.shape} @ {b.shape} is {wants}")
    if accumulate:
        if out.dtype == wide(out.dtype):
            out += _product(a, b).astype(out.dtype, copy=False)
        else:
            total = out.astype(np.float32)
            total += _product(a, b).astype(np.float32, copy=False)
            out[...] = total
    elif (
        out.dtype == a.dtype and out.flags.c_contiguous and (on_gpu(a) or wide(a.dtype) == a.dtype)
    ):
        _product(a, b, out)
    else:
        out[...] = _product(a, b)
    return out


def fallback_reason(
    a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False,
    out: Array | None = None, accumulate: bool = False, share: int = 1,
) -> Reason | None:  # fmt: skip
    """Return why ``matmul`` with these arguments is not one launch of cuBLASLt, or None.

    Nothing is computed. An ``out`` of a dtype or layout that cuBLASLt does not write costs a copy;
    for other reasons CuPy multiplies.
    """
    given = {"a": a, "b": b, "out": out}
    if here := [name for name, x in given.items() if x is not None and not on_gpu(x)]:
        return Reason(f"{here[0]} is a NumPy array: NumPy's BLAS multiplies", by_design=True)
    return cublaslt.multiply(
        a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate,
        share=share, launch=False,
    )  # fmt: skip


def capture_refusal() -> str:
    """Return why products cannot be part of a CUDA graph; "" where they can."""
    _, missing = cublaslt.library()
    return missing


def matmul_activated(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    activation: str | None = None,
    before: Array | None = None,
) -> Array | Reason:
    """Return ``f(x @ weight.T + bias)`` by one launch, or the Reason why cuBLASLt cannot.

    ``x``: (N, in). ``weight``: (out, in). ``bias``: (out,) or None. ``activation``: None, "relu",
    "gelu" (the tanh form) or "gelu_exact", which it lacks. ``before``: None, or where to write
    what the activation is applied to, (N, out). All GPU arrays of one dtype. A SlowPathWarning
    says the Reason, unless another path follows by design.
    """
    if activation == "gelu_exact":
        return Reason("cuBLASLt's GELU is the tanh form", by_design=True)
    if activation == "gelu" and x.dtype == np.float32:
        return Reason("cuBLASLt's GELU is made for 16 bits: in float32 it is 5e-6 off", True)
    bias = _aligned(bias)
    parts = [activation.upper()] if activation else []
    parts += ["AUX"] * (before is not None) + ["BIAS"] * (bias is not None)
    return _warned(
        cublaslt.multiply(
            x, weight, transpose_b=True, epilogue="_".join(parts), vector=bias, aux=before
        )
    )


def add_matmul(x: Array, weight: Array, bias: Array | None, total: Array) -> Array | Reason:
    """Add ``x @ weight.T + bias`` to ``total`` by one launch, or return the Reason why not.

    ``x``: (N, in). ``weight``: (out, in). ``bias``: (out,) or None. ``total``: (N, out), which is
    returned; it is rounded once, behind the sum. All GPU arrays of one dtype.
    """
    bias = _aligned(bias)
    epilogue = None if bias is None else "BIAS"
    return _warned(
        cublaslt.multiply(
            x, weight, total, transpose_b=True, accumulate=True, epilogue=epilogue, vector=bias
        )
    )


def _aligned(bias):
    """Return a bias as cuBLASLt takes it: contiguous, at a multiple of 16 bytes."""
    if bias is None or (bias.flags.c_contiguous and bias.data.ptr % 16 == 0):
        return bias
    return bias.copy()


def matmul_and_sums(
    dz: Array,
    x: Array,
    sums: Array,
    out: Array | None = None,
    accumulate: bool = False,
    share: int = 1,
) -> Array | Reason:
    """Return ``dz.T @ x``, and write the sums of the columns of ``dz`` to ``sums``, by one launch.

    ``dz``: (N, out). ``x``: (N, in). ``sums``: (out,), in the dtype of the product. ``out``,
    ``accumulate``, ``share``: as in ``matmul``, of the product alone. GPU arrays. Returns the
    Reason why, with nothing done, where cuBLASLt cannot do that; a SlowPathWarning says it, unless
    another path follows by design.
    """
    dtype = x.dtype if out is None else out.dtype
    if sums.dtype != dtype or not sums.flags.c_contiguous or sums.data.ptr % 16:
        return Reason(
            f"sums are {sums.dtype} with strides {sums.strides}, cuBLASLt takes contiguous {dtype} "
            "at a multiple of 16 bytes",
            by_design=True,
        )
    return _warned(
        cublaslt.multiply(
            dz, x, out, transpose_a=True, accumulate=accumulate, epilogue="BGRADB", vector=sums,
            share=share,
        )
    )  # fmt: skip


def matmul_stacks(a: Array, b: Array) -> Array:
    """Return ``a @ b`` for stacks of matrices (..., M, K) and (..., K, N) of one float dtype.

    For GPU arrays; leading axes broadcast. Where cuBLASLt cannot do that, CuPy does, which no CUDA
    graph can capture, and a SlowPathWarning says why, unless there is nothing to multiply. 16-bit
    stacks are then multiplied in float32: CuPy has no product of bfloat16 stacks.
    """
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, a.shape[-2], b.shape[-1])
    if b.ndim == 2:  # one product of two matrices
        return _product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b).reshape(shape)
    xp, count = get_xp(a), math.prod(lead)
    stacks = (xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    done = cublaslt.multiply(*(x.reshape(count, *x.shape[-2:]) for x in stacks))
    _warned(done, always=a.dtype != b.dtype)
    if type(done) is not Reason:
        return done.reshape(shape)
    work = wide(a.dtype)
    product = xp.matmul(a.astype(work, copy=False), b.astype(work, copy=False))
    return product.astype(a.dtype, copy=False)


def _warned(done: Array | Reason, always: bool = False) -> Array | Reason:
    """Return what ``cublaslt.multiply`` returned; warn of a reason, ``always`` or by its kind."""
    if type(done) is Reason and (always or not done.by_design):
        warn_slow_path(f"a matrix product takes a slower path because {done}")
    return done


def _product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a @ b; from 16-bit operands NumPy gives float32 and a GPU the operands' dtype."""
    if get_xp(a, b) is np:
        a, b = _for_blas(a), _for_blas(b)
        return _by_blocks(a, b, out) if mode.get().batch_invariant else np.matmul(a, b, out=out)
    done = _warned(cublaslt.multiply(a, b, out))
    if type(done) is not Reason:
        return done
    if a.shape[0] == b.shape[1] == 1 and a.itemsize == 2:
        # CuPy computes this as a dot product, whose sum it keeps in 16 bits
        product = a.astype(np.float32).dot(b.astype(np.float32)).astype(a.dtype)
        if out is None:
            return product
        out[...] = product
        return out
    return a.dot(b, out)


def _by_blocks(a: np.ndarray, b: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """Return a @ b, whose rows are the same bits whatever the others are and how many.

    OpenBLAS adds in another order for other numbers of rows, and its AVX2 kernel in other orders
    for rows of one product. So products have BLOCK_ROWS rows, the last filled up with zeros, and
    are taken as b.T @ a.T: then rows are lanes of the same vectors.
    """
    (M, K), N = a.shape, b.shape[1]
    blocks = -(-M // BLOCK_ROWS)
    filled = np.zeros((blocks * BLOCK_ROWS, K), a.dtype)
    filled[:M] = a
    columns = filled.reshape(blocks, BLOCK_ROWS, K).swapaxes(1, 2)
    product = np.ascontiguousarray(np.matmul(b.T, columns).swapaxes(1, 2))
    product = product.reshape(blocks * BLOCK_ROWS, N)[:M]
    if out is None:
        return product
    out[...] = product
    return out


def _for_blas(a: np.ndarray) -> np.ndarray:
    """Return ``a`` in a layout of BLAS: NumPy multiplies others by a slow loop."""
    a = a.astype(wide(a.dtype), copy=False)
    return a if a.flags.forc else np.ascontiguousarray(a)
