"""Models: configurations, and modules that compute a loss and decode."""

from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.translation import TranslationConfig, TranslationModel

__all__ = ["GPT2", "GPT2Config", "TranslationConfig", "TranslationModel"]
