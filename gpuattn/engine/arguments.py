"""What an engine is asked for: checks of settings and lengths, before anything runs."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpuattn.decode.limits import Limits, check_tokens
from gpuattn.decode.options import BeamOptions, SampleOptions
from gpuattn.engine.beam import candidates
from gpuattn.errors import problem, type_of
from gpuattn.ops.arguments import described, integer
from gpuattn.ops.sampling.beam_step import MAX_BEAM, MAX_COUNT


def refusal(options: BeamOptions) -> str | None:
    """Return why the device cannot run a search, so that ``decode.beam`` does, or None."""
    if options.coverage:
        return f"coverage is {options.coverage}, the search on the device has none"
    if options.beam > MAX_BEAM:
        return f"the beam is {options.beam}, the search on the device takes at most {MAX_BEAM}"
    if candidates(options) > MAX_COUNT:
        got = f"{len(options.eos)} end marks and a beam of {options.beam}"
        return f"{got} need {candidates(options)} continuations, the device has {MAX_COUNT}"
    return None


def is_translator(model: Any) -> bool:
    """Return whether a model translates; others continue texts."""
    return hasattr(model, "encode")


def check_model(function: str, model: Any, translates: bool) -> None:
    """Raise TypeError unless a model is a translator, or, without ``translates``, is none."""
    if is_translator(model) != translates:
        accepted, advice = "a translator", "Language models have generate."
        if not translates:
            accepted, advice = "a language model", "Translators have translate."
        raise TypeError(problem(function, "the model", type_of(model), accepted, advice))


def checked_lengths(
    function: str, what: str, texts: Sequence[Sequence[int]], limits: Sequence[int]
) -> list[int]:
    """Return the lengths of ``texts``, the argument ``what``.

    Raises TypeError unless both are lists, texts are lists of tokens and limits integers, and
    ValueError unless there is a limit for each text.
    """
    for name, value in ((what, texts), ("limits", limits)):
        if not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
            raise TypeError(problem(function, name, described(value), "a list, one entry a text"))
    kinds = set(map(type, texts))
    if wrong_kinds := [k for k in kinds if issubclass(k, str) or not hasattr(k, "__len__")]:
        wrong = next(text for text in texts if type(text) in wrong_kinds)
        accepted = "lists of tokens, such as [[5, 2]]"
        raise TypeError(problem(function, f"one of {what}", described(wrong), accepted))
    if set(map(type, limits)) - {int}:
        for limit in limits:
            integer(function, "a limit", limit, least=-math.inf)
    if len(texts) != len(limits):
        accepted = f"{len(texts)}, one for each of {what}"
        raise ValueError(problem(function, "the number of limits", len(limits), accepted))
    return list(map(len, texts))


def lengths_of(sources: Sequence[Sequence[int]], limits: Sequence[int], most: int) -> list[int]:
    """Return the lengths of sources.

    Raises ValueError for a source or a limit that is longer than ``most``, the
    ``max_length`` of the model, which counts the end mark.
    """
    lengths = checked_lengths("translate", "sources", sources, limits)
    if min(limits, default=0) < 0 or max(limits, default=0) > most:
        wrong = next(limit for limit in limits if not 0 <= limit <= most)
        accepted = f"0 to the model's max_length, {most}"
        raise ValueError(problem("translate", "a limit", wrong, accepted))
    longest = max(lengths, default=0)
    if longest + 1 > most:
        accepted = f"up to {most - 1}, and the end mark: the model's max_length is {most}"
        raise ValueError(problem("translate", "a source", f"{longest} tokens long", accepted))
    return lengths


def prefixes_of(
    options: BeamOptions, bos: int, limits: Sequence[int],
    prefix: Sequence[Sequence[int]] | None, vocab: int,
) -> Sequence[Sequence[int]]:  # fmt: skip
    """Return the prefix of each source.

    Raises ValueError for prefixes and settings that do not fit the limits or a vocabulary of that
    size.
    """
    count = len(limits)
    if prefix is None and np.ndim(bos) == 0:
        check_tokens(options, vocab)
        return [()] * count
    sources: Any = SimpleNamespace(sentences=count, xp=np)
    known = Limits(options, sources, bos, np.asarray(limits, np.int32), prefix)
    known.hidden(0, vocab)  # for its errors
    return [()] * count if prefix is None else prefix


def sampling(eos: Any, temperature: float, settings: dict[str, Any]) -> SampleOptions:
    """Return the SampleOptions of ``Engine.generate``."""
    if temperature == 0:
        temperature, settings = 1.0, settings | {"top_k": 1}
    return SampleOptions.of(settings | {"eos": eos, "temperature": temperature})
