"""Packed batches of one shape, so that one CUDA graph serves them all.

The rest of the budget is filled with sentences of padding: their labels are ignored and no other
sentence attends to them, so only the time of a step changes.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from gpuattn.data.batching import IGNORED, LanguageModelBatch, TokenOrder
from gpuattn.data.labelled import LabelBatch
from gpuattn.data.masking import MaskedBatch, count_of
from gpuattn.data.tokenizer import PAD

SENTENCES, LENGTH = 128, 32  # counts of sentences and greatest lengths are multiples of these
PARTS, ROWS = 8, 64  # sides of rectangles are multiples of a part of the budget, and of rows


def fixed_shape(batch: Any, tokens: int, longest: int) -> Any:
    """Return a ``data.batching.Batch`` with ``tokens`` on either side, and few other shapes.

    ``tokens``: the budget, at least what the batch has. ``longest``: the most tokens of a sentence.
    The number of sentences and the greatest lengths are rounded up, so that they seldom differ.
    With padding in the batch already, a side is not filled to the budget, but rounded up as well:
    one side may be far shorter than the other.
    The fields ``source_tokens`` and ``target_tokens`` still say how many count.
    """
    limits = [min(longest, _up(most, LENGTH)) for most in (batch.max_source, batch.max_target)]
    sizes = [len(batch.source), len(batch.labels)]
    padded = sizes != [batch.source_tokens, batch.target_tokens]
    part = _up(-(-tokens // PARTS), ROWS)
    full = [min(tokens, _up(n, part)) if padded else tokens for n in sizes]
    rest = [n - size for n, size in zip(full, sizes, strict=True)]
    more = max(-(-n // limit) for n, limit in zip(rest, limits, strict=True))
    sentences = _up(len(batch.cu_source) - 1 + more, SENTENCES)
    source, source_positions, cu_source = _filled(
        rest[0], limits[0], sentences, batch.source, batch.source_positions, batch.cu_source
    )
    target_in, target_positions, cu_target = _filled(
        rest[1], limits[1], sentences, batch.target_in, batch.target_positions, batch.cu_target
    )
    return replace(
        batch,
        source=source, source_positions=source_positions, cu_source=cu_source,
        max_source=limits[0], source_order=_order(batch.source_order, full[0]), target_in=target_in,
        target_positions=target_positions, labels=_padded(batch.labels, full[1], IGNORED),
        cu_target=cu_target, max_target=limits[1], target_order=_order(batch.target_order, full[1]),
    )  # fmt: skip


def fixed_documents(batch: LanguageModelBatch) -> LanguageModelBatch:
    """Return a batch of documents whose number of parts is rounded up by empty ones.

    A batch of rows has one shape already and comes back as it is.
    """
    bounds = batch.cu_seqlens
    if bounds is None:
        return batch
    more = np.full(-(len(bounds) - 1) % SENTENCES, bounds[-1])
    return replace(batch, cu_seqlens=np.concatenate([bounds, more]))


def fixed_masked(batch: MaskedBatch, tokens: int, longest: int, share: float) -> MaskedBatch:
    """Return a batch with ``tokens`` tokens, and as many rows as their ``share``.

    ``tokens``: the budget, at least what the batch has. ``longest``: the most tokens of a text. The
    rows that are added have labels that are ignored.
    """
    limit = min(longest, _up(batch.max_seqlen, LENGTH))
    rest, count = tokens - len(batch.tokens), count_of(tokens, share)
    texts = _up(len(batch.cu_seqlens) - 1 - (-rest // limit), SENTENCES)
    ids, positions, bounds = _filled(
        rest, limit, texts, batch.tokens, batch.positions, batch.cu_seqlens
    )
    return replace(
        batch, tokens=ids, positions=positions, cu_seqlens=bounds, max_seqlen=limit,
        order=_order(batch.order, tokens), rows=_padded(batch.rows, count, tokens - 1),
        labels=_padded(batch.labels, count, IGNORED),
    )  # fmt: skip


def fixed_texts(batch: LabelBatch, tokens: int, longest: int) -> LabelBatch:
    """Return a batch with ``tokens`` tokens and a rounded number of texts.

    ``tokens``, ``longest``: as of ``fixed_masked``. The texts that are added have labels that are
    ignored; those without a token begin at the last one.
    """
    limit = min(longest, _up(batch.max_seqlen, LENGTH))
    rest = tokens - len(batch.tokens)
    texts = _up(len(batch.rows) - (-rest // limit), SENTENCES)
    ids, positions, bounds = _filled(
        rest, limit, texts, batch.tokens, batch.positions, batch.cu_seqlens
    )
    return replace(
        batch, tokens=ids, positions=positions, cu_seqlens=bounds, max_seqlen=limit,
        order=_order(batch.order, tokens), rows=np.minimum(bounds[:-1], tokens - 1),
        labels=_padded(batch.labels, texts, IGNORED),
    )  # fmt: skip


def _filled(rest, limit, sentences, ids, positions, bounds):
    """Return ids, positions and bounds with ``rest`` tokens more, in sentences up to ``limit``."""
    more = np.arange(rest, dtype=np.int32)
    ends = np.minimum(np.arange(1, sentences - len(bounds) + 2) * limit, rest) + bounds[-1]
    return (
        _padded(ids, len(ids) + rest, PAD),
        np.concatenate([positions, more % limit]),
        np.concatenate([bounds, ends.astype(np.int32)]),
    )


def _order(old, tokens):
    """Return the TokenOrder with padding up to ``tokens``, less what has no fixed shape.

    PAD is the least id: those added come behind the ones there may be, before all others.
    """
    pads = int(old.segments[1]) if len(old.ids) > 1 and old.ids[0] == PAD else 0
    added = np.arange(len(old.order), tokens, dtype=np.int32)
    order = np.concatenate([old.order[:pads], added, old.order[pads:]])
    return TokenOrder(order, None, None)


def _padded(ids, count, value):
    return np.concatenate([ids, np.full(count - len(ids), value, np.int32)])


def _up(count, step):
    return -(-count // step) * step
