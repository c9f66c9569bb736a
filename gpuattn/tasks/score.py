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
    if tokenize not in TOKENIZERS:
        accepted = ", ".join(TOKENIZERS)
        raise ConfigError(problem("score", "tokenize", repr(tokenize), accepted))
    if not references or len(hypotheses) != len(references):
        got = f"{len(hypotheses)} hypotheses for {len(references)} references"
        raise DataError(problem("score", "what to compare", got, "as many, and at least one"))
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    result = bleu.corpus_score(hypotheses, [references])
    chrf = CHRF(lowercase=lowercase).corpus_score(hypotheses, [references])
    fold = str.lower if lowercase else str
    right = [fold(h) == fold(r) for h, r in zip(hypotheses, references, strict=True)]
    return {
        "exact_match": 100 * sum(right) / len(right),
        "exact_by_kind": _by_kind(right, kinds),
        "bleu": result.score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.score,
        "sentences": len(references),
    }


def _by_kind(right, kinds):
    if kinds is None or set(kinds) <= {"text"}:
        return {}
    seen = Counter(kinds)
    found = Counter(kind for kind, good in zip(kinds, right, strict=True) if good)
    return {kind: 100 * found[kind] / seen[kind] for kind in sorted(seen)}
