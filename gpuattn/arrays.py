"""NumPy or CuPy, by the arrays given; checks, strides, allocation, transfers, index checks."""

import contextlib
import contextvars
import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gpuattn.environment import usable_cores
from gpuattn.errors import DeviceMissingError, problem, type_of
from gpuattn.typing import Array, DType, Shape, Xp

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("float32"), np.dtype("float16"), BFLOAT16, np.dtype("float64"))
CTYPES = {
    FLOATS[0]: "float",
    FLOATS[1]: "f16",
    BFLOAT16: "bf16",
}  # names in common/types.cuh
LOWEST = {dtype: float(np.finfo(dtype).min) for dtype in (FLOATS[0], FLOATS[3])}
ARRAYS = "a NumPy or CuPy array, or an object with DLPack or __cuda_array_interface__"
HOST_TO_DEVICE, DEVICE_TO_DEVICE = 1, 3  # cudaMemcpyKind
MAX_THREADS = 4  # of for_each; BLAS has its own threads
rehearsing: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "gpuattn_rehearsing", default=False
)  # set by ``cuda.kernels.compiling_only``: GPU arrays hold arbitrary values
recorders: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "gpuattn_recorder", default=None
)  # the ``cuda.recorder.Recorder`` of this thread and context, or None


class NothingComputed(Exception):
    """Ends a rehearsal: the host asks for values that no kernel has computed."""


def _cupy():
    """Return CuPy if the program has imported it: no array can be on a GPU before that."""
    return sys.modules.get("cupy")


def on_gpu(array: Any) -> bool:
    """Return whether ``array`` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def get_xp(*arrays: Any) -> Xp:
    """Return the module (``numpy`` or ``cupy``) that owns the first array that is one."""
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        for array in arrays:
            if isinstance(array, cupy.ndarray):
                return cupy
    return np


def is_array(value: Any) -> bool:
    """Return whether ``value`` is a NumPy or CuPy array."""
    return isinstance(value, np.ndarray) or on_gpu(value)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is float16, bfloat16, float32 or float64."""
    return np.dtype(dtype) in FLOATS


def ctype(dtype: np.dtype) -> str | None:
    """Return the device name of a float dtype, or None: float64 has none."""
    return CTYPES.get(np.dtype(dtype))


