"""Stand-ins for CuPy and for nvmath's cuBLASLt on the CPU: they do what the descriptors say.

Host arrays pass for GPU arrays, and products are taken as the library takes them, by columns, so
wrong layouts, steps, transposes and pointers give wrong numbers.
"""

import ctypes
import enum
import sys
from types import SimpleNamespace

import numpy as np

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import scratch
from gpuattn.gemm import cublaslt

DTYPES = {0: np.dtype("float32"), 1: np.dtype("float64"), 2: np.dtype("float16"), 14: BFLOAT16}
ALGORITHMS = 3  # with workspace; one more has none
WORKSPACE = 1024


class Memory:
    """A place in the memory of ``owner``, an array."""

    __slots__ = ("device_id", "owner", "ptr")

    def __init__(self, ptr, owner):
        self.ptr, self.owner, self.device_id = ptr, owner, 0

    def __add__(self, offset):
        return Memory(self.ptr + offset, self.owner)


class Array(np.ndarray):
    """A NumPy array with the attributes of CuPy's arrays that launches read."""

    def __new__(cls, shape, dtype=np.float64, memptr=None, strides=None):
        if memptr is None:
            return super().__new__(cls, shape, dtype)
        owner = memptr.owner if memptr.owner.base is None else memptr.owner.base
        at = memptr.ptr - owner.ctypes.data
        return super().__new__(cls, shape, dtype, owner.view(np.ndarray), at, strides)

    @property
    def data(self):
        return Memory(self.__array_interface__["data"][0], self)

    @property
    def device(self):
        return SimpleNamespace(id=0)

    @property
    def _c_contiguous(self):
        return self.flags.c_contiguous


def gpu(array):
    return np.asarray(array).view(Array)


def install(monkeypatch):
    """Let products be taken by a new CublasLt, which is returned; arrays of ``gpu`` are CuPy's."""
    library = CublasLt()
    monkeypatch.setitem(sys.modules, "cupy", cupy())
    monkeypatch.setattr(cublaslt, "library", lambda: (library, ""))
    monkeypatch.setattr(cublaslt, "handle", lambda device: library.create())
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(scratch, "_workspaces", {})
    return library


def matmul_of_cupy(a, b):
    """``cupy.matmul``, which has no product of bfloat16 stacks."""
    if BFLOAT16 in (a.dtype, b.dtype) and max(a.ndim, b.ndim) > 2:
        raise TypeError("data type 'E' not understood")
    return gpu(np.matmul(a, b))


class Event:
    clock = 0.0

    def record(self):
        self.time = Event.clock

    def synchronize(self):
        pass


