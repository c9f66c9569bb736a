"""``fake_launches`` with all that a whole training run asks of CuPy and of cuBLASLt.

Nothing is computed but what NumPy computes for CuPy. Graphs replay nothing.
"""

import contextlib
import enum
import sys
from types import SimpleNamespace
from unittest import mock

import fake_cublaslt
import fake_launches
import numpy as np
from fake_gpu import GPUS

from gpuattn.cuda import kernels
from gpuattn.cuda.compiler import nvrtc_version
from gpuattn.gemm import cublaslt, tuning
from gpuattn.runtime import cold_start
from gpuattn.train import meter, session

EPILOGUES = (
    "BIAS", "RELU", "RELU_BIAS", "RELU_AUX", "RELU_AUX_BIAS", "GELU", "GELU_BIAS", "GELU_AUX",
    "GELU_AUX_BIAS", "DRELU", "DGELU", "BGRADB",
)  # fmt: skip
MORE_ARRAYS = ("add", "minimum", "concatenate", "isfinite", "cumsum")


class Products(fake_cublaslt.CublasLt):
    """Counts products, ``computed``, and leaves their memory as it is."""

    Epilogue = enum.IntEnum("Epilogue", EPILOGUES)
    computed = 0

    def matmul(self, *arguments):
        self.computed += 1


class Stream:
    """Every stream, and a captured graph of it. ``capturing``: whether one is captured."""

    ptr, capturing = 1, False

    def __init__(self, non_blocking=True, priority=0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __eq__(self, other):
        return isinstance(other, Stream)

    __hash__ = None

    def is_capturing(self):
        return Stream.capturing

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def begin_capture(self):
        Stream.capturing = True

    def end_capture(self):
        Stream.capturing = False
        return self

    def nothing(self, *_):
        pass

    synchronize = wait_event = launch = nothing


class Event:
    done, ptr = True, 1

    def __init__(self, **kwargs):
        pass

    def nothing(self, *_):
        pass

    record = synchronize = nothing


class Array(fake_cublaslt.Array):
    def get(self, out=None, blocking=True):
        out = np.empty(self.shape, self.dtype) if out is None else out
        out[...] = np.asarray(self).reshape(out.shape)
        return out

    def set(self, host, stream=None):
        self[...] = host


class Run(SimpleNamespace):
    """``launches``: noted by ``fake_launches``. ``rehearsed``: set of (file, constants).

    ``products``: a ``Products``.
    """

    def launched(self):
        return {(launch.file, tuple(sorted(launch.constants))) for launch in self.launches}


@contextlib.contextmanager
def training_on(card, memory=(140 << 30, 141 << 30)):
    """Let runs train on the card "9.0" or another of GPUS; yield a Run. ``memory``: bytes of the
    card that are free, and all."""
    products, rehearsed, started = Products(), set(), []
    begin = cold_start.InBackground.__init__

    def remember(self, work):
        begin(self, work)
        started.append(self)

    def code(device, file, constants):
        rehearsed.add((file, constants))

    with contextlib.ExitStack() as stack:
        replaced = [
            (cublaslt, "library", lambda: (products, "")),
            (cublaslt, "handle", lambda device: 7),
            (kernels, "_code", code),
            (meter, "PowerMeter", lambda: SimpleNamespace(read=lambda now=False: None)),
            (meter, "known_ceilings", lambda xp, dtype: {"matmul_tflops": 1.0}),
            (session, "choose_device", lambda name: ("cuda", "a fake GPU")),
            (cold_start, "_start", lambda dtype: nvrtc_version()),
            (cold_start.InBackground, "__init__", remember),
            (tuning, "_read", lambda path: {}),
            (tuning, "_write", lambda path, table: None),
            (fake_launches, "as_array", lambda x: np.asarray(x).view(Array)),
            (fake_launches, "Array", Array),
        ]  # fmt: skip
        launches = stack.enter_context(fake_launches.launches_on(GPUS[card]))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        _extend(sys.modules["cupy"])
        sys.modules["cupy"].cuda.runtime.memGetInfo = lambda: memory
        try:
            yield Run(launches=launches, rehearsed=rehearsed, products=products)
        finally:  # a thread that goes on would leave fakes behind
            for thread in started:
                thread.wait()


def _extend(cupy):
    """Add what runs ask of CuPy to the module of ``fake_launches``."""
    for name in (*fake_launches.NEW_ARRAYS, *MORE_ARRAYS):
        setattr(cupy, name, fake_launches._making_arrays(getattr(np, name)))
    cupy.ndarray = Array
    cuda, memory = cupy.cuda, SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 0)
    attributes, stream = cuda.Device(0).attributes, Stream()

    class Device(contextlib.nullcontext):
        id, compute_capability = 0, cuda.Device(0).compute_capability

        def __init__(self, number=0):
            super().__init__()
            self.attributes = attributes

        def synchronize(self):
            pass

    cuda.Device, cuda.Stream, cuda.Event = Device, Stream, Event
    cuda.get_current_stream = lambda: stream
    cuda.get_elapsed_time = lambda begin, end: 1.0
    cuda.using_allocator = lambda allocator: contextlib.nullcontext()
    cuda.MemoryPool = lambda allocator: SimpleNamespace(malloc=None)
    cuda.PinnedMemory, cuda.PinnedMemoryPointer = int, lambda size, offset: bytearray(size)
    cuda.alloc_pinned_memory = bytearray
    cupy.get_default_memory_pool = lambda: memory
    cuda.runtime.getDeviceProperties = lambda device: {"name": b"Fake GPU"}
