"""Sampling from GPT-2 in PyTorch, with static shapes; see ``torch_decode.py``.

As in gpt-fast (https://github.com/pytorch-labs/gpt-fast): a static cache, and tokens drawn by the
exponential race.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from gpuattn.bench.decode.cases import Decoding
from gpuattn.bench.peers.torch_decode import (
    Named,
    Replay,
    compiled,
    enter,
    feed_forward,
    linear,
    norm,
    pool,
)

KEYS = 16  # room for keys is a multiple of it, as masks of attention need


class Sampler:
    """Continues the prompts of a case, all of one length, by tokens drawn from the ``top_k`` best.

    ``top_k`` 0 takes the best.
    """

    @torch.no_grad()
    def __init__(self, case: Decoding, weights: Named, device: str) -> None:
        c, self.weights, self.top_k = case.config(), weights, case.top_k
        self.config, (sentences, self.before, self.new) = c, case.shape
        wrap, shared = compiled(device), pool(device)
        self.enter, self.layer, self.drawn = wrap(enter), wrap(_text_layer), wrap(_drawn)
        self.dtype = weights["embedding.weight"].dtype
        self.heads = c.heads, c.kv_heads or c.heads
        keys = -(-(self.before - 1 + self.new) // KEYS) * KEYS
        shape = sentences, self.heads[1], keys, c.head_size
        here: dict[str, Any] = {"device": device}
        self.caches = [
            [torch.zeros(shape, dtype=self.dtype, **here) for _ in "kv"] for _ in range(c.layers)
        ]
        self.prompts = np.array(case.texts())
        self.given = torch.zeros(sentences, self.before, dtype=torch.int64, **here)
        self.tokens = torch.zeros(sentences, 1, dtype=torch.int64, **here)
        self.pos = torch.zeros(1, dtype=torch.int64, **here)
        self.texts = torch.zeros(sentences, self.before + self.new, dtype=torch.int64, **here)
        self.begin = Replay(self._begin, device, shared)
        self.step = Replay(self._step, device, shared)

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        """Return the new tokens of each text."""
        self.given.copy_(torch.from_numpy(self.prompts))
        self.begin()
        for _ in range(self.new):
            self.step()
        return self.texts[:, self.before :].tolist()

    @torch.no_grad()
    def _begin(self):
        """Compute the keys and values of all tokens of the prompts but the last."""
        w, c = self.weights, self.config
        self.pos.fill_(self.before - 1)
        self.tokens.copy_(self.given[:, -1:])
        if self.before == 1:
            return
        seen = self.given[:, :-1]
        places = slice(0, self.before - 1)
        x = F.embedding(seen, w["embedding.weight"]) + w["embedding.position_weight"][places]
        for i in range(c.layers):
            own = w.layers[f"layers.{i}."]
            q, k, v = _heads(norm(x, own, "norms.0"), own, *self.heads)
            self.caches[i][0][:, :, places], self.caches[i][1][:, :, places] = k, v
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
            x = x + linear(y.transpose(1, 2).flatten(2), own, "attention.out")
            x = x + feed_forward(norm(x, own, "norms.1"), own, _gelu)

    @torch.no_grad()
    def _step(self):
        """Draw the next token of every text."""
        w, c = self.weights, self.config
        table, positions = w["embedding.weight"], w["embedding.position_weight"]
        x = self.enter(self.tokens, self.pos, table, positions, 1.0)
        for i in range(c.layers):
            own = w.layers[f"layers.{i}."]
            x = self.layer(x, own, *self.caches[i], self.pos, *self.heads)
        last = {kind: w[f"norm.{kind}"] for kind in ("weight", "bias")}
        self.tokens.copy_(self.drawn(x[:, -1], last, table, c.vocab, self.top_k))
        self.pos.add_(1)
        self.texts.index_copy_(1, self.pos, self.tokens)


def _text_layer(x, w, k_cache, v_cache, pos, heads, kv_heads):
    """Return the states (B, 1, width) after a layer; stores their keys and values at ``pos``."""
    q, k, v = _heads(norm(x, w, "norms.0"), w, heads, kv_heads)
    mask = (torch.arange(k_cache.shape[2], device=x.device) <= pos)[None, None, None]
    k_cache[:, :, pos], v_cache[:, :, pos] = k, v
    y = F.scaled_dot_product_attention(
        q, k_cache, v_cache, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    x = x + linear(y.transpose(1, 2).flatten(2), w, "attention.out")
    return x + feed_forward(norm(x, w, "norms.1"), w, _gelu)


def _drawn(x, last, table, vocab, top_k):
    """Return tokens (B, 1) drawn from the ``top_k`` best after the last states (B, width)."""
    logits = F.linear(F.layer_norm(x, x.shape[-1:], **last), table)
    hidden = torch.arange(logits.shape[1], device=logits.device) >= vocab
    x = logits.float().masked_fill(hidden, -torch.inf)
    if not top_k:
        return x.argmax(1, keepdim=True)
    values, tokens = x.topk(top_k, 1)
    race = torch.empty_like(values).exponential_(1)
    return tokens.gather(1, (values.softmax(1) / race).argmax(1, keepdim=True))


def _heads(x, w, heads, kv_heads):
    """Return queries, keys and values (B, heads, T, D) of states (B, T, width)."""
    counts = [heads, kv_heads, kv_heads]
    heads = linear(x, w, "attention.qkv").view(*x.shape[:2], sum(counts), -1).transpose(1, 2)
    return heads.split(counts, 1)


def _gelu(x):
    return F.gelu(x, approximate="tanh")
