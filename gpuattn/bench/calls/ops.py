"""How single calls are made: our op, and the same as an expression of NumPy's functions.

The expressions are what somebody writes without this library, in the dtype of the arrays. They run
on NumPy, where they are the bare work that our call adds to, and as CuPy's launches on a GPU.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import gpuattn
from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench.calls.cases import Called
from gpuattn.bench.samples import DTYPES
from gpuattn.typing import Array

DROPOUT = 0.1
TOP = 8
LAYER_EPS, RMS_EPS = 1e-5, 1e-6  # the defaults of our ops
NUMBERS = 65521  # drawn and repeated: a prime number, so that rows differ


class OpCall(NamedTuple):
    """``op(*inputs, **settings)``, on inputs of ``shapes(shape)``: of a float array, or (shape,
    size) for integers below ``size``. ``plain(xp, *inputs)``: the expression. ``random``: results
    are not compared with those of peers. ``boxed``: the inputs are Tensors in the forward too."""

    op: Callable
    shapes: Callable
    plain: Callable
    settings: dict[str, Any]
    random: bool = False
    boxed: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the op chooses between implementations, one of them the reference."""
        return hasattr(self.op, "prepare")


# ---- expressions --------------------------------------------------------------------------------


def _layer_norm(xp, x, weight, bias):
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered * centered).mean(-1, keepdims=True)
    return centered / xp.sqrt(variance + LAYER_EPS) * weight + bias


def _rms_norm(xp, x, weight):
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + RMS_EPS) * weight


def _softmax(xp, x):
    exponentials = xp.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _dropout(xp, x):
    keep = xp.random.random_sample(x.shape) >= DROPOUT
    return x * keep * x.dtype.type(1 / (1 - DROPOUT))


def _dropout_add_norm(xp, x, residual, weight, bias):
    h = residual + _dropout(xp, x)
    return _layer_norm(xp, h, weight, bias), h


def _linear_dropout_add_norm(xp, x, projection, residual, weight, bias):
    return _dropout_add_norm(xp, x @ projection.T, residual, weight, bias)


def _linear(xp, x, weight, bias):
    return x @ weight.T + bias


def _gelu(xp, x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + xp.tanh(inner))


def _relu(xp, x):
    return xp.maximum(x, 0)


def _swiglu(xp, x):
    gate, up = xp.split(x, 2, axis=-1)
    return gate / (1 + xp.exp(-gate)) * up


def _embedding(xp, tokens, weight):
    return weight[tokens]


