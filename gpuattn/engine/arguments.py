"""What an engine is asked for: checks of settings and lengths, before anything runs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpuattn.decode.limits import Limits, check_tokens
from gpuattn.decode.options import BeamOptions, SampleOptions
from gpuattn.engine.beam import candidates
from gpuattn.errors import problem
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


def lengths_of(sources: Sequence[Sequence[int]], limits: Sequence[int], most: int) -> list[int]:
    """Return the lengths of sources.

    Raises ValueError for a source or a limit that is longer than ``most``, the
    ``max_length`` of the model, which counts the end mark.
    """
    if min(limits, default=0) < 0 or max(limits, default=0) > most:
        wrong = next(limit for limit in limits if not 0 <= limit <= most)
        accepted = f"0 to the model's max_length, {most}"
        raise ValueError(problem("translate", "a limit", wrong, accepted))
    lengths = list(map(len, sources))
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
    return SampleOptions(eos=eos, temperature=temperature, **settings)