def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype to accumulate ``dtype`` in: float64 for float64, else float32."""
    return FLOATS[3] if np.dtype(dtype) == FLOATS[3] else FLOATS[0]


def as_array(value: Any, function: str, argument: str) -> Array:
    """Return ``value`` as a NumPy or CuPy array without copying.

    Takes arrays, NumPy scalars, and anything with ``__cuda_array_interface__`` or DLPack.
    Raises TypeError for lists and numbers, which would be copied silently, and for arrays that are
    more than their values: masked arrays, ``np.matrix``, and tensors of other libraries that
    require a gradient.
    """
    if type(value) is np.ndarray or on_gpu(value):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    got, advice = type_of(value), f"Try numpy.asarray({argument})."
    if value is None:
        got, advice = "None", ""
    elif isinstance(value, np.ma.MaskedArray):
        advice = f"Try {argument}.filled(0)."
    elif isinstance(value, np.ndarray):
        if not isinstance(value, np.matrix):
            return value
    elif getattr(value, "requires_grad", False):
        got, advice = f"{got} that requires a gradient", f"Try {argument}.detach()."
    elif hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        return _imported(value, function, argument)
    raise TypeError(problem(function, argument, got, ARRAYS, advice))


def _imported(value, function, argument):
    """Return the array of another library, without copying."""
    cuda = hasattr(value, "__cuda_array_interface__") or _on_cuda_by_dlpack(value)
    xp = import_cupy() if cuda else np
    try:
        return xp.from_dlpack(value) if hasattr(value, "__dlpack__") else xp.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        got = f"{type_of(value)} that cannot be exported ({error})"
        raise TypeError(problem(function, argument, got, ARRAYS)) from error


def _on_cuda_by_dlpack(value):
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == 2


def check_together(function: str, **arrays: Any) -> None:
    """Raise unless all arrays, or None, are on the same backend and the same GPU."""
    if _cupy() is None:
        return
    given = {name: a for name, a in arrays.items() if is_array(a)}
    gpu = {name: a for name, a in given.items() if on_gpu(a)}
    if gpu and len(gpu) < len(given):
        there, here = ", ".join(gpu), ", ".join(n for n in given if n not in gpu)
        raise TypeError(
            f"{function}: {there} on the GPU but {here} in host memory. "
            "Move them with gpuattn.to_gpu(x) or gpuattn.to_cpu(x)."
        )
    check_devices(function, gpu)


def check_devices(function: str, arrays: Mapping[Any, Any]) -> None:
    """Raise ValueError unless those of ``arrays`` (by name or place) on a GPU share one."""
    devices = {name: a.device.id for name, a in arrays.items() if on_gpu(a)}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{function}: arrays are on several GPUs: {devices}. Copy them to one.")


def check_floats(function: str, **arrays: Array | None) -> None:
    """Raise TypeError unless all arrays, or None, have one float dtype."""
    first = None
    for name, a in arrays.items():
        if a is None:
            continue
        if not is_floating(a.dtype):
            accepted = "float32, float16, bfloat16 or float64"
            raise TypeError(problem(function, f"{name}.dtype", a.dtype, accepted))
        if first is not None and a.dtype != first[1]:
            raise TypeError(
                f"{function}: {first[0]} is {first[1]} but {name} is {a.dtype}; "
                "all must share one dtype. Cast with x.astype(...)."
            )
        first = first or (name, a.dtype)


def rows_refusal(x: Array, name: str) -> str | None:
    """Return why rows of ``x``, the argument ``name``, cannot be read 16 bytes at a time, or None.

    ``x``: (..., head size), on the GPU.
    """
    width = 16 // x.itemsize
    if x.shape[-1] % width:
        return f"the head size of {name} is {x.shape[-1]}, the kernel takes multiples of {width}"
    if not x.size:
        return None
    if x.strides[-1] != x.itemsize:
        return f"the head axis of {name} is not contiguous; try xp.ascontiguousarray({name})"
    steps = (step for n, step in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1)
    if any(step % 16 for step in steps) or x.data.ptr % 16:
        return f"rows of {name} do not start at multiples of 16 bytes; try a contiguous copy"
    return None


def strided_rows(x: Array) -> tuple[Array, int]:
    """Return (x, step): rows along the last axis start ``step`` elements apart.

    Copies ``x`` if its strides are not of that form.
    """
    sizes, strides = x.shape[:-1], x.strides
    outer = [(n, step) for n, step in zip(sizes, strides, strict=False) if n > 1]
    regular = all(step == n * inner for (_, step), (n, inner) in itertools.pairwise(outer))
    packed = x.ndim and (x.shape[-1] < 2 or strides[-1] == x.itemsize)
    if not (packed and regular and all(step > 0 and step % x.itemsize == 0 for _, step in outer)):
        x = get_xp(x).ascontiguousarray(x)
        return x, x.shape[-1]
    return x, outer[-1][1] // x.itemsize if outer else x.shape[-1]


def as_rows(x: Array) -> Array:
    """Return ``x`` (..., columns) as a matrix: a view, or a copy where its strides need one."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def aligned_rows(x: Array | None, step: int) -> bool:
    """Return whether rows ``step`` elements apart start at multiples of 16 bytes; True for None."""
    return x is None or (x.data.ptr | step * x.itemsize) % 16 == 0


