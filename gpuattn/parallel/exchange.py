"""What the ranks of a run exchange in an update: sums of gradients, and parts of the parameters.

Each rank may update all parameters by the sum of all gradients. Or it holds masters, moments and
averages of a part of them alone, gets that part of the sum, updates it, and the ranks give each
other the parts of the parameters: Rajbhandari et al., "ZeRO: memory optimizations toward training
trillion parameter models" (2020), its first stage. Ranks of one host share the parts among them;
the same parts of several hosts are summed across these.
"""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, to_cpu
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics
from gpuattn.parallel.communicator import Communicator
from gpuattn.typing import Array

LEAST = 128  # elements of the array of norms


class Exchange:
    """The exchange of an optimizer's workspace between the ranks of a Communicator.

    ``optimizer``: of ``gpuattn.optim``. If its workspace holds a part, the parts are those of
    ``group``, the ranks that hold all parts together, and ``across`` are the ranks with the same
    part. ``ordered``: sums by the tree of ``add_in_pairs``.
    """

    def __init__(
        self, optimizer: Any, ranks: Communicator, ordered: bool = False,
        group: Communicator | None = None, across: Communicator | None = None,
    ) -> None:  # fmt: skip
        self._workspace, self._ranks, self._ordered = optimizer.workspace, ranks, ordered
        self._group, self._across = group or ranks, across
        self.is_sharded = self._workspace.part is not None
        if self.is_sharded:
            like = self._workspace.masters
            self._own = OptimizerState(like)
            self._norms = get_xp(like).zeros(max(LEAST, self._group.size), np.float32)
            optimizer.norms = self._norms_of_parts
            self._workspace.on_sync = self.spread_parameters

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks."""
        return all(self._ranks.gather(ok))

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks: all of them, or this rank's part alone."""
        workspace = self._workspace
        if not self.is_sharded:
            self._ranks.all_reduce(workspace.grads, self._ordered)
            return
        mine = workspace.my_grads
        self._group.reduce_scatter(workspace.grads, mine, self._ordered)
        if self._across is not None:
            self._across.all_reduce(mine, self._ordered)

    def spread_parameters(self) -> None:
        """Give the other ranks this rank's part of the parameters, and take theirs."""
        if self.is_sharded:
            params = self._workspace.params
            self._group.all_gather(params[self._workspace.mine], params)

    def _norms_of_parts(self):
        """Return an array with the norm of all gradients: those of the parts, and zeros."""
        gradient_statistics(self._workspace.my_grads, self._own)
        norm = self._own.field("norm").reshape(1)
        self._group.all_gather(norm, self._norms[: self._group.size])
        return self._norms

    # ---- whole arrays, for files ----

    def whole(self, arrays: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return {name: NumPy array} of all parts of the ``arrays`` of which each rank has one.

        Arrays of another size are those of this rank. All ranks call it.
        """
        found = {}
        for name, array in arrays.items():
            if array.size == self._workspace.masters.size:
                every = get_xp(array).empty(self._workspace.size, array.dtype)
                self._group.all_gather(array, every)
                array = every
            found[name] = np.array(to_cpu(array))
        return found

    def scatter(self, arrays: dict[str, Array], whole: dict[str, np.ndarray] | None) -> None:
        """Set ``arrays`` to this rank's parts of those that ``whole`` has on rank 0.

        Arrays of another size are set to those of rank 0. All ranks call it.
        """
        for name, array in arrays.items():
            if array.size == self._workspace.masters.size:
                xp = get_xp(array)
                every = xp.empty(self._workspace.size, array.dtype)
                if whole is not None:
                    every[...] = xp.asarray(whole[name])
                self._ranks.broadcast(every)
                array[...] = every[self._workspace.mine]
            else:
                self._ranks.broadcast(array)
