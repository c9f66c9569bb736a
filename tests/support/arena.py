"""Memory for fake GPU arrays, at addresses that a test knows."""

import ctypes

import numpy as np
from fake_cublaslt import Array, Memory

PAGE, UNIT = 4096, 512  # bytes; no two arrays lie in one UNIT


class Arena:
    """Gives ``size`` bytes to arrays of the class ``kind``, in order; again after ``reset``, but
    for the first ``kept`` of them."""

    def __init__(self, kind=Array, size=1 << 28):
        self.kind, self.size = kind, size
        self.memory = np.zeros(size + PAGE, np.uint8).view(kind)
        self.first = -(-self.memory.ctypes.data // PAGE) * PAGE
        self.at = self.kept = 0

    def reset(self):
        self.at = self.kept

    def empty(self, _, shape, dtype):
        """Stand in for ``arrays.allocate``."""
        place, size = self.first + self.at, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.at += max(-(-size // UNIT), 1) * UNIT
        assert self.at <= self.size
        return self.kind(shape, dtype, Memory(place, self.memory))

    def array(self, x):
        x = np.asarray(x)
        found = self.empty(None, x.shape, x.dtype)
        found[...] = x
        return found

    def zeros(self, shape, dtype=np.float64):
        found = self.empty(None, shape, dtype)
        ctypes.memset(found.data.ptr, 0, found.nbytes)
        return found

    def holds(self, address):
        return self.first <= address < self.first + self.size
