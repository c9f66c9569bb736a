"""Functions of arrays as CUDA graphs: the host launches one graph instead of every kernel.

A graph repeats launches with the same addresses. So arguments are copied to where the graph reads
them, results to new arrays, both by the graph itself (``graph_arrays``), and what else the function
depends on, in Python, is watched.
"""

import contextlib
import functools
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from types import MethodType
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import device_of, on_gpu, rehearsing
from gpuattn.autodiff import frozen, tape
from gpuattn.autodiff.hooks import is_hooked
from gpuattn.autodiff.tensor import Tensor
from gpuattn.autodiff.watch import Watch
from gpuattn.errors import UnsupportedError, problem, type_of, warn_slow_path
from gpuattn.modes import mode
from gpuattn.nn.dropout import RandomState
from gpuattn.runtime import graph_arrays
from gpuattn.runtime.graph_arrays import HALF, SLOTS, Ring
from gpuattn.runtime.graph_stream import DeviceStep, GraphStream, without_host_copies
from gpuattn.runtime.signature import (
    Signatures,
    filled,
    is_leaf,
    map_leaves,
    positions_and_names,
    template,
)

MOST_RESTARTS = 8  # of a signature because of changes, before there was a graph
MOST_SIGNATURES = 32  # that a function keeps: those called last
OWN_NUMBERS = 0x6A09E667F3BCC909  # apart from the numbers of an op called with the same seed


