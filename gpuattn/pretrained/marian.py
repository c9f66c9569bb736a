"""Marian of transformers (``MarianMTModel``: OPUS-MT) as ``models.translation.TranslationModel``.

Junczys-Dowmunt et al., "Marian: Fast Neural Machine Translation in C++" (2018). Its sines fill the
first half of the columns, its decoder begins with padding, and the keys and values of all
cross-attention layers, which are tensors of each layer there, are one matrix here.
"""

from typing import Any

from gpuattn.data.tokenizer import BOS, PAD, UNK, Tokenizer
from gpuattn.errors import ConfigError
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.pretrained.architecture import Architecture, in_one, register, rule
from gpuattn.pretrained.pieces import files_as_pair
from gpuattn.pretrained.settings import Settings
from gpuattn.pretrained.tokens import files_of

ACTIVATIONS = {"swish": "silu", "silu": "silu", "gelu": "gelu_exact", "gelu_new": "gelu",
               "relu": "relu"}  # fmt: skip
# They say how weights were drawn, or how a search is set where no generation_config.json says it.
UNUSED = (
    "bad_words_ids", "classif_dropout", "early_stopping", "forced_eos_token_id", "init_std",
    "length_penalty", "max_length", "num_beams", "num_hidden_layers", "save_step", "unk_token_id",
)  # fmt: skip
FIXED = {
    "scale_embedding": (False, True), "share_encoder_decoder_embeddings": (True, True),
    "tie_word_embeddings": (True, True), "static_position_embeddings": (True, True),
    "normalize_before": (False, False), "normalize_embedding": (False, False),
    "add_final_layer_norm": (False, False), "add_bias_logits": (False, False),
    "is_encoder_decoder": (True, True), "is_decoder": (False, False),
    "force_bos_token_to_be_generated": (False, False),
}  # fmt: skip
"""{key: (what transformers takes where there is none, the one value that is accepted)}."""
SIDES = ("layerdrop", "attention_heads", "ffn_dim", "layers")


def configure(settings: Settings, names: set[str], task: str | None) -> TranslationConfig:
    """Return the TranslationConfig of a config.json."""
    for key, (default, flag) in FIXED.items():
        if settings.get(key, default) is not flag:
            settings.refuse(key, settings.get(key, default), repr(flag))
    settings.read.update(UNUSED)
    settings.read.update(f"{side}_{name}" for side in ("encoder", "decoder") for name in SIDES)
    vocab, heads = settings.size("vocab_size", 58101), settings.size("encoder_attention_heads", 16)
    ffn = settings.size("encoder_ffn_dim", 4096)
    settings.only("decoder_vocab_size", vocab)
    for key, accepted, usual in (("decoder_attention_heads", heads, 16),
                                 ("decoder_ffn_dim", ffn, 4096)):  # fmt: skip
        if settings.get(key, usual) != accepted:
            settings.refuse(key, settings.get(key, usual), f"{accepted}, as of the encoder")
    dropout = settings.dropout("dropout")
    if settings.dropout("activation_dropout", 0.0):
        settings.note("activation_dropout is left out")
    return TranslationConfig(
        vocab=vocab, d_model=settings.size("d_model", 1024), heads=heads, ffn=ffn,
        layers=(settings.layers("encoder_layers", 12), settings.layers("decoder_layers", 12)),
        dropout=dropout, attention_dropout=settings.dropout("attention_dropout", 0.0),
        norm="post", positions="sinusoidal_halves",
        activation=settings.choice("activation_function", "gelu", ACTIVATIONS),
        max_length=settings.size("max_position_embeddings", 1024),
        output_bias="final_logits_bias" in names,
        bos=_token(settings, "decoder_start_token_id", 58100, vocab),
        eos=_token(settings, "eos_token_id", 0, vocab),
    )  # fmt: skip


def _token(settings, key, default, vocab):
    value = settings.get(key, default)
    if type(value) is int and 0 <= value < vocab:
        return value
    return settings.refuse(key, value, f"one token, 0 to {vocab - 1:,}", 0)


