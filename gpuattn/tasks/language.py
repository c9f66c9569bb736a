"""Runs that learn to continue a text."""

import numpy as np

from gpuattn.files import write_text
from gpuattn.models.flops import gpt2_flops
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.tasks.corpus import TextCorpus
from gpuattn.tasks.sampler import Sampler
from gpuattn.tasks.task import Task

SAMPLE_TOKENS, SAMPLE_LINES = 120, 4  # of a text written and shown at each evaluation


class LanguageTask(Task):
    """One text, a GPT2, judged by its loss on what was held out."""

    new_corpus, new_user = TextCorpus, Sampler
    command = "gpuattn sample"

    @staticmethod
    def new_model(config, tokenizer):
        return GPT2(
            GPT2Config(
                vocab=len(tokenizer), d_model=config.dim, heads=config.heads,
                layers=config.layers[0], block=config.block, dropout=config.dropout,
                kv_heads=config.kv_heads, positions=config.positions,
                activation=config.activation, pad_vocab=config.pad_vocab, bias=config.bias,
            ),
            seed=config.seed,
        )  # fmt: skip

    @staticmethod
    def describe_data(config):
        return config.lm

    def describe_model(self):
        return f"{self.config.layers[0]} layers, width {self.config.dim}"

    def describe_update(self):
        config = self.config
        rows = config.batch // config.block * config.accumulate
        return f"{rows:,} blocks of {config.block:,} tokens"

    def fixed_shape(self, batch):
        return batch  # its shape is that of all others

    def flops(self, batches):
        rows = sum(len(batch.tokens) for batch in batches)
        return gpt2_flops(self.model.config, rows, self.config.block)

    def loss(self, batch, label_smoothing=0.0, dloss=None):
        return self.model.loss(
            batch.tokens, batch.labels, dloss, label_smoothing=label_smoothing, order=batch.order
        )

    def evaluate(self, folder, update, loss, stop):
        (text,) = self.user.sample(tokens=SAMPLE_TOKENS, seed=self.config.seed)
        if stop():
            return None
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", f"{text}\n")
        figures = {"perplexity": float(np.exp(loss)), "score": -loss}
        return figures, [line for line in text.splitlines() if line.strip()][:SAMPLE_LINES]
