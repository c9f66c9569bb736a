"""Runs that learn to translate."""

import numpy as np

from gpuattn.data.fixed_shape import fixed_shape
from gpuattn.files import write_text
from gpuattn.models.flops import translation_flops
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.tasks.corpus import Corpus
from gpuattn.tasks.score import score
from gpuattn.tasks.task import Task
from gpuattn.tasks.translator import Translator

SAMPLES = 2  # translations shown at each evaluation


class TranslationTask(Task):
    """Pairs of sentences, a TranslationModel, judged by exact matches or BLEU."""

    new_corpus, new_user = Corpus, Translator
    command = "gpuattn translate"

    @staticmethod
    def new_model(config, tokenizer):
        return TranslationModel(
            TranslationConfig(
                vocab=len(tokenizer), d_model=config.dim, heads=config.heads, layers=config.layers,
                ffn=config.ffn, dropout=config.dropout,
                attention_dropout=config.attention_dropout, norm=config.norm,
                positions=config.positions, activation=config.activation,
                max_length=config.max_len + 1, kv_heads=config.kv_heads,
                pad_vocab=config.pad_vocab,
            ),
            seed=config.seed,
        )  # fmt: skip

    @staticmethod
    def describe_data(config):
        return config.task or f"{config.source} to {config.target}"

    def describe_model(self):
        return f"{'+'.join(map(str, self.config.layers))} layers, width {self.config.dim}"

    def describe_update(self):
        tokens = self.config.batch * self.config.accumulate
        fill = self.corpus.loader(0).fill(0)
        return f"up to {tokens:,} tokens on a side, {fill:.0%} of it filled"

    def fixed_shape(self, batch):
        return fixed_shape(batch, self.config.batch, self.config.max_len + 1)

    def flops(self, batches):
        lengths = [
            np.concatenate(sides) for sides in zip(*(b.lengths for b in batches), strict=True)
        ]
        return translation_flops(self.model.config, *lengths)

    def loss(self, batch, label_smoothing=0.0, dloss=None):
        return self.model.loss(batch, label_smoothing, dloss)

    def evaluate(self, folder, update, loss, stop):
        pairs = self.corpus.valid[: self.config.score_pairs]
        found = self.user.translate([pair.source for pair in pairs], beam=1, stop=stop)
        if stop():
            return None
        if not pairs:
            return {"score": -loss}, []
        self._keep(folder, update, pairs, found)
        kinds = [pair.kind for pair in pairs]
        figures = score(found, [pair.target for pair in pairs], kinds)
        figures["score"] = figures["exact_match" if self.config.exact_match else "bleu"]
        few = list(zip(pairs, found, strict=True))[:SAMPLES]
        return figures, [text for pair, text in few for text in (pair.source, f"-> {text}")]

    def _keep(self, folder, update, pairs, found):
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", _lines(found))
        if not (folder / "reference.txt").exists():
            write_text(folder / "source.txt", _lines(pair.source for pair in pairs))
            write_text(folder / "reference.txt", _lines(pair.target for pair in pairs))


def _lines(texts):
    return "".join(f"{text}\n" for text in texts)
