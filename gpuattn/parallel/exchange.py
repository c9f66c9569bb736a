"""What the ranks of a run exchange in an update: sums of gradients, and parts of the parameters.

Each rank may update all parameters by the sum of all gradients. Or it holds masters, moments and
averages of a part of them alone, gets that part of the sum, updates it, and the ranks give each
other the parts of the parameters: Rajbhandari et al., "ZeRO: memory optimizations toward training
trillion parameter models" (2020), its first stage. Ranks of one host share the parts among them;
the same parts of several hosts are summed across these.

Gradients are summed bucket by bucket (``runtime.buckets``). On GPUs that is queued on a stream of
its own, which waits for each bucket at the place of the backward pass where it is final, so that
what comes before is on the wire meanwhile: Li et al., "PyTorch Distributed: experiences on
accelerating data parallel training" (2020). The calls themselves are in no graph: a rank may have a
graph for the shape of its batch while another runs op by op, and none has begun to wait for others
when one of them fails in its backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, to_cpu
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics
from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.lane import Lane
from gpuattn.typing import Array

LEAST = 128  # elements of the array of norms


class Exchange:
    """The exchange of an optimizer's workspace between the ranks of a Communicator.

    ``optimizer``: of ``gpuattn.optim``. If its workspace holds a part, the parts are those of
    ``group``, the ranks that hold all parts together, and ``across`` are the ranks with the same
    part. ``ordered``: sums by the tree of ``add_in_pairs``. ``overlap``: whether buckets may be
    summed on a GPU before the backward pass has ended; the bits are the same.
    ``full``: for the last backward pass of an update, see ``Workspace.backward``; or None for
    ordered sums: kernels of weight gradients add up in an order that depends on which of them have
    a launch together, and buckets would change that.
    """

    def __init__(
        self, optimizer: Any, ranks: Communicator, ordered: bool = False,
        group: Communicator | None = None, across: Communicator | None = None,
        overlap: bool = True,
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
        self.full: Callable[[int, Sequence[Any]], None] | None = None if ordered else self._mark
        self._overlap, self._lane = overlap, None
        if get_xp(self._workspace.params) is not np:
            self._lane = Lane(len(self._workspace.buckets))

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks."""
        return all(self._ranks.gather(ok))

    def _mark(self, i, events):
        if self._lane is not None:
            self._lane.mark(i, events)

    def sum_gradients(self, marked: bool = False) -> None:
        """Sum the gradients over the ranks: all of them, or this rank's part alone.

        ``marked``: whether ``full`` was given to the last backward pass, and nothing has changed
        them since. The current stream waits for the sums.
        """
        buckets, lane = range(len(self._workspace.buckets)), self._lane
        if lane is None:
            for i in buckets:
                self._sum(i)
            return
        with lane.exchanging(waits=not (marked and self._overlap)):
            for i in buckets:
                if marked:
                    lane.wait(i)
                self._sum(i)

    def _sum(self, i):
        workspace = self._workspace
        whole = workspace.grads[workspace.buckets[i]]
        if not self.is_sharded:
            self._ranks.all_reduce(whole, self._ordered)
            return
        mine = workspace.my_grads[workspace.places[i]]
        self._group.reduce_scatter(whole, mine, self._ordered)
        if self._across is not None:
            self._across.all_reduce(mine, self._ordered)

    def waited(self) -> float:
        """Return the seconds that this rank has waited for sums so far, or for other ranks.

        On a GPU those of the current stream, known when its events are reached; nothing is waited
        for here.
        """
        return self._ranks.waited if self._lane is None else self._lane.seconds()

    def spread_parameters(self) -> None:
        """Give the other ranks this rank's part of the parameters, and take theirs."""
        if self.is_sharded:
            self._gather(self._workspace.my_params, self._workspace.params)

    def _gather(self, mine, whole):
        """Write the pieces of all ranks, ``mine`` for each bucket, to a whole flat buffer."""
        with self._group.grouped():
            for bucket, piece in zip(self._workspace.buckets, mine, strict=True):
                self._group.all_gather(piece, whole[bucket])

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
                self._gather([array[place] for place in self._workspace.places], every)
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
                array[...] = self._workspace.own_part(every)
            else:
                self._ranks.broadcast(array)
