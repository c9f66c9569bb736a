"""Matrix products by cuBLASLt, through nvmath's bindings: the ones that a CUDA graph can capture.

A plan is what the library has to know about a product: descriptors of the operation and of each
matrix, and the algorithm that its heuristic ranks first. It is made once for every kind of product
and launches nothing, so it may be made while a stream is captured. cuBLASLt counts columns first:
our C = A B, by rows, is its C^T = B^T A^T, and what runs along its rows is one of our columns.
"""

import contextvars
import functools
import math
import sys
import threading
from typing import NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import BFLOAT16
from gpuattn.cuda.kernels import gpu, launches

WORKSPACE_BYTES = 32 << 20  # what NVIDIA asks for on Hopper
MOST_PLANS = 4096  # then all are made anew: whoever has so many has ever new shapes
FLOAT32, FLOAT16, FLOAT64 = (np.dtype(name) for name in ("float32", "float16", "float64"))
TYPES = {FLOAT32: 0, FLOAT64: 1, FLOAT16: 2, BFLOAT16: 14}  # cudaDataType_t
COMPUTE_32F, COMPUTE_TF32, COMPUTE_64F = 68, 77, 70  # cublasComputeType_t
SUMS_IN_FLOAT32 = 2  # cublasLtReductionScheme_t: parts of a sum are not added in the dtype of C
CUPY_TF32 = 7  # CuPy's COMPUTE_TYPE_TF32
NOTHING_FITS = 7, 15  # CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED
FACTORS = {dtype: np.array([0, 1], dtype) for dtype in (FLOAT32, FLOAT64)}  # beta, or alpha
_plans = {}  # the key in ``multiply`` -> Plan, or None where cuBLASLt has nothing
_workspaces = {}  # (device, stream) -> memory: products on one stream follow each other
_lock = threading.Lock()
tuner = contextvars.ContextVar("gpuattn_tuner", default=None)  # of ``tuning.tune``


def multiply(
    a, b, out=None, *, transpose_a=False, transpose_b=False, accumulate=False,
    epilogue=None, vector=None, aux=None, share=1,
):  # fmt: skip
    """Return ``out``, to which ``a @ b`` was written or added, or None where that cannot be done.

    ``a``, ``b``: CuPy arrays (M, K) and (K, N), or stacks of them (batch, ...); stored the other
    way round with ``transpose_a``, ``transpose_b``. ``out`` None: a new array in their dtype.
    ``epilogue``: a name of ``cublasLtEpilogue_t``, with ``vector``: a bias (N,), or for "BGRADB"
    the place of the sums over rows of ``a`` (M,), and ``aux``: the place of what the gradient reads
    (M, N). Both contiguous, in the dtype of ``out``, at multiples of 16 bytes.
    ``share``: beside other work it may expect one of so many parts of the multiprocessors.
    Raises RuntimeError where the library fails.
    """
    cupy, dtype = sys.modules["cupy"], a.dtype
    low = a.data.ptr | b.data.ptr | (0 if out is None else out.data.ptr) | 256
    key = (
        a.shape, a.strides, b.shape, b.strides, dtype, b.dtype,
        None if out is None else (out.shape, out.strides, out.dtype, out.data.device_id),
        transpose_a, transpose_b, accumulate and out is not None, epilogue, share, low & -low,
        dtype == FLOAT32 and _tf32(cupy),
        cupy.cuda.runtime.getDevice(), a.data.device_id, b.data.device_id,
    )  # fmt: skip
    plan = _plans.get(key, _plans)
    if plan is _plans:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(a, b, out, *key[7:])
    if plan is None:
        return None
    if out is None:
        out = arrays.empty(a, plan.shape)
    if tuner.get() is not None:
        tuner.get()(plan, cupy, a, b, out, vector, aux)
    if not plan.run(cupy, a, b, out, vector, aux):
        _plans[key] = None
        return None
    return out


def _tf32(cupy):
    """Return whether the process lets CuPy round float32 to TF32 (CUPY_TF32=1)."""
    return cupy._core._routines_linalg.get_compute_type(FLOAT32) == CUPY_TF32


# ---- the library ---------------------------------------------------------------------------------


@functools.cache
def library():
    """Return (nvmath's bindings, "") or (None, why there are none)."""
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()  # opens the library
    except (ImportError, RuntimeError, OSError) as error:
        return None, " ".join(str(error).split())
    return cublasLt, ""


@functools.cache
def _handle(device):
    try:
        return library()[0].create()
    except library()[0].cuBLASLtError as error:
        raise _failure(
            error,
            f"to start on device {device}: it may be of another CUDA version than the driver; see "
            "gpuattn doctor, and pip install 'gpuattn[cuda12x]' or 'gpuattn[cuda13x]', whichever "
            "the driver takes",
        ) from error


def _failure(error, what):
    name = library()[0].get_status_name(error.status)
    return RuntimeError(
        f"matmul: cuBLASLt failed ({name}) {what}. Memory may be short, or earlier work on the GPU "
        "may have failed: try CUDA_LAUNCH_BLOCKING=1 and CUBLASLT_LOG_LEVEL=2"
    )


