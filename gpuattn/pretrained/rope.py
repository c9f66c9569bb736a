"""The rotary positions of a config.json: their base, and how their frequencies are scaled.

Old files have ``rope_theta`` and, for scaled ones, ``rope_scaling``; new ones have all in
``rope_parameters``.
"""

import math
from typing import Any

from gpuattn.errors import ConfigError
from gpuattn.models.rotary_scaling import RotaryScaling
from gpuattn.pretrained.settings import Settings

# {rope_type: {its key: field of a RotaryScaling}}; ``NEEDED``: keys that have no usual value
_BETWEEN = {"factor": "factor", "original_max_position_embeddings": "original"}
KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": _BETWEEN | {"low_freq_factor": "slow", "high_freq_factor": "fast"},
    "yarn": _BETWEEN | {"beta_slow": "slow", "beta_fast": "fast", "truncate": "whole",
                        "attention_factor": "scale"},
}  # fmt: skip
NEEDED = ("factor", "low_freq_factor", "high_freq_factor")


def read_rope(settings: Settings, block: int) -> tuple[float, RotaryScaling | None]:
    """Return the base of the rotary positions and their RotaryScaling or None.

    ``block``: the longest context, which was that of the training where nothing else is said.
    """
    settings.only("partial_rotary_factor", 1.0)
    theta = settings.get("rope_theta", 10_000.0)
    original = settings.get("original_max_position_embeddings", None)
    found: list[tuple[Any, RotaryScaling | None]] = []
    for key in ("rope_scaling", "rope_parameters"):
        if given := settings.get(key, {}):
            read = _read(given, theta, original or block)
            if isinstance(read, str):
                settings.refuse(key, given, read)
            elif found and found[0] != read:
                settings.refuse("rope_scaling", settings.get("rope_scaling", {}),
                                "what rope_parameters says, or one of both")  # fmt: skip
            else:
                found.append(read)
    base, scaling = found[0] if found else (theta, None)
    if type(base) not in (int, float) or not 0 < base < 1e30:
        settings.refuse("rope_theta", base, "a positive number")
        return 1.0, None
    return float(base), scaling


def _read(given, theta, original):
    """Return (base, RotaryScaling or None) of a dict of rotary positions, or what is accepted."""
    if not isinstance(given, dict):
        return '{"rope_theta": a number, "rope_type": "default"}'
    kinds = [given[key] for key in ("rope_type", "type") if given.get(key) is not None]
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in KEYS or kinds[-1:] not in ([], [kind]):
        known = ", ".join(map(repr, KEYS))
        return f"one rope_type of {known}, whose frequencies are the same for texts of any length"
    values = {key: value for key, value in given.items() if value is not None}
    if unknown := values.keys() - {"rope_theta", "rope_type", "type", *KEYS[kind]}:
        return f"{kind!r} without {', '.join(sorted(unknown))}"
    values = {"original_max_position_embeddings": original} | values
    named = {ours: values[key] for key, ours in KEYS[kind].items() if key in values}
    for ours, value in named.items():
        kinds_of = {"original": (int,), "whole": (bool,)}.get(ours, (int, float))
        if type(value) not in kinds_of:
            return f"{kind!r} with numbers, of tokens whole ones"
    missing = [key for key, ours in KEYS[kind].items() if ours not in named and key in NEEDED]
    if missing:
        return f"{kind!r} with {', '.join(missing)}"
    if kind == "yarn":
        named = {"fast": 32.0, "scale": 0.1 * math.log(max(1, named["factor"])) + 1} | named
    try:
        scaling = None if kind == "default" else RotaryScaling(kind, **named)
    except ConfigError as error:
        return f"what fits together: {error}"
    return given.get("rope_theta", theta), scaling


def written_rope(config: Any) -> dict[str, Any]:
    """Return the keys of the rotary positions of a LlamaConfig, as ``read_rope`` reads them.

    Scaled ones are there twice: transformers before 5 reads no ``rope_parameters``.
    """
    one = config.scaling
    kind = one.kind if one else "default"
    own = {key: getattr(one, ours) for key, ours in KEYS[kind].items()}
    values = {"rope_theta": config.base, "rope_type": kind} | own
    return {"rope_parameters": values} | ({"rope_scaling": values} if one else {})
