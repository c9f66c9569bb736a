"""What chapters compute with the forms and models that they compare."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import gpuattn
from gpuattn.arrays import get_xp, to_cpu
from gpuattn.autodiff.tensor import Tensor


def doublings(first: int, last: int) -> list[int]:
    """Return first, 2 * first, 4 * first ... up to last."""
    return [first << n for n in range((last // first).bit_length())]


def difference(a: Any, b: Any) -> float:
    """Return the largest difference of two arrays or Tensors, or of two lists of them."""
    if isinstance(a, list | tuple):
        return max(difference(x, y) for x, y in zip(a, b, strict=True))
    a, b = (to_cpu(x.data if isinstance(x, Tensor) else x) for x in (a, b))
    return float(abs(a - b).max())


def captured(function: Callable[..., Any], *given: Any) -> Any:
    """Return a ``gpuattn.capture`` of a function, which replays its CUDA graph for ``given``."""
    graph: Any = gpuattn.capture(function)
    for _ in range(3):  # captured at the second call
        graph(*given)
    return graph


def both_ways(form: Callable[..., Tensor], *arrays: Any, grad: Any = None) -> list[Any]:
    """Return the result of a form and the gradients of its inputs, for ``grad``, by default itself.

    ``grad``: the gradient of the result.
    """
    leaves = [Tensor(x, requires_grad=True) for x in arrays]
    out = form(*leaves)
    out.backward(out.data if grad is None else grad)
    return [out.data, *(leaf.grad for leaf in leaves)]


def generate(
    model: Any, inputs: Any, first: Any, n: int, *, kv_cache: bool = True
) -> np.ndarray:  # fmt: skip
    """Return the n likeliest tokens of each text, one after the other, (B, n) on the CPU.

    ``inputs``: what the model's ``stepper`` takes. ``first``: (B,), the tokens of the first step.
    """
    stepper, tokens, text = model.stepper(inputs, n, kv_cache=kv_cache), first, []
    for position in range(n):
        tokens = stepper.step(tokens, position).argmax(-1)
        text.append(tokens)
    return to_cpu(get_xp(tokens).stack(text, 1))


def cache_bytes(heads: int, kv_heads: int, n: int, head_size: int = 64) -> int:
    """Return the bytes of a layer's cache of keys and values, of eight texts of n tokens."""
    attention = gpuattn.nn.MultiHeadAttention(heads * head_size, heads, kv_heads=kv_heads)
    cache = attention.new_cache(8, n)
    return cache.k.nbytes + cache.v.nbytes


def gradients(model: Any, *given: Any) -> np.ndarray:
    """Return the gradients of ``model.loss(*given)``, on the CPU, in one flat array."""
    for parameter in model.parameters():
        parameter.grad = None
    model.loss(*given).backward()
    return np.concatenate([parameter.grad.ravel() for parameter in model.parameters()])


def host_peak(call: Callable[[], Any]) -> int:
    """Return the most bytes of the CPU's memory that a call holds beyond what was there."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
