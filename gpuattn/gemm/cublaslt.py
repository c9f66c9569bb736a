"""Matrix products by cuBLASLt, through nvmath's bindings: a CUDA graph can capture them.

A MatmulPlan holds what the library has to know about a product: descriptors of the operation and of
each matrix, and the algorithm that its heuristic ranks first. A plan is made once for every kind of
product. Making it launches nothing, so this may happen while a stream is captured. cuBLASLt stores
matrices by columns: our C = A B, by rows, is its C^T = B^T A^T, and our rows are its columns.
"""

import contextvars
import functools
import math
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, final

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import BFLOAT16
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import launches
from gpuattn.cuda.scratch import workspace
from gpuattn.gemm.bindings import bindings
from gpuattn.modes import mode

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends on Hopper
MOST_PLANS = 4096  # then evict all: more plans than this means that shapes never repeat
FLOAT32, FLOAT16, FLOAT64 = (np.dtype(name) for name in ("float32", "float16", "float64"))
TYPES = {FLOAT32: 0, FLOAT64: 1, FLOAT16: 2, BFLOAT16: 14}  # cudaDataType_t
COMPUTE_32F, COMPUTE_TF32, COMPUTE_64F = 68, 77, 70  # cublasComputeType_t
# cublasLtReductionScheme_t: a sum is not split, or partial sums are not added in the dtype of C
NO_SPLITS, SUMS_IN_FLOAT32 = 0, 2
CUPY_TF32 = 7  # CuPy's COMPUTE_TYPE_TF32
NOTHING_FITS = 7, 15  # CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED
FACTORS = {dtype: np.array([0, 1], dtype) for dtype in (FLOAT32, FLOAT64)}  # beta, or alpha
Matrix = Any  # a CuPy array (rows, columns), or a stack of them
Candidate = tuple[bytes, int]  # an algorithm, and the bytes of workspace that it needs
_plans: dict[tuple, Any] = {}  # the key in ``multiply`` -> MatmulPlan, or the Reason why not
_lock = threading.Lock()
tuner: contextvars.ContextVar[Callable[..., None] | None] = contextvars.ContextVar(
    "gpuattn_tuner", default=None
)  # set by ``tuning.tune``


@final
class Reason(str):
    """Why cuBLASLt does not compute a product. ``by_design``: what follows needs no warning."""

    by_design: bool

    def __new__(cls, text: str, by_design: bool = False) -> "Reason":
        self = super().__new__(cls, text)
        self.by_design = by_design
        return self


