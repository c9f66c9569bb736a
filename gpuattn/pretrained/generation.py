"""How the translator of a Hugging Face folder searches where nobody says otherwise."""

import warnings
from pathlib import Path
from typing import Any

from gpuattn.decode.options import BeamOptions
from gpuattn.errors import PretrainedError
from gpuattn.pretrained.files import CONFIG, GENERATION, read_config, read_json, to_json
from gpuattn.pretrained.settings import Settings
from gpuattn.typing import StrPath

STOPPING = {"False": "hf", "True": "hf-early", "never": "hf-never"}  # by early_stopping
# Of sampling, or said by the model. forced_eos_token_id ends a text that is cut: nothing here does.
UNUSED = (
    "_from_model_config", "decoder_start_token_id", "forced_eos_token_id", "num_return_sequences",
    "temperature", "top_k", "top_p",
)  # fmt: skip


def search_settings(folder: StrPath, eos: int) -> tuple[BeamOptions, int | None]:
    """Return the settings of a search, and the most tokens of a text (None: not limited).

    They are those of generation_config.json or, where there is none, of config.json, as in old
    folders. Raises PretrainedError that lists the settings that cannot be used.
    """
    folder, faults = Path(folder), list[str]()
    old = not (folder / GENERATION).exists()
    given = read_config(folder, faults) if old else read_json(folder / GENERATION, faults)
    settings = Settings(given, faults, CONFIG if old else GENERATION)
    settings.read.update(UNUSED)
    settings.only("do_sample", False)
    settings.only("num_beam_groups", 1)
    most = settings.get("max_length", None)
    if most is not None:  # it counts the mark at the beginning, as min_length does
        most = max(1, settings.size("max_length", 512) - 1)
    least = settings.get("min_length", 0)
    stopping = STOPPING.get(str(settings.get("early_stopping", False)))
    if stopping is None:
        value = settings.get("early_stopping", False)
        stopping = settings.refuse("early_stopping", value, "false, true or 'never'", "hf")
    chosen: dict[str, Any] = {
        "beam": settings.get("num_beams", 1), "stopping": stopping,
        "length_penalty": settings.get("length_penalty", 1.0),
        "no_repeat_ngram": settings.get("no_repeat_ngram_size", 0),
        "repetition_penalty": settings.get("repetition_penalty", 1.0),
        "renormalise": settings.flag("renormalize_logits", False),
        "min_length": max(0, least - 1) if type(least) is int else least,
        "eos": settings.get("eos_token_id", eos), "banned": _banned(settings),
    }  # fmt: skip
    try:
        search = BeamOptions(**chosen)
    except (ValueError, TypeError) as error:
        faults.append(f"{settings.file}: {error}")
    if faults:
        raise PretrainedError(folder, faults)
    unknown = [] if old else settings.unknown()
    if unknown or settings.notes:
        unused = [f"not known, and not used: {', '.join(unknown)}"] if unknown else []
        text = "; ".join(settings.notes + unused)
        warnings.warn(f"{folder / settings.file}: {text}", stacklevel=4)
    return search, most


def describe_search(search: BeamOptions, config: Any, pad: int) -> dict[str, bytes]:
    """Return {generation_config.json: its bytes} for a search by the model of a TranslationConfig.

    The rules of fairseq and CTranslate2 to stop become ``early_stopping``, the nearest.
    """
    early = {rule: name for name, rule in STOPPING.items()}.get(search.stopping, "True")
    end = search.eos[0] if len(search.eos) == 1 else list(search.eos)
    values = {
        "num_beams": search.beam, "length_penalty": search.length_penalty,
        "early_stopping": early if early == "never" else early == "True",
        "no_repeat_ngram_size": search.no_repeat_ngram,
        "repetition_penalty": search.repetition_penalty, "renormalize_logits": search.renormalise,
        "min_length": search.min_length and search.min_length + 1, "max_length": config.max_length,
        "bad_words_ids": [[token] for token in search.banned], "eos_token_id": end,
        "decoder_start_token_id": config.bos, "pad_token_id": pad,
    }  # fmt: skip
    return {GENERATION: to_json(values)}


def _banned(settings):
    """Return the tokens that never come: the bad words that are one token."""
    words = settings.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        return settings.refuse("bad_words_ids", words, "a list of lists of tokens", [])
    if any(len(word) != 1 for word in words):
        settings.note("bad_words_ids of several tokens are not used")
    return [word[0] for word in words if len(word) == 1]
