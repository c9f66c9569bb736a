"""Packed batches of one shape, so that one CUDA graph serves them all.

The rest of the budget is filled with sentences of padding: their labels are ignored and no other
sentence attends to them, so only the time of a step changes.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from gpuattn.data.batching import IGNORED, TokenOrder
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
