"""Runs that learn to translate."""

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data import generated
from gpuattn.data.fixed_shape import fixed_shape
from gpuattn.errors import ConfigError
from gpuattn.files import write_text
from gpuattn.parallel.dealing import ALONE, Dealing
from gpuattn.tasks.corpus import Corpus, held_out
from gpuattn.tasks.score import Scorer
from gpuattn.tasks.task import OF_TEXT, Task
from gpuattn.tasks.users.translator import Translator
from gpuattn.units import AUTO

SAMPLES = 2  # translations shown at each evaluation
BATCH_UNIT = 512  # tokens that a batch is a multiple of

# For the built-in pairs on two CPU cores: many small updates, until nearly all is right. After 800
# updates the learning rate is low enough for that; on a slow machine they take longer.
_QUICK = {
    "heads": 4, "layers": (2, 2), "dropout": 0.0, "batch": 640, "lr": 4e-3, "schedule": "linear",
    "lr_decay": 800, "lr_floor": 0.1, "warmup": 0.1, "label_smoothing": 0.1, "clip": 1.0,
    "ema": 0.99, "length": "450s", "until": 99.0, "eval_every": "100u", "score_pairs": 1000,
    "beam": 1,
}  # fmt: skip
_SMALL = _QUICK | {"dim": 64, "ffn": 128, "max_len": 64}
BUILT_IN_DEFAULTS = {
    "toy": _QUICK | {"dim": 96, "ffn": 256, "max_len": 96},
    "dates": _SMALL, "reverse": _SMALL,
}  # fmt: skip


