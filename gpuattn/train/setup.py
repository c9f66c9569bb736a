"""What a Trainer computes with: the workspace of its model, the optimizer, the sum over ranks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gpuattn.optim import OPTIMIZERS, AdamW
from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.exchange import Exchange
from gpuattn.parallel.outer import Outer
from gpuattn.runtime.precision import Precision
from gpuattn.runtime.workspace import Workspace
from gpuattn.tasks.task import Task
from gpuattn.train.sharding import Sharing


class Setup(NamedTuple):
    """``exchange``: sums gradients over ranks, or None. ``outer``: the step of replicas that update
    alone, or None."""

    workspace: Workspace
    optimizer: Any
    exchange: Exchange | None
    outer: Outer | None

    def waited(self, ranks: Communicator) -> Callable[[], float] | None:
        """Return a function of the seconds that this rank has waited for others so far.

        None where they are not known: for ranks of GPUs with an ``outer``.
        """
        if self.exchange:
            return self.exchange.waited
        known = self.outer and isinstance(self.workspace.params, np.ndarray)
        return (lambda: ranks.waited) if known else None


def setup(
    task: Task, device: str, precision: Precision, ranks: Communicator, sharing: Sharing | None
) -> Setup:
    """Return the Setup for a task. ``sharing``: as of a Trainer."""
    config, model = task.config, task.model
    for _, module in model.modules():
        module.deterministic = config.deterministic
    kind = OPTIMIZERS[config.optimizer]
    betas = {"betas": (0.9, config.beta2)} if issubclass(kind, AdamW) else {}
    workspace = Workspace(
        model, device, precision.dtype, precision.grad_dtype(config.update_batches),
        moments=kind.moments, masters=precision.masters,
        parts=sharing.parts if sharing else ranks.size, part=sharing.part if sharing else None,
    )  # fmt: skip
    optimizer = kind(
        workspace, weight_decay=config.weight_decay, max_norm=config.clip or None,
        loss_scale=precision.loss_scale, growth_interval=precision.growth_interval,
        seed=config.seed, **betas,
    )  # fmt: skip
    exchange = outer = None
    if config.outer_every:
        outer = Outer(optimizer, ranks, config.outer_every, config.deterministic)
    elif ranks.size > 1:
        groups = (sharing.group, sharing.across) if sharing else ()
        exchange = Exchange(optimizer, ranks, config.deterministic, *groups)
    return Setup(workspace, optimizer, exchange, outer)
