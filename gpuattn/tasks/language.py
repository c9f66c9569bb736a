"""Runs that learn to continue a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data.fixed_shape import fixed_documents
from gpuattn.errors import ConfigError
from gpuattn.files import write_text
from gpuattn.parallel.dealing import ALONE, Dealing
from gpuattn.tasks.corpus import TextCorpus
from gpuattn.tasks.task import OF_TEXT, Task
from gpuattn.tasks.users.sampler import Sampler
from gpuattn.units import AUTO

SAMPLE_TOKENS, SAMPLE_LINES = 120, 4  # of a text written and shown at each evaluation
BLOCKS = 8  # that a large batch is a multiple of, so that it can be halved


class LanguageTask(Task):
    """One text and a language model such as GPT2, judged by its loss on the held-out text."""

    name, command = "language", "gpuattn sample"
    options = ("lm", "valid_lm", "documents", "tokenizer", *OF_TEXT)
    chosen_by = ("lm",)
    new_corpus, new_user = TextCorpus, Sampler
    smaller = "a smaller --block"
    rate_title = "Tokens per second"

    @staticmethod
    def check(config: Any) -> None:
        if not config.lm:
            raise ConfigError(f"--model {config.model} learns from one text: --lm FILE")
        pairs = (config.source, config.target, config.pairs, config.valid_source)
        if any((config.task, *pairs)):
            raise ConfigError(
                "--lm FILE is all that a language model learns from; "
                "accepted: it alone, or with --valid-lm FILE"
            )
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
        return f"Language model of {config.lm}"

    @staticmethod
    def example(config: Any) -> str | None:
        return None

    @staticmethod
    def scores(config: Any) -> tuple[str, dict[str, str]]:
        return "Held-out text", {"perplexity": "perplexity"}

    @staticmethod
    def one_shape(config: Any) -> bool:
        return not config.documents

    @staticmethod
    def least_tokens(config: Any) -> int:
        return config.block

    @staticmethod
    def describe_least(config: Any) -> str:
        return f"a block of {config.block:,}"

    @staticmethod
    def unit(config: Any, most: int) -> int:
        return config.block * (BLOCKS if most >= BLOCKS * config.block else 1)

    @staticmethod
    def next_parts(config: Any, parts: int) -> int | None:
        """Blocks are shared out evenly, so that an update has as many as before."""
        rows = config.batch // config.block
        return next((n for n in range(2 * parts, rows + 1) if rows % n == 0), None)

    @staticmethod
    def part_tokens(config: Any, parts: int) -> int:
        return config.batch // config.block // parts * config.block

    def describe_update(self) -> str:
        config = self.config
        rows = config.batch // config.block * config.update_batches
        return f"{rows:,} blocks of {config.block:,} tokens"

    def fixed_shape(self, batch: Any) -> Any:
        return fixed_documents(batch)

    def flops(self, batches: Sequence[Any]) -> float:
        return self.model.config.flops(np.concatenate([batch.lengths for batch in batches]))

    def loss(self, batch: Any, label_smoothing: float = 0.0, dloss: Any = None) -> Any:
        return self.model.loss(
            batch.tokens, batch.labels, dloss, label_smoothing=label_smoothing, order=batch.order,
            **batch.packing,
        )  # fmt: skip

    def prepare_evaluation(self) -> None:
        pass

    def answers(self, user: Any, deal: Dealing = ALONE) -> list[str]:
        """Return a text that the ``user`` writes."""
        seed = self.config.seed
        return deal.each([seed], lambda seed: user.sample(tokens=SAMPLE_TOKENS, seed=seed)[0])

    def judge(
        self, answers: list[str], folder: Path, update: int, loss: float
    ) -> tuple[dict[str, Any], list[str]]:
        (text,) = answers
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", f"{text}\n")
        figures = {"perplexity": float(np.exp(loss)), "score": -loss}
        return figures, [line for line in text.splitlines() if line.strip()][:SAMPLE_LINES]
