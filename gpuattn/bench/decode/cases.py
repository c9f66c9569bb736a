"""The cells of whole generations: models, workloads, and the floor of their time.

A generation makes K texts for each of N sentences (K: the beam, 1 where it samples or is greedy).
What it cannot do without, with the sizes of its model: before the first token, the products of the
source or prompt and its keys and values; for each step, the weights once, the keys and values of
all tokens so far, and the logits, written and read once. The floor is the sum of both parts, each
the longer of two times: its bytes at the rate of a copy, its FLOPs at the rate of a product.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gpuattn.bench.cases import Cell
from gpuattn.data.tokenizer import EOS, PAD, UNK
from gpuattn.models import GPT2Config, TranslationConfig
from gpuattn.models.flops import decoder_weights, encoder_decoder_weights, prompt_weights

FIRST_WORD = UNK + 1  # the least token of a source or prompt
BANNED = PAD, EOS  # in translations: so all have the length that is asked for
FREE_BATCH = 512  # sentences at a time where lengths differ
SHORTEST, LONGEST = 4, 100  # tokens, where lengths differ
SPREADS = 0.5, 0.15  # of the logarithms: source lengths; target length over source length
BYTES = {"bfloat16": 2, "float32": 4}


def _translation(vocab, width, heads, layers, hidden):
    return TranslationConfig(
        vocab, width, heads, (layers, layers), hidden, dropout=0.0, max_length=128
    )


def _gpt(layers, width, heads, **sizes):
    return GPT2Config(d_model=width, heads=heads, layers=layers, **sizes)


MODELS: Mapping[str, TranslationConfig | GPT2Config] = MappingProxyType({
    "base": _translation(32000, 512, 8, 6, 2048),
    "tiny": _translation(8000, 256, 4, 4, 1024),
    "big": _translation(32000, 1024, 16, 6, 4096),
    "gpt2-124m": _gpt(12, 768, 12),
    "gpt2-1.5b": _gpt(48, 1600, 25),
    "toy": _translation(60, 32, 2, 2, 64),
    "toy-gpt": _gpt(2, 32, 2, vocab=60, block=64),
})  # fmt: skip
"""The models that cases name; "toy" ones are for NumPy and tests."""


class Work(NamedTuple):
    """FLOPs, and bytes that must move."""

    flops: float
    bytes: float

    def seconds(self, ceilings: Mapping[str, float]) -> float:
        """Return the least seconds that this work takes, at measured ceilings."""
        return max(
            self.flops / ceilings["matmul_tflops"] / 1e12, self.bytes / ceilings["copy_tbs"] / 1e12
        )


@dataclass(frozen=True)
class Decoding:
    """A generation with ``model``, one of MODELS, on ``shape`` = (sentences, tokens of each source
    or prompt, new tokens of each).

    A source's tokens include its mark. ``workload``: "A" translations of one length; "B"
    translations of lengths that differ, log-normal with the mean of ``shape``; "D" texts of a
    language model. ``beam``: 1 is greedy. ``top_k``: tokens are drawn from so many, 0: greedy.
    ``kv_heads``: of a model with grouped queries, 0: as many as its heads. ``cache``: False: each
    step computes all tokens again.
    """

    model: str
    shape: tuple[int, int, int]
    workload: str
    beam: int = 1
    top_k: int = 0
    kv_heads: int = 0
    cache: bool = True
    dtype: str = "bfloat16"

    @property
    def translates(self) -> bool:
        """Whether the model is a translation model."""
        return isinstance(MODELS[self.model], TranslationConfig)

    def config(self) -> Any:
        """Return the config of the model."""
        return replace(MODELS[self.model], kv_heads=self.kv_heads or None)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each source or prompt and the new tokens of each, (N,)."""
        sentences, before, new = self.shape
        if self.workload != "B":
            return np.full(sentences, before), np.full(sentences, new)
        rng, (spread, ratio) = np.random.default_rng(0), SPREADS
        sources = before * np.exp(rng.normal(-(spread**2) / 2, spread, sentences))
        targets = sources * np.exp(rng.normal(0, ratio, sentences))
        both = [x.round().clip(SHORTEST, LONGEST).astype(int) for x in (sources, targets)]
        return both[0], both[1]

    def texts(self) -> list[list[int]]:
        """Return the sources, without their marks, or the prompts."""
        rng, vocab = np.random.default_rng(1), self.config().vocab
        counts = self.lengths()[0] - self.translates
        return [rng.integers(FIRST_WORD, vocab, count).tolist() for count in counts]

    @property
    def tokens(self) -> int:
        """New tokens of the best text of each sentence, all together."""
        return int(self.lengths()[1].sum())

    # ---- the floor --------------------------------------------------------------------------

    def before(self) -> Work:
        """Return the work on sources or prompts, before the first new token."""
        c, (given, _) = self.config(), self.lengths()
        size, width = BYTES[self.dtype], c.heads * c.head_size
        if self.translates:
            weights, pairs = encoder_decoder_weights(c)[0], c.layers[0] * (given**2).sum()
        else:
            given = given - 1  # the last token of a prompt belongs to the first step
            weights, pairs = prompt_weights(c), (c.layers - 1) * (given**2).sum() / 2
        products = weights * given.sum()
        moved = weights * size + given.sum() * self._kept_bytes()
        return Work(2.0 * products + 4.0 * width * pairs, float(moved))

    def steps(self) -> Work:
        """Return the work of all steps."""
        c, (given, new) = self.config(), self.lengths()
        size, width = BYTES[self.dtype], c.heads * c.head_size
        rows, own = new * self.beam, self.beam * (new * (new + 1) // 2)  # keys of new tokens read
        if self.translates:
            weights, layers = encoder_decoder_weights(c)[1], c.layers[1]
            keys, pairs = own + new * given, own + rows * given  # beams share their source
        else:
            weights, layers = decoder_weights(c), c.layers
            keys = pairs = own + rows * (given - 1)
        steps = new.sum() / min(len(new), FREE_BATCH)
        flops = 2.0 * weights * rows.sum() + 4.0 * width * layers * pairs.sum()
        logits = 2 * rows.sum() * c.vocab * size
        return Work(flops, float(weights * size * steps + keys.sum() * self._kept_bytes() + logits))

    def _kept_bytes(self):
        """Return the bytes of a token's keys and values in all layers of the decoder."""
        c = self.config()
        layers = c.layers[1] if self.translates else c.layers
        return 2 * layers * (c.kv_heads or c.heads) * c.head_size * BYTES[self.dtype]

    def floor_us(self, ceilings: Mapping[str, float]) -> float:
        """Return the least microseconds of the generation, at measured ceilings."""
        return (self.before().seconds(ceilings) + self.steps().seconds(ceilings)) * 1e6

    def flops(self, direction: str) -> float:
        """Return the FLOPs of the generation."""
        return self.before().flops + self.steps().flops

    def bytes(self, direction: str) -> float:
        """Return the bytes that the generation must move."""
        return self.before().bytes + self.steps().bytes

    # ---- files ------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the "case" of a row of results; flags that are at their defaults are left out."""
        flags = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in ("model", "workload", "beam")
            or getattr(self, field.name) != field.default
        }
        shape = list(flags.pop("shape"))
        flags.pop("dtype", None)
        return {"shape": shape, "dtype": self.dtype, "flags": flags}

    @classmethod
    def from_dict(cls, case: dict[str, Any]) -> "Decoding":
        """Return the case of ``as_dict``."""
        return cls(shape=tuple(case["shape"]), dtype=case["dtype"], **case["flags"])

    def search(self) -> str:
        """Return how tokens are chosen, in words."""
        if self.top_k:
            return f"top-k {self.top_k}"
        return f"beam {self.beam}" if self.beam > 1 else "greedy"

    def __str__(self):
        """Return model, search and shape, for tables."""
        sentences, before, new = self.shape
        words = [self.model, self.search(), f"{sentences} x ({before} + {new})"]
        words += ["lengths differ"] * (self.workload == "B")
        words += [f"{self.kv_heads} KV heads"] * bool(self.kv_heads)
        words += ["no cache"] * (not self.cache)
        return ", ".join(words)


