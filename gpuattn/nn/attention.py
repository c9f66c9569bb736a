"""Multi-head attention over packed or batched tokens, and its key-value cache."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import empty, get_xp, on_gpu, same_memory, wide
from gpuattn.autodiff import tape
from gpuattn.errors import problem
from gpuattn.impls import Fusion, Impl, Impls
from gpuattn.nn.dropout import Dropout, Streams
from gpuattn.nn.linear import Linear
from gpuattn.nn.module import Module, check_sizes, generator, xavier_uniform
from gpuattn.nn.norm import RMSNorm
from gpuattn.ops.attention.append_kv import append_kv
from gpuattn.ops.attention.decode_attention import MAX_QUERIES, decode_attention
from gpuattn.ops.attention.flash_attention import flash_attention
from gpuattn.ops.rotary import rotary
from gpuattn.ops.softmax import softmax
from gpuattn.typing import Array


def split_heads(x: Array, counts: Sequence[int], head_dim: int) -> list[Any]:
    """Return views (..., count, head_dim) of x (..., sum(counts) * head_dim), one per count.

    Their gradients go side by side into one array.
    """
    return tape.apply(SPLIT_HEADS, (x,), counts=tuple(counts), head_dim=head_dim)


def _forward_split(x, *, needs, counts, head_dim):
    heads = x.reshape(*x.shape[:-1], sum(counts), head_dim)
    return tuple(_parts(heads, counts)), (heads.shape, x.shape)


def _parts(heads, counts):
    """Return views of the first, second, ... ``counts`` heads of (..., sum(counts), head_dim)."""
    stops = itertools.accumulate(counts)
    return [heads[..., n - count : n, :] for n, count in zip(stops, counts, strict=True)]


def _layout_of_parts(saved, out, into, *, counts, head_dim):
    shape, original = saved
    whole = empty(out, original) if into[0] is None else into[0]
    return [whole], _parts(whole.reshape(shape), counts)


def _backward_split(saved, *grads, needs, into, counts, head_dim):
    shape, original = saved
    whole, add = into[0] or (None, True)
    if add:
        whole = empty(next(g for g in grads if g is not None), original)
    for part, grad in zip(_parts(whole.reshape(shape), counts), grads, strict=True):
        if grad is None:
            part[...] = 0
        elif not same_memory(part, grad):
            part[...] = grad
    return (whole,)


SPLIT_HEADS = Impls(
    "split_heads",
    Impl("array", _forward_split, _backward_split, fusion=Fusion(layout=_layout_of_parts)),
)


class KeyValueCache:
    """Keys and values of the tokens so far: two (N, max_length, Hk, D) arrays, allocated once.

    On a GPU rows are not copied when beams are reordered: ``slots`` (1, N, max_length) has the row
    that holds each token of a text, as ``decode_attention`` takes it. It is None on a GPU
    with more rows than int16 counts, and on NumPy: there copies of rows cost less than the
    scattered reads that they save.
    """

    def __init__(
        self, like: Array, rows: int, max_length: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (rows, max_length, kv_heads, head_dim)
        self.k, self.v = arrays.zeros(like, shape), arrays.zeros(like, shape)
        self.length = 0
        self.lengths = self.slots = None
        if on_gpu(like) and rows <= np.iinfo(np.int16).max:
            xp = get_xp(like)
            self.lengths = xp.zeros(rows, np.int32)  # ``length``, where kernels read it
            own = xp.arange(rows, dtype=np.int16)[:, None]
            self.slots = xp.repeat(own, max_length, axis=1)[None]

    def extend(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Append k and v (N, T, Hk, D); return all so far.

        Views; with ``slots``, copies.
        """
        self.store(k, v)
        end = self.length
        if self.slots is None:
            return self.k[:, :end], self.v[:, :end]
        rows, keys = self.slots[0, :, :end], get_xp(self.k).arange(end)
        return self.k[rows, keys], self.v[rows, keys]

    def store(self, k: Array, v: Array) -> None:
        """Append k and v (N, T, Hk, D)."""
        end = self._end(k)
        self.k[:, self.length : end] = tape.raw(k)
        self.v[:, self.length : end] = tape.raw(v)
        self._set_length(end)

    def decodes(self, q: Array) -> bool:
        """Return whether ``attend`` accepts the queries (N, T, H, D)."""
        if self.slots is None:
            return isinstance(self.k, np.ndarray) and q.shape[1] == 1
        return q.shape[1] <= MAX_QUERIES

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Append k and v (N, T, Hk, D); return the causal attention of ``q``."""
        if self.slots is None:
            return attend_on_host(tape.raw(q), *self.extend(k, v))
        end = self._end(k)
        append_kv(self.k, self.v, k, v, self.lengths)
        self._set_length(end)
        return decode_attention(q, self.k, self.v, self.lengths, slots=self.slots)

    def reorder(self, parents: Array) -> None:
        """Let row i continue the text of row ``parents[i]``."""
        if self.slots is not None:
            known = self.slots[0, :, : self.length]
            known[...] = known[parents]
            return
        xp = get_xp(parents)
        moved = xp.flatnonzero(parents != xp.arange(len(parents)))
        for store in (self.k, self.v):
            store[moved, : self.length] = store[parents[moved], : self.length]

    def keep(self, rows: np.ndarray) -> None:
        """Drop all rows but these, in ascending order. NumPy only."""
        for name in ("k", "v"):
            store = getattr(self, name)
            store[: len(rows), : self.length] = store[rows, : self.length]
            setattr(self, name, store[: len(rows)])

    def _end(self, k):
        end = self.length + k.shape[1]
        if end > self.k.shape[1]:
            raise ValueError(
                problem("KeyValueCache", "the length", end, f"up to max_length, {self.k.shape[1]}")
            )
        return end

    def _set_length(self, end):
        self.length = end
        if self.lengths is not None:
            self.lengths.fill(end)


@dataclass(frozen=True)
class HostMemory:
    """Keys and values (B, S, Hk, D) of B memories, for cross-attention in decoding on NumPy.

    ``bias``: (B, 1, 1, S), 0 or, past the end of a memory, where keys and values are 0, -inf.
    """

    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, k: Any, v: Any, lengths: np.ndarray) -> "HostMemory":
        """Return the HostMemory of k and v whose first ``lengths`` (B,) keys count."""
        k, v = tape.raw(k), tape.raw(v)
        real, zero = np.arange(k.shape[1]) < lengths[:, None], k.dtype.type(0)
        k, v = (np.where(real[:, :, None, None], x, zero) for x in (k, v))
        return cls(k, v, np.where(real, zero, k.dtype.type(-np.inf))[:, None, None])

    def attend(self, q: Any) -> np.ndarray:
        """Return the attention of queries (B * K, 1, H, D), K for each memory, in their shape."""
        grouped = tape.raw(q).reshape(len(self.k), -1, *q.shape[2:])
        return attend_on_host(grouped, self.k, self.v, self.bias).reshape(q.shape)

    def kept(self, memories: np.ndarray) -> "HostMemory":
        """Return these memories alone."""
        return HostMemory(self.k[memories], self.v[memories], self.bias[memories])


def attend_on_host(q: Array, k: Array, v: Array, bias: Array | None = None) -> Array:
    """Return softmax(q k^T / sqrt(D) + bias) v of NumPy arrays (N, T, H, D), in q's shape.

    ``k``, ``v``: (N, S, Hk, D), S from 1 on. ``bias``: broadcasts to (N, Hk, T * H / Hk, S). What
    ``flash_attention`` computes, for problems so small that its checks and blocks would take more
    time than the arithmetic.
    """
    (N, T, H, D), kv_heads = q.shape, k.shape[2]
    rows = q.reshape(N, T, kv_heads, -1, D).transpose(0, 2, 1, 3, 4)
    with np.errstate(all="ignore"):
        rows = (rows * q.dtype.type(D**-0.5)).reshape(N, kv_heads, -1, D)
        p = np.matmul(rows, k.transpose(0, 2, 3, 1))
        if bias is not None:
            p += bias
        p -= p.max(-1, keepdims=True)
        np.exp(p, out=p)
        out = np.matmul(p, v.transpose(0, 2, 1, 3))
        out /= p.sum(-1, keepdims=True)
    out = out.reshape(N, kv_heads, T, -1, D).transpose(0, 2, 1, 3, 4)
    return out.reshape(N, T, H, D)


class MultiHeadAttention(Module):
    """Attention with ``heads`` query heads and an output projection.

    Tokens are packed, (tokens, width) with ``cu_seqlens``, or a batch (B, T, width).
    ``kv_heads``: heads of keys and values, which divide ``heads`` (grouped queries); by default as
    many. ``cross``: keys and values come from a memory. Parameters: ``qkv`` (or ``q`` and ``kv``)
    packed in that order, and ``out``; ``projects=False``: no ``kv``, a MemoryProjection has it.
    ``rotary``: queries and keys are rotated by their positions, see ``gpuattn.rotary``, whose
    ``base`` is ``rotary_base``; ``rotary_frequencies``: instead of it, the frequencies of pairs;
    ``rotary_scale``: of rotated queries and keys, as YaRN has it.
    ``qkv_bias``: of queries, keys and values; as ``bias`` by default.
    ``head_size``: of a head, width / heads by default. ``qk_norm``: the eps of an RMSNorm
    over each head of queries and keys, before they are rotated, or None.
    ``dropout`` is that of the attention probabilities.
    Vaswani et al., "Attention Is All You Need" (2017); Ainslie et al., "GQA" (2023).
    """

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, cross: bool = False,
        projects: bool = True, rotary: bool = False, causal: bool = False, dropout: float = 0.0,
        bias: bool = True, qkv_bias: bool | None = None, rotary_base: float = 10_000.0,
        rotary_frequencies: Sequence[float] | None = None, rotary_scale: float = 1.0,
        head_size: int | None = None, qk_norm: float | None = None,
        streams: Streams | None = None, rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        kv_heads = kv_heads or heads
        check_sizes("MultiHeadAttention", width=width, heads=heads, kv_heads=kv_heads)
        size = head_size or (width // heads if width % heads == 0 else 0)
        if size < 1 or heads % kv_heads:
            got = f"width {width}, heads {heads}, kv_heads {kv_heads}"
            accepted = "heads that divide the width, kv_heads that divide the heads"
            raise ValueError(problem("MultiHeadAttention", "the split", got, accepted))
        if rotary and (cross or size % 2):
            got = f"a memory, cross={cross}" if cross else f"a head size of {size}"
            accepted = "self-attention with an even head size"
            raise ValueError(problem("MultiHeadAttention", "rotary", f"for {got}", accepted))
        rng = generator(rng)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, size
        self.rotary, self.causal, self._rotary_scale = rotary, causal, rotary_scale
        self.rates: dict[str, Any] = {"base": rotary_base, "frequencies": rotary_frequencies}
        qkv_bias = bias if qkv_bias is None else qkv_bias
        sizes = [n * self.head_dim for n in (heads, 2 * kv_heads)]
        if cross:
            self.q = Linear(width, sizes[0], bias=qkv_bias, rng=rng)
            if projects:
                self.kv = Linear(width, sizes[1], bias=qkv_bias, rng=rng)
        else:
            self.qkv = Linear(width, sum(sizes), bias=qkv_bias, rng=rng)
        self.out = Linear(heads * size, width, bias=bias, rng=rng)
        if qk_norm is not None:
            self.q_norm, self.k_norm = RMSNorm(size, eps=qk_norm), RMSNorm(size, eps=qk_norm)
        self.normalises = qk_norm is not None
        self.dropout = Dropout(dropout, streams)
        self.maps: Any = None  # a list while attention_maps() collects

    def __call__(self, x: Any, memory: Any = None, **context: Any) -> Any:
        """Return the attended ``x``, of its shape.

        Arguments: those of ``attend``.
        """
        return self.out(self.attend(x, memory, **context))

    def attend(
        self, x: Any, memory: Any = None, *, positions: Array | None = None,
        key_lengths: Array | None = None, cu_seqlens: Array | None = None,
        max_seqlen: int | None = None, cu_memory: Array | None = None,
        max_memory: int | None = None, cache: KeyValueCache | None = None,
    ) -> Any:  # fmt: skip
        """Return the heads' outputs, concatenated, (..., heads * head_dim): the input of ``out``.

        ``memory``: what cross-attention reads: tokens, their keys and values, as ``project`` or a
        MemoryProjection returned them, or what attends to these, such as a HostMemory.
        ``positions``: int, of the tokens of x, for ``rotary``; by default 0, 1, ... along an axis.
        ``key_lengths`` (B,): of the keys in a padded batch. ``cu_seqlens``, ``max_seqlen``: offsets
        and greatest length of packed x; ``cu_memory``, ``max_memory``: of packed memory.
        ``cache``: a KeyValueCache that x continues. A batch of B memories serves N = B * K rows
        of x, K for each: their queries are grouped, keys and values are not repeated.
        """
        joined = *x.shape[:-1], self.heads * self.head_dim
        if memory is None:
            q, k, v = self._projected(x, positions, self.heads)
            plain = self.causal and key_lengths is None and self.maps is None
            if cache is not None and plain and not self.dropout.now()[0] and cache.decodes(q):
                return cache.attend(q, k, v).reshape(joined)
            if cache is not None:
                k, v = cache.extend(k, v)
            packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        else:
            (q,) = split_heads(self.q(x), (self.heads,), self.head_dim)
            if hasattr(memory, "attend"):
                return memory.attend(q).reshape(joined)
            k, v = memory if isinstance(memory, tuple) else self.project(memory)
            if cu_seqlens is None and len(k) != len(x):
                q = q.reshape(len(k), -1, self.heads, self.head_dim)
            packing = (cu_seqlens, cu_memory, max_seqlen, max_memory)
        if self.maps is not None:
            self.maps.append(self._probabilities(q, k))
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        offsets: dict[str, Any] = dict(zip(names, packing, strict=True))
        p, key = self.dropout.now()
        out = flash_attention(
            q, k, v, causal=self.causal, key_lengths=key_lengths, dropout_p=p, seed=key,
            deterministic=self.deterministic, **offsets,
        )  # fmt: skip
        return out.reshape(joined)

    def store(self, x: Any, cache: Any, positions: Array | None = None) -> None:
        """Store the keys and values of x (B, T, width) in ``cache``, and compute nothing else.

        They are those that ``attend`` stores there, but for the rounding of a narrower product.
        """
        _, k, v = self._projected(x, positions, 0)
        cache.store(k, v)

    def _projected(self, x, positions, heads):
        """Return the queries of ``heads`` heads, all or none, and the keys and values of x."""
        qkv = self.qkv(x, first=(self.heads - heads) * self.head_dim)
        q, k, v = split_heads(qkv, (heads, self.kv_heads, self.kv_heads), self.head_dim)
        if self.normalises:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotary(q, k, positions, donate=True, **self.rates)
            if self._rotary_scale != 1:
                q = q * self._rotary_scale**2  # the products are then as of both scaled
        return q, k, v

    def project(self, memory: Any) -> tuple[Any, Any]:
        """Return the keys and values (..., Hk, D) of a memory (..., width)."""
        k, v = split_heads(self.kv(memory), (self.kv_heads, self.kv_heads), self.head_dim)
        return k, v

    def new_cache(self, rows: int, max_length: int) -> KeyValueCache:
        """Return an empty KeyValueCache for ``rows`` sequences, on the weights' device."""
        return KeyValueCache(self.out.weight.data, rows, max_length, self.kv_heads, self.head_dim)

    def _probabilities(self, q, k):
        """Return softmax(q k^T) (B, H, T, S) of a batch, for plots: 16 bits in float32."""
        q, k = (tape.raw(x).astype(wide(x.dtype), copy=False).swapaxes(1, 2) for x in (q, k))
        B, H, T, D = q.shape
        grouped = q.reshape(B, self.kv_heads, -1, T, D)
        logits = arrays.get_xp(q).matmul(grouped, k[:, :, None].swapaxes(-1, -2))
        logits = logits.reshape(B, H, T, -1)
        return softmax(logits, scale=D**-0.5, causal=self.causal)


class MemoryProjection(Module):
    """The keys and values of a memory (..., width) for cross-attention in several layers.

    One matmul makes them all; the gradients take one matmul each. Parameters: ``kv``, for each
    layer its keys and values. Returns [(k, v) for each layer], views (..., Hk, D) of one array.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        *,
        kv_heads: int | None = None,
        bias: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        rng = generator(rng)
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads or heads, width // heads
        rows = 2 * self.kv_heads * self.head_dim
        self.kv = Linear(width, layers * rows, bias=bias, rng=rng)
        for own in np.split(self.kv.weight.data, layers):  # initialised like a layer's own
            own[...] = xavier_uniform(rng, (rows, width)).data

    def __call__(self, memory: Any) -> list[tuple[Any, Any]]:
        counts = (self.kv_heads,) * (2 * self.layers)
        parts = split_heads(self.kv(memory), counts, self.head_dim)
        return list(zip(parts[::2], parts[1::2], strict=True))
