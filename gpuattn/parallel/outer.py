"""Updates that replicas make alone, and a step of all of them from time to time: for slow links.

Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023): each
replica makes some updates with an optimizer of its own; the mean of how far they went is the
gradient of one step of Nesterov's momentum, from which all go on.
"""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, to_cpu
from gpuattn.parallel.communicator import Communicator
from gpuattn.typing import Array

RATE, MOMENTUM = 0.7, 0.9  # as in the paper


class Outer:
    """The steps of all replicas, one a rank, each after ``every`` updates of an optimizer.

    ``optimizer``: of ``gpuattn.optim``; its moments and its state are those of this rank alone.
    ``ordered``: see ``Communicator.all_reduce``. ``last``: the update after which the replicas were
    last equal.
    """

    def __init__(self, optimizer: Any, ranks: Communicator, every: int, ordered: bool) -> None:
        self.every, self.last = every, 0
        self._optimizer, self._workspace = optimizer, optimizer.workspace
        self._ranks, self._ordered = ranks, ordered
        masters = self._workspace.masters
        self._start = masters.astype(np.float32)
        self._velocity = get_xp(masters).zeros_like(self._start)
        self._others: dict[str, np.ndarray] = {}
        if ranks.rank == 0:
            for name, array in self._own().items():
                for rank in range(1, ranks.size):
                    self._others[_named(rank, name)] = np.array(to_cpu(array))

    def is_due(self, update: int) -> bool:
        """Return whether the replicas step together after an update."""
        return update % self.every == 0

    def begin(self, update: int) -> None:
        """Let the parameters as they are now, the same on all ranks, be where replicas start."""
        self._start[...] = self._workspace.masters
        self.last = update

    def step(self, update: int) -> None:
        """Step together after an update, unless that was done: all ranks call it."""
        if self.last == update:
            return
        change = self._start - self._workspace.masters
        self._ranks.all_reduce(change, self._ordered)
        change *= np.float32(1 / self._ranks.size)
        self._velocity *= np.float32(MOMENTUM)
        self._velocity += change
        change += np.float32(MOMENTUM) * self._velocity
        change *= np.float32(RATE)
        self._start -= change
        self._workspace.masters[...] = self._start
        self._workspace.sync_model()
        self.last = update

    # ---- for files ----

    def arrays(self) -> dict[str, Array]:
        """Return {name: flat array} of what a file of rank 0 holds besides what is its own."""
        return {"outer_velocity": self._velocity} | self._others

    def collect(self) -> None:
        """Bring ``arrays`` of rank 0 up to date: all ranks call it."""
        for name, array in self._own().items():
            for rank in range(1, self._ranks.size):
                if name == "optimizer_state":
                    found = self._ranks.gather(to_cpu(array))[rank]
                else:
                    found = array.copy()
                    if self._ranks.rank != rank:
                        found[...] = 0
                    self._ranks.all_reduce(found)
                if self._ranks.rank == 0:
                    self._others[_named(rank, name)][...] = to_cpu(found)

    def scatter(self) -> None:
        """Set what each rank has of its own to the ``arrays`` of rank 0: all ranks call it."""
        self._ranks.broadcast(self._velocity)
        for name, array in self._own().items():
            for rank in range(1, self._ranks.size):
                there = get_xp(array).zeros_like(array)
                if self._ranks.rank == 0:
                    there[...] = get_xp(array).asarray(self._others[_named(rank, name)])
                self._ranks.broadcast(there)
                if self._ranks.rank == rank:
                    array[...] = there

    def _own(self):
        """Return {name: array} of what differs between ranks, where their parameters do not."""
        moments = {name: getattr(self._workspace, name) for name in self._workspace.moments}
        return moments | {"optimizer_state": self._optimizer.state.array}


def _named(rank, name):
    return f"rank{rank}:{name}"