class Captured:
    """A function that runs as CUDA graphs: see ``gpuattn.capture``.

    ``reason``: None, or why the last call that could not be a graph ran op by op.
    """

    reason: str | None

    def __init__(self, function: Callable, donate: int | str | Iterable[int | str] = ()) -> None:
        if not callable(function):
            got, accepted = type_of(function), "a function of arrays"
            raise TypeError(problem("capture", "function", got, accepted))
        functools.update_wrapper(self, function)
        self.function, self.reason = function, None
        self._donated = positions_and_names(function, donate)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._devices: dict[int, GraphStream] = {}
        self._seed, self._calls = secrets.randbits(64), 0  # random numbers without manual_seed
        self._warned: set[str] = set()
        self._cupy: Any = None
        self._signatures: Any = None
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"gpuattn.capture({self.function!r})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @property
    def graphs(self) -> int:
        """How many signatures are captured."""
        return sum(entry.graph is not None for entry in self._entries.values())

    def held_bytes(self) -> int:
        """Return the bytes of device memory that the graphs hold, without their arguments."""
        return sum(size for device in self._devices.values() for _, size in device.graphs.held)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cupy = self._cupy or self._find_cupy()
        if cupy is None or (not mode.get().planned and _is_observed()) or rng.is_numbered():
            return self.function(*args, **kwargs)
        signatures = self._signatures
        key, leaves = signatures.last(args, kwargs) or signatures.find(args, kwargs)
        stream = cupy.cuda.get_current_stream()
        if stream.ptr and stream.is_capturing():  # part of that graph
            return self.function(*args, **kwargs)
        with self._lock:
            try:
                entry = self._entries.get(key)
            except TypeError as error:
                return self._unhashable(error, args, kwargs, leaves)
            if (
                entry is None
                or entry.graph is None
                or not entry.watch.same()
                or (entry.counter is not None and self._number()[0] != entry.seed)
            ):
                return self._other(cupy, entry, key, args, kwargs, leaves)
            if len(self._entries) > 1:
                self._entries.move_to_end(key)
            return self._replay(entry, leaves, stream)

    def _find_cupy(self):
        """Return CuPy if the program has imported it and a GPU works, else None."""
        cupy = sys.modules.get("cupy")
        if cupy is not None and cupy.cuda.is_available():
            self._signatures = Signatures(cupy, self._donated)
            self._cupy = cupy
        return self._cupy

    # ---- replays ----

    def _replay(self, entry, leaves, stream):
        device, ring = entry.device, entry.ring
        device.wait(stream)
        if not ring.sent % HALF:
            ring.turn(stream)
        result = entry.begin(leaves, ring.sent % SLOTS * ring.words)  # no memory: nothing has run
        try:
            if entry.inputs:
                device.copy_inputs(entry.inputs, leaves, stream)
            if entry.counter is not None:
                self._count(entry)
            for step in entry.steps:
                step.follow()
            entry.graph.launch(stream)
            ring.sent += 1
            if entry.outputs:
                device.copy_outputs(entry.outputs, result, stream)
            device.done.record(stream)
        except BaseException:
            self._lose(entry, stream)
            raise
        return filled(entry.result, result, leaves) if entry.outputs else result

    def _lose(self, entry, stream):
        """Drop a graph that may have run or not: its counts on the device may be others than here.

        The next call captures anew.
        """
        with contextlib.suppress(Exception):
            stream.synchronize()
        entry.forget_graph()

    def _number(self):
        """Return (seed, number of this call) of the random numbers of ops without a seed."""
        seed, number = rng.manual_state() or (self._seed, self._calls)
        return seed ^ OWN_NUMBERS, number

    def _drew(self):
        if rng.manual_state() is None:
            self._calls += 1
        else:
            rng.skip_one()

    def _count(self, entry):
        """Let the graph take the number of this call: it counts up by itself."""
        _, number = self._number()
        if number != entry.next:
            entry.counter.fill(number)
        entry.next = number + 1
        self._drew()

    # ---- calls that are no replays ----

    def _other(self, cupy, entry, key, args, kwargs, leaves):
        if entry is None:
            entry = self._new_entry(cupy, key, args, kwargs, leaves)
        elif not (entry.on_host or entry.refused or entry.watch.same()):
            before, change = entry, f"{entry.watch.change()} has changed since the last call"
            self._drop(key)
            self.reason, entry = change, self._new_entry(cupy, key, args, kwargs, leaves)
            entry.restarts = 0 if before.graph is not None else before.restarts + 1
            if entry.restarts == MOST_RESTARTS:
                self._refuse(f"{change}, as it had before", entry)
        if entry.on_host:
            return self.function(*args, **kwargs)
        if entry.elsewhere:
            with device_of(*map(tape.raw, leaves)):
                return self(*args, **kwargs)
        if entry.refused:
            self.reason = entry.refused
            return self._numbered(args, kwargs)
        if not entry.is_known:
            with entry.device.ordered():
                return self._first(entry, args, kwargs, leaves)
        with entry.device.ordered():
            captured = self._capture(entry, args, kwargs, leaves)
        if not captured:
            return self._numbered(args, kwargs)
        result = self._replay(entry, leaves, cupy.cuda.get_current_stream())
        if not entry.watch.same():
            self._refuse(f"the function changes {entry.watch.change()}", entry)
            entry.forget_graph()
        return result

    def _unhashable(self, error, args, kwargs, leaves):
        if any(on_gpu(tape.raw(leaf)) for leaf in leaves):
            self._refuse(f"an argument is not hashable: {error}")
        return self.function(*args, **kwargs)

    def _new_entry(self, cupy, key, args, kwargs, leaves):
        while len(self._entries) >= MOST_SIGNATURES:
            self._drop(next(iter(self._entries)))
        others: list = []
        map_leaves(lambda x: None if is_leaf(x) else others.append(x), (args, kwargs))
        arrays = [tape.raw(leaf) for leaf in leaves]
        entry = self._entries[key] = _Entry(Watch(self.function, *others, apart=RandomState))
        there = {a.data.device_id for a in arrays if on_gpu(a)}
        entry.on_host = not there and not entry.watch.on_gpu
        number = cupy.cuda.runtime.getDevice()
        if entry.on_host:
            return entry
        if len(there) > 1:
            self._refuse("its arguments are on several GPUs", entry)
        elif not all(map(on_gpu, arrays)):
            self._refuse(
                "an argument is a NumPy array, and a graph would repeat its values; "
                "move it with gpuattn.to_gpu(x)", entry,
            )  # fmt: skip
        elif there and there != {number}:
            entry.elsewhere = True
        else:
            if number not in self._devices:
                self._devices[number] = GraphStream(cupy)
            entry.device = self._devices[number]
            entry.has_copies = graph_arrays.prepare(number)
        return entry

    def _numbered(self, args, kwargs):
        """Call op by op, with the random numbers that a graph would take."""
        with rng.numbered(*self._number()) as drawn:
            result = self.function(*args, **kwargs)
        if drawn[0] > 0:
            self._drew()
        return result

    def _first(self, entry, args, kwargs, leaves):
        """Call op by op, and refuse the signature for what a graph would not repeat."""
        donated = self._donated_leaves(args, kwargs)
        inputs = [leaf for leaf in leaves if id(leaf) not in donated]
        before = [tape.raw(leaf).copy(order="K") for leaf in inputs]
        of_arguments = Watch(*[leaf for leaf in leaves if isinstance(leaf, Tensor)])
        with rng.numbered(*self._number()) as drawn:
            result = self.function(*args, **kwargs)
        if drawn[0] > 0:
            self._drew()
        if drawn[0] < 0:
            self._refuse("the function calls manual_seed", entry)
        elif not of_arguments.same():
            self._refuse(
                f"the function changes {of_arguments.change()} that is an argument; return "
                "gradients: gpuattn.value_and_grad", entry,
            )  # fmt: skip
        elif not all(_equal(tape.raw(x), y) for x, y in zip(inputs, before, strict=True)):
            self._refuse("the function writes to an argument; name it in donate=", entry)
        elif not entry.watch.same():
            if entry.has_changed:
                self._refuse(f"the function changes {entry.watch.change()}", entry)
            entry.watch, entry.has_changed = entry.watch.again(), True
            return result
        else:
            with self._refusing(entry):
                template(result, leaves, [])
        entry.is_known = True
        return result

    def _capture(self, entry, args, kwargs, leaves):
        """Capture a call, which launches nothing; return whether there is a graph now."""
        donated, device, cupy = self._donated_leaves(args, kwargs), entry.device, entry.device.cupy
        entry.forget_graph()
        statics = [leaf if id(leaf) in donated else _static(leaf) for leaf in leaves]
        own = iter(statics)  # by place: two leaves may be one array in this call alone
        args, kwargs = map_leaves(lambda x: next(own) if is_leaf(x) else x, (args, kwargs))
        entry.seed, entry.next = self._number()
        counter = cupy.full(1, entry.next, np.uint32)
        entry.steps = [DeviceStep(cupy, state) for state in entry.watch.found]
        entry.ring = ring = Ring(cupy, device.done)
        entry.has_copies = entry.has_copies and graph_arrays.load()
        given, entry.inputs = graph_arrays.inputs_of(leaves, statics, entry.has_copies)
        outputs: list = []

        def step():
            if given:
                ring.copy_in([tape.raw(statics[place]) for place in given])
            with rng.numbered(entry.seed, counter) as drawn:
                result = self.function(*args, **kwargs)
            if drawn[0] > 0:
                entry.counter = counter
                np.add(counter, 1, out=counter)
            entry.result = template(result, statics, outputs)
            made = [x for x in outputs if entry.has_copies and x.nbytes and x.flags.c_contiguous]
            if given or made:
                ring.copy_out(made)
            return made

        with self._refusing(entry), without_host_copies(cupy), contextlib.ExitStack() as stack:
            for one in entry.steps:
                stack.enter_context(one.on_device())
            graph, made = device.graphs.capture(device.stream, step)
            ring.open()
            entry.begin, entry.outputs = ring.beginning(given, leaves, outputs, made, entry.result)
            entry.kept = statics, outputs
            entry.graph = graph
        return entry.graph is not None

    @contextlib.contextmanager
    def _refusing(self, entry):
        """Refuse the signature if the block raises."""
        try:
            yield
        except UnsupportedError as error:
            self._refuse(str(error), entry)
        except Exception as error:  # noqa: BLE001 the call can run op by op
            self._refuse(f"{type(error).__name__}: {error}", entry)

    def _refuse(self, reason, entry=None):
        self.reason = reason
        if entry is not None:
            entry.refused = reason
        if reason not in self._warned:
            self._warned.add(reason)
            name = getattr(self.function, "__name__", repr(self.function))
            warn_slow_path(f"{name} runs op by op, not as a CUDA graph: {reason}")

    def _drop(self, key):
        entry = self._entries.pop(key)
        if entry.graph is not None:
            entry.device.done.synchronize()  # a launch may still use its memory

    def _donated_leaves(self, args, kwargs):
        """Return {id} of the arrays and Tensors that are donated."""
        positions, names = self._donated
        given = [x for i, x in enumerate(args) if i in positions]
        given += [x for name, x in kwargs.items() if name in names]
        found: set[int] = set()
        map_leaves(lambda x: found.add(id(x)), given)
        return found


