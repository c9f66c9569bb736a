"""Attention, fused ops and autodiff for NumPy and CuPy arrays. This list is the public API."""

from gpuattn.arrays import get_xp, to_cpu, to_gpu
from gpuattn.autodiff.functional import (
    checkpoint,
    debug,
    grad,
    gradcheck,
    no_grad,
    stop_gradient,
    value_and_grad,
)
from gpuattn.autodiff.tensor import Tensor
from gpuattn.impls import explain, use_impl
from gpuattn.ops.bias_activation import gelu, relu
from gpuattn.ops.cross_entropy import cross_entropy
from gpuattn.ops.embedding import embedding
from gpuattn.ops.flash_attention import flash_attention
from gpuattn.ops.layer_norm import layer_norm
from gpuattn.ops.linear import linear
from gpuattn.ops.scaled_dot_product_attention import scaled_dot_product_attention
from gpuattn.ops.softmax import softmax
from gpuattn.rng import manual_seed

__all__ = [
    "Tensor",
    "checkpoint",
    "cross_entropy",
    "debug",
    "embedding",
    "explain",
    "flash_attention",
    "gelu",
    "get_xp",
    "grad",
    "gradcheck",
    "layer_norm",
    "linear",
    "manual_seed",
    "no_grad",
    "relu",
    "scaled_dot_product_attention",
    "softmax",
    "stop_gradient",
    "to_cpu",
    "to_gpu",
    "use_impl",
    "value_and_grad",
]