def multiply(
    a: Matrix, b: Matrix, out: Matrix | None = None, *, transpose_a: bool = False,
    transpose_b: bool = False, accumulate: bool = False, epilogue: str | None = None,
    vector: Any = None, aux: Matrix | None = None, share: int = 1, launch: bool = True,
) -> Matrix | Reason:  # fmt: skip
    """Return ``out``, to which ``a @ b`` was written or added, or the Reason why it was not.

    ``a``, ``b``: CuPy arrays (M, K) and (K, N), or stacks of them (batch, ...); stored transposed
    with ``transpose_a``, ``transpose_b``. ``out`` None: a new array in their dtype.
    ``epilogue``: a name of ``cublasLtEpilogue_t``. ``vector``: its bias (N,), or for "BGRADB" where
    it writes the sums over rows of ``a`` (M,). ``aux``: where it writes what the gradient reads
    (M, N). Both contiguous, in the dtype of ``out``, at multiples of 16 bytes.
    ``share``: beside other work it may expect 1 / ``share`` of the multiprocessors.
    ``launch=False``: compute nothing and return the Reason, or None.
    Raises RuntimeError where the library fails. Nobody is warned here: the caller knows what
    follows.
    """
    cupy, dtype = sys.modules["cupy"], a.dtype
    low = a.data.ptr | b.data.ptr | (0 if out is None else out.data.ptr) | 256
    key = (
        a.shape, a.strides, b.shape, b.strides, dtype, b.dtype,
        None if out is None else (out.shape, out.strides, out.dtype, out.data.device_id),
        transpose_a, transpose_b, accumulate and out is not None, epilogue, share, low & -low,
        dtype == FLOAT32 and _tf32(cupy), mode.get().batch_invariant,
        cupy.cuda.runtime.getDevice(), a.data.device_id, b.data.device_id,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(a, b, out, *key[7:])
    if type(plan) is Reason:
        return plan
    if not launch:
        return None
    if out is None:
        out = arrays.empty(a, plan.shape)
    if arrays.rehearsing.get():
        return out
    if (tune := tuner.get()) is not None and not plan.invariant:
        tune(plan, cupy, a, b, out, vector, aux)
    if not plan.run(cupy, a, b, out, vector, aux):
        plan = _plans[key] = Reason("cuBLASLt planned this product but refuses to launch it")
        return plan
    if (recorder := arrays.recorders.get()) is not None:
        recorder.multiplied(plan, (a, b, out, vector, aux))
    return out


def _tf32(cupy: ModuleType) -> bool:
    """Return whether the process lets CuPy round float32 to TF32 (CUPY_TF32=1)."""
    return cupy._core._routines_linalg.get_compute_type(FLOAT32) == CUPY_TF32


# ---- the library ---------------------------------------------------------------------------------


@functools.cache
def library() -> tuple[Any, str]:
    """Return (nvmath's bindings, "") or (None, why they cannot be loaded)."""
    try:
        cublasLt = bindings()
        cublasLt.get_version()  # opens the library
    except (ImportError, RuntimeError, OSError) as error:
        return None, " ".join(str(error).split())
    return cublasLt, ""


@functools.cache
def handle(device: int) -> int:
    """Return the handle of the library on a device; the first call starts it."""
    try:
        return library()[0].create()
    except library()[0].cuBLASLtError as error:
        raise _failure(
            error,
            f"to start on device {device}: it may be of another CUDA version than the driver; see "
            "gpuattn doctor, and pip install 'gpuattn[cuda12x]' or 'gpuattn[cuda13x]', whichever "
            "the driver takes",
        ) from error


def _failure(error: Any, what: str) -> RuntimeError:
    name = library()[0].get_status_name(error.status)
    return RuntimeError(
        f"matmul: cuBLASLt failed ({name}) {what}. Memory may be short, or earlier work on the GPU "
        "may have failed: try CUDA_LAUNCH_BLOCKING=1 and CUBLASLT_LOG_LEVEL=2"
    )


# ---- plans ---------------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """The layout of a matrix, or of each matrix of a stack."""

    rows: int
    cols: int
    by_columns: bool  # a column is contiguous, otherwise a row
    leading: int  # elements from one row to the next; from one column if ``by_columns``
    batch: int  # how many matrices
    step: int  # elements from one matrix to the next


def _matrix(x: Matrix, turned: bool = False) -> _Matrix | None:
    """Return the _Matrix of an array, transposed where ``turned``; None for other layouts."""
    if any(step % x.itemsize for step in x.strides):
        return None
    return _layout(x.shape, [step // x.itemsize for step in x.strides], turned)


def _packed(shape: tuple[int, ...], turned: bool = False) -> _Matrix:
    """Return the _Matrix of a contiguous array."""
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    matrix = _layout(shape, steps, turned)
    assert matrix is not None
    return matrix


def _layout(shape: tuple[int, ...], steps: list[int], turned: bool) -> _Matrix | None:
    (*stack, rows, cols), (*apart, down, right) = shape, steps
    if turned:
        rows, cols, down, right = cols, rows, right, down
    batch, step = (stack or [1])[0], (apart or [0])[0]
    if step < 0:
        return None
    if (right == 1 or cols == 1) and (down >= cols or rows == 1):
        return _Matrix(rows, cols, False, max(down if rows > 1 else 0, cols), batch, step)
    if (down == 1 or rows == 1) and (right >= rows or cols == 1):
        return _Matrix(rows, cols, True, max(right if cols > 1 else 0, rows), batch, step)
    return None


def _operands_refusal(a: Matrix, b: Matrix, out: Matrix | None, devices: set[int]) -> Reason | None:
    """Return why no product of ``a`` and ``b`` is planned, whatever their layouts, or None."""
    _, missing = library()
    dtype = a.dtype if out is None else out.dtype
    if missing:
        return Reason(f"cuBLASLt cannot be loaded: {missing}")
    if a.dtype != b.dtype or a.dtype not in TYPES:
        return Reason(f"a is {a.dtype} and b is {b.dtype}, it takes one float dtype", True)
    if dtype != a.dtype and not (a.itemsize == 2 and dtype == FLOAT32):
        return Reason(f"out is {dtype} and a is {a.dtype}, only 16 bits take a float32 out")
    if a.ndim != b.ndim or a.ndim not in (2, 3):
        return Reason(f"a has {a.ndim} axes and b has {b.ndim}, it takes 2 or 3 of both")
    if not a.size or not b.size:
        return Reason(f"there is nothing to multiply: {a.shape} @ {b.shape}", True)
    if len(devices) > 1:
        return Reason(f"the arrays and the current device are several GPUs: {sorted(devices)}")
    return None


def _target(
    out: Matrix, shape: tuple[int, ...], device: int, epilogue: str | None
) -> _Matrix | Reason:
    """Return the _Matrix of ``out``, or why no product of a ``shape`` is written to it."""
    there = out.data.device_id
    if out.shape != shape or there != device:
        return Reason(f"out is {out.shape} on GPU {there}, the product is {shape} on {device}")
    target = _matrix(out)
    if target is None or (target.batch > 1 and not target.step):
        return Reason(f"neither rows nor columns of out are contiguous: strides {out.strides}")
    if target.by_columns and epilogue:
        return Reason(f"beside {epilogue} rows of out are contiguous, not strides {out.strides}")
    return target


def _plan(
    a: Matrix, b: Matrix, out: Matrix | None, transpose_a: bool, transpose_b: bool,
    accumulate: bool, epilogue: str | None, share: int, alignment: int, tf32: bool, invariant: bool,
    device: int, *others: int,
) -> "MatmulPlan | Reason":  # fmt: skip
    """Return the MatmulPlan, or why there is none. Arguments: see ``multiply``, and its key."""
    if reason := _operands_refusal(a, b, out, {device, *others}):
        return reason
    dtype = a.dtype if out is None else out.dtype
    given_a, given_b = _matrix(a, transpose_a), _matrix(b, transpose_b)
    copies = given_a is None, given_b is None
    left, right = given_a or _packed(a.shape, transpose_a), given_b or _packed(b.shape, transpose_b)
    shape = (*a.shape[:-2], left.rows, right.cols)
    if left.cols != right.rows or left.batch != right.batch:
        return Reason(f"the shapes of a and b do not fit: {a.shape} @ {b.shape}")
    target = _packed(shape) if out is None else _target(out, shape, device, epilogue)
    if type(target) is Reason:
        return target
    # later matrices of a stack may be aligned worse than the first
    alignment = math.gcd(alignment, *(m.step * a.itemsize for m in (left, right, target)))
    kind = f"{left} {right} {target} {a.dtype} {dtype} {accumulate} {epilogue} {alignment} {tf32}"
    kind += f" {share}" if share > 1 else ""
    lt, _ = library()
    plan = MatmulPlan(lt, handle(device), device, shape, copies, kind, invariant)
    plan.tf32 = tf32 if a.dtype == FLOAT32 else None
    compute = COMPUTE_64F if dtype == FLOAT64 else COMPUTE_TF32 if tf32 else COMPUTE_32F
    types = TYPES[a.dtype], TYPES[dtype]
    try:
        plan.describe(left, right, target, types, compute, accumulate, epilogue, share)
        candidates = plan.candidates(alignment, 1)
    except lt.cuBLASLtError as error:
        if error.status not in NOTHING_FITS:
            raise _failure(error, f"to plan {shape} = {a.shape} @ {b.shape}") from error
        candidates = []
    if not candidates:
        wanted = f" and {epilogue}" if epilogue else ""
        return Reason(
            f"cuBLASLt has no algorithm for {shape} = {a.shape} @ {b.shape} in {a.dtype}{wanted}, "
            f"at addresses of multiples of {alignment} bytes"
        )
    plan.take(candidates[0])
    return plan


class MatmulPlan:
    """How to multiply matrices of one kind. It owns descriptors of the library.

    ``lt``, ``handle``: nvmath's bindings and the library's handle of ``device``. ``shape``: of the
    product. ``copies``: whether a and b are made contiguous first. ``kind``: the name of the kind
    of product in the files of ``tuning``. ``invariant``: whether a row is the same bits wherever it
    stands: then no sum is split over blocks, and the plan is not tuned, which could change it
    between two calls.
    """

    def __init__(
        self, lt: Any, handle: int, device: int, shape: tuple[int, ...], copies: tuple[bool, bool],
        kind: str, invariant: bool = False,
    ) -> None:  # fmt: skip
        self.lt, self.handle, self.device, self.shape = lt, handle, device, shape
        self.copy_a, self.copy_b = copies
        self.kind, self.tuned, self.invariant = kind, False, invariant
        self.vector = self.aux = 0  # addresses that the operation's descriptor holds
        self.room: tuple[int, int] | None = None  # the stream of the last launch, its workspace
        self.layouts: list[int] = []
        self.tf32: bool | None = None  # of float32 operands, whether planned for TF32

    def is_current(self) -> bool:
        """Return whether the plan fits CuPy's present setting of TF32."""
        return self.tf32 is None or self.tf32 == _tf32(sys.modules["cupy"])

    def describe(
        self, left: _Matrix, right: _Matrix, target: _Matrix, types: tuple[int, int], compute: int,
        accumulate: bool, epilogue: str | None, share: int,
    ) -> None:  # fmt: skip
        """Create the descriptors. ``types``: of the operands and of the product, as in TYPES."""
        lt, operand_type, out_type = self.lt, *types
        self.count = launches.place(f"matmul {epilogue}" if epilogue else "matmul")
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
            self._set(names.SM_COUNT_TARGET, gpu(self.device).multiprocessors // share, np.int32)
        if epilogue:
            self._set(names.EPILOGUE, lt.Epilogue[epilogue], np.int32)
            if "AUX" in epilogue or epilogue[0] == "D":
                self._set(names.EPILOGUE_AUX_LD, target.cols, np.int64)
        for matrix, kind in ((first, operand_type), (second, operand_type), (target, out_type)):
            self.layouts.append(self._layout_descriptor(matrix, kind))
        self.first, self.second, self.target = self.layouts

    def _set(self, name: int, value: Any, dtype: Any) -> None:
        value = np.array([value], dtype)
        self.lt.matmul_desc_set_attribute(self.operation, name, value.ctypes.data, value.nbytes)

    def _layout_descriptor(self, matrix: _Matrix, dtype: int) -> int:
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

    def candidates(
        self, alignment: int, count: int, workspace_bytes: int = WORKSPACE_BYTES
    ) -> list[Candidate]:
        """Return up to ``count`` algorithms, the one that should be fastest first.

        ``alignment``: of the addresses of all arrays, in bytes. ``workspace_bytes``: the most that
        an algorithm may need.
        """
        lt, names = self.lt, self.lt.MatmulPreferenceAttribute
        wishes: list[tuple[int, np.ndarray]] = [
            (names.MAX_WORKSPACE_BYTES, np.array([workspace_bytes], np.uint64)),
            (
                names.REDUCTION_SCHEME_MASK,
                np.array([NO_SPLITS if self.invariant else SUMS_IN_FLOAT32], np.uint32),
            ),
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

    def take(self, candidate: Candidate) -> None:
        """Use an algorithm from now on."""
        self.candidate = candidate
        self.algorithm = np.frombuffer(candidate[0], np.uint64)
        self.algorithm_address, self.workspace_bytes = self.algorithm.ctypes.data, candidate[1]

    def run(
        self, cupy: ModuleType, a: Matrix, b: Matrix, out: Matrix, vector: Any = None,
        aux: Matrix | None = None,
    ) -> bool:  # fmt: skip
        """Launch on CuPy's current stream; return False if the library refuses what it planned."""
        if self.copy_a:
            a = cupy.ascontiguousarray(a)
        if self.copy_b:
            b = cupy.ascontiguousarray(b)
        addresses = [0 if x is None else x.data.ptr for x in (a, b, out, vector, aux)]
        return self.run_at(cupy.cuda.get_current_stream().ptr, *addresses)

    def run_at(self, stream: int, a: int, b: int, out: int, vector: int = 0, aux: int = 0) -> bool:
        """Launch on a stream, on arrays at these addresses, 0 for none; else like ``run``."""
        if not vector and not aux:
            return self._launch(stream, a, b, out)
        with _lock:  # no other thread may set its addresses between these two
            if vector not in (0, self.vector) or aux not in (0, self.aux):
                self._point(vector, aux)
            return self._launch(stream, a, b, out)

    def _point(self, vector: int, aux: int) -> None:
        """Let the operation's descriptor hold these addresses, unless they are 0."""
        names = self.lt.MatmulDescAttribute
        if vector and vector != self.vector:
            self.vector = vector
            self._set(names.BIAS_POINTER, vector, np.uint64)
        if aux and aux != self.aux:
            self.aux = aux
            self._set(names.EPILOGUE_AUX_POINTER, aux, np.uint64)

    def _launch(self, stream: int, a: int, b: int, out: int) -> bool:
        size, target, memory = self.workspace_bytes, self.target, 0
        if size:
            room = self.room  # one tuple: several threads may launch
            if room is None or room[0] != stream:
                address = workspace("cuBLASLt", WORKSPACE_BYTES, self.device, stream)
                room = self.room = stream, address
            memory = room[1]
        if self.swap:
            a, b = b, a
        try:
            self.lt.matmul(
                self.handle, self.operation, self.alpha, a, self.first, b, self.second, self.beta,
                out, target, out, target, self.algorithm_address, memory, size, stream,
            )  # fmt: skip
        except self.lt.cuBLASLtError as error:
            if error.status in NOTHING_FITS:
                return False
            raise _failure(error, f"on a product of shape {self.shape}") from error
        self.count[0] += 1
        return True

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # the library may have been unloaded
            return
        for layout in self.layouts:
            self.lt.matrix_layout_destroy(layout)
        if hasattr(self, "operation"):
            self.lt.matmul_desc_destroy(self.operation)
