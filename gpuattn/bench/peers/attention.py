"""The peers of attention: PyTorch's backends and FlashAttention-4; see ``timing.py``."""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpuattn.bench.cases import Attention
from gpuattn.bench.peers.timing import array, tensor, torch_here
from gpuattn.errors import UnsupportedError
from gpuattn.typing import Array

BUCKET = 8  # tokens: sequences with lengths in the same multiple are padded together


class Peer(NamedTuple):
    """A peer on one problem, which it may split into parts (such as buckets of lengths).

    ``into(x)``: the parts of a tensor in our layout. ``forward(part, q, k, v, bias)``: the output
    of part number ``part``. ``back(parts)``: such outputs in our layout.
    """

    into: Callable
    forward: Callable
    back: Callable


# ---- the peers ----------------------------------------------------------------------------------


def _heads_first(x):
    return [x.transpose(1, 2).contiguous()]


def _tokens_first(parts):
    return parts[0].transpose(1, 2)


def _sdpa(backend):
    def peer(case):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def forward(_, q, k, v, bias):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, dropout_p=case.dropout, is_causal=case.causal,
                    enable_gqa=case.kv_heads is not None,
                )  # fmt: skip

        return Peer(_heads_first, forward, _tokens_first)

    return peer


def _starts(case):
    """Return the offsets of packed sequences on the GPU, and the longest length."""
    torch, lengths = torch_here(), case.lengths()
    starts = np.cumsum([0, *lengths])
    return torch.tensor(starts, dtype=torch.int32, device="cuda"), max(lengths)


def _varlen(case):
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise UnsupportedError("this PyTorch has no torch.nn.attention.varlen") from error
    starts, longest = _starts(case)
    sides = {"window_size": (-1, -1)}
    if case.causal:
        sides = {"window_size": (-1 if case.window is None else case.window, 0)}
    lead = () if case.captions else case.shape[:2]

    def forward(_, q, k, v, bias):
        return varlen_attn(q, k, v, starts, starts, longest, longest, **sides)

    def back(parts):
        return parts[0].unflatten(0, lead) if lead else parts[0]

    return Peer(lambda x: [x.flatten(0, 1) if lead else x], forward, back)


def _flash_attention_4(case):
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # keep what it compiles
    try:
        from flash_attn import cute
    except ImportError as error:
        raise UnsupportedError(f"flash_attn.cute cannot be imported: {error}") from error
    options = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = case.window, 0
    if case.deterministic:
        options["deterministic"] = True
    if case.keys:
        options["num_splits"] = 0  # chosen by the library
    call = cute.flash_attn_func
    if case.captions:
        starts, longest = _starts(case)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        call = cute.flash_attn_varlen_func

    def forward(_, q, k, v, bias):
        out = call(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return Peer(lambda x: [x], forward, lambda parts: parts[0])


def _padded(bucket=None):
    """Return a peer that computes packed sequences padded, with a mask over the keys."""

    def peer(case):
        from torch.nn.functional import scaled_dot_product_attention

        torch, lengths = torch_here(), np.array(case.lengths())
        starts = np.cumsum(lengths) - lengths
        widths = -(-lengths // bucket) if bucket else np.zeros_like(lengths)
        places, masks = [], []
        for width in np.unique(widths):
            members = widths == width
            column = np.arange(lengths[members].max())
            real = column < lengths[members, None]
            place = np.where(real, starts[members, None] + column, 0)
            places.append(torch.tensor(place, device="cuda"))
            masks.append(torch.tensor(real, device="cuda"))

        def into(x):
            zero = torch.zeros((), dtype=x.dtype, device=x.device)
            parts = zip(places, masks, strict=True)
            padded = [torch.where(real[..., None, None], x[place], zero) for place, real in parts]
            return [part.transpose(1, 2).contiguous() for part in padded]

        def forward(part, q, k, v, bias):
            return scaled_dot_product_attention(q, k, v, attn_mask=masks[part][:, None, None])

        def back(parts):
            out = parts[0].new_empty((case.shape[1], *parts[0].shape[1::2]))
            for part, place, real in zip(parts, places, masks, strict=True):
                out[place[real]] = part.transpose(1, 2)[real]
            return out

        return Peer(into, forward, back)

    return peer


_OF_SDPA = {"dropout", "bias", "kv_heads", "keys", "deterministic"}
PEERS = {  # name -> (function of a case to a Peer, the features that it supports)
    "torch-cudnn": (_sdpa("CUDNN_ATTENTION"), _OF_SDPA),
    "torch-fa2": (_sdpa("FLASH_ATTENTION"), _OF_SDPA),
    "torch-efficient": (_sdpa("EFFICIENT_ATTENTION"), _OF_SDPA),
    "torch-math": (_sdpa("MATH"), _OF_SDPA),
    "torch-varlen": (_varlen, {"captions", "window", "deterministic"}),
    "torch-padded": (_padded(), {"captions"}),
    "torch-buckets": (_padded(BUCKET), {"captions"}),
    "flash-attn-4": (
        _flash_attention_4, {"captions", "window", "kv_heads", "keys", "deterministic"},
    ),
}  # fmt: skip


def _peer(name, case):
    """Return the Peer ``name`` on a case. Raises UnsupportedError with the reason why not."""
    build, supported = PEERS[name]
    missing = [feature for feature in case.features() if feature not in supported]
    if missing:
        raise UnsupportedError(f"{name} does not support {', '.join(missing)}")
    torch_here()
    return build(case)


# ---- a peer on given arrays ---------------------------------------------------------------------


class Call:
    """A peer, by ``name``, on our arrays; its methods are described in ``timing.py``."""

    is_captured = True

    def __init__(
        self, name: str, case: Attention, direction: str, inputs: tuple, dout: Array
    ) -> None:
        self.case, self.trains, self.peer = case, direction != "forward", _peer(name, case)
        self.torch = torch_here()
        self.operands = [self._leaves(tensor(x, case.dtype)) for x in inputs[:3]]
        self.bias = None
        if case.bias:
            self.bias = tensor(inputs[3], case.dtype).requires_grad_(self.trains)
        self.dout = self.peer.into(tensor(dout, case.dtype))
        if direction == "forward":
            self.run = self._forward
        elif direction == "backward":
            outs = self._forward()
            self.run = lambda: self._backward(outs, keep=True)
        else:
            self.run = lambda: self._backward(self._forward(), keep=False)

    def _leaves(self, x):
        return [part.detach().requires_grad_(self.trains) for part in self.peer.into(x)]

    def _forward(self):
        parts = enumerate(zip(*self.operands, strict=True))
        return [self.peer.forward(i, *part, self.bias) for i, part in parts]

    def _backward(self, outs, keep):
        leaves = [leaf for leaves in self.operands for leaf in leaves]
        leaves += [] if self.bias is None else [self.bias]
        with _deterministic(self.torch, self.case.deterministic):
            return self.torch.autograd.grad(outs, leaves, self.dout, retain_graph=keep)

    def restart(self) -> None:
        """Do nothing: inputs are not changed."""

    def results(self, parts: Sequence) -> tuple:
        """Return CuPy arrays in our layout: (out,), or (dq, dk, dv) and the bias's gradient."""
        if not self.trains:
            return (array(self.peer.back(parts), self.case.dtype),)
        n = len(self.dout)
        grads = [self.peer.back(parts[i * n : (i + 1) * n]) for i in range(3)]
        return tuple(array(x, self.case.dtype) for x in (*grads, *parts[3 * n :]))


@contextlib.contextmanager
def _deterministic(torch, asked):
    if not asked:
        yield
        return
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
