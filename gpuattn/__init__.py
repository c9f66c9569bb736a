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
from gpuattn.rng import manual_seed

__all__ = [
    "Tensor",
    "checkpoint",
    "debug",
    "explain",
    "get_xp",
    "grad",
    "gradcheck",
    "manual_seed",
    "no_grad",
    "stop_gradient",
    "to_cpu",
    "to_gpu",
    "use_impl",
    "value_and_grad",
]
