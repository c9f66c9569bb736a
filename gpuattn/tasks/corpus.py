"""Training and validation data as token ids: built-in pairs, pairs of files, or one text.

Built-in pairs are new in every epoch, a function of (seed, epoch).
"""

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from gpuattn.data import generated
from gpuattn.data.batching import Batch, LanguageModelBatch, LanguageModelLoader, PackedLoader
from gpuattn.data.text import encode_pairs, read_language_model, read_parallel
from gpuattn.data.tokenizer import EOS, CharTokenizer, Tokenizer
from gpuattn.errors import DataError
from gpuattn.tasks.task import DATA_FILES

GENERATED_PAIRS = 20_000  # an epoch of built-in pairs
HELD_OUT = 1000  # pairs, at most, for validation and for tests
HELD_OUT_SHARE = 50  # of a corpus without validation files, one pair in so many
TEXT_SHARE = 10  # of a text without a validation file, one character in so many, the last ones
LEAST_BATCHES = 10  # batches of an epoch, at least, that the advice for small corpora aims at
PIECE = 1000  # characters: SentencePiece learns nothing from lines much longer


class Corpus:
    """Training batches by epoch, validation pairs, and the tokenizer of a run.

    ``tokenizer``: the run's, or None to train one. ``valid``: list of Pair. ``facts``: sentences on
    the data, for the first lines of a run; ``warnings``: advice. ``fingerprint``: of the training
    text. ``digests``: {option: SHA-256} of the files. ``loader(epoch)``: its PackedLoader. Raises
    DataError for files that cannot be used, ConfigError for limits nothing fits in.
    """

    def __init__(self, config: Any, tokenizer: Any = None) -> None:
        self.config = config
        digests: dict[str, str] = {}
        train, self.valid = _task_pairs(config) if config.task else _file_pairs(config, digests)
        self.digests = _by_option(config, digests)
        if tokenizer is None:
            lines = (line for pair in train for line in pair[:2])
            tokenizer = Tokenizer.train(lines, config.vocab_size, config.seed)
        self.tokenizer = tokenizer
        self.ids, kept = self._encode(train)
        self.rebatch(config)
        self.fingerprint = zlib.crc32("\n".join(chain.from_iterable(p[:2] for p in train)).encode())
        self.facts = [self._counts(train, kept)]
        self.valid_ids, kept = self._encode(self.valid)
        self.valid = [self.valid[i] for i in kept]
        self.facts.append(
            f"{len(self.valid):,} pairs for validation, "
            f"loss of guessing by frequency {_unigram_loss(self._valid_targets()):.2f}"
        )
        alone = self._first_loader.batches(0) == 1
        tokens = int(self._first_loader.fill(0) * config.batch)
        self.warnings = _one_batch(alone, tokens, config.max_len + 1)

    def rebatch(self, config: Any) -> None:
        """Cut the same data into batches as another config says."""
        self.config = config
        self._first_loader = self._new_loader(self.ids)
        self.loader = lru_cache(1)(self._loader)

    def epoch_tokens(self) -> int:
        """Return the tokens of an epoch, on the longer side."""
        return max(sum(len(pair[side]) for pair in self.ids) for side in (0, 1))

    def _loader(self, epoch):
        """Return the PackedLoader that has the pairs of an epoch."""
        if self.config.task and epoch > 0:
            ids, _ = self._encode(_task_epoch(self.config, epoch))
            return self._new_loader(ids)
        return self._first_loader

    def _new_loader(self, ids):
        config = self.config
        return PackedLoader(ids, config.batch, config.seed, batching=config.batching)

    def valid_batches(self) -> Iterator[Batch]:
        """Yield the validation pairs in batches, always the same."""
        yield from PackedLoader(self.valid_ids, self.config.batch, seed=0).epoch(0)

    def _valid_targets(self):
        return [token for _, target in self.valid_ids for token in (*target, EOS)]

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


