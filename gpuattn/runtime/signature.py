"""What a captured function takes and returns: arrays and values in tuples, lists and dicts."""

import inspect
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import on_gpu
from gpuattn.autodiff import tape
from gpuattn.autodiff.record import RELEASED
from gpuattn.autodiff.tensor import Tensor
from gpuattn.cuda.generated import Code
from gpuattn.errors import UnsupportedError, problem, type_of
from gpuattn.modes import mode

CONSTANTS = (int, float, complex, str, bytes, type(None), np.generic, np.dtype)
MOST_FORMS = 64  # of a function: more than signatures that it keeps
# of (args, kwargs), (key, leaves) of a call; None for a call of another form
Caller = Callable[[tuple, dict[str, Any]], Any]


def positions_and_names(
    function: Callable, donate: int | str | Iterable[int | str]
) -> tuple[set[int], set[str]]:
    """Return (positions, names) of the arguments that ``donate`` names, each by both if it can.

    Raises TypeError for what names no argument of ``function``.
    """
    several = isinstance(donate, Iterable) and not isinstance(donate, str)
    given: set = set(donate) if several else {donate}  # type: ignore[arg-type]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function in C
        return {x for x in given if isinstance(x, int)}, {x for x in given if isinstance(x, str)}
    kinds = {parameter.kind for parameter in parameters.values()}
    names = {one for one in given if isinstance(one, str)}
    positions = {one for one in given if isinstance(one, int)}
    unknown = given - names - positions
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        unknown |= names - parameters.keys()
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        unknown |= positions - set(range(len(parameters)))
    if unknown:
        got, accepted = repr(next(iter(unknown))), f"positions or names of {', '.join(parameters)}"
        raise TypeError(problem("capture", "donate", got, accepted))
    both = [(i, name) for i, name in enumerate(parameters) if i in positions or name in names]
    return positions | {i for i, _ in both}, names | {name for _, name in both}


class Signatures:
    """Makes the keys of calls, each form of calls by a function that is written as text.

    ``donated``: as ``positions_and_names`` returns them; of such arguments addresses count too.
    """

    def __init__(self, cupy: Any, donated: tuple[set[int], set[str]]) -> None:
        self.cupy, self.donated = cupy, donated
        self.last: Caller = _no_form  # of the last form, which most calls have
        self._forms: dict[tuple, Caller] = {}  # those used last at the end
        self._lock = threading.Lock()

    def find(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, list]:
        """Return what identifies a call, and its arrays and Tensors; ``last`` does so for others.

        Calls differ by the shape, strides, dtype and device of arrays, by other values, by types,
        by whether they are recorded and by ``use_impl``.
        """
        kinds = _kinds(args), _kinds(kwargs) if kwargs else None
        with self._lock:
            form = self._forms.pop(kinds, None) or self._form(args, kwargs)
            self._forms[kinds] = self.last = form
            if len(self._forms) > MOST_FORMS:
                del self._forms[next(iter(self._forms))]
        # None: another thread has changed a list or dict meanwhile
        return form(args, kwargs) or self.find(args, kwargs)

    def _form(self, args, kwargs):
        """Return the Caller of calls like this one."""
        code = Code(start=object(), mode=mode.get, device=self.cupy.cuda.runtime.getDevice)
        form = _Form(code, self.cupy.ndarray)
        positions, names = self.donated
        donated = [i in positions for i in range(len(args))] + [name in names for name in kwargs]
        given = "args"
        if kwargs:
            form.refuse_if(f"(*kwargs,) != {code.name('names', (*kwargs,))}")
            given = "(*args, *kwargs.values())"
        form.refuse_if(f"{'' if kwargs else 'kwargs or '}len(args) != {len(args)}")
        form.add_all(given, (*args, *kwargs.values()), donated)
        key = ", ".join(["start", "mode()", "device()", *form.key])
        code.add(f"return ({key}), [{', '.join(form.leaves)}]")
        return code.function("args, kwargs")


