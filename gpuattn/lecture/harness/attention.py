"""Attention by several implementations: its time, its rate over the length, its memory."""

from collections.abc import Mapping, Sequence
from functools import partial

import gpuattn
from gpuattn.lecture.harness.forms import both_ways, doublings
from gpuattn.lecture.harness.say import Say, middle

Line = list[tuple[int, float]]


def times(
    say: Say, impls: Mapping[str, str | None], shape: tuple[int, ...], causal: bool = False
) -> dict[str, list[float]]:
    """Return the microseconds of attention by name, for {name: impl}, of those that run here.

    ``shape``: (B, T, H, D) of q, k and v.
    """
    data, calls = [say.normal(*shape, dtype=say.dtype) for _ in "qkv"], {}
    for name, impl in impls.items():
        call = partial(gpuattn.flash_attention, *data, causal=causal, impl=impl)
        if gpuattn.explain(call.func, *data, **call.keywords).chosen:
            calls[name] = call
    return say.kernel_times(calls)


def rates(
    say: Say, names: Sequence[str], shape: tuple[int, int, int], causal: bool
) -> tuple[dict[str, list[float]], dict[str, Line]]:
    """Return {kernel: microseconds} at the last length, and the TFLOP/s of each over the length.

    ``names``: of kernels. ``shape``: (tokens, heads, head size) of the longest text, which comes
    after an eighth of it, a quarter and a half.
    """
    last, heads, D = shape
    lines: dict[str, Line] = {}
    for tokens in doublings(last // 8, last):
        us = times(say, {name: name for name in names}, (1, tokens, heads, D), causal)
        flops = 4 * D * heads * tokens**2 / (1 + causal)
        for name, samples in us.items():
            line = lines.setdefault(f"{name}{', causal' * causal}", [])
            line.append((tokens, flops / middle(samples) / 1e6))
    return us, lines


def memory(say: Say, lengths: Sequence[int], heads: int, impl: str | None) -> Line:
    """Return the MiB that attention with heads of size 64 holds in both directions, by length.

    inf where they do not fit.
    """
    line, attention = [], partial(gpuattn.flash_attention, impl=impl)
    for tokens in lengths:
        data = [say.normal(1, tokens, heads, 64, dtype=say.dtype) for _ in "qkv"]
        line.append((tokens, say.peak(partial(both_ways, attention, *data)) / 2**20))
        say.clear()
    return line