def _rotary(xp, q, k):
    size = q.shape[-1]
    rates = 10_000.0 ** (-xp.arange(0, size, 2) / size)
    angles = (xp.arange(q.shape[1])[:, None] * rates)[:, None]
    cosine, sine = xp.cos(angles).astype(q.dtype), xp.sin(angles).astype(q.dtype)

    def rotated(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return xp.stack([a * cosine - b * sine, a * sine + b * cosine], -1).reshape(x.shape)

    return rotated(q), rotated(k)


def _attend(xp, q, k, v, seen):
    """Return the attention of (B, T, H, D) queries to the keys that ``seen`` lets through."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    logits = (q @ k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
    weights = _softmax(xp, xp.where(seen, logits, q.dtype.type(-np.inf)))
    return (weights @ v).swapaxes(1, 2)


def _flash_attention(xp, q, k, v):
    return _attend(xp, q, k, v, xp.tri(q.shape[1], dtype=bool))


def _decode_attention(xp, q, k_cache, v_cache, lengths):
    seen = xp.arange(k_cache.shape[1]) < lengths[:, None, None, None]
    return _attend(xp, q, k_cache, v_cache, seen)


def _cross_entropy(xp, logits, labels):
    logits = (logits - logits.max(-1, keepdims=True)).astype(np.float32)
    chosen = logits[xp.arange(len(labels)), labels]
    return (xp.log(xp.exp(logits).sum(-1)) - chosen).mean()


def _linear_cross_entropy(xp, x, weight, labels):
    return _cross_entropy(xp, x @ weight.T, labels)


def _topk_logprobs(xp, logits):
    order = xp.argsort(-logits, -1)[:, :TOP]
    logits = (logits - logits.max(-1, keepdims=True)).astype(np.float32)
    total = xp.log(xp.exp(logits).sum(-1, keepdims=True))
    return xp.take_along_axis(logits, order, -1) - total, order


# ---- the ops ------------------------------------------------------------------------------------


def _rows(vectors=0, matrices=1):
    return lambda shape: [shape] * matrices + [shape[-1:]] * vectors


def _matrices(*, residual=False, vectors=1):
    def shapes(shape):
        rows, inputs, outputs = shape
        return [(rows, inputs), (outputs, inputs), *[(rows, outputs)] * residual,
                *[(outputs,)] * vectors]  # fmt: skip

    return shapes


def _cached(shape):
    batch, keys, heads, size = shape
    return [(batch, 1, heads, size), shape, shape, ((batch,), keys)]


def _labelled(shape):
    return [shape, (shape[:1], shape[1])]


def _projected(shape):
    rows, inputs, vocabulary = shape
    return [(rows, inputs), (vocabulary, inputs), ((rows,), vocabulary)]


_RANDOM = {"p": DROPOUT}  # each call draws anew, as the peers do
CALLS = {
    "layer_norm": OpCall(gpuattn.layer_norm, _rows(2), _layer_norm, {}),
    "rms_norm": OpCall(gpuattn.rms_norm, _rows(1), _rms_norm, {}),
    "softmax": OpCall(gpuattn.softmax, _rows(), _softmax, {}),
    "dropout": OpCall(gpuattn.dropout, _rows(), _dropout, _RANDOM, random=True),
    "dropout_add_norm": OpCall(
        gpuattn.dropout_add_norm, _rows(2, matrices=2), _dropout_add_norm, _RANDOM, random=True
    ),
    "gelu": OpCall(gpuattn.gelu, _rows(), _gelu, {}),
    "relu": OpCall(gpuattn.relu, _rows(), _relu, {}),
    "swiglu": OpCall(gpuattn.swiglu, _rows(), _swiglu, {}),
    "add": OpCall(operator.add, _rows(matrices=2), lambda xp, x, y: x + y, {}, boxed=True),
    "linear": OpCall(gpuattn.linear, _matrices(), _linear, {}),
    "linear_dropout_add_norm": OpCall(
        gpuattn.linear_dropout_add_norm, _matrices(residual=True, vectors=2),
        _linear_dropout_add_norm, _RANDOM, random=True,
    ),
    "embedding": OpCall(
        gpuattn.embedding, lambda shape: [(shape[:1], shape[1]), shape[1:]], _embedding, {}
    ),
    "rotary": OpCall(gpuattn.rotary, _rows(matrices=2), _rotary, {}),
    "flash_attention": OpCall(
        gpuattn.flash_attention, _rows(matrices=3), _flash_attention, {"causal": True}
    ),
    "decode_attention": OpCall(gpuattn.decode_attention, _cached, _decode_attention, {}),
    "cross_entropy": OpCall(gpuattn.cross_entropy, _labelled, _cross_entropy, {}),
    "linear_cross_entropy": OpCall(
        gpuattn.linear_cross_entropy, _projected, _linear_cross_entropy, {}
    ),
    "topk_logprobs": OpCall(gpuattn.topk_logprobs, _rows(), _topk_logprobs, {"k": TOP}),
}  # fmt: skip


def draw(case: Called, xp: ModuleType) -> list[Array]:
    """Return the inputs of a call. They are drawn on the host: no kernel of CuPy's is compiled."""
    random = np.random.default_rng(0)

    def array(shape):
        if isinstance(shape[0], tuple):
            return xp.asarray(_integers(random, case.op, *shape))
        return xp.asarray(_numbers(random, shape, DTYPES[case.dtype]))

    return [array(shape) for shape in CALLS[case.op].shapes(case.shape)]


def _numbers(random, shape, dtype):
    return np.resize(random.standard_normal(NUMBERS, dtype=np.float32).astype(dtype), shape)


def _integers(random, op, shape, size):
    if op == "decode_attention":  # full caches
        return np.full(shape, size, np.int32)
    return random.integers(0, size, shape)


def is_float(x: Array) -> bool:
    """Return whether an input has a gradient: integers have none."""
    return x.dtype.kind not in "iu"


class Contender:
    """What is timed: ``run()``, which is ``forward()``, or forward and backward.

    ``leaves``: Tensors or PyTorch's that get a gradient, none: forward alone. ``gradient``: of the
    first result; None if that is one number.
    """

    def __init__(self, forward: Callable, leaves: Sequence = (), gradient: Any = None) -> None:
        self.forward, self.leaves, self.gradient = forward, leaves, gradient
        self.run = self._both if leaves else forward

    def _both(self):
        for leaf in self.leaves:
            leaf.grad = None
        out = self.forward()
        first = out[0] if isinstance(out, tuple) else out
        first.backward(self.gradient)
        return out

    def results(self) -> list[Any]:
        """Return the results of ``run()``, and the gradient of each leaf or None, as arrays."""
        out = self.run()
        outs = out if isinstance(out, tuple) else (out,)
        return [self.array(x) for x in (*outs, *(leaf.grad for leaf in self.leaves))]

    def array(self, x: Any) -> Array | None:
        """Return one of the results as an array."""
        return raw(x)


def ours(case: Called, inputs: Sequence[Array], gradient: bool, **more: Any) -> Contender:
    """Return the call of our op. ``gradient``: with its backward. ``more``: keyword arguments."""
    spec, given = CALLS[case.op], list(inputs)
    if gradient or spec.boxed:
        given = [Tensor(x, requires_grad=gradient) if is_float(x) else x for x in inputs]
    forward = functools.partial(spec.op, *given, **spec.settings, **more)
    if not gradient:
        return Contender(forward)
    out = forward()
    return Contender(
        forward, [x for x in given if isinstance(x, Tensor)],
        first_gradient(out[0] if isinstance(out, tuple) else out),
    )  # fmt: skip


def first_gradient(out: Any) -> Array | None:
    """Return a gradient for a Tensor, or None if that is one number."""
    if out.shape == ():
        return None
    xp = get_xp(out.data)
    return xp.asarray(_numbers(np.random.default_rng(1), out.shape, out.dtype))


def plain(case: Called, inputs: Sequence[Array], xp: ModuleType) -> Contender:
    """Return the call of the expression, with ``numpy`` or ``cupy``."""
    return Contender(functools.partial(CALLS[case.op].plain, xp, *inputs))
