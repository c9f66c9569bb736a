"""Evaluation of other weights than those of the last update, by all ranks."""

from collections.abc import Callable
from typing import Any

from gpuattn.parallel.agreement import together
from gpuattn.train.trainer import Trainer
from gpuattn.train.validation import by_all_ranks


def evaluated_with(
    trainer: Trainer, evaluate: Callable[[], Any], load: Callable[[], None] = lambda: None
) -> Any:
    """Return ``evaluate()`` of rank 0, which all ranks call with the weights that its ``load()``
    has put into the workspace. Then each rank has its own again; the moving average is gone.

    No rank holds a part of the weights alone: see ``sharding``.
    """
    ranks, workspace = trainer.communicator, trainer.workspace
    own = workspace.masters.copy()
    trainer.step.average = None
    together(ranks, load)
    ranks.broadcast(workspace.masters)
    workspace.sync_model()
    row = by_all_ranks(trainer, evaluate)
    workspace.masters[...] = own
    workspace.sync_model()
    return row