class TextCorpus:
    """Training batches of a text by epoch, consecutive blocks of what is held out, the tokenizer.

    Attributes as those of Corpus; ``valid_loader``: the LanguageModelLoader of what is held out.
    Without ``valid_lm`` the end of the text is held out. Characters
    are those of the whole file, subwords are learned from the text to train on.
    Raises DataError for files that cannot be used, and for too short ones.
    """

    def __init__(self, config: Any, tokenizer: Any = None) -> None:
        digests: dict[str, str] = {}
        whole = read_language_model(config.lm, digests)
        if config.valid_lm:
            train, valid = whole, read_language_model(config.valid_lm, digests)
        else:
            cut = _held_out_from(whole)
            train, valid = whole[:cut], whole[cut:]
        self.digests = _by_option(config, digests)
        if tokenizer is None:
            chars = config.tokenizer == "chars"
            subwords = (_pieces(train), config.vocab_size, config.seed)
            tokenizer = CharTokenizer.train([whole]) if chars else Tokenizer.train(*subwords)
        self.tokenizer = tokenizer
        ids, valid_ids = self._ids(config.lm, train), self._ids(config.valid_lm, valid)
        block = config.block
        if len(ids) <= block:
            raise DataError(
                f"{config.lm} has {len(ids)} tokens to learn from, and a block of {block} needs "
                f"{block + 1}. Give more text or a smaller --block"
            )
        if len(valid_ids) < 2:
            raise DataError(
                f"{len(valid_ids)} token for validation, of {config.valid_lm or config.lm}; "
                "accepted: two or more. Give more text"
            )
        self._ids_of = ids, valid_ids
        self.rebatch(config)
        self.warnings = _one_batch(len(ids) <= config.batch, len(ids), block)
        self.fingerprint = zlib.crc32(train.encode())
        self.facts = [
            f"{config.lm}: {len(train):,} characters, {len(ids):,} tokens",
            f"{len(valid_ids):,} tokens for validation, "
            f"loss of guessing by frequency {_unigram_loss(valid_ids):.2f}",
        ]

    def rebatch(self, config: Any) -> None:
        """Cut the same text into batches as another config says."""
        (ids, valid), block, rows = self._ids_of, config.block, config.batch // config.block
        self._train = LanguageModelLoader(ids, block, rows, config.seed)
        self.valid_loader = LanguageModelLoader(valid, min(block, len(valid) - 1), rows, seed=0)

    def epoch_tokens(self) -> int:
        """Return the tokens of the text."""
        return len(self._ids_of[0])

    def _ids(self, path, text):
        try:
            return self.tokenizer.encode_text(text)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def loader(self, epoch: int) -> LanguageModelLoader:
        """Return the LanguageModelLoader of every epoch."""
        return self._train

    def valid_batches(self) -> Iterator[LanguageModelBatch]:
        """Yield the held-out text as consecutive blocks, every token but the first once a label."""
        yield from self.valid_loader.blocks()


def _pieces(text):
    """Yield the lines of a text, long ones in parts."""
    for line in text.split("\n"):
        yield from (line[i : i + PIECE] for i in range(0, len(line), PIECE))


def held_out(config: Any) -> Sequence[Any]:
    """Return the pairs that ``evaluate`` uses for a run when no files are given.

    Of built-in pairs the test split, else the pairs of validation.
    """
    if config.task:
        return generated.generate(config.task, "test", HELD_OUT, config.seed)
    return _file_pairs(config)[1]


def _by_option(config, digests):
    """Return {option: SHA-256} of files by {path: SHA-256}."""
    paths = {name: getattr(config, name) for name in DATA_FILES}
    return {name: digests[path] for name, path in paths.items() if path is not None}


def held_out_text(config: Any) -> str:
    """Return the validation text of a language model's run."""
    if config.valid_lm:
        return read_language_model(config.valid_lm)
    whole = read_language_model(config.lm)
    return whole[_held_out_from(whole) :]


def _held_out_from(text):
    """Return the index at which the held-out end of a text begins."""
    return len(text) * (TEXT_SHARE - 1) // TEXT_SHARE


def _task_pairs(config):
    valid = generated.generate(config.task, "valid", HELD_OUT, config.seed)
    return _task_epoch(config, 0), valid


def _task_epoch(config, epoch):
    return generated.generate(config.task, "train", GENERATED_PAIRS, config.seed << 32 | epoch)


def _file_pairs(config, digests=None):
    files = (config.source, config.target)
    train = read_parallel(*files, on_long=config.on_long, digests=digests)
    if config.valid_source:
        return train, read_parallel(config.valid_source, config.valid_target, digests=digests)
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


def _one_batch(alone, tokens, least):
    """Return advice where all ``tokens`` are one batch; ``least``: the smallest batch."""
    if not alone:
        return []
    fewer = max(tokens // LEAST_BATCHES, least)
    return [f"all of the text is one batch, so that updates differ little. Try --batch {fewer}"]


def _unigram_loss(tokens):
    """Return the entropy of tokens, in nats: the least loss of a model without context."""
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
