"""NCCL for ranks that are threads: the same calls, on memory of the host. And what connects them.

``cupy`` and ``Nccl`` stand in for CuPy and ``cupy.cuda.nccl``; arrays are NumPy's with an address.
Each call ends when all ranks have made it, and checks that they have made the same one.
"""

import contextlib
import copy
import ctypes
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np

from gpuattn.arrays import BFLOAT16
from gpuattn.parallel import nccl
from gpuattn.parallel.communicator import Noted

SECONDS = 20  # that a rank waits for the others
TYPES = {
    "NCCL_UINT8": np.dtype("uint8"), "NCCL_FLOAT32": np.dtype("float32"),
    "NCCL_FLOAT64": np.dtype("float64"), "NCCL_FLOAT16": np.dtype("float16"),
    "NCCL_BFLOAT16": BFLOAT16,
}  # fmt: skip


class Array(np.ndarray):
    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def array(values, dtype=None):
    return np.array(values, dtype).view(Array)


class Meeting:
    """Values of ``size`` threads, handed to all of them."""

    def __init__(self, size):
        self.size, self._values = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=SECONDS)

    def exchange(self, rank, value):
        self._values[rank] = value
        self._barrier.wait()
        found = copy.deepcopy(self._values)  # before another thread goes on to change its own
        self._barrier.wait()
        return found

    def abort(self):
        self._barrier.abort()


class Threads(Noted):
    """The Communicator of the host for ranks that are threads, ``near`` of them on each host."""

    def __init__(self, meeting, rank, near):
        super().__init__()
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.local_rank, self.local_size = rank % near, near

    def gather(self, value):
        return self._meeting.exchange(self.rank, value)

    def barrier(self):
        self.gather(None)


class Nccl:
    """Stands in for the module ``cupy.cuda.nccl``. ``calls``: (rank, name, elements) so far."""

    available, NCCL_SUM, NcclError = True, 0, OSError

    def __init__(self, version=22809):
        self._version, self._meetings, self.calls = version, {}, []
        self._lock, self._open = threading.Lock(), threading.local()
        for number, name in enumerate(TYPES):
            setattr(self, name, number)

    def get_version(self):
        return self._version

    def get_unique_id(self):
        return (len(self._meetings),)

    def NcclCommunicator(self, size, name, rank):  # noqa: N802 as NCCL has it
        with self._lock:
            meeting = self._meetings.setdefault(name, Meeting(size))
        return _Communicator(self, meeting, rank)

    def groupStart(self):  # noqa: N802
        self._open.group = []

    def groupEnd(self):  # noqa: N802
        group, self._open.group = self._open.group, None
        if not group:  # of calls that were made at once
            return
        owner = group[0][0]
        sent = {(peer): data for _, kind, peer, data in group if kind == "send"}
        every = owner.meeting.exchange(owner.rank, {to: x.copy() for to, x in sent.items()})
        for _, kind, peer, data in group:
            if kind == "recv":
                data[...] = every[peer][owner.rank]


class _Communicator:
    def __init__(self, module, meeting, rank):
        self.module, self.meeting, self.rank, self.splits = module, meeting, rank, 0

    def _memory(self, pointer, count, kind):
        dtype = list(TYPES.values())[kind]
        words = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return np.frombuffer(words, np.uint8).view(dtype)

    def _meet(self, name, count, kind, given):
        self.module.calls.append((self.rank, name, count))
        every = self.meeting.exchange(self.rank, (name, count, kind, given.copy()))
        assert len({x[:3] for x in every}) == 1, every
        return [x[3] for x in every]

    def _sum(self, arrays):
        """Add from the last rank on, so that nobody relies on an order."""
        total = arrays[-1].astype(np.float64)
        for one in arrays[-2::-1]:
            total = total + one
        return total

    def allReduce(self, source, to, count, kind, op, stream):  # noqa: N802
        every = self._meet("allReduce", count, kind, self._memory(source, count, kind))
        self._memory(to, count, kind)[...] = self._sum(every)

    def reduceScatter(self, source, to, count, kind, op, stream):  # noqa: N802
        whole = self._memory(source, count * self.meeting.size, kind)
        every = self._meet("reduceScatter", count, kind, whole)
        mine = slice(self.rank * count, (self.rank + 1) * count)
        self._memory(to, count, kind)[...] = self._sum([x[mine] for x in every])

    def allGather(self, source, to, count, kind, stream):  # noqa: N802
        every = self._meet("allGather", count, kind, self._memory(source, count, kind))
        self._memory(to, count * self.meeting.size, kind)[...] = np.concatenate(every)

    def bcast(self, at, count, kind, root, stream):
        every = self._meet("bcast", count, kind, self._memory(at, count, kind))
        self._memory(at, count, kind)[...] = every[root]

    def send(self, at, count, kind, peer, stream):
        self.module._open.group.append((self, "send", peer, self._memory(at, count, kind)))

    def recv(self, at, count, kind, peer, stream):
        self.module._open.group.append((self, "recv", peer, self._memory(at, count, kind)))

    def commSplit(self, color, key):  # noqa: N802
        self.splits += 1
        every = self.meeting.exchange(self.rank, (color, key, id(self)))
        members = sorted((k, rank) for rank, (c, k, _) in enumerate(every) if c == color)
        place = [rank for _, rank in members].index(self.rank)
        name = ("split", every[0][2], self.splits, color)
        return self.module.NcclCommunicator(len(members), name, place)


def cupy(cards):
    """Return a stand-in for CuPy. ``cards``: {name of a thread: bus of its GPU}."""
    current = lambda *_: SimpleNamespace(  # noqa: E731
        pci_bus_id=cards[threading.current_thread().name], use=lambda: None
    )
    return SimpleNamespace(
        zeros=lambda shape, dtype: array(np.zeros(shape, dtype)),
        empty=lambda shape, dtype: array(np.full(shape, 7, dtype)),
        cuda=SimpleNamespace(
            Device=current,
            get_current_stream=lambda: SimpleNamespace(ptr=0, synchronize=lambda: None),
            runtime=SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda _: {}),
        ),
    )


def run_ranks(size, work, near=None, module=None, cards=None):
    """Return [result or exception of ``work(control)``] of ranks that are threads.

    ``near``: ranks on a host. ``cards``: buses of their GPUs, in place of different ones.
    """
    meeting, found = Meeting(size), [None] * size
    names = [f"rank {rank}" for rank in range(size)]
    cards = dict(zip(names, cards or [f"bus {rank}" for rank in range(size)], strict=True))

    def run(rank):
        try:
            found[rank] = work(Threads(meeting, rank, near or size))
        except Exception as error:  # noqa: BLE001 given back
            found[rank] = error
            if not isinstance(error, ValueError):
                meeting.abort()

    stand_in = cupy(cards)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nccl, "import_cupy", lambda: stand_in))
        made = module or Nccl()
        stack.enter_context(mock.patch.object(nccl, "nccl_module", lambda: made))
        stack.enter_context(mock.patch.object(nccl, "WARM_UP", 8))
        threads = [threading.Thread(target=run, args=(r,), name=names[r]) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found
