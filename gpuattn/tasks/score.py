"""Scores of translations: exact match, BLEU and chrF."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpuattn.errors import ConfigError, DataError, problem

TOKENIZERS = ("13a", "none")


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    kinds: Sequence[str] | None = None,
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
) -> dict[str, Any]:
    """Return how well sentences match their references, all figures from 0 to 100.

    Keys: ``exact_match``; ``exact_by_kind``, {kind: exact match} (empty without ``kinds``);
    ``bleu`` and ``chrf`` as sacrebleu computes them (Post 2018), ``bleu_signature``; ``sentences``.
    ``lowercase``, ``tokenize`` ("13a", "none"): of BLEU; ``lowercase`` of the other two as well.
    Raises DataError for no sentences or lists of different length.
    """
    _check_lengths(hypotheses, references)
    return Scorer(references, kinds, lowercase=lowercase, tokenize=tokenize)(hypotheses)


class Scorer:
    """``score`` with the same references again and again: it counts their n-grams once.

    Called with hypotheses, it returns what ``score`` does. Arguments and errors: those of
    ``score``.
    """

    def __init__(
        self, references: Sequence[str], kinds: Sequence[str] | None = None, *,
        lowercase: bool = False, tokenize: str = "13a",
    ) -> None:  # fmt: skip
        if tokenize not in TOKENIZERS:
            accepted = ", ".join(TOKENIZERS)
            raise ConfigError(problem("score", "tokenize", repr(tokenize), accepted))
        from sacrebleu.metrics import BLEU, CHRF

        self.references, self.kinds = references, kinds
        self._fold = str.lower if lowercase else str
        given: dict[str, Any] = {"lowercase": lowercase, "references": [references]}
        self._bleu = BLEU(tokenize=tokenize, force=True, **given)
        self._chrf = CHRF(**given)

    def __call__(self, hypotheses: Sequence[str]) -> dict[str, Any]:
        """Return the figures of ``score``."""
        references, fold = self.references, self._fold
        _check_lengths(hypotheses, references)
        bleu = self._bleu.corpus_score(hypotheses, None)
        chrf = self._chrf.corpus_score(hypotheses, None)
        right = [fold(h) == fold(r) for h, r in zip(hypotheses, references, strict=True)]
        return {
            "exact_match": 100 * sum(right) / len(right),
            "exact_by_kind": _by_kind(right, self.kinds),
            "bleu": bleu.score,
            "bleu_signature": str(self._bleu.get_signature()),
            "chrf": chrf.score,
            "sentences": len(references),
        }


def _check_lengths(hypotheses, references):
    if not references or len(hypotheses) != len(references):
        got = f"{len(hypotheses)} hypotheses for {len(references)} references"
        raise DataError(problem("score", "what to compare", got, "as many, and at least one"))


def _by_kind(right, kinds):
    if kinds is None or set(kinds) <= {"text"}:
        return {}
    seen = Counter(kinds)
    found = Counter(kind for kind, good in zip(kinds, right, strict=True) if good)
    return {kind: 100 * found[kind] / seen[kind] for kind in sorted(seen)}
