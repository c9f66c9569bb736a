"""The fused ops as ``comparison.py`` measures them: how each is called, and its reference.

Only public functions are called, each in one ``Task``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import gpuattn
from gpuattn.arrays import get_xp
from gpuattn.autodiff import tape
from gpuattn.bench.checks import TOLERANCE, compare, normal
from gpuattn.bench.fused_cases import zipf_tokens
from gpuattn.bench.samples import DTYPES
from gpuattn.data.batching import token_order
from gpuattn.errors import UnsupportedError
from gpuattn.impls import OPS, Impl, explain


@dataclass(frozen=True)
class Task:
    """How an op is called.

    ``draw(case, floats, seed, xp)``: its inputs. ``call(case, impl, *inputs)``: the op.
    ``grads``: the places of the inputs that get a gradient. ``shown(inputs, outs)``: what of the
    results is compared, by default all of them. ``edits``: inputs change in place.
    """

    draw: Callable
    call: Callable
    grads: tuple[int, ...] = ()
    shown: Callable | None = None
    edits: bool = False


# ---- rows ---------------------------------------------------------------------------------------


def _draw_rows(vectors):
    def draw(case, floats, seed, xp):
        return floats(*case.shape), *(floats(case.shape[-1]) for _ in range(vectors))

    return draw


def _softmax(case, impl, x):
    return gpuattn.softmax(x, impl=impl)


def _layer_norm(case, impl, x, weight, bias):
    return gpuattn.layer_norm(x, weight, bias, impl=impl)


def _rms_norm(case, impl, x, weight):
    return gpuattn.rms_norm(x, weight, impl=impl)


def _draw_add_norm(case, floats, seed, xp):
    vectors = (floats(case.shape[-1]) for _ in range(1 if case.rms else 2))
    return floats(*case.shape), floats(*case.shape), *vectors


def _dropout_add_norm(case, impl, x, residual, weight, bias=None):
    return gpuattn.dropout_add_norm(
        x, residual, weight, bias, p=case.dropout, seed=1 if case.dropout else None,
        norm="rms" if case.rms else "layer", impl=impl,
    )  # fmt: skip


def _gelu(case, impl, x, bias):
    return gpuattn.gelu(x, bias, impl=impl)


# ---- vocabularies -------------------------------------------------------------------------------


def _draw_labelled(case, floats, seed, xp):
    rows, vocabulary = case.shape
    labels = np.random.default_rng(seed).integers(0, vocabulary, rows)
    return floats(rows, vocabulary), xp.asarray(labels)


def _cross_entropy(case, impl, logits, labels):
    """The loss, and in the logits' memory at once their gradient: as a training step has it."""
    logits = np.reshape(logits, logits.shape)  # of a leaf nothing may be given away
    return gpuattn.cross_entropy(
        logits, labels, label_smoothing=case.smoothing, donate=True, dloss=1, impl=impl
    )


def _draw_tokens(case, floats, seed, xp):
    tokens, vocabulary, width = case.shape
    ids = zipf_tokens(tokens, vocabulary, seed)
    return xp.asarray(ids), floats(vocabulary, width), *map(xp.asarray, token_order(ids))


def _embedding(case, impl, tokens, weight, *order):
    return gpuattn.embedding(tokens, weight, order=order, impl=impl)


def _draw_beams(case, floats, seed, xp):
    sentences, beams, vocabulary = case.shape
    return floats(sentences * beams, vocabulary), floats(sentences, beams).astype(np.float32)


def _beam_step(case, impl, logits, scores):
    return gpuattn.beam_step(logits, scores, impl=impl)


def _shown_beams(inputs, outs):
    """The scores, and what the beams and tokens beside them really score: equal ones may swap."""
    (logits, scores), (best, parents, tokens) = inputs, outs
    xp = get_xp(logits)
    rows = logits.reshape(*scores.shape, -1).astype(np.float32)
    peak = rows.max(-1)
    totals = scores - peak - xp.log(xp.exp(rows - peak[..., None]).sum(-1))
    sentences = xp.arange(len(scores))[:, None]
    return [best, rows[sentences, parents, tokens] + totals[sentences, parents]]


def _draw_logits(case, floats, seed, xp):
    return (floats(*case.shape),)


def _topk_logprobs(case, impl, logits):
    return gpuattn.topk_logprobs(logits, 8, impl=impl)


# ---- the optimizer ------------------------------------------------------------------------------

OPTIMIZER = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE, MAX_NORM, STEPS = 1e-3, 1.0, 10


