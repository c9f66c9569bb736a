"""Ranks that exchange NumPy arrays by MPI, through mpi4py."""

import time
from typing import Any

import mpi4py
import numpy as np

from gpuattn.parallel.communicator import Noted, add_in_pairs
from gpuattn.typing import Array

mpi4py.rc.threads = True  # the watchdog ends the ranks from a thread of its own
from mpi4py import MPI as mpi  # noqa: E402, N811 it reads both

SPIN, NAP = 2e-3, 1e-3  # seconds that a rank polls without sleeping, and sleeps between polls after


class MPI(Noted):
    """The Communicator of the processes that an MPI launcher has started.

    A rank that waits for others polls and then sleeps, so that signals are handled, and others on
    its cores can work; once all have come, data are exchanged by MPI's collective calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._world = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._world.rank, self._world.size
        here = self._world.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = here.rank, here.size
        here.Free()
        self._ends = self._world.Dup()  # of ``leave``, which others may not expect
        self.library = " ".join(mpi.Get_library_version().strip("\0").splitlines()[0].split())
        self._received = np.empty(0, np.float32)

    def all_reduce(self, array: Array, ordered: bool = False) -> None:
        """Each rank adds a piece of the arrays of all, in pairs, and gives it to all."""
        counts, starts = self._parts(array)
        piece = self._sum_of_mine(array, counts, starts)
        self._world.Allgatherv(piece, [array, (counts, starts)])

    def reduce_scatter(self, whole: Array, piece: Array, ordered: bool = False) -> None:
        piece[...] = self._sum_of_mine(whole, *self._parts(whole))

    def _parts(self, array):
        """Return (elements, first element) of the part of each rank."""
        ends = [array.size * (i + 1) // self.size for i in range(self.size)]
        counts = np.diff(ends, prepend=0)
        return counts, [0, *ends[:-1]]

    def _sum_of_mine(self, array, counts, starts):
        own = int(counts[self.rank])
        if self._received.size != own * self.size or self._received.dtype != array.dtype:
            self._received = np.empty(own * self.size, array.dtype)
        self.barrier()
        self._world.Alltoallv(
            [array, (counts, starts)],
            [self._received, ([own] * self.size, [own * i for i in range(self.size)])],
        )
        return add_in_pairs(list(self._received.reshape(self.size, own)))

    def all_gather(self, piece: Array, whole: Array) -> None:
        self.barrier()
        inside = np.shares_memory(piece, whole)
        self._world.Allgather(mpi.IN_PLACE if inside else piece, whole)

    def broadcast(self, array: Array) -> None:
        self.barrier()
        self._world.Bcast(array)

    def barrier(self) -> None:
        self._wait(self._world)

    def gather(self, value: Any) -> list[Any]:
        self.barrier()
        return self._world.allgather(value)

    def leave(self, seconds: float) -> bool:
        """Wait until all ranks have called this, ``seconds`` at most; return whether they have."""
        return self._wait(self._ends, seconds)

    def abort(self, code: int) -> None:
        mpi.COMM_WORLD.Abort(code)

    def _wait(self, ranks, seconds=float("inf")):
        """Wait until all ranks are here, at most so long; return whether they are."""
        begin = time.perf_counter()
        request = ranks.Ibarrier()
        while not request.Test():
            waited = time.perf_counter() - begin
            if waited > seconds:
                return False
            time.sleep(0 if waited < SPIN else NAP)
        self.waited += time.perf_counter() - begin
        return True
