"""GPT-2 of transformers (``GPT2LMHeadModel``, ``GPT2Model``) as ``models.gpt2.GPT2``.

Its Conv1D layers keep their weights as (in, out).
"""

from typing import Any

from gpuattn.errors import ConfigError
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.pretrained.architecture import Architecture, register, rule
from gpuattn.pretrained.settings import Settings

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact",
               "relu": "relu"}  # fmt: skip
# They say how heads that are not here sum a text up, or how attention is rounded in 16 bits.
UNUSED = ("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
          "summary_proj_to_labels", "summary_type", "summary_use_proj")  # fmt: skip


def configure(settings: Settings, names: set[str], task: str | None) -> GPT2Config:
    """Return the GPT2Config of a config.json."""
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.only("add_cross_attention", False)
    settings.read.update(UNUSED)
    dropout = settings.dropout("resid_pdrop")
    if {settings.dropout("embd_pdrop"), settings.dropout("attn_pdrop")} != {dropout}:
        settings.note(f"resid_pdrop, {dropout}, is the dropout of embeddings and attention too")
    width = settings.size("n_embd", 768)
    return GPT2Config(
        vocab=settings.size("vocab_size", 50257), d_model=width,
        heads=settings.size("n_head", 12), layers=settings.layers("n_layer", 12),
        block=settings.size("n_positions", 1024), inner=settings.size("n_inner", 4 * width),
        activation=settings.choice("activation_function", "gelu_new", ACTIVATIONS),
        eps=settings.eps("layer_norm_epsilon", 1e-5), dropout=dropout,
        tied=settings.flag("tie_word_embeddings", True),
    )  # fmt: skip


def describe(config: GPT2Config) -> dict[str, Any]:
    """Return the keys of config.json. ConfigError lists what transformers' GPT-2 lacks."""
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    wanted = {
        "bias": (config.bias, True, "--bias"),
        "positions": (config.positions, "learned", "--positions learned"),
        "kv_heads": (config.kv_heads or config.heads, config.heads, "no --kv-heads"),
        "activation": (config.activation in names and config.activation, config.activation,
                       "--activation gelu"),
    }  # fmt: skip
    faults = [
        f"{key} is {getattr(config, key)} (train with {option})"
        for key, (value, accepted, option) in wanted.items() if value != accepted
    ]  # fmt: skip
    if faults:
        raise ConfigError(f"GPT-2 of transformers has no such model: {'; '.join(faults)}")
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "vocab_size": config.vocab, "n_positions": config.block, "n_embd": config.d_model,
        "n_layer": config.layers, "n_head": config.heads, "n_inner": config.inner,
        "activation_function": names[config.activation], "layer_norm_epsilon": config.eps,
        "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


register(Architecture(
    model_type="gpt2", model=GPT2, tasks={"language": ()},
    classes=("GPT2LMHeadModel", "GPT2Model"), configure=configure, describe=describe,
    prefix="transformer.", bare=(r"lm_head\.weight",),
    rules=(
        rule("wte.weight", "embedding.weight", padded=True),
        rule("wpe.weight", "embedding.position_weight"),
        rule("h.{i}.ln_1.{p}", "layers.{i}.norms.0.{p}"),
        rule("h.{i}.attn.c_attn.{p}", "layers.{i}.attention.qkv.{p}", turned=True),
        rule("h.{i}.attn.c_proj.{p}", "layers.{i}.attention.out.{p}", turned=True),
        rule("h.{i}.ln_2.{p}", "layers.{i}.norms.1.{p}"),
        rule("h.{i}.mlp.c_fc.{p}", "layers.{i}.feed_forward.inner.{p}", turned=True),
        rule("h.{i}.mlp.c_proj.{p}", "layers.{i}.feed_forward.out.{p}", turned=True),
        rule("ln_f.{p}", "norm.{p}"),
        rule("lm_head.weight", "output.weight", padded=True),
    ),
    tied={"lm_head.weight": "wte.weight"},
    ignored={
        r"h\.\d+\.attn\.bias": "the causal mask",
        r"h\.\d+\.attn\.masked_bias": "the value of masked scores",
    },
))  # fmt: skip
