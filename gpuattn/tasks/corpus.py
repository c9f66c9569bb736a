"""Training and validation data as token ids, in batches: of pairs, or of one text.

Where they come from: ``tasks.texts`` (built-in pairs and text files), ``tasks.stored`` (token
stores).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from gpuattn.data.batching import Batch, LanguageModelBatch, LanguageModelLoader, PackedLoader
from gpuattn.errors import DataError
from gpuattn.tasks import stored, texts
from gpuattn.tasks.prepared import Say

LEAST_BATCHES = 10  # batches of an epoch, at least, that the advice for small corpora aims at


class Corpus:
    """Training batches by epoch, validation pairs, and the tokenizer of a run.

    ``tokenizer``: the run's, or None to train one. ``say`` is given sentences while a store is
    made. ``valid``: a sequence of Pair. ``facts``: sentences on the data, for the first lines of a
    run; ``warnings``: advice. ``fingerprint``: of the training text. ``digests``: {option: SHA-256}
    of the files or stores. ``store``: the TokenStore that the data are in, or None.
    ``loader(epoch)``: its PackedLoader. Raises DataError for data that cannot be used, ConfigError
    for limits nothing fits in.
    """

    def __init__(self, config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> None:
        if stored.is_source(config):
            data = stored.pairs(config, tokenizer, say)
        else:
            data = texts.pairs(config, tokenizer)
        self.tokenizer, self.valid, self.valid_ids = data.tokenizer, data.valid, data.held
        self.fingerprint, self.digests, self.ids = data.fingerprint, data.digests, data.train
        self._mix, self.store = data.mix, data.store
        self.rebatch(config)
        first = self._first_loader
        reasons = [*data.left_out, *self._longer()]
        (source, target), each = self._tokens(), " an epoch" if config.task else ""
        left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
        self.facts = [
            f"{data.name}: {first.packing.count:,} pairs{each}, {source:,} + {target:,} tokens"
            f"{left_out}",
            f"{len(self.valid):,} pairs for validation, "
            f"loss of guessing by frequency {data.guess:.2f}",
        ]
        tokens = int(first.fill(0) * config.batch)
        self.warnings = one_batch(first.batches(0) == 1, tokens, config.max_len + 1)

    def rebatch(self, config: Any) -> None:
        """Cut the same data into batches as another config says."""
        self.config = config
        self._first_loader = self._new_loader(self.ids)
        self.loader = lru_cache(1)(self._loader)

    def epoch_tokens(self) -> int:
        """Return the tokens of an epoch, on the longer side."""
        return max(self._tokens())

    def _tokens(self):
        """Return the tokens of an epoch on each side, without end marks."""
        packing = self._first_loader.packing
        return (packing.totals - packing.count).tolist()

    def _longer(self):
        """Return how many pairs of a store are longer than the limit, in words, or nothing."""
        config, loader = self.config, self._first_loader
        count = len(loader.pairs.source) - loader.packing.count
        if count and config.on_long == "error":
            raise DataError(
                f"{config.pairs} has {count:,} pairs longer than {config.max_len} tokens. Raise "
                "--max-len, or skip long pairs"
            )
        return [f"{count:,} longer than {config.max_len} tokens"] if count else []

    def _loader(self, epoch):
        """Return the PackedLoader that has the pairs of an epoch."""
        if self.config.task and epoch > 0:
            some = texts.task_epoch(self.config, epoch)
            return self._new_loader(texts.encode(self.config, self.tokenizer, some)[0])
        return self._first_loader

    def _new_loader(self, ids):
        config = self.config
        return PackedLoader(
            ids, config.batch, config.seed, world=config.replicas, batching=config.batching,
            longest=config.max_len + 1, mix=self._mix, bos=self.tokenizer.bos,
            eos=self.tokenizer.eos,
        )  # fmt: skip

    def valid_batches(self) -> Iterator[Batch]:
        """Yield the validation pairs in batches, always the same."""
        longest = self.config.max_len + 1
        marks = {"bos": self.tokenizer.bos, "eos": self.tokenizer.eos}
        loader = PackedLoader(self.valid_ids, self.config.batch, 0, longest=longest, **marks)
        yield from loader.epoch(0)


class TextCorpus:
    """Training batches of a text by epoch, consecutive blocks of what is held out, the tokenizer.

    Attributes as those of Corpus; ``valid_loader``: the LanguageModelLoader of what is held out.
    Raises DataError for data that cannot be used, and for too short ones.
    """

    def __init__(self, config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> None:
        if stored.is_source(config):
            data = stored.text(config, tokenizer, say)
        else:
            data = texts.text(config, tokenizer)
        self.tokenizer, self._ids_of, self._mix = data.tokenizer, (data.train, data.held), data.mix
        self.fingerprint, self.digests = data.fingerprint, data.digests
        self.store = data.store
        if config.documents and not data.documents:
            raise DataError(
                f"{config.lm} has no marks where its documents end; accepted by --documents: a "
                "store of gpuattn prepare --documents"
            )
        ids, valid_ids, block = data.train, data.held, config.block
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
        self.rebatch(config)
        self.warnings = one_batch(len(ids) <= config.batch, len(ids), block)
        self.facts = [
            data.counts,
            f"{len(valid_ids):,} tokens for validation, "
            f"loss of guessing by frequency {data.guess:.2f}",
        ]

    def rebatch(self, config: Any) -> None:
        """Cut the same text into batches as another config says."""
        (ids, valid), block, rows = self._ids_of, config.block, config.batch // config.block
        self._train = LanguageModelLoader(
            ids, block, rows, config.seed, world=config.replicas, mix=self._mix,
            documents=config.documents,
        )  # fmt: skip
        self.valid_loader = LanguageModelLoader(
            valid, min(block, len(valid) - 1), rows, seed=0, documents=config.documents
        )

    def epoch_tokens(self) -> int:
        """Return the tokens of the text."""
        return len(self._ids_of[0])

    def loader(self, epoch: int) -> LanguageModelLoader:
        """Return the LanguageModelLoader of every epoch."""
        return self._train

    def valid_batches(self) -> Iterator[LanguageModelBatch]:
        """Yield the held-out text as consecutive blocks, every token but the first once a label."""
        yield from self.valid_loader.blocks()


def held_out(config: Any) -> Sequence[Any]:
    """Return the pairs that ``evaluate`` uses for a run when no files are given.

    Of built-in pairs the test split, else the pairs of validation.
    """
    if config.task:
        return texts.test_pairs(config)
    if stored.is_source(config):
        return stored.held_out_pairs(config)
    return texts.file_pairs(config)[1]


def held_out_ids(config: Any, tokenizer: Any) -> Sequence[int]:
    """Return the ids of the text that a language model's run holds out."""
    own = not config.valid_lm and stored.is_source(config)
    if own or stored.is_folder(config.valid_lm or config.lm):
        return stored.held_out_ids(config, tokenizer)
    return texts.text_ids(tokenizer, config.valid_lm or config.lm, texts.held_out_text(config))


def one_batch(alone: bool, tokens: int, least: int) -> list[str]:
    """Return advice where all ``tokens`` are one batch; ``least``: the smallest batch."""
    if not alone:
        return []
    fewer = max(tokens // LEAST_BATCHES, least)
    return [f"all of the text is one batch, so that updates differ little. Try --batch {fewer}"]
