"""What training takes of a GPU's memory: known before it begins, and made to fit.

The counts follow the ops: what each keeps for its gradient, in elements a token (of width d, hidden
width f, vocabulary V). ``tests/train/test_memory.py`` compares them with what a step takes.
"""

import dataclasses
import os
from typing import NamedTuple

from gpuattn.errors import MemoryLimitError
from gpuattn.models.config import table_rows
from gpuattn.models.loss import in_slices
from gpuattn.ops.loss.linear_cross_entropy import CHUNK_BYTES, LEAST_ROWS
from gpuattn.optim import OPTIMIZERS
from gpuattn.runs.config import GPT2

LIBRARY = 224 << 20  # what products work in, and what choosing their algorithms takes
MARGIN = 0.1  # of what is free stays so: blocks of a pool do not fill it without gaps
LEAST_UPDATES = 16  # an epoch
MOST_TOKENS = 1 << 19  # an update: what GPT-2 was trained with
STEP = 512  # tokens that a batch of sentences is a multiple of
BLOCKS = 8  # that a batch of blocks is a multiple of, so that it can be halved


class Plan(NamedTuple):
    """Bytes: of ``state`` (parameters, gradients, what optimizer and averages keep), of
    ``activations`` (the most that a step holds), and of what is held ``beside`` the step's memory,
    which its graph keeps: an evaluation, or the first step of another shape."""

    state: int
    activations: int
    beside: int

    @property
    def total(self):
        return self.state + self.activations + self.beside

    def describe(self, card):
        """Return the line that the head of a run has; ``card``: bytes in all."""
        return (
            f"{gigabytes(self.state)} parameters and optimizer + {gigabytes(self.activations)} "
            f"activations + {gigabytes(self.beside)} to evaluate and for new shapes, of "
            f"{gigabytes(card)}"
        )


def gigabytes(count):
    """Return bytes as people read them, such as "6.2 GB"."""
    return f"{count / 1e9:,.1f} GB"


def plan(model, config, precision, tokens=None):
    """Return the Plan of a run that trains ``model`` as a TrainConfig says.

    ``precision``: a ``runtime.precision.Precision``. ``tokens``: of a batch (the config's).
    """
    tokens, itemsize = tokens or config.batch, 4 if precision.dtype == "float32" else 2
    parameters = sum(parameter.size for parameter in model.parameters())
    masters = 4 if precision.masters and itemsize < 4 else 0
    gradient = 4 if precision.grad_dtype(config.accumulate) == "float32" else 2
    moments = 4 * len(OPTIMIZERS[config.optimizer].moments)
    average = 8 if config.ema else 0  # and what it computes in
    state = parameters * (itemsize + masters + gradient + moments + average)
    activations = _activations(model.config, config.checkpoint, itemsize, tokens)
    beside = _evaluation(model.config, itemsize, tokens)
    if config.ema:
        beside += parameters * (masters or itemsize)  # while the average takes their place
    if config.model != GPT2:  # sentences: batches have several shapes
        beside = max(beside, activations)
    return Plan(state, activations, beside)