class TranslationTask(Task):
    """Pairs of sentences, a TranslationModel, judged by exact matches or BLEU."""

    name, command = "translation", "gpuattn translate"
    options = (
        "task", "source", "target", "pairs", "valid_source", "valid_target", "max_len", "on_long",
        "batching", "until", "score_pairs", "beam", "length_penalty", *OF_TEXT,
    )  # fmt: skip
    new_corpus, new_user = Corpus, Translator
    smaller = "a smaller --max-len"
    rate_title = "Tokens per second, source and target"

    @staticmethod
    def default_data(given: Collection[str]) -> dict[str, Any]:
        return {} if {"task", "source", "target", "pairs"} & set(given) else {"task": "toy"}

    @staticmethod
    def data_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
        if not values.get("task"):
            return {}
        task = generated.find_generated(values["task"])
        return {"vocab_size": task.vocab_size} | BUILT_IN_DEFAULTS[task.name]

    @staticmethod
    def check(config: Any) -> None:
        files = (config.source, config.target)
        valid = (config.valid_source, config.valid_target)
        if config.lm:
            raise ConfigError(f"lm is a text for --model gpt2, not for {config.model}")
        if config.task and any((*files, *valid, config.pairs)):
            raise ConfigError(f"task is {config.task!r} and there are files; accepted: one of both")
        if config.pairs and any(files):
            raise ConfigError(
                f"pairs is {config.pairs!r} and there are files; accepted: one of both"
            )
        if not config.task and not config.pairs and not all(files):
            raise ConfigError("a task, or a source and a target file, or --pairs STORE, is needed")
        if config.until and not config.task:
            raise ConfigError(
                f"until is {config.until:g}; accepted: 0 for files, whose sentences have more than "
                "one right translation. Try --patience N"
            )
        if (config.valid_source is None) != (config.valid_target is None):
            raise ConfigError("validation needs two files: --valid SRC TGT")
        if config.batch != AUTO and config.max_len >= config.batch:
            raise ConfigError(
                f"max-len is {config.max_len}; accepted: less than a batch, {config.batch} tokens. "
                "Raise --batch or lower --max-len"
            )

    @staticmethod
    def run_name(config: Any) -> str | None:
        return config.task or config.pairs and Path(config.pairs).name

    @staticmethod
    def describe_data(config: Any) -> str:
        return config.task or config.pairs or f"{config.source} to {config.target}"

    @staticmethod
    def title(config: Any) -> str:
        return f"Translation: {TranslationTask.describe_data(config)}"

    @staticmethod
    def example(config: Any) -> str | None:
        if config.task:
            few = generated.generate(config.task, "test", 20, config.seed)
            return max((pair.source for pair in few), key=len)
        if config.pairs:
            return held_out(config)[0].source
        try:
            with open(config.valid_source or config.source, encoding="utf-8") as file:
                return file.readline().strip()
        except (OSError, UnicodeDecodeError):
            return "..."

    @staticmethod
    def scores(config: Any) -> tuple[str, dict[str, str]]:
        exact = {"exact_match": "exact match, %", "bleu": "BLEU"}
        figures = exact if config.exact_match else {"bleu": "BLEU", "chrf": "chrF"}
        return "Held-out sentences, translated greedily", figures

    @staticmethod
    def one_shape(config: Any) -> bool:
        return False

    @staticmethod
    def least_tokens(config: Any) -> int:
        return config.max_len + 1

    @staticmethod
    def describe_least(config: Any) -> str:
        return f"{config.batch:,}"

    @staticmethod
    def unit(config: Any, most: int) -> int:
        return BATCH_UNIT

    @staticmethod
    def next_parts(config: Any, parts: int) -> int | None:
        return 2 * parts if config.batch // (2 * parts) > config.max_len else None

    @staticmethod
    def part_tokens(config: Any, parts: int) -> int:
        return config.batch // parts

    def describe_model(self) -> str:
        return f"{'+'.join(map(str, self.config.layers))} layers, width {self.config.dim}"

    def describe_update(self) -> str:
        tokens = self.config.batch * self.config.update_batches
        fill = self.corpus.loader(0).fill(0)
        return f"up to {tokens:,} tokens on a side, {fill:.0%} of it filled"

    def fixed_shape(self, batch: Any) -> Any:
        return fixed_shape(batch, self.config.batch, self.config.max_len + 1)

    def flops(self, batches: Sequence[Any]) -> float:
        lengths = [
            np.concatenate(sides) for sides in zip(*(b.lengths for b in batches), strict=True)
        ]
        return self.model.config.flops(*lengths)

    def loss(self, batch: Any, label_smoothing: float = 0.0, dloss: Any = None) -> Any:
        return self.model.loss(batch, label_smoothing, dloss)

    @functools.cached_property
    def scorer(self) -> Scorer:
        """What scores translations of the validation pairs."""
        pairs = self.corpus.valid[: self.config.score_pairs]
        return Scorer([pair.target for pair in pairs], [pair.kind for pair in pairs])

    def prepare_evaluation(self) -> None:
        _ = self.scorer

    def answers(self, user: Any, deal: Dealing = ALONE) -> list[str]:
        """Return translations of the first held-out pairs."""
        pairs = self.corpus.valid[: self.config.score_pairs]
        return translated(user, [pair.source for pair in pairs], deal, beam=1)

    def judge(
        self, answers: list[str], folder: Path, update: int, loss: float
    ) -> tuple[dict[str, Any], list[str]]:
        pairs = self.corpus.valid[: self.config.score_pairs]
        if not pairs:
            return {"score": -loss}, []
        self._keep(folder, update, pairs, answers)
        figures = self.scorer(answers)
        figures["score"] = figures["exact_match" if self.config.exact_match else "bleu"]
        few = list(zip(pairs, answers, strict=True))[:SAMPLES]
        return figures, [text for pair, text in few for text in (pair.source, f"-> {text}")]

    def _keep(self, folder, update, pairs, found):
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", _lines(found))
        if not (folder / "reference.txt").exists():
            write_text(folder / "source.txt", _lines(pair.source for pair in pairs))
            write_text(folder / "reference.txt", _lines(pair.target for pair in pairs))


def translated(
    translator: Translator, sources: Sequence[str], deal: Dealing = ALONE, **options: Any
) -> list[str]:
    """Return translations of sources by all ranks of a Dealing; ``options``: of ``translate``."""

    def of(chosen):
        some = [sources[i] for i in chosen]
        return translator.translate(some, stop=deal.stop, notify=deal.note, **options)

    return deal.lines(sources, of)


def _lines(texts):
    return "".join(f"{text}\n" for text in texts)