# ---- the table ----------------------------------------------------------------------------------

DIRECTION = "forward"
GRAPH, CT2, HF, HF_STATIC = "torch-graph", "ctranslate2", "hf", "hf-static"
TOP_K = 50


def _cell(case, *peers):
    return Cell("decode", case, DIRECTION, peers)


def _translations(model, beam, sentences, *peers):
    return _cell(Decoding(model, (sentences, 32, 64), "A", beam), *peers)


def _texts(model, sentences, before, *peers, **flags):
    return _cell(Decoding(model, (sentences, before, 128), "D", top_k=TOP_K, **flags), *peers)


TABLE = [
    _texts("gpt2-124m", 1, 32, GRAPH, HF, HF_STATIC),
    _texts("gpt2-124m", 8, 32, GRAPH, HF),
    _texts("gpt2-124m", 64, 32, GRAPH),
    _texts("gpt2-124m", 1, 896, GRAPH),
    _texts("gpt2-124m", 64, 896, GRAPH),
    _texts("gpt2-124m", 8, 32, cache=False),
    _texts("gpt2-124m", 64, 896, GRAPH, kv_heads=4),
    _texts("gpt2-124m", 64, 896, GRAPH, kv_heads=1),
    _texts("gpt2-1.5b", 1, 32, GRAPH),
    _texts("gpt2-1.5b", 8, 32, GRAPH),
    _translations("base", 4, 1, GRAPH, CT2, HF),
    _translations("base", 4, 8, GRAPH, CT2, HF),
    _translations("base", 4, 64, GRAPH, CT2),
    _translations("base", 4, 128, GRAPH, CT2, HF),
    _translations("base", 4, 512, GRAPH, CT2),
    _translations("base", 1, 1, GRAPH, CT2, HF),
    _translations("base", 1, 8, GRAPH, CT2),
    _translations("base", 1, 128, GRAPH, CT2, HF),
    _translations("base", 1, 512, GRAPH, CT2),
    _cell(Decoding("base", (3003, 27, 27), "B", 4), GRAPH, CT2),
    _cell(Decoding("base", (8, 32, 64), "A", cache=False)),
    _translations("tiny", 4, 128, GRAPH, CT2),
    _translations("big", 4, 128, GRAPH, CT2),
]
"""Texts beside PyTorch and translations beside CTranslate2, the slow peers on few sentences.

The first cell has HF_STATIC, which cannot come after another model: see ``peers.decode``.
"""

NAMES = tuple(dict.fromkeys(cell.case.model for cell in TABLE))
WORKLOADS = tuple(dict.fromkeys(cell.case.workload for cell in TABLE))


def small(case: Decoding) -> Decoding:
    """Return a small case of the same kind, for NumPy."""
    sentences, before, new = (min(n, most) for n, most in zip(case.shape, (6, 8, 6), strict=True))
    heads = 1 if case.kv_heads else 0
    return replace(
        case, model="toy" if case.translates else "toy-gpt", shape=(sentences, before, new),
        kv_heads=heads, top_k=min(case.top_k, 5), dtype="float32",
    )  # fmt: skip
