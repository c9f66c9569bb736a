"""Asynchronous device-to-host copies."""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, import_cupy


class Reading:
    """Copies of arrays to the host, in the order of the current stream, without synchronizing.

    ``arrays``: NumPy or CuPy arrays; later writes to them do not change the copies.
    """

    def __init__(self, *arrays: Any) -> None:
        if get_xp(*arrays) is np:
            self._host, self._event = [array.copy() for array in arrays], None
            return
        import cupyx

        self._host = [cupyx.empty_pinned(array.shape, array.dtype) for array in arrays]
        for array, host in zip(arrays, self._host, strict=True):
            array.get(out=host, blocking=False)
        self._event = import_cupy().cuda.get_current_stream().record()

    def ready(self) -> bool:
        """Return whether the copies are complete, so that ``values`` does not wait."""
        return self._event is None or self._event.done

    def values(self) -> list[np.ndarray]:
        """Return the copies as NumPy arrays; waits until they are complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
