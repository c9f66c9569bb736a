"""How rows of logits are shared among thread blocks: slices, and who merges what they found.

See ``rawkernels/common/logit_slice.cuh``.
"""

import threading

import numpy as np

from gpuattn.arrays import import_cupy

BLOCK = 256  # threads
SLICE = 2048  # 16-byte vectors of a block, at most
CHUNK = 1 << 16  # tickets allocated at a time

_of_stream, _chunks, _kept, _lock = {}, {}, [], threading.Lock()


def slices(vocab_size, itemsize):
    """Return (slices of a row, 16-byte vectors of a slice).

    By the row alone, so that a row has the same bits in any batch.
    """
    vectors = -(-vocab_size * itemsize // 16)
    parts = -(-vectors // SLICE)
    return parts, -(-vectors // parts)


def tickets(count):
    """Return the address of ``count`` int32 zeros that no other launch uses at the same time.

    The last block of a group knows itself by them, and leaves them zero. Launches on one stream
    follow each other, so they share them. A launch under graph capture has its own for good: a
    replay may run beside anything.
    """
    cupy = import_cupy()
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()
    with _lock:
        if stream.ptr and stream.is_capturing():
            return _new_tickets(cupy, device, count)
        key = device, threading.get_ident(), stream.ptr  # a per-thread stream has one address
        if _of_stream.get(key, (0,))[0] < count:
            _of_stream[key] = count, _new_tickets(cupy, device, count)
        return _of_stream[key][1]


def _new_tickets(cupy, device, count):
    memory, used = _chunks.get(device, (None, CHUNK))
    if used + count > CHUNK:
        memory, used = cupy.cuda.Memory(4 * max(CHUNK, count)), 0  # no pool's: kept for good
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.memsetAsync(memory.ptr, 0, memory.size, stream.ptr)
        stream.synchronize()  # once: the first launch may be on any stream
        _kept.append(memory)
    _chunks[device] = memory, used + count
    return np.uint64(memory.ptr + 4 * used)
