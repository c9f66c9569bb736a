"""Attention as ``comparison.py`` measures it: inputs, calls, and the float64 reference."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

import gpuattn
from gpuattn.bench.cases import Attention
from gpuattn.bench.correctness import TOLERANCE, compare, normal
from gpuattn.impls import OPS, Call, Impl, explain, prepare


class Ours:
    """A gpuattn implementation on one problem, in one direction.

    ``xp``: numpy or cupy. ``impl``: a name, or None for the one that the op chooses. ``choose``
    raises UnsupportedError if no implementation accepts the inputs.
    """

    edits = False  # whether calls change their inputs

    def __init__(
        self, case: Attention, direction: str, xp: ModuleType, impl: str | None = None
    ) -> None:
        self.case, self.direction, self.xp = case, direction, xp
        trains = direction != "forward"
        self.needs = (trains,) * 3 + (trains and case.bias,) + (False,) * 5
        self.wanted = impl

    def draw(self, seed: int) -> tuple[tuple, Any]:
        """Return random inputs, nine arrays or Nones, and the gradient of the output."""
        case, floats = self.case, normal(self.xp, seed, self.case.dtype)
        batch, tokens, heads, head_dim = case.shape
        lead = (tokens,) if case.captions else (batch, tokens)
        q, dout = (floats(*lead, heads, head_dim) for _ in range(2))
        k, v = (floats(*lead, case.key_heads, head_dim) for _ in range(2))
        bias = floats(1, heads, tokens, tokens) if case.bias else None
        starts = None
        if case.captions:
            starts = self.xp.asarray(np.cumsum([0, *case.lengths()]), np.int32)
        return (q, k, v, bias, None, starts, starts, None, None), dout

    def prepare(self, inputs: tuple) -> Call:
        """Return the checked ``impls.Call`` on inputs of ``draw``."""
        case, (q, k, v, bias, _, starts, *_) = self.case, inputs
        longest = None if starts is None else max(case.lengths())
        return prepare(
            gpuattn.flash_attention, q, k, v, causal=case.causal, bias=bias, cu_seqlens_q=starts,
            window=None if case.window is None else (case.window, None),
            max_seqlen_q=longest, max_seqlen_k=longest,
            dropout_p=case.dropout, seed=1 if case.dropout else None,
            deterministic=case.deterministic, impl=self.wanted,
        )  # fmt: skip

    def choose(self, inputs: tuple) -> Impl:
        """Return the implementation that runs the forward."""
        return self.prepare(inputs).choose()

    def call(self, impl: Impl, inputs: tuple, dout: Any) -> Callable[[], list]:
        """Return a function of no arguments that returns the results as a list of arrays."""
        prepared = self.prepare(inputs)
        params, rule = prepared.params, prepared.choose_backward(impl, self.needs)

        def forward():
            return impl.forward(*inputs, needs=self.needs, **params)

        def backward(saved):
            grads = rule.backward(saved, dout, None, needs=self.needs, into=(None,) * 9, **params)
            return [grad for grad in grads if grad is not None]

        if self.direction == "forward":
            return lambda: list(forward()[0])
        if self.direction == "backward":
            _, saved = forward()
            return lambda: backward(saved)
        return lambda: backward(forward()[1])

    def check(self, results: list, inputs: tuple, dout: Any) -> None:
        """Raise AssertionError unless ``results`` of ``call`` equal the reference on some heads.

        The random bits of dropout are numbered by (sequence, head), so with dropout the first
        sequence and head are compared.
        """
        case, heads = self.case, self.case.shape[2]
        group, batch = heads // case.key_heads, slice(0, 1) if case.dropout else slice(None)
        first = 0 if case.dropout else case.key_heads - 1
        own, shared = slice(first * group, (first + 1) * group), slice(first, first + 1)

        def part(x, axis, heads):
            if x is None or x.dtype.kind == "i":
                return x
            x = x[:, heads] if axis == 1 else x[batch][..., heads, :]
            return x.astype(np.float64)

        by_input = [(-2, own), (-2, shared), (-2, shared), (1, own)]
        by_output = [(-2, own), (-2, own)] if self.direction == "forward" else by_input
        exact = tuple(part(x, *by_input[min(i, 3)]) for i, x in enumerate(inputs))
        reference, params = OPS["flash_attention"][-1], self.prepare(exact).params
        outs, saved = reference.forward(*exact, needs=self.needs, **params)
        wants = outs
        if self.direction != "forward":
            wants = reference.backward(
                saved, part(dout, -2, own), None, needs=self.needs, into=(None,) * 9, **params
            )
        for i, (result, where) in enumerate(zip(results, by_output, strict=False)):
            compare(part(result, *where), wants[i], TOLERANCE[case.dtype], f"{case}, result {i}")


class OursDecoding:
    """The same for ``decode_attention``: the last tokens attend to a full cache."""

    edits = False

    def __init__(
        self, case: Attention, direction: str, xp: ModuleType, impl: str | None = None
    ) -> None:
        self.case, self.xp, self.wanted = case, xp, impl

    def draw(self, seed: int) -> tuple[tuple, Any]:
        case, floats = self.case, normal(self.xp, seed, self.case.dtype)
        batch, tokens, heads, head_dim = case.shape
        q = floats(batch, tokens, heads, head_dim)
        k, v = (floats(batch, case.keys, case.key_heads, head_dim) for _ in range(2))
        return (q, k, v, self.xp.full(batch, case.keys, np.int32)), q

    def choose(self, inputs: tuple) -> Impl:
        name = explain(gpuattn.decode_attention, *inputs, impl=self.wanted).chosen
        return next(impl for impl in OPS["decode_attention"] if impl.name == name)

    def call(self, impl: Impl, inputs: tuple, dout: Any) -> Callable[[], list]:
        return lambda: [gpuattn.decode_attention(*inputs, impl=impl.name)]

    def check(self, results: list, inputs: tuple, dout: Any) -> None:
        q, k, v, lengths = inputs
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.astype(np.float64) for x in (q[:, :, -group:], k[:, :, -1:], v[:, :, -1:]))
        want = gpuattn.decode_attention(q, k, v, lengths, impl="reference")
        got = results[0][:, :, -group:].astype(np.float64)
        compare(got, want, TOLERANCE[self.case.dtype], f"{self.case}, result 0")
