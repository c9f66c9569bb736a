"""``fake_launches`` with CUDA graphs: what NumPy computes under capture is computed by replays.

Arrays are NumPy's. Under capture an operation writes NaN, or the largest integer, into a new array
and is noted; the launch of the graph computes the noted operations, in order, on what their inputs
hold then. Reading an array on the host under capture raises, as on a GPU. Kernels are not run, and
CuPy's operations are not replaced by any.
"""

import contextlib
import ctypes
import sys
from types import SimpleNamespace
from unittest import mock

import fake_cublaslt
import fake_launches
import numpy as np
from fake_gpu import GPUS

from gpuattn.autodiff import arithmetic

noted = None  # under capture: the operations so far


def do(operation):
    """Compute now, or under capture later."""
    operation() if noted is None else noted.append(operation)


def _result(function, *args, **kwargs):
    """Return ``function(*args, **kwargs)``, an Array that replays compute again."""
    plain = [_plain(x) for x in args], {key: _plain(x) for key, x in kwargs.items()}
    out = function(*plain[0], **plain[1])
    if not isinstance(out, np.ndarray | np.generic):
        return out
    out = np.array(out, subok=False).view(Array)
    if noted is not None:
        poison = np.nan if out.dtype.kind not in "biu" else np.iinfo("i1").max
        np.asarray(out)[...] = poison
        do(lambda: np.copyto(np.asarray(out), function(*plain[0], **plain[1])))
    return out


def _plain(x):
    if isinstance(x, list | tuple):
        return type(x)(_plain(item) for item in x)
    return np.asarray(x) if isinstance(x, Array) else x


class Array(fake_cublaslt.Array):
    """A NumPy array of which nothing can be read under capture, on the GPU ``number``."""

    number = 0

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=self.number)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        if out is None:
            return _result(getattr(ufunc, method), *inputs, **kwargs)
        plain, target = [_plain(x) for x in inputs], np.asarray(out[0])
        do(lambda: getattr(ufunc, method)(*plain, out=target, **kwargs))
        return out[0]

    def __array_function__(self, function, types, args, kwargs):
        return _result(function, *args, **kwargs)

    def __setitem__(self, key, value):
        target, given = np.asarray(self), _plain(value)
        do(lambda: target.__setitem__(key, given))

    def copy(self, order="C"):
        return _result(lambda x: x.copy(order), self)

    def astype(self, dtype, **kwargs):
        return _result(lambda x: x.astype(dtype), self)

    def fill(self, value):
        self[...] = value

    def sum(self, *args, **kwargs):
        return _result(np.sum, self, *args, **kwargs)

    def _read(self, *args):
        if noted is not None:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        return np.asarray(self)

    get = _read

    def __bool__(self):
        return bool(self._read())

    def __float__(self):
        return float(self._read())

    def item(self):
        return self._read().item()


class Graph:
    launches = 0

    def __init__(self, operations):
        self.operations = operations

    def launch(self, stream):
        Graph.launches += 1
        for operation in self.operations:
            operation()


class Stream:
    made = 1

    def __init__(self, non_blocking=True):
        Stream.made += 1
        self.ptr, self.capturing, self.waited = 16 * Stream.made, False, []

    def __enter__(self):
        current.append(self)
        return self

    def __exit__(self, *error):
        current.pop()

    def is_capturing(self):
        return self.capturing

    def begin_capture(self):
        global noted
        assert noted is None
        self.capturing, noted = True, []

    def end_capture(self):
        global noted
        graph, noted, self.capturing = Graph(noted), None, False
        return graph

    def record(self):
        return Event()

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        pass


class Event:
    def __init__(self, **kwargs):
        pass

    def record(self, stream=None):
        pass

    synchronize = record


DEFAULT = Stream()
DEFAULT.ptr = 0
current = [DEFAULT]


def _copy(to, source, size, kind, stream):
    do(lambda: ctypes.memmove(to, source, size))


class Pinned:
    """CuPy's allocator of pinned memory, which copies from the host ask."""

    def __init__(self):
        self.allocate = self.malloc

    def malloc(self, size):
        return size


@contextlib.contextmanager
def graphs_on(card):
    """Compute on the card "9.0" or another of GPUS; yield the fake CuPy."""
    with contextlib.ExitStack() as stack:
        for name, value in {
            "as_array": lambda x: np.asarray(x).view(Array),
            "Array": Array,
        }.items():
            stack.enter_context(mock.patch.object(fake_launches, name, value))
        stack.enter_context(mock.patch.dict(arithmetic.OPERATIONS, clear=True))  # CuPy's are run
        stack.enter_context(fake_launches.launches_on(GPUS[card]))
        cupy, pinned = sys.modules["cupy"], Pinned()

        def asarray(values, dtype=None):
            if isinstance(values, Array):
                return values
            pinned.allocate(8)
            return np.array(values, dtype).view(Array)

        def full(shape, value, dtype=None):
            out = np.empty(shape, dtype or np.asarray(value).dtype).view(Array)
            out[...] = value
            return out

        cupy.ndarray, cupy.asarray, cupy.array, cupy.full = Array, asarray, asarray, full
        cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
        cupy.get_default_pinned_memory_pool = lambda: pinned
        cuda = cupy.cuda
        cuda.set_pinned_memory_allocator = lambda allocate: setattr(pinned, "allocate", allocate)
        cuda.Stream, cuda.Event, cuda.get_current_stream = Stream, Event, lambda: current[-1]
        cuda.using_allocator = lambda allocator: contextlib.nullcontext()
        cuda.MemoryPool = lambda allocator: SimpleNamespace(malloc=None)
        cuda.runtime.memcpyAsync, cuda.runtime.CUDARuntimeError = _copy, RuntimeError
        Graph.launches = 0
        yield cupy