class _Entry:
    """What is known of a signature. ``is_known``: a call showed nothing against a graph.
    ``has_changed``: the first call changed what it depends on. ``restarts``: how often something
    changed between calls before there was a graph.

    ``ring``, ``begin``: where a replay finds its arrays, see ``graph_arrays``; ``has_copies``:
    whether a graph copies them itself. ``inputs``, ``outputs``: the others, as those of
    ``GraphStream.copy_inputs`` and ``copy_outputs``. ``kept``: arrays that the graph uses.
    ``counter``: None, or the number of the call on the device, which the graph counts up to
    ``next``.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.device: Any = None
        self.refused: str | None = None
        self.on_host = self.elsewhere = self.is_known = self.has_changed = False
        self.has_copies, self.restarts = False, 0
        self.forget_graph()

    def forget_graph(self) -> None:
        self.graph: Any = None
        self.inputs: list[tuple] = []
        self.outputs: list[tuple] = []
        self.ring: Any = None
        self.begin: Any = None
        self.kept: Any = None
        self.result: Any = None
        self.counter: Any = None
        self.seed = self.next = 0
        self.steps: list[DeviceStep] = []


def _static(leaf):
    """Return an array or Tensor of the graph's own like ``leaf``."""
    static = tape.raw(leaf).copy(order="K")
    return Tensor(static, requires_grad=leaf.requires_grad) if type(leaf) is Tensor else static


def _equal(a, b):
    """Return whether two arrays hold the same values, NaN included. Synchronizes."""
    different = (a != b) & ((a == a) | (b == b))
    return not bool(different.any())


def _is_observed():
    """Return whether ops are looked at one by one, or only rehearsed. Nothing has plans then."""
    return rehearsing.get() or frozen.is_debugging() or is_hooked()