def describe(config: TranslationConfig) -> dict[str, Any]:
    """Return the keys of config.json. ConfigError lists what transformers' Marian lacks."""
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    wanted = {
        "norm": (config.norm, "post", "--norm post"),
        "positions": (config.positions, "sinusoidal_halves", "--positions sinusoidal_halves"),
        "kv_heads": (config.kv_heads or config.heads, config.heads, "no --kv-heads"),
        "activation": (config.activation in names and config.activation, config.activation,
                       "--activation silu"),
        "tied": (config.tied, True, "one table"),
    }  # fmt: skip
    faults = [
        f"{key} is {getattr(config, key)} (train with {option})"
        for key, (value, accepted, option) in wanted.items() if value != accepted
    ]  # fmt: skip
    if faults:
        raise ConfigError(f"Marian of transformers has no such model: {'; '.join(faults)}")
    encoder, decoder = config.layers
    attention = config.dropout if config.attention_dropout is None else config.attention_dropout
    sides = {
        f"{side}_{key}": value for side in ("encoder", "decoder")
        for key, value in (("attention_heads", config.heads), ("ffn_dim", config.ffn))
    }  # fmt: skip
    return {
        "architectures": ["MarianMTModel"], "model_type": "marian", "vocab_size": config.vocab,
        "decoder_vocab_size": config.vocab, "d_model": config.d_model, **sides,
        "encoder_layers": encoder, "decoder_layers": decoder, "dropout": config.dropout,
        "attention_dropout": attention, "activation_dropout": 0.0,
        "activation_function": names[config.activation], "scale_embedding": True,
        "max_position_embeddings": config.max_length, "is_encoder_decoder": True,
        "share_encoder_decoder_embeddings": True, "tie_word_embeddings": True,
        "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": config.eos,
        "decoder_start_token_id": config.bos, "forced_eos_token_id": None,
        "bad_words_ids": [[PAD], [BOS], [UNK]],
    }  # fmt: skip


def _tokenizer_files(tokenizer):
    """Return the pair of models and the vocabulary, also of a run's own subwords."""
    return (files_as_pair if isinstance(tokenizer, Tokenizer) else files_of)(tokenizer)


def _layer(side, last):
    """Return the rules that layers of both sides have. ``last``: the number of their last norm."""
    theirs, ours = f"{side}.layers.{{i}}", f"{side}.{{i}}"
    return (
        rule(f"{theirs}.self_attn.[q_proj|k_proj|v_proj].{{p}}", f"{ours}.attention.qkv.{{p}}"),
        rule(f"{theirs}.self_attn.out_proj.{{p}}", f"{ours}.attention.out.{{p}}"),
        rule(f"{theirs}.self_attn_layer_norm.{{p}}", f"{ours}.norms.0.{{p}}"),
        rule(f"{theirs}.fc1.{{p}}", f"{ours}.feed_forward.inner.{{p}}"),
        rule(f"{theirs}.fc2.{{p}}", f"{ours}.feed_forward.out.{{p}}"),
        rule(f"{theirs}.final_layer_norm.{{p}}", f"{ours}.norms.{last}.{{p}}"),
    )


register(Architecture(
    model_type="marian", model=TranslationModel, tasks={"translation": ()},
    classes=("MarianMTModel", "MarianModel"), configure=configure, describe=describe,
    prefix="model.", bare=(r"lm_head\.weight", "final_logits_bias"),
    rules=(
        rule("shared.weight", "source.weight", padded=True),
        *_layer("encoder", 1), *_layer("decoder", 2),
        rule("decoder.layers.{i}.encoder_attn.q_proj.{p}", "decoder.{i}.cross_attention.q.{p}"),
        rule("decoder.layers.{i}.encoder_attn.out_proj.{p}",
             "decoder.{i}.cross_attention.out.{p}"),
        rule("decoder.layers.{i}.encoder_attn_layer_norm.{p}", "decoder.{i}.norms.1.{p}"),
        rule("decoder.layers.{i}.encoder_attn.[k_proj|v_proj].{p}", "memory.kv.{p}"),
        rule("final_logits_bias", "output_bias", padded=True, shaped=in_one),
    ),
    tied=dict.fromkeys(
        ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        "shared.weight",
    ),
    ignored={r"(en|de)coder\.embed_positions\.weight": "computed"},
    tokenizer_files=_tokenizer_files,
))  # fmt: skip