def _widths(c):
    """Return d, the width of all keys and values, and f, of a model's config."""
    heads = c.kv_heads or c.heads
    return c.d_model, 2 * heads * (c.d_model // c.heads), getattr(c, "ffn", 4 * c.d_model)


def _layer(c, itemsize, crosses):
    """Return the bytes a token of what a layer keeps, and of the most that it takes to go back.

    Attention: its normalized input d, queries d, keys and values, output d, the residual sum d;
    cross-attention the same, but for keys and values. The feed-forward network: normalized input
    and residual sum 2 d, hidden values f, and other activations than ReLU what they were made of
    (GELU keeps half of that on Hopper where it has no bias, which is not counted).
    Statistics are float32: a number for each head and query, two for each norm. Weight gradients
    that are put off keep inputs and gradients of products, where all else that a layer kept is
    free again: about as much.
    """
    (width, keys, hidden), attentions = _widths(c), 1 + crosses
    made_of = {"relu": 0, "swiglu": 2}.get(c.activation, 1) * hidden
    values = attentions * 4 * width + keys + 2 * width + hidden + made_of
    statistics = 4 * attentions * c.heads + 8 * (attentions + 1)
    # hidden values that a weight gradient aside still reads, their gradient; of the residual sum
    back = 2 * hidden + 2 * width
    return values * itemsize + statistics, back * itemsize


def _activations(c, checkpoint, itemsize, tokens):
    width, keys, hidden = _widths(c)
    stacks = [(c.layers, False)]
    kept = again = memory = 0
    if not isinstance(c.layers, int):
        stacks = zip(c.layers, (False, True), strict=True)
        kept = memory = c.layers[1] * keys * itemsize  # of cross-attention in all layers
    for layers, crosses in stacks:
        layer, back = _layer(c, itemsize, crosses)
        kept += width * itemsize  # what the norm behind the layers makes
        if checkpoint == "none":
            kept += width * itemsize + layers * layer  # and what comes out of the embedding
        else:
            kept += layers * 2 * width * itemsize
            back += layer
        again = max(again, back + memory)
    if checkpoint != "none":
        kept += hidden * itemsize  # passed through, in blocks of the pool too small for logits
    table = table_rows(c)
    head = tokens * width * itemsize
    if in_slices(tokens, table, itemsize, checkpoint):
        head += _slice(table, itemsize, tokens) + 4 * table * width
    else:
        head += tokens * table * itemsize
    return LIBRARY + tokens * kept + max(head, tokens * again)


def _evaluation(c, itemsize, tokens):
    """Return the bytes of a forward pass that keeps nothing."""
    width, keys, hidden = _widths(c)
    inside = 3 * width + max(2 * width + keys, hidden + width)
    if not isinstance(c.layers, int):
        inside += c.layers[1] * keys
    return _slice(table_rows(c), itemsize, tokens) + tokens * inside * itemsize


def _slice(table, itemsize, tokens):
    """Return the bytes of the logits that ``linear_cross_entropy`` has at a time."""
    row = table * itemsize
    return min(max(CHUNK_BYTES[True], LEAST_ROWS[True] * row), tokens * row)


# ---- models that fit the host ------------------------------------------------------------------


def check_host(config, device):
    """Raise MemoryLimitError when a model is larger than the memory of this machine.

    ``device``: "numpy", where the optimizer's state is in that memory too, or "cuda". Counted is
    the least there is: the matrices of the layers.
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


def layer_weights(config):
    """Return how many numbers the matrices in the layers of a TrainConfig's model hold."""
    width, gpt2 = config.dim, config.model == GPT2
    keys = 2 * (config.kv_heads or config.heads) * (width // config.heads)
    attention = 2 * width**2 + keys * width
    hidden = 4 * width if gpt2 else config.ffn
    feed_forward = (3 if config.activation == "swiglu" else 2) * width * hidden
    if gpt2:
        return config.layers[0] * (attention + feed_forward)
    return sum(config.layers) * (attention + feed_forward) + config.layers[1] * attention


def host_memory():
    """Return the bytes of memory that this machine has, infinity where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows
        return float("inf")


# ---- batches that fit --------------------------------------------------------------------------


def least_tokens(config):
    """Return the tokens of the smallest batch that a run can have."""
    return config.block if config.model == GPT2 else config.max_len + 1


def check_fits(model, config, precision, free):
    """Raise MemoryLimitError when not even the smallest batch fits ``free`` bytes."""
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


def nothing_smaller(config, update, short):
    """Return the sentence for a run that cannot go on after ``update``; ``short``: what failed."""
    least = f"a block of {config.block:,}" if config.model == GPT2 else f"{config.batch:,}"
    return (
        f"memory is used up ({short}) by a batch of {least} tokens, the smallest that there can "
        f"be; all is saved after update {update:,}. Go on with --checkpoint full, with more free "
        f"memory, or begin anew: {'; '.join(_remedies(config))}"
    )


def fit(model, config, precision, free, epoch_tokens):
    """Return the most tokens of a batch whose Plan fits ``free`` bytes, with a margin.

    No more than leave LEAST_UPDATES updates to an epoch, and MOST_TOKENS to an update: past some
    size a larger batch saves no updates (McCandlish et al., "An Empirical Model of Large-Batch
    Training", 2018).
    """
    most = min(epoch_tokens // LEAST_UPDATES, MOST_TOKENS) // config.accumulate
    least = least_tokens(config)
    unit = config.block if config.model == GPT2 else STEP
    if most >= BLOCKS * unit:
        unit *= BLOCKS if config.model == GPT2 else 1
    low, high = 0, max(1, most // unit)  # in units: all up to ``low`` fit
    while low < high:
        middle = (low + high + 1) // 2
        need = plan(model, config, precision, middle * unit).total
        low, high = (middle, high) if need <= (1 - MARGIN) * free else (low, middle - 1)
    return max(low * unit, least)


def next_parts(config, parts):
    """Return into how many parts each batch of ``config`` is cut next, at least twice ``parts``.

    Blocks are shared out evenly, so that an update has as many as before. None: they are as small
    as can be.
    """
    if config.model == GPT2:
        rows = config.batch // config.block
        return next((n for n in range(2 * parts, rows + 1) if rows % n == 0), None)
    return 2 * parts if config.batch // (2 * parts) > config.max_len else None


def in_parts(config, parts):
    """Return the config with each batch cut into so many, for the same updates."""
    size = config.batch // parts
    if config.model == GPT2:
        size = config.batch // config.block // parts * config.block
    return dataclasses.replace(config, batch=size, accumulate=config.accumulate * parts)
