"""Inputs of a training step at fixed addresses, so that a CUDA graph can be replayed.

On a GPU a batch and the numbers of its update are copied together, from one of two pinned buffers
on a second stream, while the step before still runs.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gpuattn.arrays import empty_pinned, import_cupy
from gpuattn.data.batching import TokenOrder

NUMBERS = {  # four bytes each
    "weight": np.float32,  # of the batch: its target tokens over those of a full batch
    "tokens": np.float32,  # target tokens of the batch
    "draw": np.uint32,  # numbers the dropout
    "learning_rate": np.float32,
    "divisor": np.float32,  # of the gradients: the sum of the weights of an update
    "share": np.float32,  # of the parameters in the moving average
}
ALIGN = 32  # words between starts of arrays: 128 bytes
SLOTS = 2  # pinned buffers, used in turn


class Numbers:
    """The ``NUMBERS`` by name, as views () of ``words`` (uint32)."""

    weight: Any
    tokens: Any
    draw: Any
    learning_rate: Any
    divisor: Any
    share: Any

    def __init__(self, words: Any) -> None:
        for i, (name, dtype) in enumerate(NUMBERS.items()):
            setattr(self, name, words[i : i + 1].view(dtype).reshape(()))

    def set(self, **values: float) -> None:
        """Write values by name; ``words`` must be a NumPy array."""
        for name, value in values.items():
            getattr(self, name)[...] = value


class HostFeed:
    """``numbers`` and ``batch`` of a step on NumPy; ``shape`` is None."""

    def __init__(self) -> None:
        self.numbers = Numbers(np.zeros(len(NUMBERS), np.uint32))
        self.batch: Any = None
        self.shape = None

    def load(self, batch: Any, **numbers: float) -> None:
        """Set the batch and the ``NUMBERS`` of the next step."""
        self.batch = batch
        self.numbers.set(**numbers)


class DeviceFeed:
    """``numbers`` and ``batch`` on the GPU, for steps on the stream that is current now.

    ``fixed_shape(batch)``: returns an equivalent batch with one of few shapes. ``shape``: of the
    last batch, hashable. Batches of one shape share memory: each overwrites the one before, in
    the order of the stream.
    """

    def __init__(self, fixed_shape: Callable[[Any], Any]) -> None:
        cupy = import_cupy()
        self.fixed_shape = fixed_shape
        self.stream, self.copies = (
            cupy.cuda.get_current_stream(),
            cupy.cuda.Stream(non_blocking=True),
        )
        self.words = cupy.zeros(ALIGN, np.uint32)
        self.numbers = Numbers(self.words)
        self.batch: Any = None
        self.shape: tuple = ()
        self._places: dict[tuple, tuple[Any, Any]] = {}  # shape -> (words on the device, batch)
        self._slots = [_Slot(cupy) for _ in range(SLOTS)]

    def load(self, batch: Any, **numbers: float) -> None:
        """Copy the batch and the ``NUMBERS`` of the next step, without synchronizing."""
        here = import_cupy().cuda.get_current_stream()
        assert here == self.stream, "a step computes on another stream than the one of its feed"
        batch = self.fixed_shape(batch)
        parts = [part for _, part in _arrays(batch)]
        self.shape = (*(part.shape for part in parts), *batch.limits)
        place, self.batch = self._places.get(self.shape) or self._new_place(batch, parts)
        slot = self._slots[0]
        self._slots.append(self._slots.pop(0))
        host = slot.fill(self.stream, self.copies, ALIGN + len(place))
        Numbers(host).set(**numbers)
        for begin, part in zip(_starts(parts), parts, strict=True):
            host[ALIGN + begin :][: part.size] = part.ravel().view(np.uint32)
        slot.send(self.stream, self.copies, (self.words, place))

    def _new_place(self, batch, parts):
        *starts, size = _starts(parts, end=True)
        place = import_cupy().empty(size, np.uint32)
        ids = place.view(np.int32)
        moved = (
            ids[a : a + part.size].reshape(part.shape)
            for a, part in zip(starts, parts, strict=True)
        )
        there = {name: next(moved) for name, _ in _arrays(batch)}
        for name, array in there.items():
            if isinstance(getattr(batch, name), TokenOrder):
                there[name] = TokenOrder(array, None, None)
        self._places[self.shape] = place, replace(batch, **there)
        return self._places[self.shape]


class _Slot:
    """A pinned buffer and one on the device, between the host and the memory that steps read."""

    def __init__(self, cupy):
        self.copied, self.read = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self.host = self.device = None

    def __del__(self, ending=sys.is_finalizing):
        # CuPy gives pinned memory to others at once, also while it waits to be copied from
        if getattr(self, "host", None) is not None and not ending():
            with contextlib.suppress(Exception):
                self.copied.synchronize()

    def fill(self, stream, copies, size):
        """Return pinned words (size,) to be written, when the last ones have been copied."""
        self.copied.synchronize()
        if self.host is None or len(self.host) < size:
            self.read.synchronize()
            self.host = empty_pinned(size, np.uint32)
            self.device = import_cupy().empty(size, np.uint32)
            copies.wait_event(stream.record())
        self.size = size
        return self.host[:size]

    def send(self, stream, copies, places):
        """Copy the words to the arrays ``places``, one after the other."""
        copies.wait_event(self.read)
        self.device[: self.size].set(self.host[: self.size], copies)
        self.copied.record(copies)
        stream.wait_event(self.copied)
        begin = 0
        for place in places:
            place[...] = self.device[begin : begin + len(place)]
            begin += len(place)
        self.read.record(stream)


def _arrays(batch):
    """Return [(name, array)] of the fields of a batch of a fixed shape that steps read."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values |= {name: v.order for name, v in values.items() if isinstance(v, TokenOrder)}
    return [
        (name, value)
        for name, value in values.items()
        if isinstance(value, np.ndarray) and name != "sentences"
    ]


def _starts(parts, end=False):
    """Return the first word of each part; with ``end`` also the end of the last one."""
    sizes = [-(-part.size // ALIGN) * ALIGN for part in parts]
    return [0, *np.cumsum(sizes).tolist()][: len(parts) + end]
