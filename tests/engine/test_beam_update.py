"""Beam search with beam_step and beam_update, compared with gpuattn.decode."""

import os

import numpy as np
import pytest
from decode.fakes import BOS, EOS, Fake, random_model

from gpuattn.arrays import to_cpu
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import LENGTH_RULES
from gpuattn.engine.beam import READ, stable_texts
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.beam_update import Beams, beam_update, best_texts


def search(xp, logits_of, sentences, vocab, limits, beam, nbest, penalty, rule, impl=None):
    """Return [(tokens, score, normalised, ended)] of each sentence; the host follows the slots."""
    beams = Beams(
        xp.zeros(1, np.float32), sentences, beam, max(limits),
        lambda length: LENGTH_RULES[rule](length, penalty),
    )  # fmt: skip
    beams.start(BOS, limits)

    rows = np.zeros((sentences, beam, max(limits) + 1), int)
    certain = []
    for _ in range(max(limits) + 2):
        tokens, positions = to_cpu(beams.tokens), to_cpu(beams.positions)
        slots, logits = to_cpu(beams.slots), []
        known, told = stable_texts(*(to_cpu(getattr(beams, name)) for name in READ))
        live, ended = to_cpu(beams.scores) > -np.inf, to_cpu(beams.pool_scores)[:, 0] > -np.inf
        for b in range(sentences):
            texts: list = [[] for _ in range(beam)]
            for i in range(beam):
                t = positions[b, i]
                rows[b, i, t] = tokens[b, i]
                text = [rows[b, slots[b, i, j], j] for j in range(1, t)] + [tokens[b, i]][: int(t)]
                texts[i] = text
                logits.append(logits_of(b, tuple(map(int, text))))
            shared = os.path.commonprefix([x for x, on in zip(texts, live[b], strict=True) if on])
            assert known[b] == (0 if ended[b] else len(shared))
            certain.append((b, told[b, : known[b]].tolist()))
        logits = xp.asarray(np.array(logits), np.float32)
        found = beam_step(logits, beams.scores)
        beam_update(*found, beams, eos=xp.asarray([EOS], np.int32), nbest=nbest, impl=impl)
    assert int(beams.live[0]) == 0 and bool(beams.done.all())
    texts, lengths, scores, normalised = map(to_cpu, best_texts(beams, nbest))
    for b, begin in certain:
        assert texts[b, 0, : len(begin)].tolist() == begin
    return [
        [
            (texts[b, n, : lengths[b, n]].tolist(), scores[b, n], normalised[b, n],
             bool(lengths[b, n] < limits[b]))
            for n in range(nbest) if scores[b, n] != -np.inf
        ]
        for b in range(sentences)
    ]  # fmt: skip


def test_a_start_on_a_gpu_leaves_the_state_of_one_on_numpy(gpu):
    rng, names = np.random.default_rng(0), [*Beams.STARTED, "history"]
    both = [Beams(xp.zeros(1, np.float32), 300, 3, 50, float) for xp in (gpu, np)]
    limits = np.full(300, 5, np.int32)
    for turn in range(3):
        tokens = rng.integers(1, 9, 300)
        for beams in both:
            beams.start(tokens if turn == 2 else turn, limits)
        for name in names:
            there, here = (to_cpu(getattr(beams, name)) for beams in both)
            np.testing.assert_array_equal(there, here, err_msg=name)
        limits = rng.integers(-1, 3, 300).astype(np.int32)


@pytest.mark.parametrize("seed", range(40))
def test_equals_decode(xp, seed):
    rng = np.random.default_rng(seed)
    vocab, beam, sentences = int(rng.integers(2, 9)), int(rng.integers(1, 7)), 3
    limits = rng.integers(0, 7, sentences).tolist()
    limits[0] = max(1, limits[0])
    nbest, penalty = int(rng.integers(1, beam + 1)), float(rng.choice([0, 0.6, 1, 2, -1]))
    rule, model = str(rng.choice(["power", "gnmt"])), random_model(seed, vocab)
    found = search(xp, model, sentences, vocab, limits, beam, nbest, penalty, rule)
    for b, limit in enumerate(limits):
        one = Fake(xp, 1, lambda sentence, text, b=b: model(b, text))
        options = {"beam": beam, "nbest": nbest, "length_penalty": penalty, "length_rule": rule}
        (want,) = beam_search(one, bos=BOS, eos=EOS, max_length=limit, **options)
        if limit:
            assert [h.tokens for h in want] == [tokens for tokens, *_ in found[b]]
            assert [h.ended for h in want] == [ended for *_, ended in found[b]]
            np.testing.assert_array_equal([h.score for h in want], [s for _, s, _, _ in found[b]])
            np.testing.assert_array_equal(
                [h.normalised for h in want], [n for _, _, n, _ in found[b]]
            )
