"""The memory of training, computed before it begins, and batches that fit a GPU.

The config of a model knows what its activations take: ``models.memory``.
"""

import dataclasses
import os
from typing import Any, NamedTuple

from gpuattn.errors import MemoryLimitError
from gpuattn.models.kinds import MODELS
from gpuattn.optim import OPTIMIZERS
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime.precision import Precision
from gpuattn.tasks.registry import task_of

LIBRARY_BYTES = 224 << 20  # workspaces of matrix products, and those of choosing their algorithms
FREE_SHARE = 0.1  # of the free memory that stays free: a pool's blocks leave gaps
LEAST_UPDATES = 16  # an epoch
MOST_TOKENS = 1 << 19  # an update, as GPT-2 was trained


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

    def describe(self, card: int, free: float = float("inf")) -> str:
        """Return a line for the head of a run; ``card``: bytes of the GPU, ``free``: of these."""
        text = (
            f"{gigabytes(self.state)} parameters and optimizer + {gigabytes(self.activations)} "
            f"activations + {gigabytes(self.beside)} to evaluate and for new shapes, of "
            f"{gigabytes(card)}"
        )
        if self.total <= free:
            return text
        return (
            f"{text}: more than the {gigabytes(free)} that are free. Where memory runs out, "
            "batches are cut in parts, for the same updates; --batch auto chooses one that fits"
        )


def gigabytes(count: float) -> str:
    """Return bytes as text, such as "6.2 GB"."""
    return f"{count / 1e9:,.1f} GB"


def plan(
    model: Any, config: TrainConfig, precision: Precision, tokens: int | None = None,
    parts: int = 1,
) -> MemoryPlan:  # fmt: skip
    """Return the MemoryPlan of a run that trains ``model`` as a TrainConfig says.

    ``tokens``: of a batch; those of the config unless given. ``parts``: into how many ranks share
    masters, moments and averages.
    """
    tokens, itemsize = tokens or int(config.batch), 4 if precision.dtype == "float32" else 2
    parameters = sum(parameter.size for parameter in model.parameters())
    masters = 4 if precision.masters and itemsize < 4 else 0
    gradient = 4 if precision.grad_dtype(config.update_batches) == "float32" else 2
    moments = 4 * len(OPTIMIZERS[config.optimizer].moments)
    average = 4 if config.ema else 0
    state = parameters * (itemsize + gradient)
    state += -(-parameters * (masters + moments + average) // parts)
    if parts > 1:  # its pieces of gradients side by side, and copies of float32 parameters
        state += -(-parameters * (gradient + (0 if masters else itemsize)) // parts)
    state += (sum(t.size for _, t in model.named_tensors()) - parameters) * itemsize  # frozen
    sizes = model.config
    activations = LIBRARY_BYTES + sizes.activation_bytes(tokens, itemsize, config.checkpoint)
    beside = sizes.evaluation_bytes(tokens, itemsize)
    if config.ema:
        beside += parameters * (masters or itemsize) // parts  # while the average replaces them
    if config.outer_every:  # where replicas start, their velocity; and their change
        state += 8 * parameters
    if parts > 1 or config.outer_every:
        beside = max(beside, 4 * parameters)  # one buffer of all parts, or a change
    if not task_of(config).one_shape(config):
        beside = max(beside, activations)
    return MemoryPlan(state, activations, beside)


# ---- models that fit the host ------------------------------------------------------------------


def check_host(config: TrainConfig, device: str) -> None:
    """Raise MemoryLimitError when a model is larger than the memory of this machine.

    ``device``: "numpy", where the optimizer's state is in that memory too, or "cuda". A lower
    bound is compared: the matrices of the layers, with the copy of the state that saves write.
    """
    average = 4 if config.ema else 0  # bytes of a parameter
    master = 2 if config.precision == "pure-bf16" else 4
    each = copied = master + 4 * len(OPTIMIZERS[config.optimizer].moments) + average
    if device == "numpy":
        each += copied + 4 + average  # the state itself, gradients, scratch of the average
    count, memory = layer_weights(config), host_memory()
    if each * count > memory:
        raise MemoryLimitError(
            f"a model larger than memory: its layers have {count / 1e6:,.0f} M parameters, which "
            f"take {gigabytes(each * count)} with the copy to save; this machine has "
            f"{gigabytes(memory)}. Try a smaller --dim or fewer --layers"
        )


def layer_weights(config: TrainConfig) -> int:
    """Return the number of elements in the matrices of all layers of a TrainConfig's model."""
    any_vocab = 1  # before data are read
    return MODELS[config.model].configure(config, any_vocab).layer_weights()


def host_memory() -> float:
    """Return the bytes of this machine's memory, infinity where they are unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows
        return float("inf")


# ---- batches that fit --------------------------------------------------------------------------


def least_tokens(config: TrainConfig) -> int:
    """Return the tokens of the smallest batch that a run can have."""
    return task_of(config).least_tokens(config)


def check_fits(
    model: Any, config: TrainConfig, precision: Precision, free: int, parts: int = 1
) -> None:
    """Raise MemoryLimitError when the smallest batch does not fit ``free`` bytes; see ``plan``."""
    least = plan(model, config, precision, least_tokens(config), parts)
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
    yield task_of(config).smaller


def nothing_smaller(config: TrainConfig, update: int, short: str) -> str:
    """Return the sentence for a run that cannot continue after ``update``; ``short``: its error."""
    least = task_of(config).describe_least(config)
    return (
        f"memory is used up ({short}) by a batch of {least} tokens, the smallest possible; all is "
        f"saved after update {update:,}. Continue with --checkpoint full or with more free memory, "
        f"or begin another run with {'; '.join(_remedies(config))}"
    )


def fit(
    model: Any, config: TrainConfig, precision: Precision, free: int, epoch_tokens: int,
    parts: int = 1,
) -> int:  # fmt: skip
    """Return the most tokens of a batch whose MemoryPlan fits ``free`` bytes less FREE_SHARE.

    An epoch of ``epoch_tokens`` has at least LEAST_UPDATES updates, and an update at most
    MOST_TOKENS: beyond some size a larger batch saves no updates (McCandlish et al., "An Empirical
    Model of Large-Batch Training", 2018).
    """
    most = min(epoch_tokens // LEAST_UPDATES, MOST_TOKENS) // config.update_batches
    least = least_tokens(config)
    unit = task_of(config).unit(config, most)
    low, high = 0, max(1, most // unit)  # in units; up to ``low`` they fit
    while low < high:
        middle = (low + high + 1) // 2
        need = plan(model, config, precision, middle * unit, parts).total
        low, high = (middle, high) if need <= (1 - FREE_SHARE) * free else (low, middle - 1)
    return max(low * unit, least)


def next_parts(config: TrainConfig, parts: int) -> int | None:
    """Return into how many parts to cut each batch of ``config`` next, at least twice ``parts``.

    None: no smaller part is possible.
    """
    return task_of(config).next_parts(config, parts)


def in_parts(config: TrainConfig, parts: int) -> TrainConfig:
    """Return the config with each batch cut into ``parts``, for the same updates."""
    tokens = task_of(config).part_tokens(config, parts)
    return dataclasses.replace(config, batch=tokens, accumulate=config.accumulate * parts)
