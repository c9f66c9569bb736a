"""What the host sends to a search, and the few sizes that it comes in."""

import contextlib
import itertools
import operator
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import HOST_TO_DEVICE, empty_pinned, get_xp, import_cupy, on_gpu

ALIGNED = 64  # integers: 256 bytes
FIXED_TOKENS = 2048  # of sources or prompts that are computed together, where that is fixed


class Inputs:
    """Integers that the host sends to a search: written to ``host``, then sent to ``device``.

    On a GPU ``host`` is pinned, and ``send`` does not wait. ``like``: an array of the device.
    ``sizes``: of the parts, at most.
    """

    def __init__(self, like: Any, sizes: Sequence[int]) -> None:
        size = _offsets(sizes)[-1]
        self.device = get_xp(like).zeros(size, np.int32)
        self.host = np.zeros(size, np.int32)
        self._sent: Any = None
        self._known: dict[tuple[int, ...], tuple[list[np.ndarray], int]] = {}
        self._used = 0
        if on_gpu(like):
            self.host = empty_pinned(size, np.int32)

    def __del__(self, ending=sys.is_finalizing):
        # CuPy gives pinned memory to others at once, also while it waits to be copied from
        if getattr(self, "_sent", None) is not None and not ending():
            with contextlib.suppress(Exception):
                self._sent.synchronize()

    def begin(self, sizes: tuple[int, ...]) -> list[np.ndarray]:
        """Return parts of ``host`` of these sizes, to be written, once what was sent has arrived.

        They hold what was written last if that was in the same sizes; else any of those integers.
        """
        if sizes not in self._known:
            self._known[sizes] = parts(self.host, sizes), _offsets(sizes)[-1]
        found, self._used = self._known[sizes]
        if self._sent is not None:
            self._sent.synchronize()
        return found

    def send(self) -> None:
        """Copy the parts that ``begin`` returned to the device, in the order of the stream."""
        used = self._used
        if not on_gpu(self.device):
            self.device[:used] = self.host[:used]
            return
        cuda = import_cupy().cuda
        stream, size = cuda.get_current_stream(), used * self.host.itemsize
        ends = self.device.data.ptr, self.host.ctypes.data
        cuda.runtime.memcpyAsync(*ends, size, HOST_TO_DEVICE, stream.ptr)
        if self._sent is None:
            self._sent = cuda.Event(disable_timing=True)
        self._sent.record(stream)


def portions(lengths: Sequence[int], most: int, tokens: int) -> list[list[int]]:
    """Return indices of texts, in order: up to ``most``, whose lengths sum up to ``tokens``.

    A longer text is alone.
    """
    found: list[list[int]] = []
    left = 0
    for i, length in enumerate(lengths):
        if not found or length > left or len(found[-1]) == most:
            found.append([])
            left = tokens
        found[-1].append(i)
        left -= length
    return found


def joined(texts: Sequence[list[int]], wider: Any = np.int32) -> np.ndarray:
    """Return the tokens of all lists, one behind the other: int32, read-only.

    Integers of more than 32 bits, and NumPy's, are converted to the dtype ``wider``, with NumPy's
    errors. Raises TypeError for what is no integer.
    """
    try:  # half the time of NumPy
        packed = [struct.Struct(f"{len(text)}i").pack(*text) for text in texts]
    except struct.error:
        every = itertools.chain.from_iterable(texts)
        return np.fromiter(map(operator.index, every), wider, sum(map(len, texts)))
    return np.frombuffer(b"".join(packed), np.int32)


def token_mask(like: Any, tokens: Iterable[int], vocab: int) -> Any:
    """Return bool (vocab,) on the device of ``like``, true for ``tokens``."""
    mask = np.zeros(vocab, bool)
    mask[list(tokens)] = True
    return get_xp(like).asarray(mask)


def parts(inputs: Any, sizes: Sequence[int]) -> list[Any]:
    """Return views of ``sizes`` integers each, as far apart as kernels want arrays aligned."""
    begins = _offsets(sizes)[:-1]
    return [inputs[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _offsets(sizes):
    """Return where parts of these sizes begin, and where the last one ends."""
    return [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]


def rounded(count: int, most: int, least: int = 16) -> int:
    """Return ``count`` rounded up to a power of two, or beyond 256 to a multiple of 64.

    From ``least`` to ``most``. What differs in such sizes alone shares a search or a graph.
    """
    up = max(least, 1 << (count - 1).bit_length()) if count <= 256 else -(-count // 64) * 64
    return max(count, min(up, most))
