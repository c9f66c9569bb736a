"""The memory that a step of a Transformer takes beside its parameters, in bytes.

The counts follow the ops: what each keeps for its gradient, in elements per token (of width d,
hidden width f, vocabulary V). ``tests/train/test_memory.py`` compares them with what a step takes.
"""

from typing import Any

from gpuattn.models.loss import in_slices
from gpuattn.ops.loss.linear_cross_entropy import CHUNK_BYTES, LEAST_ROWS


def activation_bytes(c: Any, tokens: int, itemsize: int, checkpoint: str) -> int:
    """Return the most that the activations of a training step take.

    ``c``: a ``models.config.ModelConfig``. ``tokens``: of a batch. ``itemsize``: of the dtype that
    the step computes in. ``checkpoint``: one of ``models.config.CHECKPOINT``.
    """
    width, keys, hidden = _widths(c)
    kept = memory = _crossing_layers(c) * keys * itemsize  # cross-attention's keys and values
    recomputed = 0
    for layers, crosses in c.stacks:
        layer, back = _layer(c, itemsize, crosses)
        kept += width * itemsize  # the output of the norm after the layers
        if checkpoint == "none":
            kept += width * itemsize + layers * layer  # and the output of the embedding
        else:
            kept += layers * 2 * width * itemsize
            back += layer
        recomputed = max(recomputed, back + memory)
    if checkpoint != "none":
        kept += hidden * itemsize  # freed blocks of the pool that are too small for the logits
    head, predicted = tokens * width * itemsize, round(tokens * c.predicted)
    if in_slices(predicted, c.table_rows, itemsize, checkpoint) and not c.output_bias:
        head += _slice(c, itemsize, predicted) + 4 * c.table_rows * width
    else:
        head += predicted * c.table_rows * itemsize
    return tokens * kept + max(head, tokens * recomputed)


def evaluation_bytes(c: Any, tokens: int, itemsize: int) -> int:
    """Return the bytes of a forward pass that keeps nothing. Arguments: see above."""
    width, keys, hidden = _widths(c)
    inside = 3 * width + max(2 * width + keys, hidden + width) + _crossing_layers(c) * keys
    return _slice(c, itemsize, round(tokens * c.predicted)) + tokens * inside * itemsize


def _widths(c):
    """Return d, the width of all keys and values, and f."""
    heads = c.kv_heads or c.heads
    return c.d_model, 2 * heads * c.head_size, c.ffn


def _crossing_layers(c):
    """Return how many layers have cross-attention."""
    return sum(layers for layers, crosses in c.stacks if crosses)


def _layer(c, itemsize, crosses):
    """Return the bytes per token that a layer keeps, and the most that its backward pass adds.

    Attention: its normalized input d, queries d (heads times their size, where that is not d), keys
    and values, output as queries, the residual sum d;
    cross-attention the same, but for keys and values. The feed-forward network: normalized input
    and residual sum 2 d, hidden values f, and for activations other than ReLU their inputs
    (GELU keeps half of that on Hopper where it has no bias, which is not counted).
    Statistics are float32: a number for each head and query, two for each norm. Deferred weight
    gradients keep inputs and gradients of matmuls, while all else that a layer kept is already
    free: about as much.
    """
    (width, keys, hidden), attentions = _widths(c), 1 + crosses
    activation_inputs = {"relu": 0, "swiglu": 2}.get(c.activation, 1) * hidden
    values = (
        attentions * 2 * (width + c.heads * c.head_size)
        + keys
        + 2 * width
        + hidden
        + activation_inputs
    )
    statistics = 4 * attentions * c.heads + 8 * (attentions + 1)
    # hidden values that a weight gradient on the side stream still reads, and their gradient; the
    # residual sum and its gradient
    back = 2 * hidden + 2 * width
    return values * itemsize + statistics, back * itemsize


def _slice(c, itemsize, tokens):
    """Return the bytes of the logits that exist at a time: slices, but for those with a bias."""
    row = c.table_rows * itemsize
    if c.output_bias:
        return tokens * row
    return min(max(CHUNK_BYTES[True], LEAST_ROWS[True] * row), tokens * row)
