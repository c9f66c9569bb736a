"""Device memory that kernels share from launch to launch, kept until the process ends.

It comes from ``cudaMalloc``, not from CuPy's memory pool: the private pool of a captured graph
would take back what was allocated during the capture. Launches on one stream run one after the
other, so they share memory; launches on different streams do not.
"""

import threading
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy, recorders

CHUNK = 1 << 16  # int32 counters allocated at a time
_counters: dict[tuple[int, int, int], tuple[int, np.uint64]] = {}  # by device, thread and stream
_chunks: dict[int, tuple[Any, int]] = {}  # by device: memory, how many of its counters are taken
_chunks_in_use: list[Any] = []  # all memory of counters
_workspaces: dict[tuple[str, int, int], Any] = {}  # by user, device and stream: memory
_lock = threading.Lock()


def counters(count: int = 1) -> np.uint64:
    """Return the address of ``count`` int32 zeros that no other launch uses at the same time.

    They are zeroed once, before this returns; a kernel has to leave them zero. Launches of one
    thread on one stream share them. Under graph capture each launch gets its own, and nobody else
    does later: a replay may run beside anything.
    """
    address = _find_counters(count)
    if (recorder := recorders.get()) is not None:
        recorder.counted(address, count)
    return address


def _find_counters(count: int) -> np.uint64:
    cupy = import_cupy()
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()
    with _lock:
        if stream.ptr and stream.is_capturing():
            return _new_counters(cupy, device, count)
        # per-thread default streams of all threads have one address
        key = device, threading.get_ident(), stream.ptr
        if key not in _counters or _counters[key][0] < count:
            _counters[key] = count, _new_counters(cupy, device, count)
        return _counters[key][1]


def _new_counters(cupy: Any, device: int, count: int) -> np.uint64:
    memory, used = _chunks.get(device, (None, CHUNK))
    if used + count > CHUNK:
        memory, used = _zeros(4 * max(CHUNK, count)), 0
        _chunks_in_use.append(memory)
    _chunks[device] = memory, used + count
    return np.uint64(memory.ptr + 4 * used)


def workspace(user: str, size: int, device: int, stream: int, zeroed: bool = False) -> int:
    """Return the address of ``size`` bytes that only launches of ``user`` on a stream write to.

    ``size``: the same in every call of a user for a device. ``stream``: the address of the current
    one. ``zeroed``: the bytes are zeroed once, before this returns, and a kernel has to leave them
    zero; else they hold anything. Graphs captured on the stream use the same memory:
    they may be replayed on another stream, but not at the same time as work on this one.
    """
    key = user, device, stream
    memory = _workspaces.get(key)
    if memory is None:
        new = _zeros if zeroed else import_cupy().cuda.memory.Memory
        with _lock:  # of threads that come at once, one allocates
            memory = _workspaces[key] = _workspaces.get(key) or new(size)
    return memory.ptr


def _zeros(size: int) -> Any:
    """Return memory of ``size`` bytes that are zero for launches on any stream."""
    cuda = import_cupy().cuda
    memory, stream = cuda.memory.Memory(size), cuda.Stream(non_blocking=True)
    cuda.runtime.memsetAsync(memory.ptr, 0, size, stream.ptr)  # the current one may be captured
    stream.synchronize()
    return memory