def _draw_parameters(case, floats, seed, xp):
    (n,), wide = case.shape, normal(xp, seed + 1, "float32")
    params, momentum, squares = wide(n), 0.01 * wide(n), (0.01 * wide(n)) ** 2
    model = None if case.dtype == "float32" else params.astype(DTYPES[case.dtype])
    state = gpuattn.OptimizerState(params, learning_rate=LEARNING_RATE, step=STEPS)
    return params, floats(n), momentum, squares, model, state


def _adamw(case, impl, params, grads, momentum, squares, model, state):
    gpuattn.gradient_statistics(grads, state, max_norm=MAX_NORM, impl=impl)
    gpuattn.adamw(params, grads, momentum, squares, state, model=model, impl=impl, **OPTIMIZER)
    return params, momentum, squares


TASKS = {
    "softmax": Task(_draw_rows(0), _softmax, (0,)),
    "layer_norm": Task(_draw_rows(2), _layer_norm, (0, 1, 2)),
    "rms_norm": Task(_draw_rows(1), _rms_norm, (0, 1)),
    "dropout_add_norm": Task(_draw_add_norm, _dropout_add_norm, (0, 1, 2, 3)),
    "gelu": Task(_draw_rows(1), _gelu, (0, 1)),
    "cross_entropy": Task(_draw_labelled, _cross_entropy, (0,), edits=True),
    "embedding": Task(_draw_tokens, _embedding, (1,)),
    "beam_step": Task(_draw_beams, _beam_step, shown=_shown_beams),
    "topk_logprobs": Task(_draw_logits, _topk_logprobs, shown=lambda inputs, outs: outs[:1]),
    "adamw": Task(_draw_parameters, _adamw, edits=True),
}


REFERENCE = Impl("reference", None)


class Ours:
    """One of our implementations on a problem: ``call(inputs)`` computes one direction of it.

    ``impl``: a name, or None for what the op itself would choose.
    """

    def __init__(self, case, direction, xp, impl=None):
        self.case, self.direction, self.xp, self.wanted = case, direction, xp, impl
        self.task = TASKS[case.op]
        self.edits = self.task.edits

    def draw(self, seed):
        """Return random inputs, and the gradients of the outputs; the same for the same seed."""
        floats = normal(self.xp, seed, self.case.dtype)
        inputs = self.task.draw(self.case, floats, seed, self.xp)
        if self.direction == "forward" or not self.task.grads:
            return inputs, None
        if self.case.op == "cross_entropy":
            return inputs, [self.xp.ones((), np.float32)]
        shape = self.case.shape
        shape = (shape[0], shape[2]) if self.case.op == "embedding" else shape
        count = 2 if self.case.op == "dropout_add_norm" else 1
        return inputs, [floats(*shape) for _ in range(count)]

    def restart(self, sets):
        """Give the arrays of ``sets`` the values that they were drawn with."""
        for seed, (inputs, _) in enumerate(sets):
            for x, first in zip(inputs, self.draw(seed)[0], strict=True):
                if x is not None:
                    _array(x)[...] = _array(first)

    def choose(self, inputs):
        """Return the implementation that runs. Raises UnsupportedError if none accepts."""
        answer = explain(self.task.call, self.case, self.wanted, *inputs)
        if answer.chosen is None:
            raise UnsupportedError(str(answer))
        return next(impl for impl in OPS[answer.op] if impl.name == answer.chosen)

    def call(self, impl, inputs, douts):
        """Return a function without arguments that computes, as a list of arrays."""

        def forward(*inputs):
            return listed(self.task.call(self.case, impl.name, *inputs))

        if douts is None:
            return lambda: forward(*inputs)
        leaves, boxed = [], list(inputs)
        for place in self.task.grads[: len(inputs)]:
            boxed[place] = gpuattn.Tensor(inputs[place], requires_grad=True)
            leaves.append(boxed[place])

        def backward(outs):
            return tape.gradients(outs, douts, leaves, retain_graph=True)

        if self.direction == "backward":
            outs = forward(*boxed)
            return lambda: backward(outs)

        def both():
            outs = forward(*boxed)
            return [*(out.data for out in outs), *backward(outs)]

        return both

    def check(self, results, inputs, douts):
        """Raise AssertionError unless ``results`` of ``call`` are the reference's."""
        fresh = self.draw(0)
        wants = self.call(REFERENCE, *fresh)()
        if self.task.shown and douts is None:
            results = self.task.shown(inputs, results)
            wants = self.task.shown(fresh[0], wants)
        for i, (got, want) in enumerate(zip(results, wants, strict=True)):
            what = f"{self.case.op} {self.case}, result {i}"
            compare(got.astype("f4"), want.astype("f4"), TOLERANCE[self.case.dtype], what)


def listed(outs):
    """Return what an op returns, one thing or several, as a list."""
    return list(outs) if isinstance(outs, tuple | list) else [outs]


def _array(x):
    return getattr(x, "array", x)
