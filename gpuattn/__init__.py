"""Attention, fused ops and autodiff for NumPy and CuPy arrays. This list is the public API.

Layers are in ``gpuattn.nn``, models in ``gpuattn.models``, optimizers in ``gpuattn.optim``;
how to decode, in the modules of ``gpuattn.decode``. ``load_run`` opens a trained model.
"""

import importlib

import gpuattn.environment  # noqa: F401  before what imports NumPy
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
from gpuattn.ops.attention.append_kv import append_kv
from gpuattn.ops.attention.decode_attention import decode_attention
from gpuattn.ops.attention.flash_attention import flash_attention
from gpuattn.ops.attention.scaled_dot_product_attention import scaled_dot_product_attention
from gpuattn.ops.dropout import dropout
from gpuattn.ops.embedding import embedding
from gpuattn.ops.linear.bias_activation import gelu, relu, swiglu
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.linear.linear_dropout_add_norm import linear_dropout_add_norm
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.ops.loss.linear_cross_entropy import linear_cross_entropy
from gpuattn.ops.norm.dropout_add_norm import dropout_add_norm
from gpuattn.ops.norm.layer_norm import layer_norm
from gpuattn.ops.norm.rms_norm import rms_norm
from gpuattn.ops.rotary import rotary
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.sample_tokens import sample_tokens
from gpuattn.ops.sampling.topk_logprobs import topk_logprobs
from gpuattn.ops.softmax import softmax
from gpuattn.ops.update.adamw import adamw
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics
from gpuattn.ops.update.lamb import TensorTable, lamb
from gpuattn.ops.update.lion import lion
from gpuattn.ops.update.sgd import sgd
from gpuattn.rng import manual_seed

MODULES = ("models", "nn", "optim", "runtime")  # imported when first asked for

__all__ = [
    "OptimizerState",
    "Tensor",
    "TensorTable",
    "adamw",
    "append_kv",
    "beam_step",
    "checkpoint",
    "cross_entropy",
    "debug",
    "decode_attention",
    "dropout",
    "dropout_add_norm",
    "embedding",
    "explain",
    "flash_attention",
    "gelu",
    "get_xp",
    "grad",
    "gradcheck",
    "gradient_statistics",
    "lamb",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_dropout_add_norm",
    "lion",
    "load_run",
    "manual_seed",
    "no_grad",
    "relu",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "scaled_dot_product_attention",
    "sgd",
    "softmax",
    "stop_gradient",
    "swiglu",
    "to_cpu",
    "to_gpu",
    "topk_logprobs",
    "use_impl",
    "value_and_grad",
]


def __getattr__(name):
    """Import on first use what most programs do not need."""
    if name in MODULES:
        return importlib.import_module(f"gpuattn.{name}")
    if name == "load_run":
        return importlib.import_module("gpuattn.runs.folder").load_run
    if name == "__version__":
        return importlib.import_module("gpuattn.version").version()
    raise AttributeError(f"module 'gpuattn' has no attribute {name!r}")


def __dir__():
    """Return what is public: no module that holds parts of it."""
    return sorted([*__all__, *MODULES, "__version__"])
