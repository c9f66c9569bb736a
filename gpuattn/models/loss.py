"""The loss of a model's last states, from all logits at once or from slices of them."""

from typing import Any

from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.ops.loss.linear_cross_entropy import linear_cross_entropy
from gpuattn.typing import Array

WHOLE_BYTES = 2 << 30  # above this size slices are as fast


def in_slices(rows: int, table: int, itemsize: int, checkpoint: str) -> bool:
    """Return whether training computes the logits (rows, table) in slices."""
    return checkpoint == "full" or rows * table * itemsize > WHOLE_BYTES


def loss_of_states(model: Any, states: Any, weight: Any, labels: Array, **settings: Any) -> Tensor:
    """Return the mean cross-entropy of ``softmax(states @ weight.T)`` and ``labels``, a Tensor.

    ``settings``: as of ``cross_entropy``. ``model.checkpoint`` says how much memory is spent.
    """
    table, itemsize = len(raw(weight)), raw(states).itemsize
    if not model.training or in_slices(labels.size, table, itemsize, model.checkpoint):
        return linear_cross_entropy(states, weight, labels, **settings)
    return cross_entropy(linear(states, weight), labels, donate=True, **settings)
