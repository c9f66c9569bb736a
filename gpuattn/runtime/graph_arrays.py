"""Copies between the arrays of a call and those of a CUDA graph, as nodes of the graph.

A graph repeats launches with the same addresses, so it computes with arrays of its own. The host
writes the addresses of a call's arrays into a slot of a ring in pinned memory, which kernels read
by the same address, and launches the graph: no copies on the host's account, which take longer
than that. A count in device memory says which slot a replay takes.

Device code: ``rawkernels/graph_arrays.cu``.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import empty_pinned
from gpuattn.autodiff import tape
from gpuattn.autodiff.record import write_constant
from gpuattn.autodiff.tensor import Tensor
from gpuattn.cuda.generated import Code, short_dtype, write_array
from gpuattn.cuda.gpu import gpu, kernels_refusal
from gpuattn.cuda.kernels import compile_ahead, kernel
from gpuattn.errors import KernelCompileError, warn_slow_path
from gpuattn.runtime.signature import Out, filled
from gpuattn.typing import Array

FILE = "graph_arrays.cu"
SLOT, IN, OUT = "graph_slot", "graph_copy_in", "graph_copy_out"
BLOCK, CHUNK, MOST, SLOTS = 256, 4096, 64, 256  # as in the device code
BLOCKS = 4  # per multiprocessor
HALF = SLOTS // 2
ARRAYS = np.dtype(
    [
        ("own", np.uint64, MOST), ("bytes", np.uint64, MOST), ("before", np.uint32, MOST + 1),
        ("count", np.uint32), ("first", np.uint32), ("last", np.uint32),
    ]
)  # fmt: skip


def prepare(device: int) -> bool:
    """Return whether a device runs these kernels; start to compile them."""
    if kernels_refusal(device) is not None:
        return False
    compile_ahead(FILE)
    return True


def load() -> bool:
    """Load the kernels, so that none is loaded while a stream captures. False if it fails."""
    try:
        for name in (SLOT, IN, OUT):
            kernel(FILE, name)
    except KernelCompileError as error:
        warn_slow_path(f"captured functions copy arguments and results beside graphs: {error}")
        return False
    return True


def inputs_of(
    leaves: Sequence, statics: Sequence, runs_here: bool
) -> tuple[list[int], list[tuple[int, Array, int, int]]]:
    """Return (places of the leaves that a graph copies to its own arrays, those that the host does
    as ``GraphStream.copy_inputs`` takes them). ``statics``: the graph's own, or the leaf itself."""
    given: list[int] = []
    others: list[tuple[int, Array, int, int]] = []
    for place, (leaf, static) in enumerate(zip(leaves, statics, strict=True)):
        x, to = tape.raw(leaf), tape.raw(static)
        if leaf is static or not x.nbytes:
            continue
        if x.strides != to.strides:
            others.append((place, to, 0, 0))
        elif runs_here:
            given.append(place)
        else:
            others.append((place, to, to.data.ptr, to.nbytes))
    return given, others


