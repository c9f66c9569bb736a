"""Linear layers."""

from typing import Any

import numpy as np

from gpuattn.nn.module import Module, check_sizes, constant, generator, xavier_uniform
from gpuattn.ops.linear.bias_activation import silu, swiglu
from gpuattn.ops.linear.linear import linear
from gpuattn.typing import Array

UNFUSED_ACTIVATIONS = {"silu": silu, "swiglu": swiglu}
"""Activations that are not fused into the matmul."""


class Linear(Module):
    """``activation(x @ weight.T + bias)``: (..., inputs) to (..., outputs).

    ``weight``: (outputs, inputs). ``activation``: None, "relu", "gelu" (tanh form) or "gelu_exact".

    >>> import numpy as np
    >>> Linear(3, 5)(np.ones((2, 4, 3), "float32")).shape
    (2, 4, 5)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        activation: str | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        check_sizes("Linear", inputs=inputs, outputs=outputs)
        self.weight = xavier_uniform(generator(rng), (outputs, inputs))
        self.bias = constant(0, outputs) if bias else None
        self.activation = activation

    def __call__(self, x: Any, first: int = 0) -> Any:
        """Return the outputs from number ``first`` on, (..., outputs - first)."""
        weight, bias = self.weight, self.bias
        if first:
            weight, bias = weight[first:], None if bias is None else bias[first:]
        return linear(x, weight, bias, activation=self.activation)


class FeedForward(Module):
    """Two linear layers with an activation between them: (..., width) to (..., width).

    ``activation``: "relu", "gelu" (tanh form), "gelu_exact", "silu" or "swiglu", whose first layer
    is twice as wide, for the gate. Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "relu",
        bias: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        check_sizes("FeedForward", width=width, hidden=hidden)
        rng = generator(rng)
        self.unfused: Any = UNFUSED_ACTIVATIONS.get(activation)
        inner = 2 * hidden if activation == "swiglu" else hidden
        fused = None if self.unfused else activation
        self.inner = Linear(width, inner, bias=bias, activation=fused, rng=rng)
        self.out = Linear(hidden, width, bias=bias, rng=rng)

    def __call__(self, x: Any) -> Any:
        return self.out(self.activated(x))

    def activated(self, x: Array) -> Any:
        """Return the input of ``out`` for ``x``."""
        if self.unfused is None:
            return self.inner(x)
        return self.unfused(linear(x, self.inner.weight), self.inner.bias)
