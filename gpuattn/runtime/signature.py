"""What a captured function takes and returns: arrays and values in tuples, lists and dicts."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import on_gpu
from gpuattn.autodiff import tape
from gpuattn.autodiff.record import RELEASED
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import UnsupportedError, problem

CONSTANTS = (int, float, complex, str, bytes, type(None), np.generic, np.dtype)


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


def add_leaves(gpu_array: type, value: Any, donated: bool, leaves: list, key: list) -> None:
    """Append the arrays and Tensors in ``value`` to ``leaves``, and what identifies it to ``key``.

    ``gpu_array``: the class ``cupy.ndarray``. ``donated``: whether addresses count too.
    """
    kind = type(value)
    if kind is gpu_array or kind is Tensor or kind is np.ndarray:
        leaves.append(value)
        if kind is Tensor:
            key.append(value.requires_grad)
            value = value.data
        if type(value) is np.ndarray:
            key += (kind, "numpy")
            return
        memory = value.data
        key += (kind, value.shape, value.strides, value.dtype, memory.device_id)
        if donated:
            key.append(memory.ptr)
    elif kind is dict:
        key += (kind, *value)
        for item in value.values():
            add_leaves(gpu_array, item, donated, leaves, key)
    elif kind is list or isinstance(value, tuple):
        key += (kind, len(value))
        for item in value:
            add_leaves(gpu_array, item, donated, leaves, key)
    elif isinstance(value, float | np.floating):
        key += (kind, value or repr(value))  # 0.0 == -0.0
    else:
        key += (kind, value)


def is_leaf(value: Any) -> bool:
    """Return whether ``add_leaves`` makes ``value`` a leaf: an array or a Tensor."""
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
            raise UnsupportedError(f"it returns a {type(array).__name__}; accepted: {accepted}")
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
