"""The optimizers of a flat workspace: two launches an update."""

from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.ops.update.adamw import adamw
from gpuattn.ops.update.flat_update import DECAY_BLOCK
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics
from gpuattn.ops.update.lamb import TensorTable, lamb
from gpuattn.ops.update.lion import lion
from gpuattn.ops.update.sgd import sgd


class Optimizer:
    """Base class: updates the parameters of a workspace in place from its gradients.

    ``workspace``: has flat ``masters``, ``grads``, the buffers named in ``moments``, a ``decay``
    table, and ``model`` (the 16-bit parameters, or None); see ``runtime.workspace``. Masters in
    bfloat16 are rounded stochastically, by ``seed``. ``max_norm``: clip the gradient's norm there,
    or None. ``loss_scale``, ``growth_interval``: where the loss scale starts and after how many
    clean updates it doubles (0: never moves). Raises ValueError for numbers out of range, at the
    first update.
    """

    moments: tuple[str, ...] = ()

    def __init__(
        self,
        workspace: Any,
        *,
        max_norm: float | None = None,
        loss_scale: float = 1.0,
        growth_interval: int = 0,
        seed: int = 0,
        **constants: Any,
    ) -> None:
        self.workspace = workspace
        self.statistics: dict[str, Any] = {"max_norm": max_norm, "growth_interval": growth_interval}
        self.constants = {"seed": seed, **constants}
        self.state = OptimizerState(workspace.masters, loss_scale=loss_scale)

    def step(self, learning_rate: Any, divisor: Any = None) -> None:
        """Update the parameters from the gradients in the workspace, without synchronizing.

        ``divisor``: gradients are divided by it (the number of tokens they were summed over); None
        leaves what ``state.divisor`` holds, 1 unless set.
        """
        state = self.state
        state.learning_rate = learning_rate
        if divisor is not None:
            state.divisor = divisor
        gradient_statistics(self.workspace.grads, state, **self.statistics)
        self._update()

    def __repr__(self):
        """Return the settings, the size of the buffers with their padding, and the state."""
        settings = ", ".join(f"{n}={v!r}" for n, v in (self.statistics | self.constants).items())
        masters = self.workspace.masters
        size = f"{masters.size:,} elements of {masters.dtype}"
        return f"{type(self).__name__}({settings})\n  {size}\n  {self.state!r}"

    def _buffers(self):
        """Return the first arguments of an update: parameters, gradients, moments, state."""
        w = self.workspace
        return w.masters, w.grads, *[getattr(w, name) for name in self.moments], self.state

    def _update(self):
        raise NotImplementedError


class AdamW(Optimizer):
    """AdamW. ``betas``, ``eps``, ``weight_decay``: as in ``gpuattn.ops.update.adamw.adamw``."""

    moments = ("exp_avg", "exp_avg_sq")
    decoupled = True

    def __init__(
        self,
        workspace: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-9,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(
            workspace, betas=tuple(betas), eps=eps, weight_decay=weight_decay, **common
        )

    def _update(self):
        w = self.workspace
        adamw(
            *self._buffers(), model=w.model, decay=w.decay, decoupled=self.decoupled,
            **self.constants,
        )  # fmt: skip


class Adam(AdamW):
    """Adam, where weight decay is an L2 penalty: part of the gradient."""

    decoupled = False


class Lamb(Optimizer):
    """LAMB: the ``workspace`` has ``slots`` too, {name: (start, ...)}.

    ``betas``, ``eps``, ``weight_decay``: as in ``ops.update.lamb.lamb``. Tensors that do not
    decay are not adapted.
    """

    moments = AdamW.moments

    def __init__(
        self,
        workspace: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(
            workspace, betas=tuple(betas), eps=eps, weight_decay=weight_decay, **common
        )
        starts = [slot[0] for slot in workspace.slots.values()]
        decays = to_cpu(workspace.decay)[np.array(starts) // DECAY_BLOCK]
        self.tensors = TensorTable(workspace.masters, starts, workspace.masters.size, decays)

    def _update(self):
        lamb(*self._buffers(), self.tensors, model=self.workspace.model, **self.constants)


class Lion(Optimizer):
    """Lion. ``betas``, ``weight_decay``: as in ``gpuattn.ops.update.lion.lion``."""

    moments = ("exp_avg",)

    def __init__(
        self,
        workspace: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(workspace, betas=tuple(betas), weight_decay=weight_decay, **common)

    def _update(self):
        w = self.workspace
        lion(*self._buffers(), model=w.model, decay=w.decay, **self.constants)


class SGD(Optimizer):
    """Gradient descent with momentum, whose velocity is the workspace's ``exp_avg``.

    ``momentum``, ``nesterov``, ``weight_decay``: as in ``gpuattn.ops.update.sgd.sgd``.
    """

    moments: tuple[str, ...] = ("exp_avg",)

    def __init__(
        self,
        workspace: Any,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        if not momentum:
            self.moments = ()
        common |= {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(workspace, **common)

    def _update(self):
        w = self.workspace
        *buffers, state = self._buffers()
        velocity = None if not self.moments else buffers.pop()
        sgd(*buffers, velocity, state, model=w.model, decay=w.decay, **self.constants)


OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "adam": Adam, "lamb": Lamb, "lion": Lion, "sgd": SGD}
