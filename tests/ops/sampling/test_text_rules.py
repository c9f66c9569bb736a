"""Rules that read the texts, against those of gpuattn.decode. Whole searches:
``tests/engine/test_semantics.py``."""

import numpy as np
import pytest
from checks import DTYPES, dtype_of, implementations, module_named

from gpuattn.arrays import to_cpu
from gpuattn.decode import processors
from gpuattn.ops.sampling.text_rules import IMPLS, NAME, TextRules, text_rules

SENTENCES, BEAM, ROOM, VOCAB, PADDED = 3, 2, 9, 7, 8
EOS, BANNED = (1, 4), (2, 2)
RULES = {
    "n-gram of 1": {"no_repeat_ngram": 1}, "n-gram of 2": {"no_repeat_ngram": 2},
    "n-gram of 4": {"no_repeat_ngram": 4}, "penalty": {"repetition_penalty": 1.5},
    "reward": {"repetition_penalty": 0.5, "no_repeat_ngram": 3},
    "least length": {"min_length": 3}, "bans": {"banned": BANNED}, "prefix": {"prefix_room": 4},
    "all": {
        "min_length": 5, "banned": BANNED, "prefix_room": 3, "no_repeat_ngram": 2,
        "repetition_penalty": 1.5,
    },
}  # fmt: skip


class Problem:
    """Random texts in the form of ``Beams``, of 0 to ROOM - 1 tokens after the first.

    Row 1 is of a text that ended. ``arrays``: the arguments of ``text_rules`` on ``xp``.
    """

    def __init__(self, xp, dtype, seed=0, **rules):
        rng = np.random.default_rng(seed)
        rows, table = SENTENCES * BEAM, (SENTENCES, BEAM)
        self.logits = np.full((rows, PADDED), np.nan, dtype_of(dtype))  # padding is never read
        self.logits[:, :VOCAB] = 2 * rng.standard_normal((rows, VOCAB))
        self.logits[0, 3] = -np.inf
        self.scores = -rng.random(table).astype(np.float32)
        self.scores[0, 1] = -np.inf
        self.lengths = rng.integers(0, ROOM, table).astype(np.int32)
        self.lengths[0], self.lengths[-1] = 0, ROOM - 1
        history = rng.integers(0, 3, (SENTENCES, ROOM, BEAM, 2)).astype(np.int32)
        slots = rng.integers(0, BEAM, (SENTENCES, BEAM, ROOM)).astype(np.int16)
        self.rules = TextRules(xp.zeros(1), SENTENCES, eos=EOS, **rules)
        first = rng.integers(0, 3, SENTENCES).astype(np.int32)
        self.prefix = rng.integers(0, VOCAB, self.rules.prefix.shape).astype(np.int32)
        self.prefix[1] = -1
        self.rules.first[...], self.rules.prefix[...] = map(xp.asarray, (first, self.prefix))
        self.texts = [
            [first[b], *(history[b, j, slots[b, i, j + 1], 0] for j in range(self.lengths[b, i]))]
            for b in range(SENTENCES) for i in range(BEAM)
        ]  # fmt: skip
        given = self.logits, self.scores, self.lengths, history, slots
        self.arrays = [xp.asarray(x).copy() for x in given]

    def wanted(self, row, on_logits):
        """Return (the changed row, what its score rises by) by the processors of decode."""
        rules, x = self.rules, self.logits[row : row + 1, :VOCAB].astype(np.float32)[None]
        score, length = self.scores.ravel()[row], self.lengths.ravel()[row]
        logprobs = processors.log_softmax(x)
        forced = self.prefix[row // BEAM, length] if length < self.prefix.shape[1] else -1
        x = x if on_logits else logprobs
        if score == -np.inf:
            return x[0, 0], 0
        if forced >= 0:
            return np.where(np.arange(VOCAB) == forced, 0, -np.inf), logprobs[0, 0, forced]
        text = np.array(self.texts[row], np.int32)[None, None]
        if rules.repetition_penalty != 1:
            x = processors.penalise_repetitions(x, text, rules.repetition_penalty)
        if rules.no_repeat_ngram:
            x = processors.ban_repeated_ngrams(x, text, rules.no_repeat_ngram)
        hidden = {*to_cpu(rules.banned).tolist(), *(EOS if length < rules.min_length else ())}
        return processors.ban(x, np.isin(np.arange(VOCAB), list(hidden)))[0, 0], 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_logits", [False, True], ids=["amounts", "in place"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name, where", implementations(IMPLS))
