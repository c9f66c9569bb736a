"""The fused ops as ``comparison.py`` measures them: how each is called, and its reference.

Only public functions are called, each by one ``OpSpec``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import gpuattn
from gpuattn.arrays import get_xp
from gpuattn.autodiff.backward_pass import gradients
from gpuattn.bench.correctness import TOLERANCE, compare, normal
from gpuattn.bench.fused.cases import Fused, zipf_tokens
from gpuattn.bench.samples import DTYPES
from gpuattn.data.batching import token_order
from gpuattn.impls import Impl, prepare


def _as_drawn(case, *inputs):
    return inputs, {}


@dataclass(frozen=True)
class OpSpec:
    """How an op is called.

    ``draw(case, floats, seed, xp)``: its inputs. ``arguments(case, *inputs)``: positional and
    keyword arguments of ``op``. ``grads``: the indices of the inputs that get a gradient.
    ``shown(inputs, outs)``: the results to compare, by default all of them. ``edits``:
    inputs change in place. ``before(impl, *inputs)`` runs first, and is timed too.
    ``results(*inputs)``: of an op that returns nothing, the inputs that it edits.
    """

    op: Callable
    draw: Callable
    arguments: Callable = _as_drawn
    grads: tuple[int, ...] = ()
    shown: Callable | None = None
    edits: bool = False
    before: Callable | None = None
    results: Callable | None = None

    def call(self, case: Fused, impl: str, *inputs: Any) -> Any:
        """Return the op's result by an implementation, by name."""
        if self.before:
            self.before(impl, *inputs)
        args, kwargs = self.arguments(case, *inputs)
        out = self.op(*args, impl=impl, **kwargs)
        return self.results(*inputs) if self.results else out

    def choose(self, case: Fused, impl: str | None, *inputs: Any) -> Impl:
        """Return the implementation that runs for ``impl``, a name or None."""
        args, kwargs = self.arguments(case, *inputs)
        return prepare(self.op, *args, impl=impl, **kwargs).choose()


# ---- rows ---------------------------------------------------------------------------------------


def _draw_rows(vectors):
    def draw(case, floats, seed, xp):
        return floats(*case.shape), *(floats(case.shape[-1]) for _ in range(vectors))

    return draw


def _draw_add_norm(case, floats, seed, xp):
    vectors = (floats(case.shape[-1]) for _ in range(1 if case.rms else 2))
    return floats(*case.shape), floats(*case.shape), *vectors


def _dropout_add_norm(case, *inputs):
    seed, norm = 1 if case.dropout else None, "rms" if case.rms else "layer"
    return inputs, {"p": case.dropout, "seed": seed, "norm": norm}


# ---- vocabularies -------------------------------------------------------------------------------


def _draw_labelled(case, floats, seed, xp):
    rows, vocabulary = case.shape
    labels = np.random.default_rng(seed).integers(0, vocabulary, rows)
    return floats(rows, vocabulary), xp.asarray(labels)


def _cross_entropy(case, logits, labels):
    """As in a training step: loss and gradient in one call, the gradient in place of the logits."""
    logits = np.reshape(logits, logits.shape)  # a leaf's memory can't be donated
    return (logits, labels), {"label_smoothing": case.smoothing, "donate": True, "dloss": 1}


def _draw_tokens(case, floats, seed, xp):
    tokens, vocabulary, width = case.shape
    ids = zipf_tokens(tokens, vocabulary, seed)
    return xp.asarray(ids), floats(vocabulary, width), *map(xp.asarray, token_order(ids))


def _embedding(case, tokens, weight, *order):
    return (tokens, weight), {"order": order}


def _draw_beams(case, floats, seed, xp):
    sentences, beams, vocabulary = case.shape
    return floats(sentences * beams, vocabulary), floats(sentences, beams).astype(np.float32)


def _shown_beams(inputs, outs):
    """Return the scores, and those of the chosen beams and tokens, as ties may be in any order."""
    (logits, scores), (best, parents, tokens) = inputs, outs
    xp = get_xp(logits)
    rows = logits.reshape(*scores.shape, -1).astype(np.float32)
    peak = rows.max(-1)
    totals = scores - peak - xp.log(xp.exp(rows - peak[..., None]).sum(-1))
    sentences = xp.arange(len(scores))[:, None]
    return [best, rows[sentences, parents, tokens] + totals[sentences, parents]]


def _draw_logits(case, floats, seed, xp):
    return (floats(*case.shape),)


def _topk_logprobs(case, logits):
    return (logits, 8), {}


# ---- the optimizer ------------------------------------------------------------------------------

OPTIMIZER = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE, MAX_NORM, STEPS = 1e-3, 1.0, 10


def _draw_parameters(case, floats, seed, xp):
    (n,), wide = case.shape, normal(xp, seed + 1, "float32")
    params, momentum, squares = wide(n), 0.01 * wide(n), (0.01 * wide(n)) ** 2
    model = None if case.dtype == "float32" else params.astype(DTYPES[case.dtype])
    state = gpuattn.OptimizerState(params, learning_rate=LEARNING_RATE, step=STEPS)
    return params, floats(n), momentum, squares, model, state


def _gradient_statistics(impl, params, grads, momentum, squares, model, state):
    gpuattn.gradient_statistics(grads, state, max_norm=MAX_NORM, impl=impl)


