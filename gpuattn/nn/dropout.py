"""Dropout, and the random streams of its calls."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn import arrays, rng
from gpuattn.autodiff.tape import raw
from gpuattn.errors import problem
from gpuattn.nn.module import Module
from gpuattn.ops.dropout import dropout


@dataclass
class RandomState:
    """The seed of a run and the number of the update: one object shared by a whole model.

    ``step`` grows by each update: a training step, or an optimizer of the whole model, sees to
    that. It may be a one-element uint32 array on the device.
    """

    seed: int = 0
    step: Any = 0


def random_states(module: Module) -> list[RandomState]:
    """Return the RandomStates of a module and of all modules inside, each once."""
    held = [value for _, inner in module.modules() for value in vars(inner).values()]
    return list({id(v): v for v in held if isinstance(v, RandomState)}.values())


class Streams:
    """Numbers the dropout calls of a model in order of construction, one random stream for each."""

    def __init__(self, state: RandomState | None = None) -> None:
        self.state = state or RandomState(rng.fresh_seed())
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


class Dropout(Module):
    """Sets elements to zero with probability ``p`` and scales the others by 1 / (1 - p).

    The bits are a function of (seed, stream, step) and the index of the element, so recomputation
    drops the same elements. ``streams``: those of the model; by default the layer has its own.
    Raises ValueError for a ``p`` outside 0 to 1.
    """

    def __init__(self, p: float, streams: Streams | None = None) -> None:
        if not 0 <= p <= 1:
            raise ValueError(problem("Dropout", "p", p, "0 <= p <= 1"))
        streams = streams or Streams()
        self.p = float(p)
        self.random = streams.state
        self.stream = streams.next()

    def now(self) -> tuple[float, Any]:
        """Return (p, key) for an op with fused dropout: (0.0, None) outside of training."""
        if not self.training or self.p == 0:
            return 0.0, None
        return self.p, rng.Key(self.random.seed, self.stream, self.random.step)

    def __call__(self, x: Any) -> Any:
        p, key = self.now()
        return dropout(x, p, seed=key) if p else x


class StochasticDepth(Dropout):
    """Dropout of whole samples of a residual branch, (B, ...) to the same.

    Huang et al., "Deep Networks with Stochastic Depth" (2016).
    """

    def __call__(self, x: Any) -> Any:
        p, key = self.now()
        if not p:
            return x
        ones = arrays.zeros(raw(x), (len(x), *[1] * (x.ndim - 1)))
        ones += 1
        return x * dropout(ones, p, seed=key)


class LayerDrop(Dropout):
    """Leaves a whole layer out for a whole batch with probability ``p``.

    Fan et al., "Reducing Transformer Depth on Demand with Structured Dropout" (2020).
    """

    def __call__(self, before: Any, after: Any) -> Any:  # type: ignore[override]
        """Return ``before``, the input of the layer, where it is left out, else ``after``."""
        p, key = self.now()
        if not p:
            return after
        one = arrays.zeros(raw(after), (1,) * after.ndim)
        one += 1
        return np.where(raw(dropout(one, p, seed=key)) > 0, after, before)
