"""The memory of training, computed before it begins, and batches that fit a GPU.

The formulas add up what each op saves for its gradient, in elements a token (of width d, hidden
width f, vocabulary V). ``tests/train/test_memory.py`` compares them with measured steps.
"""

import dataclasses
import os
from typing import Any, NamedTuple

from gpuattn.errors import MemoryLimitError
from gpuattn.models.config import table_rows
from gpuattn.models.loss import in_slices
from gpuattn.ops.loss.linear_cross_entropy import CHUNK_BYTES, LEAST_ROWS
from gpuattn.optim import OPTIMIZERS
from gpuattn.runs.config import GPT2, TrainConfig
from gpuattn.runtime.precision import Precision

LIBRARY_BYTES = 224 << 20  # workspaces of matrix products, and those of choosing their algorithms
FREE_SHARE = 0.1  # of the free memory that stays free: a pool's blocks leave gaps
LEAST_UPDATES = 16  # an epoch
MOST_TOKENS = 1 << 19  # an update, as GPT-2 was trained
TOKENS_MULTIPLE = 512  # of the tokens of a batch of sentences
BLOCKS_MULTIPLE = 8  # of the blocks of a batch, so that it can be halved


class MemoryPlan(NamedTuple):
    """Bytes of a run: ``state`` (parameters, gradients, moments, averages), ``activations`` (the
    most that a step holds, kept by its graph), and ``beside`` (what an evaluation, or the first
    step of another shape, holds in addition)."""

    state: int
    activations: int
    beside: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state + self.activations + self.beside

    def describe(self, card: int) -> str:
        """Return a line for the head of a run; ``card``: bytes of the GPU."""
        return (
            f"{gigabytes(self.state)} parameters and optimizer + {gigabytes(self.activations)} "
            f"activations + {gigabytes(self.beside)} to evaluate and for new shapes, of "
            f"{gigabytes(card)}"
        )


def gigabytes(count: float) -> str:
    """Return bytes as text, such as "6.2 GB"."""
    return f"{count / 1e9:,.1f} GB"


def plan(
    model: Any, config: TrainConfig, precision: Precision, tokens: int | None = None
) -> MemoryPlan:
    """Return the MemoryPlan of a run that trains ``model`` as a TrainConfig says.

    ``tokens``: of a batch; those of the config unless given.
    """
    tokens, itemsize = tokens or int(config.batch), 4 if precision.dtype == "float32" else 2
    parameters = sum(parameter.size for parameter in model.parameters())
    masters = 4 if precision.masters and itemsize < 4 else 0
    gradient = 4 if precision.grad_dtype(config.accumulate) == "float32" else 2
    moments = 4 * len(OPTIMIZERS[config.optimizer].moments)
    average = 8 if config.ema else 0  # itself and its scratch buffer
    state = parameters * (itemsize + masters + gradient + moments + average)
    activations = _activations(model.config, config.checkpoint, itemsize, tokens)
    beside = _evaluation(model.config, itemsize, tokens)
    if config.ema:
        beside += parameters * (masters or itemsize)  # a copy, while the average replaces them
    if config.model != GPT2:  # sentences: batches have several shapes
        beside = max(beside, activations)
    return MemoryPlan(state, activations, beside)