def _adamw(case, params, grads, momentum, squares, model, state):
    return (params, grads, momentum, squares, state), {"model": model, **OPTIMIZER}


def _updated(params, grads, momentum, squares, *_):
    return params, momentum, squares


OP_SPECS = {
    "softmax": OpSpec(gpuattn.softmax, _draw_rows(0), grads=(0,)),
    "layer_norm": OpSpec(gpuattn.layer_norm, _draw_rows(2), grads=(0, 1, 2)),
    "rms_norm": OpSpec(gpuattn.rms_norm, _draw_rows(1), grads=(0, 1)),
    "dropout_add_norm": OpSpec(
        gpuattn.dropout_add_norm, _draw_add_norm, _dropout_add_norm, grads=(0, 1, 2, 3)
    ),
    "dropout": OpSpec(
        gpuattn.dropout, _draw_rows(0), lambda case, x: ((x, case.dropout), {"seed": 1}), grads=(0,)
    ),
    "gelu": OpSpec(gpuattn.gelu, _draw_rows(1), grads=(0, 1)),
    "cross_entropy": OpSpec(
        gpuattn.cross_entropy, _draw_labelled, _cross_entropy, grads=(0,), edits=True
    ),
    "embedding": OpSpec(gpuattn.embedding, _draw_tokens, _embedding, grads=(1,)),
    "beam_step": OpSpec(gpuattn.beam_step, _draw_beams, shown=_shown_beams),
    "topk_logprobs": OpSpec(
        gpuattn.topk_logprobs, _draw_logits, _topk_logprobs, shown=lambda inputs, outs: outs[:1]
    ),
    "adamw": OpSpec(
        gpuattn.adamw,
        _draw_parameters,
        _adamw,
        edits=True,
        before=_gradient_statistics,
        results=_updated,
    ),
}


class Ours:
    """A gpuattn implementation on one problem, in one direction.

    ``xp``: numpy or cupy. ``impl``: a name, or None for the one that the op chooses.
    """

    def __init__(
        self, case: Fused, direction: str, xp: ModuleType, impl: str | None = None
    ) -> None:
        self.case, self.direction, self.xp, self.wanted = case, direction, xp, impl
        self.spec = OP_SPECS[case.op]
        self.edits = self.spec.edits

    def draw(self, seed: int) -> tuple[tuple, list | None]:
        """Return random inputs, and the gradients of the outputs; the same for the same seed."""
        floats = normal(self.xp, seed, self.case.dtype)
        inputs = self.spec.draw(self.case, floats, seed, self.xp)
        if self.direction == "forward" or not self.spec.grads:
            return inputs, None
        if self.case.op == "cross_entropy":
            return inputs, [self.xp.ones((), np.float32)]
        shape = self.case.shape
        shape = (shape[0], shape[2]) if self.case.op == "embedding" else shape
        count = 2 if self.case.op == "dropout_add_norm" else 1
        return inputs, [floats(*shape) for _ in range(count)]

    def restart(self, sets: Sequence[tuple]) -> None:
        """Reset the arrays of ``sets``, one of each seed from 0 on, to the values of ``draw``."""
        for seed, (inputs, _) in enumerate(sets):
            for x, first in zip(inputs, self.draw(seed)[0], strict=True):
                if x is not None:
                    _array(x)[...] = _array(first)

    def choose(self, inputs: tuple) -> Impl:
        """Return the implementation that runs. Raises UnsupportedError if none accepts."""
        return self.spec.choose(self.case, self.wanted, *inputs)

    def call(self, impl: Impl, inputs: tuple, douts: list | None) -> Callable[[], list]:
        """Return a function of no arguments that returns the results as a list of arrays."""

        def forward(*inputs):
            return listed(self.spec.call(self.case, impl.name, *inputs))

        if douts is None:
            return lambda: forward(*inputs)
        leaves, boxed = [], list(inputs)
        for place in self.spec.grads[: len(inputs)]:
            boxed[place] = gpuattn.Tensor(inputs[place], requires_grad=True)
            leaves.append(boxed[place])

        def backward(outs):
            return gradients(outs, douts, leaves, retain_graph=True)

        if self.direction == "backward":
            outs = forward(*boxed)
            return lambda: backward(outs)

        def both():
            outs = forward(*boxed)
            return [*(out.data for out in outs), *backward(outs)]

        return both

    def check(self, results: list, inputs: tuple, douts: list | None) -> None:
        """Raise AssertionError unless ``results`` of ``call`` equal the reference."""
        fresh = self.draw(0)
        wants = self.call(self.spec.choose(self.case, "reference", *fresh[0]), *fresh)()
        if self.spec.shown and douts is None:
            results = self.spec.shown(inputs, results)
            wants = self.spec.shown(fresh[0], wants)
        for i, (got, want) in enumerate(zip(results, wants, strict=True)):
            what = f"{self.case.op} {self.case}, result {i}"
            compare(got.astype("f4"), want.astype("f4"), TOLERANCE[self.case.dtype], what)


def listed(outs: Any) -> list:
    """Return the result of an op, one array or several, as a list."""
    return list(outs) if isinstance(outs, tuple | list) else [outs]


def _array(x):
    return getattr(x, "array", x)
