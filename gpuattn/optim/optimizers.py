"""The optimizers: a model's parameters in one flat workspace, two launches an update."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, keep_freed_memory, on_gpu, to_cpu
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import CheckpointError, GradientError, problem
from gpuattn.nn.dropout import random_states
from gpuattn.nn.module import Module
from gpuattn.ops.arguments import described, number
from gpuattn.ops.update.adamw import adamw
from gpuattn.ops.update.flat_update import DECAY_BLOCK
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics
from gpuattn.ops.update.lamb import TensorTable, lamb
from gpuattn.ops.update.lion import lion
from gpuattn.ops.update.sgd import sgd
from gpuattn.runtime import precision as precisions
from gpuattn.runtime.workspace import Workspace
from gpuattn.tensor_file import differences
from gpuattn.typing import Array

SHOWN = 4  # names in a message
STATE, UPDATES = "optimizer:state", "optimizer:updates"  # in a state_dict, beside the parameters


class Optimizer:
    """Base class: updates parameters in place, all of them in two launches.

    ``model``: a Module, or Tensors with ``requires_grad``, in float32. Their values move into the
    flat buffers of a new ``Workspace`` on the device where they are, so move a model before. A
    ``Workspace`` is taken as it is. Weight decay applies to parameters with two axes or more. The
    dropout of a Module is numbered by its updates; with Tensors alone, all drop the same elements.
    ``lr``: the learning rate, or a function of the update's number from 0 on, such as a
    ``Schedule``; an attribute that may be changed. None: each ``step`` is given one.
    ``max_norm``: clip the gradient's norm there, or None.
    ``precision``: of parameters and activations from now on: "fp32", "bf16", "fp16", "pure-bf16"
    (updates are rounded stochastically, by ``seed``) or "auto": bf16 on a GPU. Others than
    pure-bf16 keep float32 masters. NumPy computes in float32.
    ``loss_scale``, ``growth_interval``: where the loss scale starts and after how many clean
    updates it doubles (0: never moves); by default as the precision needs it.

    Raises TypeError or ValueError for no parameters, or others than these; for constants out of
    range at the first update.

    >>> import numpy as np
    >>> from gpuattn import nn, optim
    >>> line = nn.Linear(1, 1)
    >>> optimizer = optim.AdamW(line, lr=0.1)
    >>> x = np.linspace(0, 1, 16, dtype="float32").reshape(-1, 1)
    >>> for _ in range(200):
    ...     loss = np.mean((line(x) - 3 * x) ** 2)
    ...     loss.backward()
    ...     optimizer.step()
    >>> loss.item() < 1e-3
    True
    """

    moments: tuple[str, ...] = ()

    def __init__(
        self,
        model: Any,
        *,
        lr: float | Callable[[int], float] | None = None,
        max_norm: float | None = None,
        precision: str | None = None,
        loss_scale: float | None = None,
        growth_interval: int | None = None,
        seed: int = 0,
        **constants: Any,
    ) -> None:
        name = type(self).__name__
        if lr is not None and not callable(lr):
            accepted = "0 or more, or a function of the update's number"
            number(name, "lr", lr, accepted, lambda rate: 0 <= rate < math.inf)
        self.lr, self.updates = lr, 0
        self.workspace, chosen = _workspace(name, model, precision, self.moments)
        scale = chosen.loss_scale if loss_scale is None else loss_scale
        interval = chosen.growth_interval if growth_interval is None else growth_interval
        self.statistics: dict[str, Any] = {"max_norm": max_norm, "growth_interval": interval}
        self.constants = constants
        if self.workspace.masters.dtype != np.float32:  # weights are rounded stochastically
            self.constants = {"seed": seed, **constants}
        self.state = OptimizerState(self.workspace.masters, loss_scale=scale)
        self.norms: Callable[[], Array] | None = None  # of all parts, where each is elsewhere
        self._random = random_states(model) if isinstance(model, Module) else []

    # ---- an update ----

    def step(self, learning_rate: Any = None, divisor: Any = 1) -> None:
        """Update the parameters from their gradients, which the next ``backward`` overwrites.

        ``learning_rate``: instead of ``lr``. ``divisor``: gradients are divided by it, such as the
        number of ``backward`` calls they are summed over. With a loss scale, call
        ``loss.backward(optimizer.loss_scale)``. Nothing synchronizes. Gradients with inf or NaN
        leave the parameters as they are, and ``state.skipped`` counts them.
        Raises GradientError for parameters without a gradient.
        """
        rate = self.learning_rate() if learning_rate is None else learning_rate
        self.check_gradients()
        self.update(rate, divisor)
        self.advance()

    @property
    def loss_scale(self) -> Array:
        """What the loss must be multiplied by before backward: live, () float32 on the device."""
        return self.state.field("loss_scale")

    def zero_grad(self) -> None:
        """Drop all gradients without an update."""
        self.workspace.begin()

    # ---- its parts, for a step that is captured as a graph ----

    def learning_rate(self) -> float:
        """Return the learning rate of the next update. Raises ValueError if ``lr`` is None."""
        if self.lr is None:
            name = type(self).__name__
            advice = f"Try {name}(model, lr=1e-3), or step(learning_rate=1e-3)."
            raise ValueError(problem(name, "lr", None, "a number or an optim.Schedule", advice))
        return self.lr(self.updates) if callable(self.lr) else self.lr

    def check_parameters(self) -> None:
        """Raise GradientError unless the parameters are still in the workspace."""
        if not self.workspace.holds_parameters():
            raise GradientError(
                f"{type(self).__name__}: the parameters are no longer in its buffers: another "
                "optimizer has taken them, or their data was replaced. Use the newest optimizer of "
                "a model"
            )

    def check_gradients(self) -> None:
        """Raise GradientError unless each parameter has a gradient in the workspace."""
        self.check_parameters()
        name, idle = type(self).__name__, self.workspace.idle()
        if len(idle) == len(self.workspace.tensors):
            raise GradientError(
                f"{name}: no parameter has a gradient; accepted: one for each. Call "
                "loss.backward() first, with a loss of this model"
            )
        if idle:
            raise GradientError(
                f"{name}: no gradient has reached {listed(idle)}; accepted: one for each. Use it "
                "in the loss, or set its requires_grad to False before the optimizer is made"
            )

    def update(self, learning_rate: Any, divisor: Any = None) -> None:
        """Update the parameters from the gradients in the workspace, and do nothing else.

        ``divisor``: None leaves what ``state.divisor`` holds, 1 unless set.
        """
        state = self.state
        state.learning_rate = learning_rate
        if divisor is not None:
            state.divisor = divisor
        grads = self.workspace.grads if self.norms is None else self.norms()
        gradient_statistics(grads, state, **self.statistics)
        self._update()

    def advance(self) -> None:
        """Count an update: its gradients are used, and the dropout of the next one is numbered."""
        for tensor in self.workspace.tensors.values():
            tensor.grad_started = False
        self._count(self.updates + 1)

    def _count(self, updates):
        self.updates = updates
        for random in self._random:
            random.step = updates

    # ---- its state ----

    def state_dict(self) -> dict[str, Any]:
        """Return {name: NumPy array or number} of what an exact continuation needs. Synchronizes.

        The parameters are in it, by their paths and in the masters' dtype. Files of it:
        ``runtime.checkpoint.save(folder, "state", optimizer.state_dict())``.
        """
        arrays = {**self.workspace.state_dict(), STATE: self.state.array}
        copies = {name: to_cpu(array.copy()) for name, array in arrays.items()}
        return copies | {UPDATES: self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``, parameters included: all of it, or nothing.

        Raises CheckpointError that names what is missing, unknown, or of another shape or dtype.
        """
        given = {name: to_cpu(value) for name, value in state.items()}
        counts = {STATE: self.state.array, UPDATES: np.asarray(self.updates)}
        wrong = differences({**self.workspace.state_dict(), **counts}, given)
        if wrong:
            name = type(self).__name__
            raise CheckpointError(f"{name}: the state is of another model or optimizer: {wrong}")
        self._count(int(given.pop(UPDATES)))
        self.state.array[...] = get_xp(self.state.array).asarray(given.pop(STATE))
        self.workspace.load_state_dict(given)

    def __repr__(self):
        """Return the settings, the size of the buffers with their padding, and the state."""
        settings = {"lr": self.lr} if self.lr is not None else {}
        settings |= self.statistics | self.constants
        shown = ", ".join(f"{n}={v!r}" for n, v in settings.items())
        masters = self.workspace.masters
        size = f"{masters.size:,} elements of {masters.dtype}"
        return f"{type(self).__name__}({shown})\n  {size}\n  {self.state!r}"

    def _buffers(self):
        """Return the first arguments of an update: parameters, gradients, moments, state."""
        w = self.workspace
        return w.masters, w.my_grads, *[getattr(w, name) for name in self.moments], self.state

    def _launches(self):
        """Yield the arguments of each launch of an update: buffers, and the others by name.

        There is one launch. Where only a part of the masters is held, its pieces of the 16-bit
        parameters lie apart, and each piece has a launch of its own.
        """
        w, (*buffers, state) = self.workspace, self._buffers()
        if w.part is None or w.model is None:
            yield (*buffers, state), {"model": w.model, "decay": w.decay}
            return
        for place, mine in zip(w.places, w.my_params, strict=True):
            blocks = slice(place.start // DECAY_BLOCK, place.stop // DECAY_BLOCK)
            yield (*[x[place] for x in buffers], state), {"model": mine, "decay": w.decay[blocks]}

    def _update(self):
        raise NotImplementedError


class _Tensors:
    """Tensors as a module, whose paths are their numbers."""

    def __init__(self, function: str, tensors: Iterable) -> None:
        accepted = "a Module, or Tensors with requires_grad"
        if not isinstance(tensors, Iterable) or isinstance(tensors, Tensor | Mapping):
            advice = "Put it into a list." if isinstance(tensors, Tensor) else ""
            raise TypeError(problem(function, "model", described(tensors), accepted, advice))
        self.tensors: dict[int, Tensor] = {}
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                got = f"holding {described(tensor)}"
                raise TypeError(problem(function, "model", got, accepted))
            if tensor.node is not None or not tensor.requires_grad:
                got = f"holding {'a result' if tensor.node else 'a Tensor without requires_grad'}"
                raise ValueError(problem(function, "model", got, accepted))
            self.tensors[id(tensor)] = tensor

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for i, tensor in enumerate(self.tensors.values()):
            yield str(i), tensor


def _workspace(
    function: str, model: Any, precision: str | None, moments: tuple[str, ...]
) -> tuple[Any, precisions.Precision]:
    """Return (Workspace, Precision) of an optimizer's first argument."""
    if hasattr(model, "masters"):
        if precision is not None:
            accepted = "None: a Workspace has its dtype already"
            raise ValueError(problem(function, "precision", repr(precision), accepted))
        return model, precisions.PRECISIONS["fp32"]  # for its loss scale, 1
    module: Any = model if isinstance(model, Module) else _Tensors(function, model)
    parameters = [tensor for _, tensor in module.named_parameters()]
    if not parameters:
        accepted = "a Module with Tensors that require a gradient among its attributes, or Tensors"
        got = f"{described(model)} without parameters"
        raise ValueError(problem(function, "model", got, accepted))
    device = "cuda" if on_gpu(parameters[0].data) else "numpy"
    if device == "numpy":
        keep_freed_memory()
    chosen = precisions.choose(precision or "fp32", device)
    workspace = Workspace(module, device, chosen.dtype, moments=moments, masters=chosen.masters)
    return workspace, chosen


def listed(names: list[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class AdamW(Optimizer):
    """AdamW. ``betas``, ``eps``, ``weight_decay``: as in ``gpuattn.ops.update.adamw.adamw``."""

    moments = ("exp_avg", "exp_avg_sq")
    decoupled = True

    def __init__(
        self,
        model: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-9,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(model, betas=tuple(betas), eps=eps, weight_decay=weight_decay, **common)

    def _update(self):
        for buffers, others in self._launches():
            adamw(*buffers, **others, decoupled=self.decoupled, **self.constants)


class Adam(AdamW):
    """Adam, where weight decay is an L2 penalty: part of the gradient."""

    decoupled = False


class Lamb(Optimizer):
    """LAMB: the step of each parameter is adapted to its norm.

    ``betas``, ``eps``, ``weight_decay``: as in ``ops.update.lamb.lamb``. Tensors that do not
    decay are not adapted.
    """

    moments = AdamW.moments

    def __init__(
        self,
        model: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(model, betas=tuple(betas), eps=eps, weight_decay=weight_decay, **common)
        w = self.workspace
        starts = [slot[0] for slot in w.slots.values()]
        decays = to_cpu(w.decay)[np.array(starts) // DECAY_BLOCK]
        self.tensors = TensorTable(w.masters, starts, w.masters.size, decays)

    def _update(self):
        lamb(*self._buffers(), self.tensors, model=self.workspace.model, **self.constants)


class Lion(Optimizer):
    """Lion. ``betas``, ``weight_decay``: as in ``gpuattn.ops.update.lion.lion``."""

    moments = ("exp_avg",)

    def __init__(
        self,
        model: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(model, betas=tuple(betas), weight_decay=weight_decay, **common)

    def _update(self):
        for buffers, others in self._launches():
            lion(*buffers, **others, **self.constants)


class SGD(Optimizer):
    """Gradient descent with momentum, whose velocity is the workspace's ``exp_avg``.

    ``momentum``, ``nesterov``, ``weight_decay``: as in ``gpuattn.ops.update.sgd.sgd``.
    """

    moments: tuple[str, ...] = ("exp_avg",)

    def __init__(
        self,
        model: Any,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        if not momentum:
            self.moments = ()
        common |= {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(model, **common)

    def _update(self):
        for (params, grads, *velocity, state), others in self._launches():
            sgd(params, grads, *velocity or [None], state, **others, **self.constants)


OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "adam": Adam, "lamb": Lamb, "lion": Lion, "sgd": SGD}
