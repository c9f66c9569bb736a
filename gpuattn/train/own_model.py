"""``gpuattn.training_step``: a model that a program wrote itself, trained by one call an update.

``runtime.TrainingStep`` computes it, as in ``gpuattn train``; here any arrays become a batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import BFLOAT16, get_xp
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import problem, type_of
from gpuattn.nn.module import Module
from gpuattn.ops.arguments import described, integer
from gpuattn.optim.optimizers import Optimizer, listed
from gpuattn.runtime.training_step import TrainingStep
from gpuattn.typing import Array

NAME = "training_step"
ALIGN = 32  # words between starts of arrays: 128 bytes


def training_step(
    model: Module, loss: Callable[..., Tensor], optimizer: Optimizer, *, accumulate: int = 1
) -> "OwnStep":
    """Return ``step(*arrays)``: see ``gpuattn.training_step``."""
    if not isinstance(model, Module):
        raise TypeError(problem(NAME, "model", described(model), "a gpuattn.nn.Module"))
    if not callable(loss):
        accepted = "a function of the model and the arrays of a batch"
        raise TypeError(problem(NAME, "loss", described(loss), accepted))
    if not isinstance(optimizer, Optimizer):
        accepted = "one of gpuattn.optim"
        raise TypeError(problem(NAME, "optimizer", described(optimizer), accepted))
    _check_optimizer(model, optimizer)
    accumulate = integer(NAME, "accumulate", accumulate, "1 or more", 1)
    if accumulate > 1 and optimizer.workspace.grads.dtype != np.float32:
        optimizer.workspace.keep_gradients_in("float32")
    return OwnStep(model, loss, optimizer, accumulate)


class OwnStep:
    """What ``training_step`` returns. ``step``: the TrainingStep that computes."""

    def __init__(
        self, model: Module, loss: Callable[..., Tensor], optimizer: Optimizer, accumulate: int
    ) -> None:
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        called: list[bool] = []  # grows by each call of ``loss``; a replay of a graph is none
        self._called, self._unfinished = called, False

        def of_batch(batch, dloss):  # no method: a cycle of references would keep device memory
            called.append(True)
            return _checked(loss(model, *batch.arrays))

        # The default stream, on which most programs work: a stream of its own would have to wait
        # for theirs, and theirs for it, which takes 20 us an update.
        xp = get_xp(optimizer.workspace.params)
        stream = None if xp is np else xp.cuda.Stream.null
        self.step = TrainingStep(
            model, optimizer, of_batch, tokens=1, fixed_shape=packed, stream=stream
        )

    def __call__(self, *arrays: Array) -> Any:
        """Update the model by the gradient of a batch; return its loss, see ``training_step``."""
        step, optimizer = self.step, self.optimizer
        parts = self._parts(arrays)
        rate = optimizer.learning_rate()
        optimizer.check_parameters()
        self._called.clear()
        with step.ordered():
            if self._unfinished:  # a call that raised may have left a part of its loss
                step.clear_loss()
            self._unfinished = True
            step.begin(rate)
            for i, part in enumerate(parts):
                step.add(part, optimizer.updates * len(parts) + i)
            if self._called:
                optimizer.check_gradients()
            step.apply()
            loss = step.take_loss()
            self._unfinished = False
        optimizer.advance()
        return loss

    def _parts(self, arrays):
        """Return a list of ``Arrays``, one for each part of a batch."""
        for i, array in enumerate(arrays):
            if not isinstance(array, np.ndarray):
                advice = "The step copies them to the GPU itself, while the one before runs."
                got = f"a {type(array).__module__}.{type(array).__name__}"
                raise TypeError(problem(NAME, f"array {i} of a batch", got, "NumPy arrays", advice))
            if array.dtype.kind not in "biuf" and array.dtype != BFLOAT16:
                accepted = "numbers or booleans"
                raise TypeError(problem(NAME, f"array {i} of a batch", array.dtype, accepted))
            if self.accumulate > 1 and (not array.ndim or len(array) % self.accumulate):
                accepted = f"a first axis that is a multiple of accumulate, {self.accumulate}"
                got = f"of shape {array.shape}"
                raise ValueError(problem(NAME, f"array {i} of a batch", got, accepted))
        training, count = self.model.training, self.accumulate
        if count == 1:
            return [Arrays(arrays, training)]
        cut = [np.split(array, count) for array in arrays]
        return [Arrays(tuple(part[i] for part in cut), training) for i in range(count)]


def _check_optimizer(model, optimizer):
    """Raise ValueError unless the optimizer has the parameters of the model, and no others."""
    held = {id(tensor): name for name, tensor in optimizer.workspace.tensors.items()}
    own = {id(tensor): path for path, tensor in model.named_parameters()}
    foreign = [name for key, name in held.items() if key not in own]
    if foreign:
        got = f"of another model: it has {listed(foreign)}"
        accepted = f"one over the parameters of this {type(model).__name__}"
        raise ValueError(problem(NAME, "optimizer", got, accepted))
    left = [path for key, path in own.items() if key not in held]
    if left:
        raise ValueError(problem(
            NAME, "optimizer", f"without {listed(left)}", "one over all parameters of the model",
            "Set requires_grad of the others to False.",
        ))  # fmt: skip


def _checked(value):
    """Return the result of a user's loss in float32, in which the loss scale is."""
    if not isinstance(value, Tensor) or value.shape != ():
        shape = getattr(value, "shape", None)
        got = described(value) if shape is None else f"{type_of(value)} of shape {shape}"
        advice = "Compute it from the model's results, and reduce it with np.mean."
        accepted = "a Tensor of shape ()"
        raise TypeError(problem(NAME, "the result of loss", got, accepted, advice))
    return value if value.dtype == np.float32 else value.astype(np.float32)


# ---- batches ----


@dataclass(frozen=True)
class Arrays:
    """A batch of any arrays, and the mode of the model for it.

    Batches are of equal weight, so each counts as one target token.
    """

    arrays: tuple[Array, ...]
    training: bool

    target_tokens = 1


@dataclass(frozen=True)
class Words:
    """The same with the arrays end to end in one of 32-bit words, as ``runtime.feed`` takes them.

    ``kinds``: (shape, dtype) of each array.
    """

    words: Array
    kinds: tuple[tuple[tuple[int, ...], np.dtype], ...]
    training: bool

    @property
    def limits(self) -> Any:
        """What a graph depends on."""
        return self.kinds, self.training

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays: views of ``words``."""
        return tuple(
            self.words[begin:end].view(np.uint8)[:size].view(dtype).reshape(shape)
            for (shape, dtype), (begin, end, size) in zip(
                self.kinds, _places(self.kinds), strict=True
            )
        )


def packed(batch: Arrays) -> Words:
    """Return a batch of NumPy arrays as ``Words``."""
    kinds = tuple((array.shape, array.dtype) for array in batch.arrays)
    places = list(_places(kinds))
    words = np.zeros(places[-1][1] if places else 0, np.int32)
    for array, (begin, end, size) in zip(batch.arrays, places, strict=True):
        own = words[begin:end].view(np.uint8)[:size]
        own[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Words(words, kinds, batch.training)


def _places(kinds):
    """Yield (first word, word after the last, bytes) of each array."""
    begin = 0
    for shape, dtype in kinds:
        size = math.prod(shape) * dtype.itemsize
        end = begin + -(-size // (4 * ALIGN)) * ALIGN
        yield begin, end, size
        begin = end
