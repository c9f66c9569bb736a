"""The keys of a config.json: each is used, harmless, unknown or refused.

A key that is refused changes the math in a way that the model lacks; a sentence then names the key
and its value. Keys that are neither used nor harmless are named in one warning.
"""

from collections.abc import Mapping
from typing import Any

from gpuattn.pretrained.files import CONFIG

# They say how a model was trained, saved, or is searched with; not what it computes.
HARMLESS = {
    "_attn_implementation_autoset", "_name_or_path", "architectures", "auto_map", "bos_token_id",
    "classifier_dropout", "dtype", "eos_token_id", "finetuning_task", "gradient_checkpointing",
    "id2label", "initializer_range", "label2id", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "output_past", "pad_token_id", "problem_type", "return_dict",
    "sep_token_id", "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
MOST = {"layers": 1 << 12, "sizes": 1 << 24}  # above them a config is a mistake


class Settings:
    """Reads a config.json, or another ``file`` of settings, notes what is read, and collects faults
    as sentences.

    ``preprocessor``: the content of preprocessor_config.json, how images become arrays.
    """

    def __init__(
        self, config: Mapping[str, Any], faults: list[str], file: str = CONFIG,
        preprocessor: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.faults, self.file = config, faults, file
        self.preprocessor = preprocessor or {}
        self.read: set[str] = set()
        self.notes: list[str] = []

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key; the default where it is missing or null."""
        self.read.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def size(self, key: str, default: int, most: int = MOST["sizes"]) -> int:
        """Return a whole number from 1 on."""
        value = self.get(key, default)
        if type(value) is int and 1 <= value <= most:
            return value
        return self.refuse(key, value, f"a whole number from 1 to {most:,}", default)

    def layers(self, key: str, default: int) -> int:
        """Return a number of layers."""
        return self.size(key, default, MOST["layers"])

    def eps(self, key: str, default: float) -> float:
        """Return a positive number."""
        value = self.get(key, default)
        if type(value) in (int, float) and 0 < value < 1:
            return float(value)
        return self.refuse(key, value, "a number above 0 and below 1", default)

    def dropout(self, key: str, default: float = 0.1) -> float:
        """Return a probability below 1."""
        value = self.get(key, default)
        if type(value) in (int, float) and 0 <= value < 1:
            return float(value)
        return self.refuse(key, value, "a number from 0 to below 1", 0.0)

    def choice(self, key: str, default: str, names: Mapping[str, str]) -> str:
        """Return ``names[value]``."""
        value = self.get(key, default)
        if isinstance(value, str) and value in names:
            return names[value]
        return self.refuse(key, value, " or ".join(map(repr, names)), names[default])

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False."""
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        return self.refuse(key, value, "true or false", default)

    def only(self, key: str, accepted: Any) -> None:
        """Refuse any other value of a key that changes the math."""
        value = self.get(key, accepted)
        if value != accepted:
            self.refuse(key, value, repr(accepted), accepted)

    def unknown(self) -> list[str]:
        """Return the keys that were not read and are not harmless."""
        return sorted(self.config.keys() - self.read - HARMLESS)

    def note(self, text: str) -> None:
        """Add a sentence to the warning that loading gives."""
        self.notes.append(text)

    def refuse(self, key: str, value: Any, accepted: str, instead: Any = None) -> Any:
        """Add a fault; return what to go on with."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        self.faults.append(f"{self.file}: {key} is {shown}; accepted: {accepted}")
        return instead
