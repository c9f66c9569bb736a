"""The loss of a model's last states, from all logits at once or from slices of them."""

from typing import Any

from gpuattn import arrays
from gpuattn.arrays import on_gpu, wide
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.ops.loss.linear_cross_entropy import linear_cross_entropy, rows_at_a_time
from gpuattn.typing import Array

WHOLE_BYTES = 2 << 30  # above this size slices are as fast


def in_slices(rows: int, table: int, itemsize: int, checkpoint: str) -> bool:
    """Return whether training computes the logits (rows, table) in slices."""
    return checkpoint == "full" or rows * table * itemsize > WHOLE_BYTES


def loss_of_states(
    model: Any, states: Any, weight: Any, labels: Array, *, bias: Any = None, **settings: Any
) -> Tensor:
    """Return the mean cross-entropy of ``softmax(states @ weight.T + bias)`` and ``labels``, a
    Tensor.

    ``settings``: as of ``cross_entropy``. ``model.checkpoint`` says how much memory is spent; with
    a ``bias`` all logits exist at once.
    """
    table, itemsize = len(raw(weight)), raw(states).itemsize
    slices = not model.training or in_slices(labels.size, table, itemsize, model.checkpoint)
    if slices and bias is None:
        return linear_cross_entropy(states, weight, labels, **settings)
    return cross_entropy(linear(states, weight, bias), labels, donate=True, **settings)


def log_probabilities(
    states: Any, weight: Any, labels: Array, vocab: int, bias: Any = None
) -> Array:
    """Return the log-probability of each of the labels (N,) in ``softmax(states @ weight.T +
    bias)``.

    ``states``: (N, d_model). ``vocab``: rows of ``weight`` from it on are padding. float32 (N,), 0
    for labels to ignore. No gradients; the logits of all rows never exist at once.
    """
    x, weight = raw(states), raw(weight)
    settings: dict[str, Any] = {"vocab_size": vocab, "reduction": "none", "donate": True}
    found = arrays.empty(x, labels.shape, wide(x.dtype))
    size = rows_at_a_time(len(x), len(weight), x.itemsize, on_gpu(x))
    for begin in range(0, len(x), size):
        part = slice(begin, begin + size)
        logits = raw(linear(x[part], weight, bias))
        found[part] = -raw(cross_entropy(logits, labels[part], **settings))
    return found
