"""Models: configurations, and modules that compute a loss and decode.

Each module registers its model in ``models.kinds``; the first one is the default of ``--model``.
"""

from gpuattn.models.translation import TranslationConfig, TranslationModel

# isort: split
from gpuattn.models.bert import Bert, BertConfig
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig

__all__ = [
    "GPT2",
    "Bert",
    "BertConfig",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "TranslationConfig",
    "TranslationModel",
]
