"""Runs that learn to guess hidden tokens of texts, a line each."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data.fixed_shape import fixed_masked
from gpuattn.data.masking import MARKS, MaskedBatch, MaskedLoader, Texts
from gpuattn.data.text import read_language_model
from gpuattn.errors import ConfigError, DataError
from gpuattn.files import write_text
from gpuattn.parallel.dealing import ALONE, Dealing
from gpuattn.tasks import stored, texts
from gpuattn.tasks.corpus import held_out_ids, one_batch
from gpuattn.tasks.prepared import Say
from gpuattn.tasks.task import LineTask
from gpuattn.tasks.users.unmasker import Unmasker
from gpuattn.typing import StrPath
from gpuattn.units import AUTO

SHOWN, KEPT = 4, 100  # lines shown, and kept in a file, at each evaluation


class MaskedTask(LineTask):
    """The lines of one text and an encoder such as Bert, judged by its loss on hidden tokens."""

    name, command = "masked", "gpuattn embed"
    options = ("lm", "valid_lm", "mask", "tokenizer", "vocab_size", "pad_vocab")
    chosen_by = ("lm",)
    new_user = Unmasker

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.model.config = replace(self.model.config, predicted=config.mask)

    @staticmethod
    def new_corpus(config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> Any:
        return MaskedCorpus(config, tokenizer, say)

    @staticmethod
    def check(config: Any) -> None:
        if not config.lm:
            raise ConfigError(
                f"--model {config.model} learns from one text: --lm FILE; or from lines with "
                "labels: --classify FILE"
            )
        pairs = (config.source, config.target, config.pairs, config.valid_source)
        if any((config.task, config.images, config.classify, *pairs)):
            raise ConfigError(
                "--lm FILE is all that masked tokens are learnt from; accepted: it alone, or with "
                "--valid-lm FILE"
            )
        if config.block <= MARKS:
            raise ConfigError(f"block is {config.block}; accepted: {MARKS + 1} or more for bert")
        if config.batch != AUTO and config.block > config.batch:
            raise ConfigError(
                f"block is {config.block}; accepted: up to a batch, {config.batch} tokens. "
                "Raise --batch or lower --block"
            )

    @staticmethod
    def run_name(config: Any) -> str | None:
        return Path(config.lm).name.split(".")[0]

    @staticmethod
    def describe_data(config: Any) -> str:
        return config.lm

    @staticmethod
    def title(config: Any) -> str:
        return f"Masked tokens of {config.lm}"

    @staticmethod
    def example(config: Any) -> str | None:
        try:
            with open(config.valid_lm or config.lm, encoding="utf-8") as file:
                return next(filter(None, map(str.strip, file)), None)
        except (OSError, UnicodeDecodeError):
            return None

    @staticmethod
    def scores(config: Any) -> tuple[str, dict[str, str]]:
        return "Hidden tokens of the held-out text", {"accuracy": "right, %"}

    def describe_update(self) -> str:
        tokens = self.config.batch * self.config.update_batches
        return f"up to {tokens:,} tokens, {100 * self.config.mask:g} % of them to guess"

    def fixed_shape(self, batch: Any) -> Any:
        config = self.config
        return fixed_masked(batch, config.batch, config.block, config.mask)

    def loss(self, batch: Any, label_smoothing: float = 0.0, dloss: Any = None) -> Any:
        return self.model.masked_loss(
            batch.tokens, batch.rows, batch.labels, dloss, label_smoothing=label_smoothing,
            **batch.packing,
        )  # fmt: skip

    def answers(self, user: Any, deal: Dealing = ALONE) -> list[Any]:
        """Return the guesses of the ``user`` for each held-out batch; a GPU sees batches of one
        shape."""

        def guesses(batch):
            return user.guess(self.fixed_shape(batch))[0][: len(batch.rows)]

        return deal.each(self.corpus.valid_batches(), guesses)

    def judge(
        self, answers: list[Any], folder: Path, update: int, loss: float
    ) -> tuple[dict[str, Any], list[str]]:
        right, count = 0, 0
        lines: list[str] = []
        for batch, guesses in zip(self.corpus.valid_batches(), answers, strict=True):
            right += int((guesses == batch.labels).sum())
            count += len(batch.labels)
            lines += islice(self.user.lines(batch, guesses), KEPT - len(lines))
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", "".join(f"{line}\n" for line in lines))
        return {"accuracy": 100 * right / count, "score": -loss}, lines[:SHOWN]


# ---- data ---------------------------------------------------------------------------------------


class MaskedCorpus:
    """Training batches by epoch and those held out, whose masks are fixed; as
    ``tasks.corpus.Corpus`` has them. Raises DataError for data that cannot be used.
    """

    def __init__(self, config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> None:
        if stored.is_source(config):
            data = stored.text(config, tokenizer, say)
        else:
            data = texts.text(config, tokenizer)
        self.tokenizer, self.store = data.tokenizer, data.store
        self.fingerprint, self.digests = data.fingerprint, data.digests
        _check_tokenizer(self.tokenizer, config)
        self._train = _texts(data.train, self.tokenizer, config.block, config.lm)
        valid = config.valid_lm or config.lm
        self._held = _texts(data.held, self.tokenizer, config.block, valid)
        starts = self._train.starts
        self._mix = [(*np.searchsorted(starts, part[:2]).tolist(), part[2]) for part in data.mix]
        self.rebatch(config)
        tokens = self.epoch_tokens()
        self.warnings = one_batch(self.loader(0).batches(0) == 1, tokens, config.block)
        content = self._held.flat[~np.isin(self._held.flat, _separators(self.tokenizer))]
        self.facts = [
            f"{data.counts}, {len(self._train):,} lines or parts of up to {config.block} tokens",
            f"{len(self._held):,} for validation, loss of guessing by frequency "
            f"{texts.entropy(content):.2f}",
        ]

    def rebatch(self, config: Any) -> None:
        """Cut the same texts into batches as another config says."""
        share = config.mask, self.tokenizer
        self._loader = MaskedLoader(
            self._train, config.batch, config.seed, *share, mix=self._mix, world=config.replicas
        )
        self._valid = MaskedLoader(self._held, config.batch, 0, *share)

    def epoch_tokens(self) -> int:
        """Return the tokens of an epoch, marks among them."""
        return int(self._loader.packing.totals[0])

    def loader(self, epoch: int) -> MaskedLoader:
        """Return the MaskedLoader of every epoch."""
        return self._loader

    def valid_batches(self) -> Iterator[MaskedBatch]:
        """Yield the texts held out in batches, always the same."""
        return self._valid.epoch(0)


def _texts(ids, tokenizer, block, path):
    """Return the Texts of ids. DataError for none at all."""
    found = Texts(ids, _separators(tokenizer), block - MARKS)
    if not len(found):
        raise DataError(f"{path} has no line with text, to learn from or to hold out")
    return found


def _separators(tokenizer):
    """Return the ids that end a line, or a document, in what ``encode_text`` gives."""
    end = tokenizer.line_end
    return [*tokenizer.marks, *([end] if tokenizer.decode_text([end]) == "\n" else [])]


def _check_tokenizer(tokenizer, config):
    """Raise ConfigError for the tokenizer of a folder that hides no tokens."""
    found = f"--from {config.origin}: its tokenizer"
    if tokenizer.mask is None:
        raise ConfigError(f"{found} has no mask token; accepted: one with such as [MASK]")
    if len(tokenizer.marks) != 2:
        count = len(tokenizer.marks)
        raise ConfigError(
            f"{found} puts {count} marks around a line; accepted: two, such as [CLS] and [SEP]"
        )


def held_out_masked(user: Unmasker, path: StrPath | None = None) -> Iterator[MaskedBatch]:
    """Return batches of the lines of a text file, or of those that a user's run holds out, masked
    as at its evaluations. Raises DataError for a file that cannot be used."""
    config, tokenizer = user.config, user.tokenizer
    ids: Sequence[int]
    if path:
        ids = texts.text_ids(tokenizer, path, read_language_model(path))
    else:
        ids = held_out_ids(config, tokenizer)
    found = _texts(ids, tokenizer, config.block, path or config.valid_lm or config.lm)
    return MaskedLoader(found, config.batch, 0, config.mask, tokenizer).epoch(0)
