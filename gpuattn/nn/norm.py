"""Normalisation, alone or fused with the residual connection before it."""

from typing import Any

from gpuattn.nn.module import Module, check_sizes, constant
from gpuattn.ops.linear.linear_dropout_add_norm import linear_dropout_add_norm
from gpuattn.ops.norm.dropout_add_norm import norm_and_residual
from gpuattn.ops.norm.layer_norm import layer_norm
from gpuattn.ops.norm.rms_norm import rms_norm
from gpuattn.typing import Array


class LayerNorm(Module):
    """Rows of width ``width`` to mean 0 and variance 1, then ``* weight + bias``.

    Ba, Kiros and Hinton, "Layer Normalization" (2016).
    """

    def __init__(self, width: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        check_sizes("LayerNorm", width=width)
        self.weight = constant(1, width)
        self.bias = constant(0, width) if bias else None
        self.eps = eps

    def __call__(self, x: Any) -> Any:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def and_residual(self, x: Array) -> tuple[Any, Any]:
        """Return (norm(x), x); the backward pass adds both gradients in one launch."""
        return norm_and_residual(x, self.weight, self.bias, norm="layer", eps=self.eps)

    def add(
        self, x: Array, out: Any, residual: Any, dropout: Any, donate: bool = False
    ) -> tuple[Any, Any]:  # fmt: skip
        """Return (norm(h), h) for h = residual + dropout(out(x)), in one pass.

        ``out``, ``dropout``: the Linear and Dropout modules at the end of the branch. ``donate``:
        as of ``linear_dropout_add_norm``.
        """
        p, key = dropout.now()
        return linear_dropout_add_norm(
            x, out.weight, residual, self.weight, self.bias, projection_bias=out.bias, p=p,
            seed=key, norm="layer", eps=self.eps, donate=donate,
        )  # fmt: skip


class RMSNorm(Module):
    """Rows of width ``width`` to mean square 1, then ``* weight``.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        check_sizes("RMSNorm", width=width)
        self.weight = constant(1, width)
        self.eps = eps

    def __call__(self, x: Any) -> Any:
        return rms_norm(x, self.weight, eps=self.eps)

    def and_residual(self, x: Array) -> tuple[Any, Any]:
        """Return (norm(x), x) as ``LayerNorm.and_residual`` does."""
        return norm_and_residual(x, self.weight, norm="rms", eps=self.eps)

    def add(
        self, x: Array, out: Any, residual: Any, dropout: Any, donate: bool = False
    ) -> tuple[Any, Any]:  # fmt: skip
        """Return (norm(h), h) as ``LayerNorm.add`` does."""
        p, key = dropout.now()
        return linear_dropout_add_norm(
            x, out.weight, residual, self.weight, projection_bias=out.bias, p=p, seed=key,
            norm="rms", eps=self.eps, donate=donate,
        )  # fmt: skip
