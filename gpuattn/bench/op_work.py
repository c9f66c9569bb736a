"""FLOPs and bytes of a single call of an op, computed from the arguments that the tape passes.

Bytes: every array that a call reads or writes, once; arrays updated in place (parameters, moments,
donated logits) twice. Of a table, no more than the rows that are looked up. FLOPs: of matrix
products alone, 2 m n k each; in attention 4 D for every visible pair of a query and a key forward,
2.5 times that backward, as in ``cases``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpuattn.arrays import is_array, to_cpu
from gpuattn.bench import attention_traffic
from gpuattn.bench.attention_traffic import total
from gpuattn.bench.cases import WORK
from gpuattn.ops.attention import unfused
from gpuattn.optim import OPTIMIZERS

UPDATES = ("gradient_statistics", *OPTIMIZERS)  # ops of the optimizer's update


def moved(
    op: str, direction: str, arguments: tuple, given: dict[str, Any], result: Any,
    function: Callable | None = None,
) -> int:  # fmt: skip
    """Return the bytes of a call: ``function(*arguments, **given)`` returned ``result``.

    ``function`` is asked for of attention: "unfused" writes and reads tables that it does not
    return, see ``attention_traffic``.
    """
    if function in (unfused.forward, unfused.backward):
        inputs = arguments if direction == "forward" else arguments[0][:9]
        return sum(map(total, attention_traffic.model(inputs, given, "unfused", direction)))
    donated = op == "cross_entropy" and given["donate"] and any(given["needs"])
    if donated and direction == "backward" and arguments[0][1] is None:
        return 0  # the forward has computed the gradient
    if op not in UPDATES and not donated and _views((result, given.get("into")), arguments):
        return 0
    sizes: dict[int, int] = {}
    for x in arrays_in((arguments, given, result)):
        place = address(x)
        sizes[place] = max(sizes.get(place, 0), x.nbytes)
    if op == "embedding" and direction == "forward":
        table, out = arguments[1], result[0]
        sizes[address(table)] = min(table.nbytes, out.nbytes)
    twice = []
    if op in OPTIMIZERS:
        params, _, *others = arguments
        moments = [x for x in arrays_in(others) if x.shape == params.shape and x.itemsize == 4]
        twice = [params, *moments]
    elif donated:
        twice = [arguments[0] if direction == "forward" else result[0]]
    return sum(sizes.values()) + sum(x.nbytes for x in twice)


def flops(op: str, direction: str, arguments: tuple, given: dict[str, Any]) -> float:
    """Return the FLOPs of a call, 0 without a matrix product."""
    count = COUNTS.get(op)
    return count(direction, arguments, given) if count else 0


def _linear(direction, arguments, given):
    if direction == "forward":
        x, weight = arguments[:2]
        return 2 * x.size * len(weight)
    (_, x, weight, *_), dy = arguments[:2]  # see ops/linear/gradients.py: save
    inside = (weight if x is None else x).shape[-1]
    return 2 * dy.size * inside * sum(given["needs"][:2])


def _linear_dropout_add_norm(direction, arguments, given):
    if direction == "backward":
        saved, dnormed, dh, *_ = arguments  # a second gradient may follow
        arguments = saved, dh if dnormed is None else dnormed
    return _linear(direction, arguments, given)


def _linear_cross_entropy(direction, arguments, given):
    if direction == "backward":
        return 0  # the forward has computed the gradients
    x, weight = arguments[:2]
    return 2 * x.size * len(weight) * (1 + sum(given["needs"][:2]))


def _attention(direction, arguments, given):
    q, k, v, _, key_lengths, cu_q, cu_k = (arguments if direction == "forward" else arguments[0])[
        :7
    ]
    if cu_q is not None:
        lengths = zip(np.diff(to_cpu(cu_q)), np.diff(to_cpu(cu_k)), strict=True)
    elif key_lengths is not None:
        lengths = ((q.shape[1], int(keys)) for keys in to_cpu(key_lengths))
    else:
        lengths = [(q.shape[1], k.shape[1])] * len(q)
    pairs = sum(_pairs(T, S, given["window"], given["align"]) for T, S in lengths)
    return WORK[direction] * 2 * (q.shape[-1] + v.shape[-1]) * q.shape[-2] * pairs


def _pairs(queries, keys, window, align):
    """Return the visible pairs (query, key) of a sequence."""
    left, right = window
    if left is None and right is None:
        return int(queries) * int(keys)
    at = np.arange(queries) + (keys - queries if align == "bottom_right" else 0)
    first = np.zeros_like(at) if left is None else np.maximum(at - left, 0)
    last = np.full_like(at, keys - 1) if right is None else np.minimum(at + right, keys - 1)
    return int(np.maximum(last - first + 1, 0).sum())


COUNTS = {
    "linear": _linear,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_dropout_add_norm": _linear_dropout_add_norm,
    "flash_attention": _attention,
}


def _views(result, arguments):
    """Return whether all arrays that a call returned or saved are views of its arguments."""
    owned = {id(_owner(x)) for x in arrays_in(arguments)}
    return all(id(_owner(x)) in owned for x in arrays_in(result))


def _owner(x):
    return x if x.base is None else x.base


def arrays_in(value: Any) -> Iterator[Any]:
    """Yield the arrays in nested tuples, lists and dicts."""
    if is_array(value):
        yield value
    elif isinstance(value, dict):
        yield from arrays_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from arrays_in(part)


def address(x: Any) -> int:
    """Return the address of an array's first element."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
