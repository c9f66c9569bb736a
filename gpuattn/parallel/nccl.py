"""Ranks that exchange CuPy arrays by NCCL, one process a GPU.

Calls are queued on the current stream, and become part of a CUDA graph where that is captured; all
ranks then capture the same calls and launch the same graphs. Calls in graphs and others may come in
turns, so NCCL_GRAPH_MIXING_SUPPORT must stay what it is by default, 1. Values of the host go by
another Communicator, which also starts this one.
"""

import contextlib
import copy
import ctypes
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy, rehearsing
from gpuattn.errors import ConfigError
from gpuattn.parallel.agreement import silent, together
from gpuattn.parallel.communicator import Communicator, add_in_pairs
from gpuattn.typing import Array

INSTALL = "pip install nvidia-nccl-cu12 (CUDA 12) or nvidia-nccl-cu13"
TYPES = {
    "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64", "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
}  # fmt: skip
WARM_UP = 1 << 21  # elements of float32 of the first collectives, by which NCCL takes its memory


class NCCL:
    """The Communicator of ranks with a GPU each, the current one. ``control``: between the same
    ranks, on the host.

    Raises ConfigError, on all ranks, where NCCL is missing, its versions differ, or two ranks have
    one GPU.
    """

    def __init__(self, control: Communicator) -> None:
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.local_rank, self.local_size = control.local_rank, control.local_size
        self._nccl = nccl = together(control, nccl_module)
        cards = control.gather((*_card(), nccl.get_version()))
        _check(cards, control)
        try:
            name = control.gather(nccl.get_unique_id() if control.rank == 0 else None)[0]
            self._ranks = _kept(nccl.NcclCommunicator(control.size, name, control.rank))
            control.barrier()
            self._warm_up()
        except nccl.NcclError as error:
            raise ConfigError(
                f"NCCL cannot connect the GPUs: {error}. Look at what gpuattn doctor says of NCCL, "
                "of /dev/shm and of links, and set NCCL_DEBUG=WARN to see the reason"
            ) from error

    def all_reduce(self, array: Array, ordered: bool = False) -> None:
        if ordered:
            piece = array.reshape(self.size, -1)[self.rank]
            self.reduce_scatter(array, piece, ordered=True)
            self.all_gather(piece, array)
        elif not rehearsing.get():
            at, of = array.data.ptr, self._nccl
            self._ranks.allReduce(at, at, array.size, self._type(array), of.NCCL_SUM, _stream())

    def reduce_scatter(self, whole: Array, piece: Array, ordered: bool = False) -> None:
        if ordered:
            received = import_cupy().empty((self.size, piece.size), whole.dtype)
            self._exchange(whole.reshape(self.size, -1), received)
            piece[...] = add_in_pairs(list(received))
        elif not rehearsing.get():
            self._ranks.reduceScatter(
                whole.data.ptr, piece.data.ptr, piece.size, self._type(whole),
                self._nccl.NCCL_SUM, _stream(),
            )  # fmt: skip

    def all_gather(self, piece: Array, whole: Array) -> None:
        if not rehearsing.get():
            kind = self._nccl.NCCL_UINT8
            self._ranks.allGather(piece.data.ptr, whole.data.ptr, piece.nbytes, kind, _stream())

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        if rehearsing.get():
            yield
            return
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def broadcast(self, array: Array) -> None:
        if not rehearsing.get():
            kind = self._nccl.NCCL_UINT8
            self._ranks.bcast(array.data.ptr, array.nbytes, kind, 0, _stream())

    def split(self, color: int) -> "NCCL":
        other = copy.copy(self)
        other._ranks = _kept(self._ranks.commSplit(color, self.rank))
        colors = self.control.gather(color)
        other.rank, other.size = colors[: self.rank].count(color), colors.count(color)
        return other

    # values of the host

    def barrier(self) -> None:
        self.control.barrier()

    def gather(self, value: Any) -> list[Any]:
        return self.control.gather(value)

    def note(self, update: int | None = None) -> None:
        self.control.note(update)

    def abort(self, code: int) -> None:
        self.control.abort(code)

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for those of other ranks; GPUs wait by themselves."""
        return self.control.waited

    def version(self) -> str:
        """Return the version of NCCL, such as "2.28.9"."""
        return version_text(self._nccl.get_version())

    def _exchange(self, rows, received):
        """Write row ``rank`` of each rank's ``rows`` into a row of ``received``."""
        if rehearsing.get():
            return
        kind = self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for other in range(self.size):
            mine, theirs = rows[other], received[other]
            self._ranks.send(mine.data.ptr, mine.nbytes, kind, other, _stream())
            self._ranks.recv(theirs.data.ptr, theirs.nbytes, kind, other, _stream())
        self._nccl.groupEnd()

    def _type(self, array):
        return getattr(self._nccl, TYPES[str(array.dtype)])

    def _warm_up(self):
        """Let NCCL connect and take its memory, before it is planned how much is left."""
        cupy = import_cupy()
        whole = cupy.zeros(WARM_UP * self.size, np.float32)
        piece = whole.reshape(self.size, -1)[self.rank]
        self.all_reduce(whole)
        self.reduce_scatter(whole, piece)
        self.all_gather(piece, whole)
        self.broadcast(whole)
        cupy.cuda.get_current_stream().synchronize()


