"""Models of Hugging Face folders: loading, saving, tokenizers. Nothing is downloaded or unpickled.

Each architecture's module registers itself in ``pretrained.architecture``.
"""

from gpuattn.pretrained import bert, gpt2, llama, marian, vit  # noqa: F401
from gpuattn.pretrained.files import is_pretrained
from gpuattn.pretrained.folder import load_pretrained, save_pretrained
from gpuattn.pretrained.tokens import load_tokenizer

__all__ = ["is_pretrained", "load_pretrained", "load_tokenizer", "save_pretrained"]
