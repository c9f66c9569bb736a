"""What the tape records: arrays that remember the call that made them, and the calls."""

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuattn.arrays import is_array
from gpuattn.autodiff.frozen import editable, fingerprint, freeze, is_debugging, thaw
from gpuattn.cuda.generated import Code
from gpuattn.errors import GradientError
from gpuattn.impls import Impl
from gpuattn.typing import Array

_order, _lock = itertools.count(), threading.RLock()
RELEASED = object()  # what a node holds as ``saved`` once its gradient was computed


class Box:
    """An array that remembers the node that made it.

    ``grad_slot``: a slice of a flat gradient buffer, or None. With one, gradients are written
    there; ``grad_started`` says whether the next one adds (True) or overwrites (False).
    """

    __slots__ = (
        "__weakref__", "_version", "data", "grad", "grad_slot", "grad_started", "index", "node",
        "requires_grad",
    )  # fmt: skip

    def __init__(
        self, data: Array, node: "Node | None" = None, index: int = 0, requires_grad: bool = False
    ) -> None:
        self.data, self.node, self.index = data, node, index
        self.requires_grad = requires_grad or node is not None
        self.grad: Any = None
        self.grad_slot: Any = None
        self.grad_started = False
        self._version: list[int] | None = [0]

    @property
    def version(self) -> list[int]:
        """The count of edits, shared with views of the same memory."""
        if self._version is None:  # of ``constants``: most of them are never asked
            with _lock:
                if self._version is None:
                    self._version = [0]
        return self._version

    @version.setter
    def version(self, value: list[int]) -> None:
        self._version = value

    def link(self) -> "Box":
        """Return a copy without data; itself for leaves and parts of an array, whose data stay."""
        if self.node is None or self.node.impl.fusion.layout is not None:
            return self
        link = object.__new__(type(self))
        Box.__init__(link, None, self.node, self.index)
        link.requires_grad = self.requires_grad
        return link


def constants(kind: type[Box]) -> Callable[[Array], Box]:
    """Return a function like ``kind``, of an array that is there already and nobody else holds.

    For calls that take microseconds: nothing is checked, and attributes are set one by one.
    """
    code = Code()
    code.add(f"return {write_constant(code, kind, 'data')}")
    return code.function("data")


def write_constant(code: Code, kind: type[Box], data: str, requires_grad: bool = False) -> str:
    """Write what makes a constant, as in ``constants``, of ``data``; return its name."""
    code.values |= {"new": object.__new__, "kind": kind}
    box = f"box{len(code.lines)}"
    code.add(
        f"{box} = new(kind)",
        f"{box}.data, {box}.node, {box}.index, {box}.requires_grad = "
        f"{data}, None, 0, {requires_grad}",
        f"{box}.grad = {box}.grad_slot = {box}._version = None",
        f"{box}.grad_started = False",
    )
    return box


class Changed:
    """``last``: a new object after each change of an attribute of any Counted."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = object()


changed = Changed()


class Counted:
    """An object of which is known whether attributes have changed since a ``changed.last``.

    A change comes before its mark: who reads the mark and then the attributes misses none, with
    any number of threads.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker that sees them takes any attribute

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            changed.last = object()

        def __delattr__(self, name):
            super().__delattr__(name)
            changed.last = object()


class Node:
    """One recorded call. ``plan``: its ``plans.Plan`` if that has a program, else None."""

    __slots__ = (
        "frozen", "impl", "inputs", "links", "needs", "op", "order", "outputs", "params", "plan",
        "saved", "watched",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        impl: Impl,
        inputs: tuple,
        needs: tuple[bool, ...],
        params: dict[str, Any],
        saved: Any,
        outs: tuple,
        plan: Any = None,
    ) -> None:
        self.plan = plan if plan is not None and plan.program is not None else None
        if self.plan is not None and self.plan.links is not None:
            self.links = self.plan.links
        else:
            # saved[i] is input links[i] (>= 0), output ~links[i] (< 0), or another value (None)
            self.links = [_find(s, inputs, outs) for s in saved] if type(saved) is tuple else []
            if self.plan is not None:
                self.plan.links = self.links
        self.op, self.impl, self.needs, self.params, self.saved = op, impl, needs, params, saved
        self.order, self.outputs = next(_order), len(outs)
        self.frozen: list = []
        self.watched: list = []
        # keep only the maker of an input that is not saved, so that its memory can be freed
        self.inputs = tuple([
            x.link() if isinstance(x, Box) and i not in self.links else x
            for i, x in enumerate(inputs)
        ])  # fmt: skip

    def watch(self, boxes: list[Box]) -> None:
        """Detect later edits of what was saved: by version, and on NumPy by making it read-only."""
        debugging = is_debugging()
        for link in self.links:
            if link is None:
                continue
            box = self.inputs[link] if link >= 0 else boxes[~link]
            data = box.data if isinstance(box, Box) else box
            if isinstance(data, np.ndarray):
                freeze(data, self.frozen)
            if isinstance(box, Box):
                trace = fingerprint(data) if debugging else None
                self.watched.append((box.version, box.version[0], data if trace else None, trace))

    def check_unedited(self) -> None:
        for version, then, data, trace in self.watched:
            if version[0] != then or (trace is not None and fingerprint(data) != trace):
                raise GradientError(
                    f"an array that {self.op} saved for its gradient was edited in place since. "
                    "Edit a copy, or call backward() first."
                )

    def no_grads(self) -> list:
        """Return a None for each gradient that the backward takes."""
        return [None] * (self.outputs + self.impl.fusion.takes_second)

    def release(self) -> None:
        """Drop what was saved. Chains of any length are freed node by node, without recursion."""
        if self.frozen:
            thaw(self.frozen)
        self.saved = RELEASED
        self.inputs, self.links, self.watched = (), [], []

    def __del__(self):
        if self.frozen:
            thaw(self.frozen)


def key(box: Any) -> Any:
    """Return the identity of a result, which its Box and the links to it share: its maker."""
    return id(box) if getattr(box, "node", None) is None else (box.node, box.index)


def _find(saved, inputs, outs):
    if not is_array(saved):
        return None
    for i, x in enumerate(inputs):
        if (x.data if isinstance(x, Box) else x) is saved:
            return i
    for i, out in enumerate(outs):
        if out is saved:
            return ~i
    return None


def edit(box: Box, key: Any, value: Any) -> None:
    """Set ``box.data[key] = value``; nodes that saved it refuse their gradient from then on."""
    with editable(box.data):
        box.data[key] = value
    box.version[0] += 1
