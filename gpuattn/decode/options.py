"""The settings of generation, what each means, and which of them other programs have.

Of all decoders:

- ``eos``: the token that ends a text, a list of several, or None for texts without end.
- ``max_length``: the most tokens of a text, its end mark included; one number, or one for each
  sentence. A longer text is cut: ``ended`` is False.
- ``min_length``: the tokens before an end mark may come, those of a prefix included.
- ``banned``: tokens that never come.
- ``prefix``: for each sentence the tokens that its text begins with. Bans and penalties do not
  apply to them. They count in score and length. The beams spread at the first step after them.
- ``no_repeat_ngram``: n; no n tokens in a row come twice in a text (0: no such rule).
- ``repetition_penalty``: p; of each token that has come, the logit or log-probability x becomes
  x / p if x > 0, else x * p (Keskar et al., 2019). For both rules the text begins with ``bos``.
- ``renormalise``: True: bans and penalties come before the log-softmax, so that the probabilities
  of all allowed tokens add up to 1. False: after it. Sampling has them before it in any case.

Of sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``: see ``decode.sample.sample``.

Of beam search:

- ``beam``: K texts are followed. ``nbest``: how many of up to K are returned.
- ``length_penalty``, ``length_rule``: hypotheses are ordered by score / divisor; the divisor is
  length ** penalty ("power") or ((5 + length) / 6) ** penalty ("gnmt": Wu et al., 2016).
- ``end_counts``: whether that length counts the end mark. A length of 0 is taken as 1.
- ``coverage``: b, 0 or more; to a text's score / divisor comes b times the sum of log(min(a, 1))
  over its source tokens: a is the cross-attention to the token, summed over the steps of the text,
  its end mark's included. Tokens without any do not count. See ``Stepper.watch``.
- ``stopping``, ``patience``: when a sentence is done, whatever the others of its batch do.

A step looks at the (1 + E) * K best continuations, for E end marks, and at least 2 * K. Those among
the first K that end go to a pool of the K best texts; the best K that do not end go on. With
``enough`` = round(K * patience) a sentence is done, by ``stopping``:

- "fairseq": when enough texts have ended, or no beam can get among the ``nbest`` best any more.
- "hf": when K have ended, and the best beam, divided for its present length, is no better than the
  worst of them. "hf-never": the same, but for a penalty above 0 divided for ``max_length``.
- "hf-early": when enough texts have ended.
- "ct2": when enough texts have ended; with a penalty and a coverage of 0, when ``nbest`` have, and
  the best continuation of a step was an end mark.

At ``max_length`` all beams compete as they are with "fairseq". With the others the first K
continuations do, whether they end or not.

The settings of others' beam searches, and where these still differ (tests compare results with
those of Hugging Face transformers 5.23 and CTranslate2 4.8; greedy search and sampling of
Hugging Face have ``renormalise=True``: they penalise logits):

| | fairseq | Hugging Face | CTranslate2 |
| --- | --- | --- | --- |
| ``stopping`` | "fairseq" | "hf", "hf-early", "hf-never" | "ct2" |
| is there | | ``early_stopping`` False, True, "never" | |
| ``end_counts`` | True | True | True (Whisper: False) |
| ``renormalise`` | False | False | True |
| ``coverage`` is there | none | none | ``coverage_penalty`` |
| score of a prefix there | as here | 0, and not in the length | 0 |
| n-grams, repetitions begin there | with ``bos`` | with the prompt | after ``bos`` |
| E > 1 end marks there | none | as here | 2 * K continuations |
| dead ends there | as here | texts with scores near -1e9 | with the least float |
| at ``max_length`` there | the end mark is forced | as here | as here |
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from gpuattn.errors import problem
from gpuattn.ops.arguments import check_flags, integer, number
from gpuattn.ops.sampling.sample_tokens import check_settings
from gpuattn.units import nearest

MAX_PENALTY = 10  # beyond it, powers of a length overflow a float
LENGTH_RULES = {
    "power": lambda length, penalty: max(length, 1) ** penalty,
    "gnmt": lambda length, penalty: ((5 + length) / 6) ** penalty,
}
STOPPING = ("fairseq", "hf", "hf-early", "hf-never", "ct2")


@functools.lru_cache(64)
def _made_once(cls, items, kinds):
    """Return ``cls._made(dict(items))``, the same object for equal arguments.

    ``kinds``: of the values, as 1 and 1.0 are equal.
    """
    return cls._made(dict(items))


def _kind(value):
    """Return the type of a value, of a tuple those of its elements."""
    return tuple(map(type, value)) if type(value) is tuple else type(value)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all decoders share.

    Raises ValueError for a setting out of range, TypeError for one of another type.
    """

    function: ClassVar[str] = "decode"
    eos: Any  # int, several, or None; kept as a tuple
    min_length: int = 0
    banned: Collection[int] = ()  # kept as a tuple
    no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        eos = () if self.eos is None else self.eos
        for name, tokens in (("eos", eos), ("banned", self.banned)):
            tokens = tuple(tokens) if isinstance(tokens, Iterable) else (tokens,)
            found = tuple(integer(self.function, name, t, "tokens", -(1 << 62)) for t in tokens)
            object.__setattr__(self, name, tuple(dict.fromkeys(found)))
        integer(self.function, "min_length", self.min_length, "0 to max_length")
        integer(self.function, "no_repeat_ngram", self.no_repeat_ngram, "0 for none, or from 1 on")
        accepted, p = "a number above 0; 1 penalises nothing", self.repetition_penalty
        number(self.function, "repetition_penalty", p, accepted, _above_zero)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the options that keyword arguments say.

        Raises TypeError for one that is unknown, and where ``eos`` is missing.
        """
        made: Any = _made_once
        try:
            return made(cls, tuple(settings.items()), tuple(map(_kind, settings.values())))
        except TypeError:  # a value cannot be hashed, or settings are wrong, which raises again
            return cls._made(settings)

    @classmethod
    def _made(cls, settings):
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in names:
                said = problem(cls.function, "a setting", repr(name), ", ".join(names))
                raise TypeError(said + nearest(name, names))
        if "eos" not in settings:
            accepted = "the token that ends a text, several, or None"
            raise TypeError(problem(cls.function, "eos", "missing", accepted))
        return cls(**settings)

    @property
    def by_text(self) -> bool:
        """Whether bans or penalties depend on the tokens so far."""
        return self.no_repeat_ngram > 0 or self.repetition_penalty != 1


@dataclass(frozen=True, kw_only=True)
class GreedyOptions(Options):
    """Settings of ``greedy``."""

    function: ClassVar[str] = "greedy"
    renormalise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self.function, renormalise=self.renormalise)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Options):
    """Settings of ``sample``."""

    function: ClassVar[str] = "sample"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.function, self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, kw_only=True)
class BeamOptions(GreedyOptions):
    """Settings of ``beam_search`` and of the engine."""

    function: ClassVar[str] = "beam_search"
    beam: int = 5
    nbest: int = 1
    length_penalty: float = 1.0
    length_rule: str = "power"
    end_counts: bool = True
    stopping: str = "fairseq"
    patience: float = 1.0
    coverage: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        where = self.function
        integer(where, "beam", self.beam, "1 or more", 1)
        integer(where, "nbest", self.nbest, f"1 to beam, {self.beam}", 1, self.beam)
        accepted = f"{-MAX_PENALTY} to {MAX_PENALTY}"
        number(where, "length_penalty", self.length_penalty, accepted, _small)
        _check_name(where, "length_rule", self.length_rule, tuple(LENGTH_RULES))
        _check_name(where, "stopping", self.stopping, STOPPING)
        check_flags(where, end_counts=self.end_counts)
        number(where, "patience", self.patience, "a number above 0", _above_zero)
        accepted = f"0 to {MAX_PENALTY}"
        number(where, "coverage", self.coverage, accepted, lambda b: 0 <= b <= MAX_PENALTY)
        if self.patience != 1 and self.stopping in ("hf", "hf-never"):
            accepted = (
                f"1 with stopping {self.stopping!r}, which waits for K texts and their scores"
            )
            raise ValueError(problem(where, "patience", self.patience, accepted))
        if self.enough < self.nbest:
            accepted = f"enough that round(beam * patience) is nbest, {self.nbest}, or more"
            raise ValueError(problem(where, "patience", self.patience, accepted))

    @property
    def enough(self) -> int:
        """The number of ended texts that is enough."""
        return max(1, round(self.beam * self.patience))

    def divisor(self, tokens: int, ended: bool = False) -> float:
        """Return what the score of a text of so many tokens is divided by.

        ``ended``: whether an end mark follows them.
        """
        length = tokens + (ended and self.end_counts)
        return LENGTH_RULES[self.length_rule](length, self.length_penalty)


def _above_zero(x):
    return 0 < x < float("inf")


def _small(x):
    return -MAX_PENALTY <= x <= MAX_PENALTY


def _check_name(function, name, value, names):
    if value not in names:
        raise ValueError(problem(function, name, repr(value), ", ".join(names)))
