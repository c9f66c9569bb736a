"""Llama, SmolLM, Qwen2 and Qwen3 of transformers (``LlamaForCausalLM``, ``Qwen2ForCausalLM``,
``Qwen3ForCausalLM``) as ``models.llama.Llama``.

Its rotary positions turn rows i and i + D / 2 of a head together, ours neighbours: the rules put
the rows of queries and keys in the order of ours, and back.
"""

from typing import Any

from gpuattn.errors import ConfigError
from gpuattn.models.llama import Llama, LlamaConfig
from gpuattn.pretrained.architecture import Architecture, register, rule
from gpuattn.pretrained.rope import read_rope, written_rope
from gpuattn.pretrained.settings import Settings

# {model_type: what the classes of transformers take where config.json says nothing}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "block": 2048, "keys": None,
              "head_dim": None},
    "qwen2": {"vocab_size": 151_936, "intermediate_size": 22_016, "block": 32_768, "keys": 32,
              "head_dim": None},
    "qwen3": {"vocab_size": 151_936, "intermediate_size": 22_016, "block": 32_768, "keys": 32,
              "head_dim": 128},
}  # fmt: skip


def configure(settings: Settings, names: set[str], task: str | None) -> LlamaConfig:
    """Return the LlamaConfig of a config.json."""
    kind = settings.config["model_type"]
    usual = DEFAULTS[kind]
    settings.choice("hidden_act", "silu", {"silu": "swiglu"})
    settings.only("attention_bias", kind == "qwen2")
    settings.only("mlp_bias", False)
    settings.only("use_sliding_window", False)
    settings.only("pretraining_tp", 1)
    kinds = settings.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        settings.refuse("layer_types", kinds, "'full_attention' for all")
    if settings.get("attention_dropout", 0.0):
        settings.note("attention_dropout is the dropout of embeddings and branches too")
    settings.read.update(("sliding_window", "max_window_layers"))  # of the window that is not used
    width, heads = settings.size("hidden_size", 4096), settings.size("num_attention_heads", 32)
    size = settings.size("head_dim", usual["head_dim"] or max(1, width // heads))
    block = settings.size("max_position_embeddings", usual["block"])
    base, scaling = read_rope(settings, block)
    return LlamaConfig(
        vocab=settings.size("vocab_size", usual["vocab_size"]), d_model=width, heads=heads,
        layers=settings.layers("num_hidden_layers", 32),
        ffn=settings.size("intermediate_size", usual["intermediate_size"]),
        block=block, base=base, scaling=scaling,
        kv_heads=settings.size("num_key_value_heads", usual["keys"] or heads),
        head_dim=None if size * heads == width else size,
        eps=settings.eps("rms_norm_eps", 1e-6),
        dropout=settings.dropout("attention_dropout", 0.0), qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3", tied=settings.flag("tie_word_embeddings", False),
    )  # fmt: skip


def describe(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of config.json: of a qwen2 with biases, of a qwen3 with norms of heads."""
    if config.dropout:
        raise ConfigError(
            f"Llama of transformers has no such dropout: {config.dropout}; accepted: 0"
        )
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "Llama of transformers has biases (qkv_bias) or norms (qk_norm), not both"
        )
    name = "Qwen2" if config.qkv_bias else "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{name}ForCausalLM"], "model_type": name.lower(),
        "vocab_size": config.vocab, "hidden_size": config.d_model,
        "intermediate_size": config.ffn, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads, "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.block, "rms_norm_eps": config.eps,
        "rope_theta": config.base, **written_rope(config),
        "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


for model_type in DEFAULTS:
    register(Architecture(
        model_type=model_type, model=Llama, tasks={"language": ()},
        classes=(f"{model_type.title()}ForCausalLM", f"{model_type.title()}Model"),
        configure=configure, describe=describe, prefix="model.", bare=(r"lm_head\.weight",),
        rules=(
            rule("embed_tokens.weight", "embedding.weight", padded=True),
            rule("layers.{i}.input_layernorm.weight", "layers.{i}.norms.0.weight"),
            rule("layers.{i}.self_attn.[q_proj|k_proj|v_proj].{p}",
                 "layers.{i}.attention.qkv.{p}", heads=True),
            rule("layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm.weight",
                 heads=True),
            rule("layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm.weight",
                 heads=True),
            rule("layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.out.weight"),
            rule("layers.{i}.post_attention_layernorm.weight", "layers.{i}.norms.1.weight"),
            rule("layers.{i}.mlp.[gate_proj|up_proj].weight",
                 "layers.{i}.feed_forward.inner.weight"),
            rule("layers.{i}.mlp.down_proj.weight", "layers.{i}.feed_forward.out.weight"),
            rule("norm.weight", "norm.weight"),
            rule("lm_head.weight", "output.weight", padded=True),
        ),
        tied={"lm_head.weight": "embed_tokens.weight"},
        ignored={r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta"},
    ))  # fmt: skip