def test_equals_decode(name, where, rules, on_logits, dtype):
    for seed in range(4):
        x = Problem(module_named(where), dtype, seed, on_logits=on_logits, **rules)
        listed = text_rules(*x.arrays, x.rules, vocab_size=VOCAB, impl=name)
        logits, scores = (to_cpu(a).astype(np.float32) for a in x.arrays[:2])
        assert np.isnan(logits[:, VOCAB:]).all()
        assert (listed is None) == (on_logits or set(rules) == {"prefix_room"})
        for row, found in enumerate(logits[:, :VOCAB]):
            want, rise = x.wanted(row, on_logits)
            score = x.scores.ravel()[row]
            np.testing.assert_allclose(scores.ravel()[row], score + rise, rtol=1e-5)
            if rise == 0 and not on_logits:
                found = processors.log_softmax(found[None])[0]
                for token, amount in zip(*(to_cpu(a)[row] for a in listed or ()), strict=True):
                    found[token] -= amount if token >= 0 else 0
            coarse = on_logits and "repetition_penalty" in rules  # in the dtype of the logits
            tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
            tolerance = tolerance if coarse else 1e-5
            np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("on_logits", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name, where", implementations(IMPLS))
def test_a_row_without_numbers(name, where, on_logits):
    """NaN stays NaN, in its row alone, also where the token is forced; an ended text stays so."""
    rules = {"prefix_room": 3, "repetition_penalty": 1.5, "on_logits": on_logits}
    for wrong in (np.nan, np.inf):
        x = Problem(module_named(where), "float32", **rules)
        x.arrays[0][:4] = wrong  # both rows of the first two sentences
        listed = text_rules(*x.arrays, x.rules, vocab_size=VOCAB, impl=name)
        logits, scores = (to_cpu(a) for a in x.arrays[:2])
        assert np.isnan(scores[0]).tolist() == [True, False]  # forced; ended
        assert scores[0, 1] == -np.inf and not np.isnan(scores[1:]).any()
        assert np.isfinite(logits[4:, :VOCAB]).all()
        if listed:
            tokens, amounts = map(to_cpu, listed)
            assert np.isnan(amounts[2, 0]) and tokens[2, 0] == x.texts[2][0]
            assert not np.isnan(amounts[4:][tokens[4:] >= 0]).any()


def test_both_implementations_list_the_same(gpu):
    for seed in range(9):
        x = Problem(gpu, "float32", seed, **RULES["all"])
        given = [[a.copy() for a in x.arrays] for _ in range(2)]
        both = [
            text_rules(*arrays, x.rules, vocab_size=VOCAB, impl=impl)
            for arrays, impl in zip(given, ("raw-simt", "reference"), strict=True)
        ]
        (tokens, amounts), (wanted, others) = ([to_cpu(a) for a in pair] for pair in both)
        np.testing.assert_array_equal(tokens, wanted)
        used = tokens >= 0
        np.testing.assert_allclose(amounts[used], others[used], rtol=1e-4, atol=1e-5)


def test_shapes_that_do_not_fit(xp):
    x = Problem(xp, "float32")
    logits, scores, lengths, history, slots = x.arrays
    with pytest.raises(ValueError, match=f"{NAME}: logits: shape is"):
        text_rules(logits[1:], scores, lengths, history, slots, x.rules)
    with pytest.raises(ValueError, match=f"{NAME}: history: shape is"):
        text_rules(logits, scores, lengths, history[:, 1:], slots, x.rules)
    with pytest.raises(ValueError, match=f"{NAME}: logits is .*contiguous rows"):
        text_rules(logits[:, ::2], scores, lengths, history, slots, x.rules)
    with pytest.raises(TypeError, match="logits.dtype is int32"):
        text_rules(logits.view(np.int32), scores, lengths, history, slots, x.rules)
