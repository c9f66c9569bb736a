"""A stepper whose logits are a function of the tokens so far, and searches in plain Python."""

import itertools

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.decode.stepper import Stepper

BOS, EOS = 0, 1


class Fake(Stepper):
    """A Stepper with logits from ``logits_of(sentence, tokens so far without bos)``: V numbers."""

    def __init__(self, xp, sentences, logits_of, dtype=np.float32):
        self.xp, self.sentences, self.logits_of, self.dtype = xp, sentences, logits_of, dtype
        self.steps = self.computed = 0

    def start(self, beam):
        self.beam, self.texts, self.steps = beam, [()] * (self.sentences * beam), 0
        self.kept = list(range(self.sentences))

    def step(self, tokens, position):
        assert isinstance(tokens, self.xp.ndarray) and tokens.dtype == np.int32
        assert tokens.shape == (len(self.texts),) and position == self.steps
        self.steps += 1
        added = zip(self.texts, to_cpu(tokens).tolist(), strict=True)
        self.texts = [(*text, token) for text, token in added]
        assert all(text[0] == BOS for text in self.texts)
        rows = [
            self.logits_of(self.kept[r // self.beam], text[1:]) for r, text in enumerate(self.texts)
        ]
        self.computed += len(rows)
        return self.xp.asarray(np.array(rows), self.dtype)

    def reorder(self, parents):
        assert parents.dtype == np.int32 and parents.shape == (len(self.texts),)
        parents = to_cpu(parents).tolist()
        assert all(r // self.beam == p // self.beam for r, p in enumerate(parents))
        self.texts = [self.texts[p] for p in parents]

    def keep(self, sentences):
        assert self.xp is np and 0 < len(sentences) < len(self.kept)
        rows = (sentences[:, None] * self.beam + np.arange(self.beam)).ravel()
        self.texts = [self.texts[r] for r in rows]
        self.kept = [self.kept[b] for b in sentences]


def random_model(seed, vocab, spread=2.0):
    """Return random logits that depend on the sentence and all tokens; EOS gets likelier."""

    def logits_of(sentence, text):
        rng = np.random.default_rng([seed, sentence, len(text), *text])
        logits = spread * rng.standard_normal(vocab)
        logits[EOS] += 0.5 * len(text)
        return logits.astype(np.float32).astype(np.float64)

    return logits_of


def log_softmax(row):
    row = np.asarray(row, np.float64)
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def divide(score, length, penalty, rule):
    return score / (max(length, 1) ** penalty if rule == "power" else ((5 + length) / 6) ** penalty)


def plain_beam(logits_of, sentence, beam, max_length, penalty, rule, min_length=0, banned=()):
    """Return [(normalised, score, text, ended)], best first, for one sentence."""
    running, pool = [(0.0, ())], []
    for step in range(max_length):
        candidates = []
        for slot, (score, text) in enumerate(running):
            for token, logprob in enumerate(log_softmax(logits_of(sentence, text))):
                if token in banned or (token == EOS and step < min_length):
                    continue
                candidates.append((score + logprob, slot, token, text))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        for score, _, token, text in candidates[:beam]:
            if token == EOS:
                pool.append((divide(score, step + 1, penalty, rule), score, list(text), True))
        pool = sorted(pool, key=lambda h: -h[0])[:beam]
        going_on = [c for c in candidates[: 2 * beam] if c[2] != EOS][:beam]
        running = [(score, (*text, token)) for score, _, token, text in going_on]
        if len(pool) == beam:
            return pool
    for score, text in running:
        pool.append((divide(score, max_length, penalty, rule), score, list(text), False))
    return sorted(pool, key=lambda h: -h[0])[:beam]


def every_text(logits_of, sentence, vocab, max_length, penalty, rule):
    """Return [(normalised, score, text, ended)] of every possible text, best first."""
    found = []
    for length in range(max_length + 1):
        for text in itertools.product([t for t in range(vocab) if t != EOS], repeat=length):
            score = 0.0
            for i, token in enumerate(text):
                score += log_softmax(logits_of(sentence, text[:i]))[token]
            ended = length < max_length
            if ended:
                score += log_softmax(logits_of(sentence, text))[EOS]
            normalised = divide(score, length + ended, penalty, rule)
            found.append((normalised, score, list(text), ended))
    return sorted(found, key=lambda h: -h[0])
