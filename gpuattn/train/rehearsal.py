"""The kernels of evaluations compile while the first updates of a run do, or run."""

import copy
from typing import Any

from gpuattn.nn.module import uninitialised
from gpuattn.runtime.cold_start import rehearse
from gpuattn.runtime.feed import DeviceFeed
from gpuattn.tasks.task import Task


def rehearse_evaluation(task: Task) -> None:
    """Start to compile the kernels that an evaluation launches, and prepare what else it needs.

    For a thread of its own: another one trains the model of ``task`` meanwhile, so this calls one
    that is not in training, with the same parameters.
    """
    other = _in_evaluation(task)
    feed = DeviceFeed(task.fixed_shape)
    shapes: set[Any] = set()

    def loss_of(batch):
        feed.load(batch, tokens=batch.target_tokens)
        if feed.shape not in shapes:
            shapes.add(feed.shape)
            with other.model.evaluating():
                rehearse(lambda: other.loss(feed.batch))

    for number, batch in enumerate(other.corpus.valid_batches()):  # the last may be smaller
        loss_of(batch)
        if number == 0:
            rehearse(lambda: other.answers(other.user))
            task.prepare_evaluation()


def _in_evaluation(task):
    other = copy.copy(task)
    with uninitialised():
        other.model = type(task.model)(task.model.config).eval()
    other.model.checkpoint = task.model.checkpoint
    named = zip(task.model.named_tensors(), other.model.named_tensors(), strict=True)
    for (_, own), (_, same) in named:
        same.data = own.data
    other.user = task.new_user(task.config, other.model, task.corpus.tokenizer)
    return other