class _Form:
    """Writes what makes ``key`` and ``leaves``, texts, and returns None where a call differs."""

    def __init__(self, code: Code, gpu_array: type) -> None:
        self.code, self.gpu_array = code, gpu_array
        self.key: list[str] = []
        self.leaves: list[str] = []
        self.count = 0

    def refuse_if(self, condition: str) -> None:
        self.code.add(f"if {condition}:", "    return None")

    def add_all(self, given: str, values: Collection, donated: Iterable[bool]) -> None:
        """Write what signs the ``values`` that the text ``given`` has."""
        first = self.count
        self.count += len(values)
        names = [f"x{i}" for i in range(first, self.count)]
        if names:
            self.code.add(f"{', '.join(names)}, = {given}")
        for name, value, one in zip(names, values, donated, strict=True):
            self._add(name, value, one)

    def _add(self, x, value, donated):
        kind = type(value)
        self.refuse_if(f"type({x}) is not {self.code.name('kind', kind)}")
        if kind is self.gpu_array or kind is Tensor or kind is np.ndarray:
            self._add_leaf(x, value, donated)
        elif kind is dict:
            self.refuse_if(f"(*{x},) != {self.code.name('keys', (*value,))}")
            self.add_all(f"{x}.values()", value.values(), [donated] * len(value))
        elif kind is list or isinstance(value, tuple):
            self.refuse_if(f"len({x}) != {len(value)}")
            self.add_all(x, value, [donated] * len(value))
        elif isinstance(value, float | np.floating):
            self.key.append(f"{x} or repr({x})")  # 0.0 == -0.0
        else:
            self.key.append(x)

    def _add_leaf(self, x, value, donated):
        self.leaves.append(x)
        data, kind = x, type(value)
        if kind is Tensor:
            self.key.append(f"{x}.requires_grad")
            data, kind = x.replace("x", "data"), type(value.data)
            self.code.add(f"{data} = {x}.data")
            self.refuse_if(f"type({data}) is not {self.code.name('kind', kind)}")
        if kind is not np.ndarray:
            memory = x.replace("x", "memory")
            self.code.add(f"{memory} = {data}.data")
            self.key += [f"{data}.shape", f"{data}.strides", f"{data}.dtype", f"{memory}.device_id"]
            self.key += [f"{memory}.ptr"] * donated


def _no_form(args, kwargs):
    """The Caller before the first call."""


def _kinds(value):
    """Return what is equal for values that a function of ``Signatures`` takes alike."""
    kind = type(value)
    if kind is Tensor:
        return kind, type(value.data)
    if kind is dict:
        return kind, (*value,), tuple([_kinds(item) for item in value.values()])
    if kind is list or isinstance(value, tuple):
        return kind, tuple([_kinds(item) for item in value])
    return kind


def is_leaf(value: Any) -> bool:
    """Return whether ``Signatures`` makes ``value`` a leaf: an array or a Tensor."""
    return type(value) is Tensor or type(value) is np.ndarray or on_gpu(value)


def map_leaves(function: Callable, tree: Any) -> Any:
    """Return ``tree`` with ``function(leaf)`` in place of every leaf, in the order of leaves."""
    kind = type(tree)
    if kind is dict:
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if kind is list or isinstance(tree, tuple):
        values = [map_leaves(function, value) for value in tree]
        return kind(*values) if hasattr(tree, "_fields") else kind(values)
    return function(tree)


@dataclass(frozen=True, slots=True)
class Out:
    """A place in a result: of output ``number``, or of leaf ``leaf`` of the call itself.

    ``kind``: the class of a Tensor, else None.
    """

    number: int = -1
    leaf: int = -1
    kind: Any = None
    requires_grad: bool = False


def template(result: Any, given: list, outputs: list) -> Any:
    """Return ``result`` with an Out in place of every array; append those to copy to ``outputs``.

    ``given``: the arrays and Tensors among the function's arguments. Raises UnsupportedError for
    what a graph cannot give again.
    """
    places = {id(leaf): place for place, leaf in enumerate(given)}
    numbers: dict[int, int] = {}

    def replace(value):
        if id(value) in places:
            return Out(leaf=places[id(value)])
        array = tape.raw(value)
        if isinstance(array, CONSTANTS):
            return array
        if not on_gpu(array):
            accepted = "GPU arrays, Tensors, numbers and text, in tuples, lists and dicts"
            raise UnsupportedError(f"it returns {type_of(array)}; accepted: {accepted}")
        number = numbers.setdefault(id(array), len(outputs))
        if number == len(outputs):
            outputs.append(array)
        if array is value:
            return Out(number)
        if value.requires_grad and value.node is not None and value.node.saved is not RELEASED:
            raise UnsupportedError(
                "it returns a recorded Tensor, whose gradient would not be that of a replay; "
                "return gradients (gpuattn.value_and_grad), or call it inside no_grad()"
            )
        return Out(number, kind=type(value), requires_grad=value.requires_grad and not value.node)

    return map_leaves(replace, result)


def filled(place: Any, outs: list, leaves: list) -> Any:
    """Return the result of a call: ``place``, made by ``template``, with arrays for each Out."""
    if type(place) is Out:
        if place.leaf >= 0:
            return leaves[place.leaf]
        out = outs[place.number]
        return out if place.kind is None else place.kind(out, requires_grad=place.requires_grad)
    if type(place) is tuple:
        return tuple([filled(inner, outs, leaves) for inner in place])
    if isinstance(place, tuple | list | dict):
        return map_leaves(lambda x: filled(x, outs, leaves), place)
    return place
