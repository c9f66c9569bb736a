"""Averages of parameters: over the updates of a run, and over saved checkpoints.

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
Device code: ``rawkernels/update/moving_average.cu``.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp, is_floating, on_gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import CheckpointError, problem

BLOCK, BLOCKS = 256, 4096  # threads of a block, and blocks at most


class ExponentialAverage:
    """An exponential moving average of all parameters, in one flat float32 buffer.

    ``workspace``: has flat ``masters`` and ``sync_model()``. ``decay``: the weight of the old
    average, 0 <= decay < 1; at update n at most (1 + n) / (10 + n), so that the random initial
    values fade quickly. Raises ValueError for another decay.
    """

    def __init__(self, workspace: Any, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(problem("ExponentialAverage", "decay", decay, "0 <= decay < 1"))
        self.workspace, self.decay, self.updates = workspace, decay, 0
        self.average = workspace.masters.astype(np.float32)
        if not on_gpu(self.average):
            self._scratch = arrays.empty(self.average, self.average.shape)

    def next_share(self) -> float:
        """Count an update; return the weight of the new parameters in it."""
        self.updates += 1
        return 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))

    def update(self, share: Any) -> None:
        """Add the current parameters to the average with weight ``share``.

        ``share``: a number, or a () float32 array on the parameters' device.
        """
        masters, size = self.workspace.masters, self.average.size
        if on_gpu(self.average):
            share = get_xp(self.average).asarray(share, np.float32)
            kernel("update/moving_average.cu", "moving_average", scalar=ctype(masters.dtype))(
                (min(-(-size // BLOCK), BLOCKS),), (BLOCK,), self.average, masters, share, size
            )
            return
        self._scratch[...] = masters
        self._scratch -= self.average
        self._scratch *= share
        self.average += self._scratch

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the model has the averaged parameters.

        Where the workspace holds a part of them, all ranks enter it and leave it together; an
        exception then leaves the averaged ones.
        """
        masters = self.workspace.masters
        own = masters.copy()
        masters[...] = self.average
        self.workspace.sync_model()
        whole = self.workspace.on_sync is None
        try:
            yield
            whole = True
        finally:
            if whole:
                masters[...] = own
                self.workspace.sync_model()


def average_tensors(checkpoints: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the mean of several {name: array}, in float64 and rounded once to each dtype.

    Integer arrays are taken from the last. Raises CheckpointError unless all have the same names
    and shapes, ValueError for no checkpoint at all.
    """
    first, count = None, 0
    sums: dict[str, np.ndarray] = {}
    for tensors in checkpoints:
        count += 1
        shapes = {name: array.shape for name, array in tensors.items()}
        if first is None:
            first = shapes
        elif shapes != first:
            odd = sorted(set(first.items()) ^ set(shapes.items()))[0][0]
            raise CheckpointError(f"average: {odd} is not in all checkpoints with the same shape")
        for name, array in tensors.items():
            if is_floating(array.dtype):
                sums[name] = sums.get(name, 0) + array.astype(np.float64)
    if first is None:
        raise ValueError("average: no checkpoints were given")
    means = {name: (total / count).astype(tensors[name].dtype) for name, total in sums.items()}
    return {name: means.get(name, array) for name, array in tensors.items()}
