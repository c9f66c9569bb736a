"""Models: configurations, and modules that compute a loss and decode.

Each module registers its model in ``models.kinds``; the first one is the default of ``--model``.
"""

from gpuattn.models.translation import TranslationConfig, TranslationModel

# isort: split
from gpuattn.models.bert import Bert, BertConfig
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig
from gpuattn.models.rotary_scaling import RotaryScaling
from gpuattn.models.vit import ViT, ViTConfig

__all__ = [
    "GPT2",
    "Bert",
    "BertConfig",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "RotaryScaling",
    "TranslationConfig",
    "TranslationModel",
    "ViT",
    "ViTConfig",
]
