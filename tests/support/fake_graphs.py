"""``fake_launches`` with CUDA graphs: what NumPy computes under capture is computed by replays.

Arrays are NumPy's. Under capture an operation writes NaN, or the largest integer, into a new array
and is noted; the launch of the graph computes the noted operations, in order, on what their inputs
hold then. Reading an array on the host under capture raises, as on a GPU. Kernels are not run but
those of ``graph_arrays``, and CuPy's operations are not replaced by any. New arrays hold POISON, as
do those that a graph copies to, before each launch. Inside ``late()`` nothing runs before someone
waits for it or reads an array.
"""

import contextlib
import ctypes
import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import fake_cublaslt
import fake_launches
import numpy as np
from fake_gpu import GPUS

from gpuattn.autodiff import arithmetic
from gpuattn.runtime import graph_arrays

POISON = 0xA5  # each byte
noted = None  # under capture: the operations so far
queue = None  # inside ``late``: what has to be computed; ``over``: how much was
over = 0
held = []  # the arrays of that block: CuPy's pool gives memory away in the order of the stream


def do(operation):
    """Compute now, or under capture later."""
    if noted is not None:
        noted.append(operation)
    elif queue is not None:
        queue.append(operation)
    else:
        operation()


def run(until=None):
    """Compute what is late: all, or until so many operations are over since ``late`` began."""
    global over
    while queue and (until is None or over < until):
        queue.pop(0)()
        over += 1


@contextlib.contextmanager
def late():
    """Compute in a block no sooner than something waits for it."""
    global queue, over
    queue, over = [], 0
    try:
        yield
        run()
    finally:
        queue = None
        held.clear()


def _result(function, *args, **kwargs):
    """Return ``function(*args, **kwargs)``, an Array that replays compute again."""
    run()
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

    def __new__(cls, shape, dtype=np.float64, memptr=None, strides=None):
        self = super().__new__(cls, shape, dtype, memptr, strides)
        if memptr is None:
            ctypes.memset(self.ctypes.data, POISON, self.nbytes)
        return self

    def __array_finalize__(self, other):
        if queue is not None:
            held.append(self)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=self.number)

    @property
    def device(self):
        return SimpleNamespace(id=self.number)

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
        run()
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
            if isinstance(operation, Copies) and operation.name == graph_arrays.IN:
                do(operation.poison)
        for operation in self.operations:
            do(operation)


class Copies:
    """A launch of a kernel of ``graph_arrays`` that copies arrays."""

    def __init__(self, name, given, state):
        self.name, self.state = name, state.data.ptr
        (one,) = given.view(graph_arrays.ARRAYS)
        self.first, n, self.last = (int(one[name]) for name in ("first", "count", "last"))
        self.own, self.bytes = one["own"][:n].tolist(), one["bytes"][:n].tolist()

    def poison(self):
        for own, size in zip(self.own, self.bytes, strict=True):
            ctypes.memset(own, POISON, size)

    def __call__(self):
        _, words, now = (ctypes.c_uint64 * 3).from_address(self.state + 8)
        given = (ctypes.c_uint64 * len(self.own)).from_address(now + 8 * self.first)
        assert all(given), "nobody has written to this slot"
        for own, size, other in zip(self.own, self.bytes, given, strict=True):
            ends = (other, own) if self.name == graph_arrays.OUT else (own, other)
            ctypes.memmove(*ends, size)
        if self.last:
            ctypes.c_uint32.from_address(self.state).value += 1
            ctypes.memset(now, 0, 8 * words)


def _read_slot(state):
    count = ctypes.c_uint32.from_address(state.data.ptr).value
    slots, words, now = (ctypes.c_uint64 * 3).from_address(state.data.ptr + 8)
    ctypes.memmove(now, slots + 8 * (count % graph_arrays.SLOTS * words), 8 * words)


def _kernel(file, name):
    assert file == graph_arrays.FILE
    if name == graph_arrays.SLOT:
        return lambda grid, block, state: do(lambda: _read_slot(state))
    return lambda grid, block, given, state: do(Copies(name, given, state))


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

    def record(self, event=None):
        if event is None:
            return Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        run()


class Event:
    def __init__(self, **kwargs):
        self.at = 0

    def record(self, stream=None):
        self.at = over + len(queue or ())

    def synchronize(self):
        run(self.at)


DEFAULT = Stream()
DEFAULT.ptr = 0
current = [DEFAULT]


def _copy(to, source, size, kind, stream):
    do(lambda: ctypes.memmove(to, source, size))


class Pinned:
    """CuPy's allocator of pinned memory, which copies from the host ask.

    ``early``: how often it was freed with something left to compute.
    """

    def __init__(self):
        self.allocate, self.early, self.kept = self.malloc, 0, []

    def malloc(self, size):
        self.kept.append(bytearray(size))
        memory = (ctypes.c_char * size).from_buffer(self.kept[-1])
        weakref.finalize(memory, self._free)
        return memory

    def _free(self):
        self.early += bool(queue)


@contextlib.contextmanager
def graphs_on(card):
    """Compute on the card "9.0" or another of GPUS; yield the fake CuPy."""
    with contextlib.ExitStack() as stack:
        for name, value in {
            "as_array": lambda x: np.asarray(x).view(Array),
            "Array": Array,
        }.items():
            stack.enter_context(mock.patch.object(fake_launches, name, value))
        stack.enter_context(mock.patch.object(graph_arrays, "kernel", _kernel))
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
        cuda.alloc_pinned_memory = lambda size: pinned.allocate(size)
        cuda.Stream, cuda.Event, cuda.get_current_stream = Stream, Event, lambda: current[-1]
        cuda.using_allocator = lambda allocator: contextlib.nullcontext()
        cuda.MemoryPool = lambda allocator: SimpleNamespace(malloc=None)
        cuda.runtime.memcpyAsync, cuda.runtime.CUDARuntimeError = _copy, RuntimeError
        Graph.launches = 0
        yield cupy
