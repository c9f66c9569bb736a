"""Structs that kernels read from device memory, with the addresses of arrays in them."""

from typing import Any

import numpy as np

from gpuattn.autodiff.tape import raw


class Records:
    """Makes elements of structs, and holds the arrays whose addresses they have."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def make(self, struct: np.dtype, **fields: Any) -> np.ndarray:
        """Return one element of ``struct``, whose fields of type uint64 are given as arrays."""
        record = np.zeros((), struct)
        for name, value in fields.items():
            record[name] = self.address(value) if struct[name] == np.uint64 else value
        return record

    def address(self, x: Any) -> int:
        """Return the address of an array or Tensor, which is contiguous; 0 for None."""
        if x is None:
            return 0
        x = raw(x)
        assert x.flags.c_contiguous, x.shape
        self._held.append(x)
        return x.data.ptr
