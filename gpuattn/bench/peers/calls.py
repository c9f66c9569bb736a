"""PyTorch beside our single calls, captured layer and plain loop of updates; see ``timing.py``."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn.bench.calls.cases import Called
from gpuattn.bench.calls.ops import DROPOUT, LAYER_EPS, RMS_EPS, TOP, Contender, is_float
from gpuattn.bench.peers.timing import WARM_UPS, array, tensor, torch_here

ATTENTION = "flash_attention", "decode_attention"  # PyTorch's layout is (B, H, T, D)


# ---- ops: functions that return a function of no arguments --------------------------------------


def _layer_norm(F, x, weight, bias):
    return functools.partial(F.layer_norm, x, x.shape[-1:], weight, bias, LAYER_EPS)


def _rms_norm(F, x, weight):
    return functools.partial(F.rms_norm, x, x.shape[-1:], weight, RMS_EPS)


def _dropout_add_norm(F, x, residual, weight, bias):
    def call():
        h = residual + F.dropout(x, DROPOUT)
        return F.layer_norm(h, h.shape[-1:], weight, bias, LAYER_EPS), h

    return call


def _linear_dropout_add_norm(F, x, projection, residual, weight, bias):
    def call():
        h = residual + F.dropout(F.linear(x, projection), DROPOUT)
        return F.layer_norm(h, h.shape[-1:], weight, bias, LAYER_EPS), h

    return call


def _swiglu(F, x):
    def call():
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return call


def _rotary(F, q, k):
    torch, size = torch_here(), q.shape[-1]
    rates = 10_000.0 ** (-np.arange(0, size, 2) / size)
    angles = np.outer(np.arange(q.shape[1]), rates)[:, None]
    cosine, sine = (
        torch.as_tensor(table, dtype=q.dtype, device=q.device)
        for table in (np.cos(angles), np.sin(angles))
    )

    def rotated(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2)

    return lambda: (rotated(q), rotated(k))


def _flash_attention(F, q, k, v):
    return functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)


def _decode_attention(F, q, k_cache, v_cache, lengths):
    return functools.partial(F.scaled_dot_product_attention, q, k_cache, v_cache)


def _linear_cross_entropy(F, x, weight, labels):
    return lambda: F.cross_entropy(F.linear(x, weight), labels)


def _topk_logprobs(F, logits):
    return lambda: F.log_softmax(logits.float(), -1).topk(TOP)


CALLS: dict[str, Callable[..., Callable]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda F, x: functools.partial(F.softmax, x, -1),
    "dropout": lambda F, x: functools.partial(F.dropout, x, DROPOUT),
    "dropout_add_norm": _dropout_add_norm,
    "gelu": lambda F, x: functools.partial(F.gelu, x, approximate="tanh"),
    "relu": lambda F, x: functools.partial(F.relu, x),
    "swiglu": _swiglu,
    "add": lambda F, x, y: functools.partial(operator.add, x, y),
    "linear": lambda F, x, weight, bias: functools.partial(F.linear, x, weight, bias),
    "linear_dropout_add_norm": _linear_dropout_add_norm,
    "embedding": lambda F, tokens, weight: functools.partial(F.embedding, tokens, weight),
    "rotary": _rotary,
    "flash_attention": _flash_attention,
    "decode_attention": _decode_attention,
    "cross_entropy": lambda F, x, labels: functools.partial(F.cross_entropy, x, labels),
    "linear_cross_entropy": _linear_cross_entropy,
    "topk_logprobs": _topk_logprobs,
}


class Eager(Contender):
    """PyTorch's call of a case on our ``inputs``; with ``leaves`` also backward, from the array
    ``gradient``."""

    def __init__(
        self, case: Called, inputs: Sequence[Any], differentiated: bool, gradient: Any
    ) -> None:
        functional = torch_here().nn.functional
        self.turned = case.op in ATTENTION
        tensors = [self._tensor(x) for x in inputs]
        leaves = []
        if differentiated:
            floats = [is_float(x) for x in inputs]
            tensors = [
                x.detach().requires_grad_() if wanted else x
                for x, wanted in zip(tensors, floats, strict=True)
            ]
            leaves = [x for x in tensors if x.requires_grad]
        start = None if gradient is None else self._tensor(gradient)
        super().__init__(CALLS[case.op](functional, *tensors), leaves, start)

    def _tensor(self, x):
        return self._turn(tensor(x, x.dtype.name))

    def _turn(self, x):
        return x.transpose(1, 2) if self.turned and x.ndim == 4 else x

    def array(self, x: Any) -> Any:
        if x is None or not x.is_floating_point():  # indices are not compared
            return None
        return array(self._turn(x.detach()), str(x.dtype).removeprefix("torch."))


# ---- a captured layer ---------------------------------------------------------------------------


class GraphedLayer:
    """PyTorch's layer in a CUDA graph: a call copies ``x`` in, replays it, and clones the result.

    So it takes any array and returns a new one, as a captured function does. ``layer``: a pre-norm
    TransformerEncoderLayer of ours with ReLU, whose weights it has.
    """

    def __init__(self, layer: Any, x: Any) -> None:
        torch = torch_here()
        own, forward, (first, second) = layer.attention, layer.feed_forward, layer.norms
        theirs = {
            "self_attn.in_proj_": own.qkv, "self_attn.out_proj.": own.out,
            "linear1.": forward.inner, "linear2.": forward.out, "norm1.": first, "norm2.": second,
        }  # fmt: skip
        dtype = x.dtype.name
        self._x = tensor(x, dtype)
        module = torch.nn.TransformerEncoderLayer(
            x.shape[-1], own.heads, len(forward.inner.weight.data), 0.0, norm_first=True,
            batch_first=True, device="cuda", dtype=self._x.dtype,
        ).eval()  # fmt: skip
        module.load_state_dict({
            f"{name}{kind}": tensor(getattr(part, kind).data, dtype)
            for name, part in theirs.items() for kind in ("weight", "bias")
        })  # fmt: skip
        self._input, stream = self._x.clone(), torch.cuda.current_stream()
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            for _ in range(WARM_UPS):
                module(self._input)
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._output = module(self._input)

    def __call__(self) -> Any:
        self._input.copy_(self._x)
        self._graph.replay()
        return self._output.clone()

    def result(self) -> Any:
        """Return the result of a call as an array."""
        return array(self(), str(self._x.dtype).removeprefix("torch."))


# ---- a loop of updates --------------------------------------------------------------------------


class NetworkLoop:
    """The plain loop of ``calls.loops.NetworkLoop`` in PyTorch.

    ``weights``: {path: NumPy array}. ``settings``: of AdamW.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray], x: np.ndarray, settings: Mapping[str, Any]
    ) -> None:
        torch = torch_here()
        sizes = weights["hidden.weight"].shape
        self._first = {
            f"{place}.{kind}": torch.from_numpy(np.array(weights[f"{name}.{kind}"]))
            for place, name in ((0, "hidden"), (2, "out"))
            for kind in ("weight", "bias")
        }
        with torch.device("cuda"):
            self.network = torch.nn.Sequential(
                torch.nn.Linear(sizes[1], sizes[0]), torch.nn.GELU("tanh"),
                torch.nn.Linear(sizes[0], 1),
            )  # fmt: skip
        self.x = torch.from_numpy(x).cuda()
        self._settings = {**settings, "fused": True}
        self.restart()

    def restart(self) -> None:
        """Undo all updates."""
        self.network.load_state_dict(self._first)
        parameters = self.network.parameters()
        self.optimizer = torch_here().optim.AdamW(parameters, **self._settings)

    def __call__(self) -> None:
        loss = ((self.network(self.x) - self.x.sin()) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss = loss.detach()

    def loss(self) -> float:
        """Return the loss of the last update."""
        return float(self._loss)