def _workspace(cupy, device, stream):
    """Return the address of memory that only products on this stream use, and graphs of it.

    Such a graph may run on another stream, but not beside this one.
    """
    memory = _workspaces.get((device, stream))
    if memory is None:  # not from a pool: that of a graph would take it back
        memory = _workspaces[device, stream] = cupy.cuda.memory.Memory(WORKSPACE_BYTES)
    return memory.ptr


# ---- plans ---------------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """How a matrix, or each of a stack of them, lies in memory."""

    rows: int
    cols: int
    by_columns: bool  # neighbours in memory are rows, otherwise columns
    leading: int  # elements from a row (by columns: from a column) to the next
    batch: int  # matrices, and elements from one to the next
    step: int


def _matrix(x, turned=False):
    """Return the _Matrix of an array, transposed where ``turned``, or None: no such layout."""
    if any(step % x.itemsize for step in x.strides):
        return None
    return _layout(x.shape, [step // x.itemsize for step in x.strides], turned)


def _packed(shape, turned=False):
    return _layout(shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], turned)


def _layout(shape, steps, turned):
    (*batch, rows, cols), (*step, down, right) = shape, steps
    if turned:
        rows, cols, down, right = cols, rows, right, down
    batch, step = (batch or [1])[0], (step or [0])[0]
    if step < 0:
        return None
    if (right == 1 or cols == 1) and (down >= cols or rows == 1):
        return _Matrix(rows, cols, False, max(down if rows > 1 else 0, cols), batch, step)
    if (down == 1 or rows == 1) and (right >= rows or cols == 1):
        return _Matrix(rows, cols, True, max(right if cols > 1 else 0, rows), batch, step)
    return None


def _plan(
    a, b, out, transpose_a, transpose_b, accumulate, epilogue, share, alignment, tf32, device,
    *others,
):  # fmt: skip
    """Return the Plan, or None: shapes, dtypes or places do not fit, or there is no algorithm."""
    lt, _ = library()
    dtype = a.dtype if out is None else out.dtype
    fits = a.dtype == b.dtype and a.dtype in TYPES and a.ndim == b.ndim and a.ndim in (2, 3)
    fits = fits and (dtype == a.dtype or (a.itemsize == 2 and dtype == FLOAT32))
    if lt is None or not fits or not a.size or not b.size or {device} != set(others):
        return None
    left, right = _matrix(a, transpose_a), _matrix(b, transpose_b)
    copies = left is None, right is None
    left, right = left or _packed(a.shape, transpose_a), right or _packed(b.shape, transpose_b)
    shape = (*a.shape[:-2], left.rows, right.cols)
    if left.cols != right.rows or left.batch != right.batch:
        return None
    if out is not None and (out.shape != shape or out.data.device_id != device):
        return None
    target = _packed(shape) if out is None else _matrix(out)
    if target is None or (target.by_columns and epilogue) or (target.batch > 1 and not target.step):
        return None
    # matrices of a stack may lie worse than the first
    alignment = math.gcd(alignment, *(m.step * a.itemsize for m in (left, right, target)))
    kind = f"{left} {right} {target} {a.dtype} {dtype} {accumulate} {epilogue} {alignment} {tf32}"
    kind += f" {share}" if share > 1 else ""
    plan = Plan(lt, _handle(device), device, shape, copies, kind)
    compute = COMPUTE_64F if dtype == FLOAT64 else COMPUTE_TF32 if tf32 else COMPUTE_32F
    types = TYPES[a.dtype], TYPES[dtype]
    try:
        plan.describe(left, right, target, types, compute, accumulate, epilogue, share)
        candidates = plan.candidates(alignment, 1)
    except lt.cuBLASLtError as error:
        if error.status not in NOTHING_FITS:
            raise _failure(error, f"to plan {shape} = {a.shape} @ {b.shape}") from error
        return None
    if not candidates:
        return None
    plan.take(candidates[0])
    return plan


class Plan:
    """How to multiply matrices of one kind. Its descriptors are the library's, by address."""

    def __init__(self, lt, handle, device, shape, copies, kind):
        self.lt, self.handle, self.device, self.shape = lt, handle, device, shape
        self.copy_a, self.copy_b = copies
        self.kind, self.tuned = kind, False
        self.vector = self.aux = 0  # addresses that the operation holds
        self.layouts = []

    def describe(self, left, right, target, types, compute, accumulate, epilogue, share):
        lt, operand_type, out_type = self.lt, *types
        self.name = f"matmul {epilogue}" if epilogue else "matmul"
        self.accumulate = accumulate
        factors = FACTORS[FLOAT64 if compute == COMPUTE_64F else FLOAT32]
        self.alpha = factors[1:].ctypes.data
        self.beta = factors[int(accumulate) :].ctypes.data
        self.operation = lt.matmul_desc_create(compute, TYPES[factors.dtype])
        self.swap = not target.by_columns  # see the top of this file
        first, second = (right, left) if self.swap else (left, right)
        names = lt.MatmulDescAttribute
        self._set(names.TRANSA, first.by_columns == self.swap, np.int32)
        self._set(names.TRANSB, second.by_columns == self.swap, np.int32)
        if share > 1:
            self._set(names.SM_COUNT_TARGET, gpu(self.device)[1] // share, np.int32)
        if epilogue:
            self._set(names.EPILOGUE, lt.Epilogue[epilogue], np.int32)
            if "AUX" in epilogue or epilogue[0] == "D":
                self._set(names.EPILOGUE_AUX_LD, target.cols, np.int64)
        self.layouts += [self._place(first, operand_type), self._place(second, operand_type)]
        self.layouts += [self._place(target, out_type)]
        self.first, self.second, self.target = self.layouts

    def _set(self, name, value, dtype):
        value = np.array([value], dtype)
        self.lt.matmul_desc_set_attribute(self.operation, name, value.ctypes.data, value.nbytes)

    def _place(self, matrix, dtype):
        lt, names = self.lt, self.lt.MatrixLayoutAttribute
        sides = matrix.rows, matrix.cols
        sides = sides if matrix.by_columns else sides[::-1]
        layout = lt.matrix_layout_create(dtype, *sides, matrix.leading)
        if matrix.batch > 1:
            for name, value in (
                (names.BATCH_COUNT, np.array([matrix.batch], np.int32)),
                (names.STRIDED_BATCH_OFFSET, np.array([matrix.step], np.int64)),
            ):
                lt.matrix_layout_set_attribute(layout, name, value.ctypes.data, value.nbytes)
        return layout

    def candidates(self, alignment, count):
        """Return up to ``count`` algorithms as ``take`` takes them, what should be fastest first.

        ``alignment``: of all arrays, in bytes.
        """
        lt, names = self.lt, self.lt.MatmulPreferenceAttribute
        wishes = [
            (names.MAX_WORKSPACE_BYTES, np.array([WORKSPACE_BYTES], np.uint64)),
            (names.REDUCTION_SCHEME_MASK, np.array([SUMS_IN_FLOAT32], np.uint32)),
        ]
        for matrix in "ABCD":
            name = names[f"MIN_ALIGNMENT_{matrix}_BYTES"]
            wishes.append((name, np.array([alignment], np.uint32)))
        results = np.zeros(count, lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, np.int32)
        preference = lt.matmul_preference_create()
        try:
            for name, value in wishes:
                lt.matmul_preference_set_attribute(
                    preference, name, value.ctypes.data, value.nbytes
                )
            lt.matmul_algo_get_heuristic(
                self.handle, self.operation, self.first, self.second, self.target, self.target,
                preference, count, results.ctypes.data, found.ctypes.data,
            )  # fmt: skip
        finally:
            lt.matmul_preference_destroy(preference)
        self.alignment = alignment
        return [(one["algo"].tobytes(), int(one["workspace_size"])) for one in results[: found[0]]]

    def take(self, candidate):
        """Use an algorithm, (its bytes, how many bytes of workspace it needs), from now on."""
        self.candidate = candidate
        self.algorithm = np.frombuffer(candidate[0], np.uint64)
        self.algorithm_address, self.workspace_bytes = self.algorithm.ctypes.data, candidate[1]

    def run(self, cupy, a, b, out, vector=None, aux=None):
        """Launch on CuPy's current stream; return False if the library plans it but refuses it."""
        if self.copy_a:
            a = cupy.ascontiguousarray(a)
        if self.copy_b:
            b = cupy.ascontiguousarray(b)
        if vector is None and aux is None:
            return self._launch(cupy, a, b, out)
        with _lock:  # another thread would set other addresses
            self._point(vector, aux)
            return self._launch(cupy, a, b, out)

    def _point(self, vector, aux):
        names = self.lt.MatmulDescAttribute
        if vector is not None and vector.data.ptr != self.vector:
            self.vector = vector.data.ptr
            self._set(names.BIAS_POINTER, self.vector, np.uint64)
        if aux is not None and aux.data.ptr != self.aux:
            self.aux = aux.data.ptr
            self._set(names.EPILOGUE_AUX_POINTER, self.aux, np.uint64)

    def _launch(self, cupy, a, b, out):
        stream, bytes_ = cupy.cuda.get_current_stream().ptr, self.workspace_bytes
        workspace = _workspace(cupy, self.device, stream) if bytes_ else 0
        a, b, out, target = a.data.ptr, b.data.ptr, out.data.ptr, self.target
        if self.swap:
            a, b = b, a
        try:
            self.lt.matmul(
                self.handle, self.operation, self.alpha, a, self.first, b, self.second, self.beta,
                out, target, out, target, self.algorithm_address, workspace, bytes_, stream,
            )  # fmt: skip
        except self.lt.cuBLASLtError as error:
            if error.status in NOTHING_FITS:
                return False
            raise _failure(error, f"on a product of shape {self.shape}") from error
        launches[self.name] += 1
        return True

    def __del__(self, ending=sys.is_finalizing):
        if ending():  # the library may be gone
            return
        for layout in self.layouts:
            self.lt.matrix_layout_destroy(layout)
        if hasattr(self, "operation"):
            self.lt.matmul_desc_destroy(self.operation)
