"""``generate`` of Hugging Face transformers with our weights: M2M-100's and GPT-2's classes.

M2M-100 is the pre-norm translation model there that computes what ours does. A case runs as it is,
with transformers' growing cache, or with its static cache, for which ``generate`` compiles the
model ("hf-static").
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from gpuattn.bench.decode.cases import BANNED, Decoding
from gpuattn.data.tokenizer import BOS, EOS, PAD
from gpuattn.nn.embedding import sinusoidal_positions

SIDES = {"self_attn.out_proj": "attention.out", "encoder_attn.q_proj": "cross_attention.q",
         "encoder_attn.out_proj": "cross_attention.out", "fc1": "feed_forward.inner",
         "fc2": "feed_forward.out", "self_attn_layer_norm": "norms.0"}  # fmt: skip
TEXTS = {"ln_1": "norms.0", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
         "ln_2": "norms.1", "mlp.c_fc": "feed_forward.inner",
         "mlp.c_proj": "feed_forward.out"}  # fmt: skip


class Model:
    """A model of transformers with our weights, {name: tensor}."""

    def __init__(self, case: Decoding, weights: Mapping[str, Tensor], device: str) -> None:
        transformers.logging.set_verbosity_error()
        table = weights["source.weight" if case.translates else "embedding.weight"]
        with torch.device(device):
            new = _translator if case.translates else _language_model
            self.model = new(case.config()).to(table.dtype).eval()
        given = (_of_translator if case.translates else _of_language_model)(case.config(), weights)
        own = dict(self.model.named_parameters())
        if given.keys() != own.keys():
            raise RuntimeError(f"other parameters than ours: {sorted(given.keys() ^ own.keys())}")
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(given[name])
            if case.translates:
                self._set_positions(case.config())

    def _set_positions(self, config):
        """Give both sides our sinusoidal positions; theirs begin behind the padding token."""
        table = torch.as_tensor(sinusoidal_positions(config.max_length, config.d_model))
        for side in (self.model.model.encoder, self.model.model.decoder):
            weights = side.embed_positions.weights
            weights[PAD + 1 : PAD + 1 + len(table)] = table.to(weights)

    def call(self, case: Decoding, static: bool) -> "Call":
        """Return the generation of a case, all of whose lengths are equal."""
        return Call(self.model, case, static)


class Call:
    """A ``generate`` of one case."""

    def __init__(self, model: Any, case: Decoding, static: bool) -> None:
        self.model, (_, before, new) = model, case.shape
        texts = [[*text, EOS] if case.translates else text for text in case.texts()]
        self.texts = torch.tensor(texts)
        self.settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new}
        if case.translates:
            self.skipped = 1  # the mark of the beginning
            self.settings |= {"num_beams": case.beam, "do_sample": False}
            self.settings["suppress_tokens"] = list(BANNED)
        else:
            self.skipped = before
            draws = {"do_sample": True, "top_k": case.top_k} if case.top_k else {"do_sample": False}
            self.settings |= draws
        if static:
            self.settings["cache_implementation"] = "static"

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        """Return the new tokens of each text."""
        given = self.texts.to(self.model.device)
        found = self.model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), **self.settings
        )
        return found[:, self.skipped :].tolist()


def _translator(c):
    model = transformers.M2M100ForConditionalGeneration(
        transformers.M2M100Config(
            vocab_size=c.vocab,
            d_model=c.d_model,
            encoder_layers=c.layers[0],
            decoder_layers=c.layers[1],
            encoder_attention_heads=c.heads,
            decoder_attention_heads=c.heads,
            encoder_ffn_dim=c.ffn,
            decoder_ffn_dim=c.ffn,
            activation_function=c.activation,
            scale_embedding=True,
            max_position_embeddings=c.max_length,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            dropout=0.0,
            attention_dropout=0.0,
        )  # fmt: skip
    )
    _never_end(model, decoder_start_token_id=BOS)
    return model


def _language_model(c):
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab,
            n_positions=c.block,
            n_embd=c.d_model,
            n_layer=c.layers,
            n_head=c.heads,
            layer_norm_epsilon=c.eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=True,
        )  # fmt: skip
    )
    _never_end(model)
    return model


def _never_end(model, **settings):
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, eos_token_id=None, bos_token_id=BOS, use_cache=True, **settings
    )


def _of_translator(c, weights):
    """Return our weights by M2M-100's names."""
    found = {"model.shared.weight": weights["source.weight"][: c.vocab]}
    memories = {
        kind: weights[f"memory.kv.{kind}"].tensor_split(2 * c.layers[1])
        for kind in ("weight", "bias")
    }
    for side, count in zip(("encoder", "decoder"), c.layers, strict=True):
        norms = {"final_layer_norm": "norms.1"}
        if side == "decoder":
            norms = {"encoder_attn_layer_norm": "norms.1", "final_layer_norm": "norms.2"}
        for kind in ("weight", "bias"):
            found[f"model.{side}.layer_norm.{kind}"] = weights[f"{side}_norm.{kind}"]
            for i in range(count):
                theirs, ours = f"model.{side}.layers.{i}.", f"{side}.{i}."
                for name, own in (SIDES | norms).items():
                    if f"{ours}{own}.{kind}" in weights:
                        found[f"{theirs}{name}.{kind}"] = weights[f"{ours}{own}.{kind}"]
                parts = weights[f"{ours}attention.qkv.{kind}"].tensor_split(3)
                for letter, part in zip("qkv", parts, strict=True):
                    found[f"{theirs}self_attn.{letter}_proj.{kind}"] = part
                if side == "decoder":
                    for n, letter in enumerate("kv"):
                        name = f"{theirs}encoder_attn.{letter}_proj.{kind}"
                        found[name] = memories[kind][2 * i + n]
    return found


def _of_language_model(c, weights):
    """Return our weights by GPT-2's names; its matrices are (in, out)."""
    found = {
        "transformer.wte.weight": weights["embedding.weight"][: c.vocab],
        "transformer.wpe.weight": weights["embedding.position_weight"],
    }
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = weights[f"norm.{kind}"]
        for i in range(c.layers):
            for name, own in TEXTS.items():
                x = weights[f"layers.{i}.{own}.{kind}"]
                found[f"transformer.h.{i}.{name}.{kind}"] = x.T if x.ndim == 2 else x
    return found
