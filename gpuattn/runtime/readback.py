"""Numbers on their way from the device to the host, for whom nobody waits."""

import numpy as np

from gpuattn.arrays import get_xp, import_cupy


class Reading:
    """The arrays as they are at this place of the current stream."""

    def __init__(self, *arrays):
        if get_xp(*arrays) is np:
            self._host, self._event = [array.copy() for array in arrays], None
            return
        import cupyx

        self._host = [cupyx.empty_pinned(array.shape, array.dtype) for array in arrays]
        for array, host in zip(arrays, self._host, strict=True):
            array.get(out=host, blocking=False)
        self._event = import_cupy().cuda.get_current_stream().record()

    def ready(self):
        """Return whether ``values`` would not wait."""
        return self._event is None or self._event.done

    def values(self):
        """Return the arrays on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