def import_cupy() -> Any:
    """Return the module CuPy. Raises DeviceMissingError that says how to install it."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceMissingError(
            f"CuPy cannot be imported ({error}). pip install 'gpuattn[cuda13x]' (or cuda12x)."
        ) from error
    return cupy


def to_gpu(array: Any) -> Array:
    """Return a CuPy array with the same values. Raises DeviceMissingError without a working GPU."""
    cupy = import_cupy()
    if not cupy.cuda.is_available():
        raise DeviceMissingError("no CUDA device works here. Run: gpuattn doctor")
    return cupy.asarray(array)


def to_cpu(array: Any) -> np.ndarray:
    """Return a NumPy array with the same values; a GPU array is copied after its stream is done.

    Raises IndexError if a kernel met an index out of range since the last copy.
    """
    if not on_gpu(array):
        return np.asarray(array)
    if rehearsing.get():
        raise NothingComputed
    copy = array.get()
    check_indices()
    return copy


def same_memory(a: Array, b: Array) -> bool:
    """Return whether two arrays are the same elements of the same memory."""
    if on_gpu(a) != on_gpu(b):
        return False
    starts = [x.data.ptr if on_gpu(x) else x.ctypes.data for x in (a, b)]
    same = (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)
    return same and starts[0] == starts[1]


allocate = None  # None, or allocate(xp, shape, dtype): tests fill new arrays with NaN here


def empty(like: Array, shape: int | Shape, dtype: DType | None = None) -> Array:
    """Return an uninitialised C-contiguous array on the backend and device of ``like``."""
    xp, dtype = get_xp(like), dtype or like.dtype
    array = allocate(xp, shape, dtype) if allocate else xp.empty(shape, dtype)
    if (recorder := recorders.get()) is not None:
        recorder.allocated(array)
    return array


def empty_pinned(shape: int | Shape, dtype: DType) -> np.ndarray:
    """Return an uninitialised NumPy array that a GPU copies to and from without waiting.

    As ``cupyx.empty_pinned``; importing cupyx takes 0.4 s, because it imports SciPy.
    """
    dtype, size = np.dtype(dtype), math.prod(np.atleast_1d(shape))
    memory = import_cupy().cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
    return np.frombuffer(memory, dtype, size).reshape(shape)


def shared(array: Array) -> Array:
    """Return ``array``, which was just written, when every stream may read it.

    For what is made once, at its first use, and read from then on by whatever stream is current.
    Waits for the current stream, but not under graph capture.
    """
    if on_gpu(array):
        stream = import_cupy().cuda.get_current_stream()
        if not (stream.ptr and stream.is_capturing()):
            stream.synchronize()
    return array


def zeros(like: Array, shape: int | Shape, dtype: DType | None = None) -> Array:
    """Return zeros on the backend and device of ``like``."""
    array = get_xp(like).zeros(shape, dtype or like.dtype)
    if (recorder := recorders.get()) is not None:
        recorder.allocated(array, zeroed=True)
    return array


def copied(array: Array, dtype: DType) -> Array:
    """Return a copy of ``array`` in ``dtype``.

    One of contiguous values in their own dtype is ``cudaMemcpyAsync``: CuPy's ``array`` launches a
    kernel that copies an element a thread.
    """
    xp = get_xp(array)
    if xp is np or array.dtype != dtype or not array.flags.c_contiguous or not array.size:
        return xp.array(array, dtype)
    copy, cuda = xp.empty(array.shape, dtype), xp.cuda
    ends, stream = (copy.data.ptr, array.data.ptr), cuda.get_current_stream().ptr
    cuda.runtime.memcpyAsync(*ends, array.nbytes, DEVICE_TO_DEVICE, stream)
    return copy


def unrecorded_write() -> None:
    """Say that CuPy writes to an array that was there before: such a call has no program.

    To be called beside every such write by an implementation that launches kernels, because a
    ``cuda.recorder.Recorder`` cannot see it.
    """
    if (recorder := recorders.get()) is not None:
        recorder.refused = True


_NOWHERE = contextlib.nullcontext()


def device_of(*arrays: Any) -> contextlib.AbstractContextManager:
    """Return a context in which the device of the first GPU array is the current one."""
    cupy = _cupy()
    if cupy is not None:
        for array in arrays:
            if isinstance(array, cupy.ndarray):
                here = array.data.device_id == cupy.cuda.runtime.getDevice()
                return _NOWHERE if here else array.device
    return _NOWHERE


@functools.cache
def _helpers():
    """Return (threads besides the calling one, their pool)."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import, rarely needed

    count = min(usable_cores(), MAX_THREADS) - 1
    return count, ThreadPoolExecutor(max(count, 1), thread_name_prefix="gpuattn")


