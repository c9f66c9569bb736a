"""What a run learns from: pairs of a built-in task or of files, as token ids, and what is held out.

A built-in task has new pairs in every epoch, a function of (seed, epoch).
"""

import zlib
from functools import lru_cache
from itertools import chain

import numpy as np

from gpuattn.data import tasks
from gpuattn.data.batching import PackedLoader
from gpuattn.data.text import encode_pairs, read_parallel
from gpuattn.data.tokenizer import EOS, Tokenizer
from gpuattn.errors import DataError

TASK_PAIRS = 20_000  # an epoch of a built-in task
HELD_OUT = 1000  # pairs, at most, for validation and for tests
HELD_OUT_SHARE = 50  # of a corpus without validation files, one pair in so many


class Corpus:
    """Training batches by epoch, validation pairs, and the tokenizer of a run.

    ``tokenizer``: the run's, or None to train one. ``valid``: list of Pair. ``facts``: sentences
    on what was read, for the head of a run. ``fingerprint``: of the training text.
    ``loader(epoch)``: its PackedLoader.
    Raises DataError for files that cannot be used, ConfigError for limits nothing fits in.
    """

    def __init__(self, config, tokenizer=None):
        self.config = config
        train, self.valid = _task_pairs(config) if config.task else _file_pairs(config)
        if tokenizer is None:
            lines = (line for pair in train for line in pair[:2])
            tokenizer = Tokenizer.train(lines, config.vocab_size, config.seed)
        self.tokenizer = tokenizer
        self.ids, kept = self._encode(train)
        self._first_loader = PackedLoader(self.ids, config.batch, config.seed)
        self.loader = lru_cache(1)(self._loader)
        self.fingerprint = zlib.crc32("\n".join(chain.from_iterable(p[:2] for p in train)).encode())
        self.facts = [self._counts(train, kept)]
        self.valid_ids, kept = self._encode(self.valid)
        self.valid = [self.valid[i] for i in kept]
        self.facts.append(
            f"{len(self.valid):,} pairs for validation, "
            f"loss of guessing by frequency {_unigram_loss(self.valid_ids):.2f}"
        )

    def _loader(self, epoch):
        """Return the PackedLoader that has the pairs of an epoch."""
        if self.config.task and epoch > 0:
            ids, _ = self._encode(_task_epoch(self.config, epoch))
            return PackedLoader(ids, self.config.batch, self.config.seed)
        return self._first_loader

    def valid_batches(self):
        """Yield the validation pairs in batches, always the same."""
        yield from PackedLoader(self.valid_ids, self.config.batch, seed=0).epoch(0)

    def _encode(self, pairs):
        limits = {"max_tokens": self.config.max_len, "on_long": self.config.on_long}
        return encode_pairs(pairs, self.tokenizer, **limits)

    def _counts(self, train, kept):
        source, target = (sum(len(pair[side]) for pair in self.ids) for side in (0, 1))
        what = f"{self.config.task}, generated" if self.config.task else self.config.source
        each = " an epoch" if self.config.task else ""
        return (
            f"{what}: {len(self.ids):,} pairs{each}, {source:,} + {target:,} tokens"
            f"{_left_out(train, kept, self.config)}"
        )


def held_out(config):
    """Return the pairs that ``evaluate`` uses for a run when no files are given.

    Of a built-in task the test split, else the pairs of validation.
    """
    if config.task:
        return tasks.generate(config.task, "test", HELD_OUT, config.seed)
    return _file_pairs(config)[1]


def _task_pairs(config):
    valid = tasks.generate(config.task, "valid", HELD_OUT, config.seed)
    return _task_epoch(config, 0), valid


def _task_epoch(config, epoch):
    return tasks.generate(config.task, "train", TASK_PAIRS, config.seed << 32 | epoch)


def _file_pairs(config):
    train = read_parallel(config.source, config.target, on_long=config.on_long)
    if config.valid_source:
        return train, read_parallel(config.valid_source, config.valid_target)
    if len(train) < 2:
        raise DataError(
            f"{config.source} has one usable pair; accepted: two or more, or give --valid SRC TGT"
        )
    order = np.random.Generator(np.random.Philox([config.seed, 1])).permutation(len(train))
    count = min(HELD_OUT, max(1, len(train) // HELD_OUT_SHARE))
    chosen = set(order[:count].tolist())
    valid = [pair for i, pair in enumerate(train) if i in chosen]
    left = [i for i in range(len(train)) if i not in chosen]
    kept = type(train)([train[i] for i in left], [train.lines[i] for i in left],
                       train.empty, train.too_long)  # fmt: skip
    return kept, valid


def _unigram_loss(pairs):
    """Return the entropy of target tokens, end marks among them, in nats: the least loss of a model
    that looks at nothing."""
    tokens = [token for _, target in pairs for token in (*target, EOS)]
    counts = np.unique(tokens, return_counts=True)[1]
    return float(np.log(len(tokens)) - (counts * np.log(counts)).sum() / len(tokens))


def _left_out(train, kept, config):
    """Return ", 3 longer than 256 tokens (line 8,211 first)" and the like, or nothing."""
    reasons = []
    if getattr(train, "empty", []):
        reasons.append(f"{len(train.empty):,} with an empty side (line {train.empty[0]:,} first)")
    long = list(getattr(train, "too_long", []))
    lines = getattr(train, "lines", range(1, len(train) + 1))
    long += [lines[i] for i in sorted(set(range(len(train))) - set(kept))]
    if long:
        reasons.append(
            f"{len(long):,} longer than {config.max_len} tokens (line {min(long):,} first)"
        )
    return f"; left out: {', '.join(reasons)}" if reasons else ""