class Ring:
    """The addresses of the last calls of one graph, in turns in SLOTS slots.

    ``done``: an event that is recorded after every replay. ``words``: addresses in a slot, those
    of ``copy_in`` first. ``slots``: all of them, in pinned memory. ``sent``: how many replays were
    launched; the next one takes the slot ``sent % SLOTS``, and the caller counts.
    """

    def __init__(self, cupy: Any, done: Any) -> None:
        self.cupy, self.done, self.sent, self.words = cupy, done, 0, 0
        self.state = cupy.zeros(4, np.uint64)  # Ring of the device code
        self.given: Any = None  # a copy of a slot on the device
        self.slots = memoryview(b"")
        self.over = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]  # replays of a half

    def copy_in(self, arrays: Sequence[Array]) -> None:
        """Launch copies from the addresses in the slot to ``arrays``: the graph begins."""
        kernel(FILE, SLOT)((1,), (BLOCK,), self.state)
        for i in range(0, len(arrays), MOST):
            self._copy(IN, arrays[i : i + MOST])

    def copy_out(self, arrays: Sequence[Array]) -> None:
        """Launch copies of ``arrays`` to the addresses in the slot: the graph ends."""
        if not self.words:
            self.copy_in(())
        for i in range(0, max(1, len(arrays)), MOST):
            self._copy(OUT, arrays[i : i + MOST], last=i + MOST >= len(arrays))

    def _copy(self, name, arrays, last=False):
        device, count = gpu(self.cupy.cuda.runtime.getDevice()), len(arrays)
        sizes = np.array([x.nbytes for x in arrays], np.uint64)
        given = np.zeros(1, ARRAYS)
        (one,) = given
        one["own"][:count] = [x.data.ptr for x in arrays]
        one["bytes"][:count] = sizes
        one["before"][1 : count + 1] = np.cumsum((sizes + CHUNK - 1) // CHUNK)
        one["count"], one["first"], one["last"] = count, self.words, last
        self.words += count
        grid = (min(max(1, int(one["before"][count])), BLOCKS * device.multiprocessors),)
        kernel(FILE, name)(grid, (BLOCK,), given.view(f"V{ARRAYS.itemsize}"), self.state)

    def open(self) -> None:
        """Make the slots: the graph is captured, and replays begin after this on its stream."""
        if not self.words:
            return
        memory = empty_pinned(SLOTS * self.words, np.uint64)
        self.slots = memoryview(memory)  # type: ignore[arg-type]
        self.given = self.cupy.zeros(self.words, np.uint64)
        state = np.array([0, memory.ctypes.data, self.words, self.given.data.ptr], np.uint64)
        self.state[...] = self.cupy.asarray(state)

    def beginning(
        self, given: Sequence[int], leaves: Sequence, outputs: Sequence[Array],
        made: Sequence[Array], result: Any,
    ) -> tuple[Callable[[Sequence, int], Any], list[tuple[int, Array, int]]]:  # fmt: skip
        """Return (begin, outputs that are left to the caller: (number, array, bytes or 0)).

        ``begin(leaves, at)``: called before a replay whose slot begins at word ``at``. It makes new
        arrays for ``made``, those of the ``outputs`` that the graph copies, and writes addresses.
        It returns the call's result; or, where outputs are left, the list of all, with None there.
        ``given``: the places of ``leaves`` that the graph copies. ``result``: of ``template``.
        """
        code = Code(slots=self.slots, filled=filled)
        for word, place in enumerate(given):
            data = "data.data" if type(leaves[place]) is Tensor else "data"
            code.add(f"slots[at + {word}] = leaves[{place}].{data}.ptr")
        word = len(given)
        own, names, left = {id(x) for x in made}, [], []
        for number, x in enumerate(outputs):
            if id(x) not in own:
                left.append((number, x, x.nbytes if x.flags.c_contiguous else 0))
                names.append("None")
                continue
            shape, kind = code.name("shape", x.shape), code.name("dtype", short_dtype(x.dtype))
            names.append(f"x{number}")
            write_array(code, f"x{number}", f"{shape}, {kind}")
            code.add(f"slots[at + {word}] = x{number}.data.ptr")
            word += 1
        outs = f"[{', '.join(names)}]"
        code.add(f"return {outs if left else _expression(code, result, outs)}")
        return code.function("leaves, at"), left

    def turn(self, stream: Any) -> None:
        """Wait until the half of the slots that begins is free; to be called where one begins.

        ``stream``: waits for all replays so far.
        """
        half = self.sent // HALF % 2
        if self.sent:
            self.over[1 - half].record(stream)
        if self.sent >= SLOTS:
            self.over[half].synchronize()

    def __del__(self, ending=sys.is_finalizing):
        if not ending():  # a replay may still read the slots
            with contextlib.suppress(Exception):
                self.done.synchronize()


def _expression(code, place, outs):
    """Write what makes ``filled(place, outs, leaves)``; return its text. ``outs``: "[x0, x1]"."""
    if type(place) is tuple:
        return f"({''.join(f'{_expression(code, one, outs)}, ' for one in place)})"
    if type(place) is Out and place.leaf >= 0:
        return f"leaves[{place.leaf}]"
    if type(place) is Out and place.kind is None:
        return f"x{place.number}"
    if type(place) is Out and place.kind is Tensor:
        return write_constant(code, Tensor, f"x{place.number}", place.requires_grad)
    return f"filled({code.name('place', place)}, {outs}, leaves)"
