"""Matrix products: the one place that hands matrices to a library.

NumPy's BLAS on the CPU; on a GPU cuBLASLt (``cublaslt.py``), or cuBLAS through CuPy where nvmath is
not installed. Sums are kept in float32 for 16-bit operands and are never TF32 unless the process
asks CuPy for it.
"""

import math

import numpy as np

from gpuattn.arrays import check_floats, check_together, get_xp, on_gpu, wide
from gpuattn.gemm import cublaslt


def matmul(a, b, *, transpose_a=False, transpose_b=False, out=None, accumulate=False, share=1):
    """Return ``a @ b`` for ``a`` (M, K) and ``b`` (K, N), in their dtype.

    ``transpose_a``, ``transpose_b``: the operand is stored as (K, M), or as (N, K).
    ``out``: (M, N) of any float dtype, such as a slice of a flat gradient buffer; it is written
    (or added to, with ``accumulate``) and returned. Operands of which neither rows nor columns are
    contiguous are copied first. ``share``: on a GPU, the n-th part of which it may expect for
    itself. Raises TypeError for mixed dtypes or backends and ValueError for shapes that do not fit.
    """
    if on_gpu(a) and on_gpu(b) and (out is None or on_gpu(out)) and a.ndim == 2:
        done = cublaslt.multiply(
            a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate,
            share=share,
        )  # fmt: skip
        if done is not None:
            return done
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


def capture_refusal():
    """Return why products cannot be part of a CUDA graph, or None."""
    _, missing = cublaslt.library()
    return missing


def matmul_activated(x, weight, bias=None, activation=None, before=None):
    """Return ``f(x @ weight.T + bias)`` by one launch, or None where no library can do that.

    ``x``: (N, in). ``weight``: (out, in). ``bias``: (out,) or None. ``activation``: None, "relu" or
    "gelu" (the tanh form). ``before``: None, or where to write what the activation is taken of,
    (N, out). All GPU arrays of one dtype.
    """
    if activation == "gelu" and x.dtype == np.float32:
        return None  # the library's is good for 16 bits: 5e-6 off
    if bias is not None and (not bias.flags.c_contiguous or bias.data.ptr % 16):
        bias = bias.copy()
    parts = [activation.upper()] if activation else []
    parts += ["AUX"] * (before is not None) + ["BIAS"] * (bias is not None)
    return cublaslt.multiply(
        x, weight, transpose_b=True, epilogue="_".join(parts), vector=bias, aux=before
    )


def matmul_and_sums(dz, x, sums, out=None, accumulate=False, share=1):
    """Return ``dz.T @ x``, and write the sums of the columns of ``dz`` to ``sums``, by one launch.

    ``out``, ``accumulate``, ``share``: as in ``matmul``; of the product alone. Returns None, with
    nothing done, where no library can do that. GPU arrays of one dtype, and ``sums`` in that of
    ``out``.
    """
    dtype = x.dtype if out is None else out.dtype
    if sums.dtype != dtype or not sums.flags.c_contiguous or sums.data.ptr % 16:
        return None
    return cublaslt.multiply(
        dz, x, out, transpose_a=True, accumulate=accumulate, epilogue="BGRADB", vector=sums,
        share=share,
    )  # fmt: skip


def matmul_stacks(a, b):
    """Return ``a @ b`` for stacks of matrices (..., M, K) and (..., K, N) of one float dtype.

    For GPU arrays; leading axes broadcast. Returns None where cuBLASLt cannot do it.
    """
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, a.shape[-2], b.shape[-1])
    if b.ndim == 2:  # one product of two matrices
        done = cublaslt.multiply(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
    else:
        xp, count = get_xp(a), math.prod(lead)
        stacks = (xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
        done = cublaslt.multiply(*(x.reshape(count, *x.shape[-2:]) for x in stacks))
    return None if done is None else done.reshape(shape)


def _product(a, b, out=None):
    """Return a @ b; from 16-bit operands NumPy gives float32 and a GPU the operands' dtype."""
    if get_xp(a, b) is np:
        return np.matmul(_for_blas(a), _for_blas(b), out=out)
    done = cublaslt.multiply(a, b, out)
    if done is not None:
        return done
    if a.shape[0] == b.shape[1] == 1 and a.itemsize == 2:
        # CuPy sums a single element in 16 bits
        product = a.astype(np.float32).dot(b.astype(np.float32)).astype(a.dtype)
        if out is None:
            return product
        out[...] = product
        return out
    return a.dot(b, out)


def _for_blas(a):
    """Return ``a`` as BLAS takes it: NumPy multiplies other layouts by a slow loop."""
    a = a.astype(wide(a.dtype), copy=False)
    return a if a.flags.forc else np.ascontiguousarray(a)
