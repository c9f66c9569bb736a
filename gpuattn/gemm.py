"""Matrix products: the one place that hands matrices to a library.

NumPy's BLAS on the CPU, cuBLAS through CuPy on a GPU. Sums are kept in float32 for 16-bit
operands and are never TF32 unless the process asks CuPy for it.
"""

import numpy as np

from gpuattn.arrays import check_floats, check_together, get_xp, on_gpu, wide


def matmul(a, b, *, transpose_a=False, transpose_b=False, out=None, accumulate=False):
    """Return ``a @ b`` for ``a`` (M, K) and ``b`` (K, N), in their dtype.

    ``transpose_a``, ``transpose_b``: the operand is stored as (K, M), or as (N, K).
    ``out``: (M, N) of any float dtype, such as a slice of a flat gradient buffer; it is written
    (or added to, with ``accumulate``) and returned. Operands that are neither C- nor
    Fortran-contiguous are copied first. Raises TypeError for mixed dtypes or backends and
    ValueError for shapes that do not fit.
    """
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
    return "CuPy refuses cuBLAS in a graph"


def _product(a, b, out=None):
    """Return a @ b; from 16-bit operands NumPy gives float32 and CuPy the operands' dtype."""
    if get_xp(a, b) is np:
        return np.matmul(_for_blas(a), _for_blas(b), out=out)
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