def for_each(function: Callable[[Any], None], items: Sequence) -> None:
    """Call ``function`` on every item, in several threads: NumPy releases Python's lock.

    For work on parts of NumPy arrays that do not overlap; the order of calls is undefined. The
    calling thread takes part, so nested calls cannot deadlock.
    """
    left = iter(items)

    def work():
        for item in left:
            function(item)

    if len(items) < 2:
        work()
        return
    count, pool = _helpers()
    helpers = [pool.submit(work) for _ in range(min(count, len(items) - 1))]
    try:
        work()
    finally:  # cancel helpers that have not started: no items are left
        started = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in started]
    for error in filter(None, errors):
        raise error


# ---- indices out of range: raised at once on NumPy, on a GPU at the next copy to the host -------

_FLAG_BASE = 1 << 62  # keeps a flag that holds a (negative) index from being zero
# device -> int64 (arguments, 2): zero, or _FLAG_BASE + index and the number of rows
_flags: dict[int, Array] = {}
_flag_rows: dict[str, int] = {}  # "function: argument" -> its row in each array of flags


def index_flag(like: Array, what: str) -> Array:
    """Return two int64 on the GPU of ``like``, to which kernels write an index out of range.

    ``what``: "function: argument". See ``common/index.cuh``.
    """
    place = _flag_rows.setdefault(what, len(_flag_rows))
    device = like.device.id
    if device not in _flags:
        _flags.setdefault(device, shared(get_xp(like).zeros((32, 2), np.int64)))
    if (recorder := recorders.get()) is not None:
        recorder.kept(_flags[device])
    return _flags[device][place]


def checked_index(index: Array, size: int, what: str) -> Array:
    """Return ``index`` if 0 <= index < size throughout; IndexError on NumPy, flagged on a GPU.

    On a GPU, where nothing is read back, entries out of range become 0.
    """
    if not on_gpu(index):
        if index.size and (index.min() < 0 or index.max() >= size):
            raise IndexError(_index_message(what, index[(index < 0) | (index >= size)][0], size))
        return index
    xp, flag = get_xp(index), index_flag(index, what)
    wrong = (index < 0) | (index >= size)
    if index.size:
        found = xp.where(wrong, index.astype(np.int64) + _FLAG_BASE, 0).max()
        flag[0] = xp.maximum(flag[0], found)
        flag[1] = size
    return xp.where(wrong, 0, index)


def check_indices() -> None:
    """Raise IndexError if a kernel read an index out of range. Synchronizes with the GPUs."""
    for flags in _flags.values():
        values = flags.get()
        if values[:, 0].any():
            flags.fill(0)
            place = int(values[:, 0].argmax())
            what = next(name for name, p in _flag_rows.items() if p == place)
            raise IndexError(_index_message(what, values[place, 0] - _FLAG_BASE, values[place, 1]))


def _index_message(what, index, size):
    return problem(*what.split(": "), f"holding {index}", f"0 <= index < {size}")


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for later arrays, not return it to the system.

    Training allocates the same arrays at every step; without this, Linux clears their pages again
    each time, which takes a third of a small NumPy step. For the whole process; needs glibc.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the largest value that every glibc accepts
        libc.mallopt(trim_threshold, (1 << 31) - 1)
