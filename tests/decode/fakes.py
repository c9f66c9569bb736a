"""A stepper whose logits are a function of the tokens so far, and searches in plain Python."""

import itertools

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.decode.options import BeamOptions
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
        return True


class Attending(Fake):
    """A Fake with cross-attention: ``attention_of(sentence, tokens so far)``, S numbers."""

    def __init__(self, xp, sentences, logits_of, attention_of):
        super().__init__(xp, sentences, logits_of)
        self.attention_of = attention_of

    def watch(self):
        pass

    def step(self, tokens, position):
        logits = super().step(tokens, position)
        rows = enumerate(self.texts)
        found = [self.attention_of(self.kept[r // self.beam], text[1:]) for r, text in rows]
        self.attention = self.xp.asarray(np.array(found), np.float32)
        return logits


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


def plain_logprobs(logits, text, options, forced):
    """Return the log-probabilities of the tokens after ``text``, which begins with BOS."""
    model = log_softmax(logits)
    if forced is not None:
        return [p if token == forced else -np.inf for token, p in enumerate(model)]
    row = list(logits if options.renormalise else model)
    size, penalty = options.no_repeat_ngram, options.repetition_penalty
    for token, x in enumerate(row):
        if penalty != 1 and token in text:
            row[token] = x / penalty if x > 0 else x * penalty
        grams = [text[i : i + size] for i in range(len(text) - size + 1)] if size else []
        early = token in options.eos and len(text) - 1 < options.min_length
        if (*text[len(text) - size + 1 :], token) in grams or token in options.banned or early:
            row[token] = -np.inf
    return log_softmax(row) if options.renormalise and max(row) > -np.inf else row


def plain_search(logits_of, sentence, options, max_length, prefix=(), attention_of=None):
    """Return [(normalised, score, text, ended)], best first, for one sentence by BeamOptions.

    ``attention_of(sentence, text)``: see ``Attending``.
    """

    def normalised(score, text, ended):
        divided = score / options.divisor(len(text), ended)
        if not options.coverage:
            return divided
        seen = sum(attention_of(sentence, text[:t]) for t in range(len(text) + ended))
        return divided + options.coverage * np.log(np.minimum(seen[seen > 0], 1)).sum()

    beam, stopping = options.beam, options.stopping
    running, pool, count, best_ended = [(0.0, ())], [], 0, False
    if max_length == 0:
        return [(0.0, 0.0, [], False)]
    for step in range(max_length):
        found = []
        for slot, (score, text) in enumerate(running):
            forced = prefix[step] if step < len(prefix) else None
            row = plain_logprobs(logits_of(sentence, text), (BOS, *text), options, forced)
            found += [(score + p, slot, token, text) for token, p in enumerate(row) if p > -np.inf]
        found.sort(key=lambda c: (-c[0], c[1], c[2]))
        found = found[: max(2, 1 + len(options.eos)) * beam]
        last = step + 1 == max_length
        for score, _, token, text in found[:beam]:
            if token in options.eos:
                count += 1
                pool.append((normalised(score, text, True), score, list(text), True))
        pool = sorted(pool, key=lambda h: -h[0])[:beam]
        best_ended |= bool(found) and found[0][2] in options.eos
        going_on = [(rank, c) for rank, c in enumerate(found) if c[2] not in options.eos][:beam]
        running = [(c[0], (*c[3], c[2])) for _, c in going_on]
        enough, length = count >= options.enough, step + 1
        if stopping == "ct2" and options.length_penalty == options.coverage == 0:
            enough = best_ended and count >= options.nbest
        if stopping in ("hf", "hf-never") and running:
            if stopping == "hf-never" and options.length_penalty > 0:
                length = max_length
            enough &= running[0][0] / options.divisor(length) <= pool[-1][0] if enough else False
        if last and not (stopping == "fairseq" and enough):
            for (rank, _), (score, text) in zip(going_on, running, strict=True):
                if stopping == "fairseq" or rank < beam:
                    pool.append((normalised(score, text, False), score, list(text), False))
        if enough or not running:
            break
    return sorted(pool, key=lambda h: -h[0])[:beam]


def plain_beam(logits_of, sentence, beam, max_length, penalty, rule, min_length=0, banned=()):
    """Return what ``plain_search`` does for these settings."""
    options = BeamOptions(
        eos=EOS, beam=beam, length_penalty=penalty, length_rule=rule, min_length=min_length,
        banned=banned,
    )  # fmt: skip
    return plain_search(logits_of, sentence, options, max_length)


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