def cupy(capturing=False):
    """Return a module in which host arrays are on device 0."""
    stream = SimpleNamespace(ptr=1, is_capturing=lambda: capturing)
    return SimpleNamespace(
        ndarray=Array,
        empty=lambda shape, dtype=np.float64: gpu(np.empty(shape, dtype)),
        zeros=lambda shape, dtype=np.float64: gpu(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype: gpu(np.full(shape, value, dtype)),
        matmul=matmul_of_cupy,
        ascontiguousarray=lambda x: gpu(np.ascontiguousarray(x)),
        broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
        _core=SimpleNamespace(_routines_linalg=SimpleNamespace(get_compute_type=lambda dtype: 1)),
        cuda=SimpleNamespace(
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda begin, end: end.time - begin.time,
            Event=Event,
            memory=SimpleNamespace(Memory=lambda size: SimpleNamespace(ptr=64)),
            runtime=SimpleNamespace(
                getDevice=lambda: 0, getDeviceProperties=lambda device: {"name": b"Fake GPU"}
            ),
        ),
    )


class Error(Exception):
    def __init__(self, status):
        super().__init__(status)
        self.status = status


class CublasLt:
    """The part of ``nvmath.bindings.cublasLt`` that we call, with the numbers of its header."""

    cuBLASLtError = Error
    MatmulDescAttribute = enum.IntEnum(
        "MatmulDescAttribute",
        {"TRANSA": 3, "TRANSB": 4, "EPILOGUE": 7, "BIAS_POINTER": 8}
        | {"EPILOGUE_AUX_POINTER": 11, "EPILOGUE_AUX_LD": 12, "SM_COUNT_TARGET": 15},
    )
    MatrixLayoutAttribute = enum.IntEnum(
        "MatrixLayoutAttribute", {"BATCH_COUNT": 5, "STRIDED_BATCH_OFFSET": 6}
    )
    MatmulPreferenceAttribute = enum.IntEnum(
        "MatmulPreferenceAttribute",
        {"MAX_WORKSPACE_BYTES": 1, "REDUCTION_SCHEME_MASK": 3}
        | {f"MIN_ALIGNMENT_{x}_BYTES": 5 + i for i, x in enumerate("ABCD")},
    )
    Epilogue = enum.IntEnum("Epilogue", {"BIAS": 4, "RELU": 2, "RELU_BIAS": 6, "BGRADB": 512})
    matmul_heuristic_result_dtype = np.dtype(
        [("algo", [("data_", "<u8", (8,))]), ("workspace_size", "<u8"), ("state", "<i4")]
    )

    def __init__(self, costs=(1.0,) * (ALGORITHMS + 1)):
        self.objects, self.planned, self.status, self.costs = {}, 0, 0, costs
        self.preferences, self.ran = [], []

    def get_version(self):
        return 130000

    def get_status_name(self, status):
        return f"CUBLAS_STATUS_{status}"

    def create(self):
        return 7

    def _new(self, **values):
        number = 1 + max(self.objects, default=0)
        self.objects[number] = values
        return number

    def _set(self, number, attribute, address, size):
        self.objects[number][attribute.name] = int.from_bytes(
            ctypes.string_at(address, size), "little"
        )

    def _destroy(self, number):
        del self.objects[number]

    matmul_desc_set_attribute = matrix_layout_set_attribute = matmul_preference_set_attribute = _set
    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _destroy

    def matmul_desc_create(self, compute, scale):
        return self._new(compute=compute, scale=scale)

    def matrix_layout_create(self, dtype, rows, cols, leading):
        return self._new(dtype=DTYPES[dtype], rows=rows, cols=cols, leading=leading)

    def matmul_preference_create(self):
        return self._new()

    def matmul_algo_get_heuristic(
        self, handle, operation, a, b, c, d, preference, count, results, found
    ):  # fmt: skip
        self.planned += 1
        self.preferences.append(dict(self.objects[preference]))
        if self.status:
            raise Error(self.status)
        if self.objects[preference]["MAX_WORKSPACE_BYTES"] < WORKSPACE:
            numbers, room = np.array([ALGORITHMS]), 0
        else:
            numbers, room = np.arange(min(count, ALGORITHMS)), WORKSPACE
        count = len(numbers)
        places = np.zeros(count, self.matmul_heuristic_result_dtype)
        places["algo"]["data_"][:, 0], places["workspace_size"] = numbers, room
        ctypes.memmove(results, places.ctypes.data, places.nbytes)
        number = np.array([count], np.int32)  # lives as long as its address is used
        ctypes.memmove(found, number.ctypes.data, 4)

    def _matrix(self, address, number, index):
        layout = self.objects[number]
        dtype = layout["dtype"]
        address += index * layout.get("STRIDED_BATCH_OFFSET", 0) * dtype.itemsize
        assert layout["leading"] >= layout["rows"]
        size = (layout["cols"] - 1) * layout["leading"] + layout["rows"]
        flat = _at(address, size, dtype)
        steps = dtype.itemsize, layout["leading"] * dtype.itemsize
        return np.lib.stride_tricks.as_strided(flat, (layout["rows"], layout["cols"]), steps)

    def matmul(
        self, handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
        algorithm, workspace, workspace_bytes, stream,
    ):  # fmt: skip
        if self.status:
            raise Error(self.status)
        which = int(_at(algorithm, 8, np.uint64)[0])
        room = (64, WORKSPACE) if which < ALGORITHMS else (0, 0)
        assert (handle, (workspace, workspace_bytes), stream) == (7, room, 1)
        assert c == d and c_layout == d_layout
        self.ran.append(which)
        Event.clock += self.costs[which]
        does = self.objects[operation]
        dtype = DTYPES[does["scale"]]
        alpha, beta = (_at(place, 1, dtype)[0] for place in (alpha, beta))
        for index in range(self.objects[d_layout].get("BATCH_COUNT", 1)):
            left, right = self._matrix(a, a_layout, index), self._matrix(b, b_layout, index)
            left, right = (
                (x.T if does.get(name) else x).astype(dtype)
                for x, name in ((left, "TRANSA"), (right, "TRANSB"))
            )
            out = self._matrix(d, d_layout, index)
            result = alpha * (left @ right)
            epilogue = self.Epilogue(does["EPILOGUE"]).name if "EPILOGUE" in does else ""
            if epilogue.endswith("BIAS"):
                result += _at(does["BIAS_POINTER"], len(out), out.dtype)[:, None].astype(dtype)
            if epilogue.startswith("RELU"):
                result = np.maximum(result, 0)
            if epilogue == "BGRADB":
                _at(does["BIAS_POINTER"], right.shape[1], out.dtype)[:] = right.sum(0)
            out[...] = result + (beta * out.astype(dtype) if beta else 0)


def _at(address, size, dtype):
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype)
