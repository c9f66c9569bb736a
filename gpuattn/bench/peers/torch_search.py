"""A beam search for translation in PyTorch, with static shapes; see ``torch_decode.py``.

The caches stay in place; ``slots`` says which row holds each key of a beam, and the compiled
attention reads the keys there. Texts have the length that is asked for, so the search keeps no pool
of texts that have ended.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from gpuattn.bench.decode.cases import BANNED, FREE_BATCH, Decoding
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
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.nn.embedding import sinusoidal_positions

TILE = 64  # columns of the logits; the K best of a row lie in the K tiles with the greatest maxima
ROUND = 32  # lengths of a batch are rounded up to a multiple of it where they differ


class Layers:
    """The functions of a step, compiled."""

    def __init__(self, device: str) -> None:
        wrap = compiled(device)
        self.enter, self.decoder = wrap(enter), wrap(_decoder_layer)
        self.candidates, self.advance = wrap(_candidates), wrap(_advance)


class Translations:
    """All sources of a case, sorted by length, in batches of up to FREE_BATCH."""

    def __init__(self, case: Decoding, weights: Named, device: str) -> None:
        self.texts, limits = case.texts(), case.lengths()[1].tolist()
        layers, shared = Layers(device), pool(device)
        order = sorted(range(len(self.texts)), key=lambda i: (-len(self.texts[i]), -limits[i]))
        self.batches, searches = [], {}
        for begin in range(0, len(order), FREE_BATCH):
            chosen = order[begin : begin + FREE_BATCH]
            most = [limits[i] for i in chosen]
            shape = [len(self.texts[chosen[0]]) + 1, max(most)]
            if case.workload == "B":
                shape = [-(-n // ROUND) * ROUND for n in shape]
            key = tuple(shape)
            if key not in searches:
                count = min(len(order), FREE_BATCH)
                searches[key] = BeamSearch(case, weights, count, *shape, device, layers, shared)
            self.batches.append((searches[key], chosen, most))

    def run(self) -> list[list[int]]:
        """Return the best translations, in the order of the sources."""
        found: list[Any] = [None] * len(self.texts)
        for search, chosen, most in self.batches:
            texts = search.run([self.texts[i] for i in chosen], most)
            for i, text in zip(chosen, texts, strict=True):
                found[i] = text
        return found


class BeamSearch:
    """A search over ``count`` sources of up to ``source`` tokens, their mark included.

    ``new``: the most tokens of a translation.
    """

    @torch.no_grad()
    def __init__(
        self, case: Decoding, weights: Named, count: int, source: int, new: int, device: str,
        layers: Layers, shared: Any,
    ) -> None:  # fmt: skip
        c, self.weights, self.layers = case.config(), weights, layers
        self.config, self.beam, self.new, self.count = c, case.beam, new, count
        self.masked = case.workload == "B"
        self.dtype = weights["source.weight"].dtype
        rows, shape = count * case.beam, (new, c.heads, c.head_size)
        here: dict[str, Any] = {"device": device}
        self.positions = torch.as_tensor(
            sinusoidal_positions(c.max_length, c.d_model), dtype=self.dtype, **here
        )
        kinds = range(c.layers[1])
        self.caches = [
            [torch.zeros(rows, *shape, dtype=self.dtype, **here) for _ in "kv"] for _ in kinds
        ]
        memory = count, c.heads, source, c.head_size
        self.memory = [[torch.zeros(memory, dtype=self.dtype, **here) for _ in "kv"] for _ in kinds]
        self.source = torch.full((count, source), EOS, **here)
        self.lengths = torch.full((count,), source, **here)
        self.limits = torch.full((count,), new, **here)
        self.own = torch.arange(rows, **here).view(count, case.beam)
        self.slots = self.own[:, :, None].repeat(1, 1, new)
        self.tokens = torch.full((count, case.beam), BOS, **here)
        self.scores = torch.zeros(count, case.beam, **here)
        self.first = torch.full((case.beam,), -torch.inf, **here)
        self.first[0] = 0
        self.pos = torch.zeros(1, dtype=torch.int64, **here)
        self.history = torch.zeros(count, case.beam, new, dtype=torch.int64, **here)
        self.best = torch.zeros(count, new, dtype=torch.int64, **here)
        self.encode = Replay(self._encode, device, shared)
        self.step = Replay(self._step, device, shared)

    @torch.no_grad()
    def run(self, sources: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
        """Return the best translation of each source, of ``limits`` tokens."""
        width = self.source.shape[1]
        padded = np.full((len(sources), width), EOS)
        for row, text in zip(padded, sources, strict=True):
            row[: len(text)] = text
        count = slice(0, len(sources))
        self.source[count] = torch.from_numpy(padded).to(self.source.device)
        self.lengths[count] = torch.as_tensor([len(s) + 1 for s in sources]).to(self.source.device)
        self.limits[count] = torch.as_tensor(limits).to(self.source.device)
        self.encode()
        for _ in range(max(limits)):
            self.step()
        texts = self.best[count].tolist()
        return [text[:most] for text, most in zip(texts, limits, strict=True)]

    @torch.no_grad()
    def _encode(self):
        """Encode the sources and start the search."""
        w, c = self.weights, self.config
        mask = self._memory_mask()
        scale = c.d_model**0.5
        x = F.embedding(self.source, w["source.weight"]) * scale
        x = x + self.positions[: x.shape[1]]
        for i in range(c.layers[0]):
            own = w.layers[f"encoder.{i}."]
            n = norm(x, own, "norms.0")
            q, k, v = linear(n, own, "attention.qkv").view(*x.shape[:2], 3, c.heads, -1).unbind(2)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + linear(y.transpose(1, 2).reshape(x.shape), own, "attention.out")
            x = x + feed_forward(norm(x, own, "norms.1"), own, F.relu)
        x = norm(x, w, "encoder_norm")
        parts = linear(x, w, "memory.kv").view(*x.shape[:2], c.layers[1], 2, c.heads, -1)
        for i, (k, v) in enumerate(self.memory):
            k.copy_(parts[:, :, i, 0].transpose(1, 2))
            v.copy_(parts[:, :, i, 1].transpose(1, 2))
        self.pos.zero_()
        self.tokens.fill_(BOS)
        self.scores.copy_(self.first.expand_as(self.scores))
        self.slots.copy_(self.own[:, :, None].expand_as(self.slots))

    def _memory_mask(self):
        """Return (B, 1, 1, S), or None where all sources have one length."""
        if not self.masked:
            return None
        places = torch.arange(self.source.shape[1], device=self.source.device)
        return (places < self.lengths[:, None])[:, None, None]

    @torch.no_grad()
    def _step(self):
        """Take the next token of every beam."""
        w, c = self.weights, self.config
        table, mask = w["source.weight"], self._memory_mask()
        x = self.layers.enter(self.tokens.view(-1), self.pos, table, self.positions, c.d_model**0.5)
        slots = self.slots.view(-1, self.new) if self.beam > 1 else None
        for i in range(c.layers[1]):
            x = self.layers.decoder(
                x, w.layers[f"decoder.{i}."], *self.caches[i], *self.memory[i], self.pos, slots,
                mask, c.heads,
            )  # fmt: skip
        own = {kind: w[f"decoder_norm.{kind}"] for kind in ("weight", "bias")}
        found = self.layers.candidates(x, own, table, self.scores, c.vocab)
        self.layers.advance(
            *found, self.scores, self.tokens, self.slots, self.own, self.history, self.best,
            self.limits, self.pos,
        )  # fmt: skip


def _advance(
    found, parents, chosen, scores, tokens, slots, own, history, best, limits, pos,
):  # fmt: skip
    """Let every beam continue by what was found, each (B, K); keep texts that have their length."""
    scores.copy_(found)
    tokens.copy_(chosen)
    new = history.shape[2]
    here = torch.arange(new, device=pos.device) == pos
    if scores.shape[1] == 1:
        texts = torch.where(here, chosen[:, :, None], history)
    else:
        parents = parents[:, :, None].expand_as(history)
        texts = torch.where(here, chosen[:, :, None], history.gather(1, parents))
        following = torch.arange(new, device=pos.device) == pos + 1
        slots.copy_(torch.where(following, own[:, :, None], slots.gather(1, parents)))
    history.copy_(texts)
    pos.add_(1)
    best.copy_(torch.where((limits == pos)[:, None], texts[:, 0], best))


def _decoder_layer(x, w, k_cache, v_cache, k_memory, v_memory, pos, slots, mask, heads):
    """Return the states (rows, width) after a layer; stores their keys and values at ``pos``."""
    rows, width = x.shape
    n = norm(x, w, "norms.0")
    q, k, v = linear(n, w, "attention.qkv").view(rows, 3, heads, -1).unbind(1)
    k_cache[:, pos], v_cache[:, pos] = k[:, None], v[:, None]
    keys = torch.arange(k_cache.shape[1], device=x.device)
    ks, vs = (k_cache, v_cache) if slots is None else (k_cache[slots, keys], v_cache[slots, keys])
    scores = (q.float()[:, None] * ks.float()).sum(-1) * q.shape[-1] ** -0.5  # (rows, keys, heads)
    p = scores.masked_fill((keys > pos)[:, None], -torch.inf).softmax(1)
    y = (p[..., None] * vs.float()).sum(1).to(x.dtype)
    x = x + linear(y.reshape(rows, width), w, "attention.out")
    n = norm(x, w, "norms.1")
    q = linear(n, w, "cross_attention.q").view(len(k_memory), -1, heads, q.shape[-1])
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k_memory, v_memory, attn_mask=mask)
    x = x + linear(y.transpose(1, 2).reshape(rows, width), w, "cross_attention.out")
    return x + feed_forward(norm(x, w, "norms.2"), w, F.relu)


def _candidates(x, last, table, scores, vocab):
    """Return (scores, parents, tokens), each (B, K), of the best continuations of each sentence.

    ``x``: the last states (B * K, width). ``last``: weight and bias of the last norm.
    """
    logits = F.linear(F.layer_norm(x, x.shape[-1:], **last), table)
    sentences, beam = scores.shape
    columns = torch.arange(logits.shape[1], device=logits.device)
    x = logits.float().masked_fill(columns >= vocab, -torch.inf)
    normaliser = x.logsumexp(1)
    for token in BANNED:
        x = x.masked_fill(columns == token, -torch.inf)
    if beam == 1:
        best, tokens = x.max(1, keepdim=True)
        return scores + best - normaliser[:, None], torch.zeros_like(tokens), tokens
    tiles = x.view(len(x), -1, TILE)
    count = min(beam, tiles.shape[1])
    chosen = tiles.amax(2).topk(count, 1).indices  # (rows, count)
    found = tiles.gather(1, chosen[:, :, None].expand(-1, -1, TILE)).flatten(1)
    values, places = found.topk(beam, 1)
    tokens = chosen.gather(1, places // TILE) * TILE + places % TILE
    total = (values - normaliser[:, None]).view(sentences, beam, beam) + scores[:, :, None]
    best, places = total.flatten(1).topk(beam, 1)
    return best, places // beam, tokens.view(sentences, -1).gather(1, places)