def _widths(c):
    """Return (d, width of all keys and values together, f) of a model's config."""
    heads = c.kv_heads or c.heads
    return c.d_model, 2 * heads * (c.d_model // c.heads), getattr(c, "ffn", 4 * c.d_model)


def _layer(c, itemsize, crosses):
    """Return the bytes a token that a layer saves, and the most that its backward pass adds.

    Attention saves its normalized input d, queries d, keys and values, output d, and the residual
    sum d; cross-attention the same without keys and values. The feed-forward network saves its
    normalized input and residual sum 2 d, hidden values f, and with other activations than ReLU
    their inputs (GELU saves half of that on Hopper without a bias, which is not counted).
    Statistics are float32: a number for each head and query, two for each norm. Deferred weight
    gradients keep the inputs and output gradients of matrix products when the rest of the layer is
    free again: about as much.
    """
    (width, keys, hidden), attentions = _widths(c), 1 + crosses
    inputs = {"relu": 0, "swiglu": 2}.get(c.activation, 1) * hidden
    values = attentions * 4 * width + keys + 2 * width + hidden + inputs
    statistics = 4 * attentions * c.heads + 8 * (attentions + 1)
    # hidden values that a weight gradient on the side stream reads, their gradient; the residual's
    back = 2 * hidden + 2 * width
    return values * itemsize + statistics, back * itemsize


def _activations(c, recompute, itemsize, tokens):
    """Return the bytes of a step's activations; ``recompute``: a level of ``--checkpoint``."""
    width, keys, hidden = _widths(c)
    stacks = [(c.layers, False)]
    kept = most_backward = memory = 0
    if not isinstance(c.layers, int):
        stacks = zip(c.layers, (False, True), strict=True)
        kept = memory = c.layers[1] * keys * itemsize  # of all cross-attention layers
    for layers, crosses in stacks:
        layer, back = _layer(c, itemsize, crosses)
        kept += width * itemsize  # the output of the norm after the layers
        if recompute == "none":
            kept += width * itemsize + layers * layer  # with the output of the embedding
        else:
            kept += layers * 2 * width * itemsize
            back += layer
        most_backward = max(most_backward, back + memory)
    if recompute != "none":
        kept += hidden * itemsize  # temporary, in blocks of the pool too small for logits
    table = table_rows(c)
    head = tokens * width * itemsize
    if in_slices(tokens, table, itemsize, recompute):
        head += _slice(table, itemsize, tokens) + 4 * table * width
    else:
        head += tokens * table * itemsize
    return LIBRARY_BYTES + tokens * kept + max(head, tokens * most_backward)


def _evaluation(c, itemsize, tokens):
    """Return the bytes of a forward pass that saves nothing."""
    width, keys, hidden = _widths(c)
    inside = 3 * width + max(2 * width + keys, hidden + width)
    if not isinstance(c.layers, int):
        inside += c.layers[1] * keys
    return _slice(table_rows(c), itemsize, tokens) + tokens * inside * itemsize


def _slice(table, itemsize, tokens):
    """Return the bytes of the logits that ``linear_cross_entropy`` computes at a time."""
    row = table * itemsize
    return min(max(CHUNK_BYTES[True], LEAST_ROWS[True] * row), tokens * row)


# ---- models that fit the host ------------------------------------------------------------------


def check_host(config: TrainConfig, device: str) -> None:
    """Raise MemoryLimitError when a model is larger than the memory of this machine.

    ``device``: "numpy", where the optimizer's state is in that memory too, or "cuda". A lower
    bound is compared: the matrices of the layers.
    """
    each = 4  # bytes of a float32
    if device == "numpy":
        each *= 2 + len(OPTIMIZERS[config.optimizer].moments) + (2 if config.ema else 0)
    count, memory = layer_weights(config), host_memory()
    if each * count > memory:
        raise MemoryLimitError(
            f"a model larger than memory: its layers have {count / 1e6:,.0f} M parameters, which "
            f"take {gigabytes(each * count)}; this machine has {gigabytes(memory)}. "
            "Try a smaller --dim or fewer --layers"
        )


def layer_weights(config: TrainConfig) -> int:
    """Return the number of elements in the matrices of all layers of a TrainConfig's model."""
    width, gpt2 = config.dim, config.model == GPT2
    keys = 2 * (config.kv_heads or config.heads) * (width // config.heads)
    attention = 2 * width**2 + keys * width
    hidden = 4 * width if gpt2 else config.ffn
    feed_forward = (3 if config.activation == "swiglu" else 2) * width * hidden
    if gpt2:
        return config.layers[0] * (attention + feed_forward)
    return sum(config.layers) * (attention + feed_forward) + config.layers[1] * attention


def host_memory() -> float:
    """Return the bytes of this machine's memory, infinity where they are unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows
        return float("inf")


# ---- batches that fit --------------------------------------------------------------------------


def least_tokens(config: TrainConfig) -> int:
    """Return the tokens of the smallest batch that a run can have."""
    return config.block if config.model == GPT2 else config.max_len + 1


def check_fits(model: Any, config: TrainConfig, precision: Precision, free: int) -> None:
    """Raise MemoryLimitError when the smallest batch does not fit ``free`` bytes."""
    least = plan(model, config, precision, least_tokens(config))
    if least.total > free:
        raise MemoryLimitError(
            f"a model larger than the card: parameters and optimizer take {gigabytes(least.state)}"
            f" and the smallest batch {gigabytes(least.total - least.state)}, {gigabytes(free)} "
            f"are free. Try {'; '.join(_remedies(config))}"
        )


def _remedies(config):
    if config.checkpoint != "full":
        yield "--checkpoint full"
    if config.precision != "pure-bf16":
        yield "--precision pure-bf16"
    if config.ema:
        yield "--ema 0"
    if len(OPTIMIZERS[config.optimizer].moments) > 1:
        yield "--optimizer lion, with one moment"
    yield "a smaller --dim or fewer --layers"
    yield "a smaller --block" if config.model == GPT2 else "a smaller --max-len"


def nothing_smaller(config: TrainConfig, update: int, short: str) -> str:
    """Return the sentence for a run that cannot continue after ``update``; ``short``: its error."""
    least = f"a block of {config.block:,}" if config.model == GPT2 else f"{config.batch:,}"
    return (
        f"memory is used up ({short}) by a batch of {least} tokens, the smallest possible; all is "
        f"saved after update {update:,}. Continue with --checkpoint full or with more free memory, "
        f"or begin another run with {'; '.join(_remedies(config))}"
    )


def fit(model: Any, config: TrainConfig, precision: Precision, free: int, epoch_tokens: int) -> int:
    """Return the most tokens of a batch whose MemoryPlan fits ``free`` bytes less FREE_SHARE.

    An epoch of ``epoch_tokens`` has at least LEAST_UPDATES updates, and an update at most
    MOST_TOKENS: beyond some size a larger batch saves no updates (McCandlish et al., "An Empirical
    Model of Large-Batch Training", 2018).
    """
    most = min(epoch_tokens // LEAST_UPDATES, MOST_TOKENS) // config.accumulate
    least = least_tokens(config)
    unit = config.block if config.model == GPT2 else TOKENS_MULTIPLE
    if most >= BLOCKS_MULTIPLE * unit:
        unit *= BLOCKS_MULTIPLE if config.model == GPT2 else 1
    low, high = 0, max(1, most // unit)  # in units; up to ``low`` they fit
    while low < high:
        middle = (low + high + 1) // 2
        need = plan(model, config, precision, middle * unit).total
        low, high = (middle, high) if need <= (1 - FREE_SHARE) * free else (low, middle - 1)
    return max(low * unit, least)


def next_parts(config: TrainConfig, parts: int) -> int | None:
    """Return into how many parts to cut each batch of ``config`` next, at least twice ``parts``.

    Blocks are divided evenly, so that an update has as many as before. None: no smaller part is
    possible.
    """
    if config.model == GPT2:
        rows = int(config.batch) // config.block
        return next((n for n in range(2 * parts, rows + 1) if rows % n == 0), None)
    return 2 * parts if int(config.batch) // (2 * parts) > config.max_len else None


def in_parts(config: TrainConfig, parts: int) -> TrainConfig:
    """Return the config with each batch cut into ``parts``, for the same updates."""
    size = int(config.batch) // parts
    if config.model == GPT2:
        size = int(config.batch) // config.block // parts * config.block
    return dataclasses.replace(config, batch=size, accumulate=config.accumulate * parts)