def _kept(communicator):
    """Return a communicator that lives as long as the process.

    Its end would wait for all CUDA graphs with its calls, which may live longer.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
    return communicator


def nccl_module() -> Any:
    """Return ``cupy.cuda.nccl``. Raises ConfigError where it is of no use."""
    import_cupy()
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConfigError(
            f"several GPUs work together by NCCL, which CuPy cannot load ({error}). Try {INSTALL}"
        ) from error
    if not getattr(nccl, "available", False) or not hasattr(nccl, "NCCL_BFLOAT16"):
        raise ConfigError(
            "several GPUs work together by NCCL, which this CuPy has not, or without bfloat16. "
            f"Try cupy 14.1 or newer, and {INSTALL}"
        )
    return nccl


def version_text(number: int) -> str:
    """Return the text of a version of NCCL that is a number, such as 22809."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def take_card(control: Communicator) -> None:
    """Make the GPU of this rank the current one: that of its number on its host.

    A launcher may show each rank its own one alone. Raises ConfigError for more ranks than GPUs.
    """
    cuda, here = import_cupy().cuda, control.local_rank
    seen = cuda.runtime.getDeviceCount()
    if control.local_size > seen > 1:
        raise ConfigError(
            f"{control.local_size} ranks on a host with {seen} GPUs; accepted: one rank a GPU. "
            f"Start {seen} ranks there, or set CUDA_VISIBLE_DEVICES"
        )
    cuda.Device(here if seen > 1 else 0).use()


def _check(cards, ranks):
    """Raise ConfigError, on all ranks, where two have one GPU, or other versions of NCCL."""
    seen: dict[Any, int] = {}
    versions = {version for *_, version in cards}
    found = ""
    for rank, (host, card, _) in enumerate(cards):
        if (host, card) in seen:
            found = (
                f"ranks {seen[host, card]} and {rank} have the same GPU, {card}; accepted: a GPU "
                "for each rank. Start fewer ranks, or let each one see another GPU"
            )
        seen[host, card] = rank
    if len(versions) > 1:
        found = (
            f"ranks have NCCL {' and '.join(sorted(map(version_text, versions)))}; accepted: one "
            f"version. Install the same one: {INSTALL}"
        )
    if found:
        raise silent(ConfigError(found), ranks.rank > 0)


def _card():
    """Return (host, what names the current GPU on it)."""
    runtime = import_cupy().cuda.runtime
    uuid = runtime.getDeviceProperties(runtime.getDevice()).get("uuid")
    bus = import_cupy().cuda.Device().pci_bus_id
    return socket.gethostname(), bus if uuid is None else f"{bus} ({bytes(uuid)[:16].hex()})"


def _stream():
    return import_cupy().cuda.get_current_stream().ptr
