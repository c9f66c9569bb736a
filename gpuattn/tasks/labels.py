"""Runs that learn to tell classes of texts apart."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.data.class_names import LabelledTokenizer
from gpuattn.data.fixed_shape import fixed_texts
from gpuattn.data.labelled import (
    MOST_BYTES,
    Labelled,
    LabelLoader,
    class_names,
    read_labelled,
    some_of,
)
from gpuattn.data.text import raw_lines
from gpuattn.data.tokenizer import CharTokenizer, Tokenizer
from gpuattn.errors import ConfigError, DataError
from gpuattn.files import write_text
from gpuattn.parallel.dealing import ALONE, Dealing
from gpuattn.pretrained.origin import with_new_head
from gpuattn.tasks.prepared import Say
from gpuattn.tasks.task import LineTask
from gpuattn.tasks.texts import by_option, entropy
from gpuattn.tasks.users.classifier import TextClassifier, cut
from gpuattn.typing import StrPath

HELD_OUT, HELD_OUT_SHARE = 10_000, 10  # texts without validation data, at most, one in so many
LEAST_BATCHES = 10  # batches of an epoch, at least, that the advice for small data aims at
BATCH = 1024  # tokens: about as many texts as the 32 of Devlin et al., "BERT" (2019)
LEAST_BLOCK = 3  # tokens: two marks, and one between them
SHOWN, KEPT = 4, 100  # wrong labels shown, and kept in a file, at each evaluation


class LabelTask(LineTask):
    """Texts with labels, and an encoder with a classifier such as Bert, judged by its share of
    right labels."""

    name, command = "labels", "gpuattn classify"
    options = ("classify", "valid_classify", "tokenizer", "vocab_size", "pad_vocab")
    chosen_by, new_head = ("classify",), True
    new_user, predicted = TextClassifier, "text"

    @staticmethod
    def new_corpus(config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> Any:
        return LabelCorpus(config, tokenizer)

    def adapted(self, model: Any) -> Any:
        """Return a model with a classifier of the run's classes: where it has none, with a new
        one."""
        names = self.corpus.tokenizer.names
        if model.config.classes == len(names) and self.corpus.classes_known:
            return model
        self.corpus.facts.append(f"the model of {self.config.origin} gets a new classifier")
        return with_new_head(model, names, self.config.seed)

    @staticmethod
    def data_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
        return {"batch": BATCH}

    @staticmethod
    def check(config: Any) -> None:
        others = (config.task, config.source, config.target, config.pairs, config.images)
        if any((*others, config.valid_source, config.lm, config.valid_lm)):
            raise ConfigError(
                "--classify FILE is all that a classifier of texts learns from; accepted: it "
                "alone, or with --valid-classify FILE"
            )
        if config.block < LEAST_BLOCK:
            raise ConfigError(f"block is {config.block}; accepted: {LEAST_BLOCK} or more for bert")

    @staticmethod
    def run_name(config: Any) -> str | None:
        return Path(config.classify).name.split(".")[0]

    @staticmethod
    def describe_data(config: Any) -> str:
        return config.classify

    @staticmethod
    def title(config: Any) -> str:
        return f"Classifier of {config.classify}"

    @staticmethod
    def example(config: Any) -> str | None:
        lines = raw_lines(config.valid_classify or config.classify, MOST_BYTES)
        texts = ((raw or b"").decode(errors="replace").split("\t")[0].strip() for raw in lines)
        return next(filter(None, texts), None)

    @staticmethod
    def scores(config: Any) -> tuple[str, dict[str, str]]:
        return "Held-out texts", {"accuracy": "right, %"}

    def describe_update(self) -> str:
        config = self.config
        tokens, batches = config.batch * config.update_batches, self.corpus.loader(0).batches(0)
        texts = len(self.corpus.train.texts) * config.accumulate / batches
        return f"up to {tokens:,} tokens, about {texts:.0f} texts"

    def fixed_shape(self, batch: Any) -> Any:
        return fixed_texts(batch, self.config.batch, self.config.block)

    def loss(self, batch: Any, label_smoothing: float = 0.0, dloss: Any = None) -> Any:
        return self.model.class_loss(
            batch.tokens, batch.rows, batch.labels, dloss, label_smoothing=label_smoothing,
            **batch.packing,
        )  # fmt: skip

    def answers(self, user: Any, deal: Dealing = ALONE) -> list[Any]:
        """Return (indices of held-out texts, numbers of the labels that the ``user`` gives them) of
        each batch; a GPU sees batches of one shape."""

        def labels(batch):
            probabilities = user.of_batch(self.fixed_shape(batch))
            return batch.sentences, probabilities[: len(batch.rows)].argmax(1)

        return deal.each(self.corpus.valid_batches(), labels)

    def judge(
        self, answers: list[Any], folder: Path, update: int, loss: float
    ) -> tuple[dict[str, Any], list[str]]:
        valid, names = self.corpus.valid, self.corpus.tokenizer.names
        found = np.zeros(len(valid.texts), np.int64)
        for sentences, labels in answers:
            found[sentences] = labels
        wrong = [mistake.describe() for mistake in mistakes(valid, [names[i] for i in found])]
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", "".join(f"{x}\n" for x in wrong[:KEPT]))
        accuracy = 100 * (1 - len(wrong) / len(found))
        return {"accuracy": accuracy, "score": accuracy}, wrong[:SHOWN]


class Mistake(NamedTuple):
    """A text of line ``line`` that got another label, ``found``, than its own."""

    line: int
    text: str
    label: str
    found: str

    def describe(self) -> str:
        """Return the mistake in words."""
        return f"{self.label} taken for {self.found}: {self.text}"


def mistakes(texts: Labelled, found: Sequence[str]) -> list[Mistake]:
    """Return the Mistakes among the labels ``found`` of texts."""
    every = map(Mistake, texts.lines, texts.texts, texts.labels, found)
    return [one for one in every if one.label != one.found]


# ---- data ---------------------------------------------------------------------------------------


class LabelCorpus:
    """Training batches by epoch and those held out, as ``tasks.corpus.Corpus`` has them.

    ``tokenizer``: the run's LabelledTokenizer, a tokenizer alone, or None to train one.
    ``train``, ``valid``: Labelled. ``classes_known``: whether the tokenizer came with names.
    Raises DataError for texts that cannot be used, ConfigError for batches that one does not fit.
    """

    store = None  # of tokens

    def __init__(self, config: Any, tokenizer: Any = None) -> None:
        known, digests = getattr(tokenizer, "names", ()), dict[str, str]()
        self.classes_known = bool(known)
        train, names = _read(config, known, digests), known
        names = names or class_names(train.labels)
        if len(names) < 2:
            raise DataError(f"{config.classify} has one class, {names[0]!r}; accepted: two or more")
        self.train, self.valid = _parts(config, train, names, digests)
        if tokenizer is None:
            tokenizer = _new_tokenizer(config, train.texts, self.train.texts)
        self.tokenizer = tokenizer if self.classes_known else LabelledTokenizer(tokenizer, names)
        self._train, long = encoded(self.tokenizer, self.train, config.block, config.classify)
        held = config.valid_classify or config.classify
        self._held, held_long = encoded(self.tokenizer, self.valid, config.block, held)
        self.digests = by_option(config, digests)
        self.fingerprint = int(self.digests["classify"][:8], 16)
        longest = max(map(len, (*self._train, *self._held)))
        if longest > config.batch:
            raise ConfigError(
                f"batch is {config.batch}; accepted: {longest} tokens or more, which a text of "
                f"{config.classify} has. Raise --batch, or lower --block"
            )
        self.rebatch(config)
        counts = np.bincount(self.train.numbers(names), minlength=len(names))
        self.facts = [
            f"{config.classify}: {len(self.train.texts):,} texts, {int(counts.min()):,} to "
            f"{int(counts.max()):,} of each of {len(names):,} classes{_cuts(long, config)}",
            f"{len(self.valid.texts):,} texts for validation, loss of guessing by frequency "
            f"{entropy(self.valid.numbers(names)):.2f}{_cuts(held_long, config)}",
        ]
        fewer = max(self.epoch_tokens() // LEAST_BATCHES, longest)
        advice = f"an epoch has less than {LEAST_BATCHES} batches. Try --batch {fewer}"
        short = fewer < config.batch and self._loader.batches(0) < LEAST_BATCHES
        self.warnings = [advice] if short else []
        if missing := [name for name, count in zip(names, counts, strict=True) if not count]:
            self.warnings.append(f"there is no text to learn {some_of(missing)} from")

    def rebatch(self, config: Any) -> None:
        """Cut the same texts into batches as another config says."""
        names = self.tokenizer.names
        self._loader = LabelLoader(
            self._train, self.train.numbers(names), config.batch, config.seed, config.replicas
        )
        self._valid = LabelLoader(self._held, self.valid.numbers(names), config.batch, 0)

    def epoch_tokens(self) -> int:
        """Return the tokens of an epoch, marks among them."""
        return int(self._loader.packing.totals[0])

    def loader(self, epoch: int) -> LabelLoader:
        """Return the LabelLoader of every epoch."""
        return self._loader

    def valid_batches(self) -> Iterator[Any]:
        """Yield the texts held out in LabelBatches, always the same."""
        return self._valid.epoch(0)


def _read(config, known, digests):
    """Return the Labelled to learn from; ``known``: the names of the classes of a run or a folder,
    which may be none."""
    found = read_labelled(config.classify, digests=digests)
    other = next((i for i, label in enumerate(found.labels) if label not in known), None)
    if known and other is not None:
        raise DataError(
            f"{config.classify}, line {found.lines[other]}: the label {found.labels[other]!r} is "
            f"none of the classifier that the run has; accepted: {some_of(known)}. For others "
            "begin with an encoder: a folder of load_pretrained(FOLDER, task='embedding')"
        )
    return found


def _parts(config, train, names, digests):
    """Return the Labelled to learn from and those held out."""
    if config.valid_classify:
        return train, read_labelled(config.valid_classify, names=names, digests=digests)
    if len(train.texts) < 2:
        raise DataError(
            f"{config.classify} has one text; accepted: two or more, or give --valid-classify FILE"
        )
    order = np.random.Generator(np.random.Philox([config.seed, 1])).permutation(len(train.texts))
    count = min(HELD_OUT, max(1, len(order) // HELD_OUT_SHARE))
    return train.some(np.sort(order[count:])), train.some(np.sort(order[:count]))


def _new_tokenizer(config, whole, texts):
    """Return a tokenizer of the characters of the ``whole`` file, or of subwords of the texts that
    are learnt from."""
    if config.tokenizer == "chars":
        return CharTokenizer.train(whole)
    return Tokenizer.train(texts, config.vocab_size, config.seed)


def encoded(
    tokenizer: Any, labelled: Labelled, block: int, path: StrPath
) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of texts of a file, and the lines of those that are cut to ``block``
    tokens."""
    try:
        ids = tokenizer.encode_marked(labelled.texts)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if [] in ids:
        raise DataError(f"{path}, line {labelled.lines[ids.index([])]}, has no token")
    long = [line for line, one in zip(labelled.lines, ids, strict=True) if len(one) > block]
    return [cut(one, block) for one in ids], long


def _cuts(long, config):
    """Return how many texts are cut, in words, or nothing."""
    if not long:
        return ""
    return f"; {len(long):,} are cut to {config.block} tokens (line {long[0]:,} first)"


def held_out_texts(user: TextClassifier, path: StrPath | None = None) -> Labelled:
    """Return the texts of a file, or those that a user's run holds out.

    Raises DataError for a file that cannot be used, such as one with a label unseen in training.
    """
    names, config = user.tokenizer.names, user.config
    if path:
        return read_labelled(path, names=names)
    digests: dict[str, str] = {}
    return _parts(config, _read(config, names, digests), names, digests)[1]
