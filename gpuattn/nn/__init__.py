"""Layers: modules whose calls run the fused ops, on packed tokens or batches.

Sizes of layers are integers: TypeError for others, ValueError below 1.
"""

from gpuattn.nn.attention import KeyValueCache, MemoryProjection, MultiHeadAttention
from gpuattn.nn.dropout import Dropout, LayerDrop, RandomState, StochasticDepth, Streams
from gpuattn.nn.embedding import Embedding, sinusoidal_positions
from gpuattn.nn.linear import FeedForward, Linear
from gpuattn.nn.module import Module, uninitialised
from gpuattn.nn.norm import LayerNorm, RMSNorm
from gpuattn.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "Dropout",
    "Embedding",
    "FeedForward",
    "KeyValueCache",
    "LayerDrop",
    "LayerNorm",
    "Linear",
    "MemoryProjection",
    "Module",
    "MultiHeadAttention",
    "RMSNorm",
    "RandomState",
    "StochasticDepth",
    "Streams",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "sinusoidal_positions",
    "uninitialised",
]
