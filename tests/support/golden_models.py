"""Write small, odd, randomly filled models with what transformers computes with them.

    python tests/support/golden_models.py tests/pretrained/golden
    python tests/support/golden_models.py --check FOLDER

It needs transformers and PyTorch, which the tests do not. ``--check`` compares instead: FOLDER is
what ``export_models.py`` wrote with gpuattn. Each model is a folder in the format of
Hugging Face, and ``expected.npz``: inputs and float32 results. The sizes and settings are
unusual on purpose, and no weight is at its initial value: with usual ones a wrong eps or a
forgotten bias would not be seen.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB, LIMIT = 67, 11
GPT2 = {
    "vocab_size": VOCAB, "n_positions": LIMIT, "n_embd": 24, "n_layer": 2, "n_head": 3,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BERT = {
    "vocab_size": VOCAB, "max_position_embeddings": LIMIT, "hidden_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 3,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCAB, "max_position_embeddings": LIMIT, "hidden_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "gpt2-tied": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"layer_norm_epsilon": 1e-3}),
    "gpt2-untied": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {
        "n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": 0.02,
        "tie_word_embeddings": False, "n_head": 6,
    }),
    "bert-masked": ("BertForMaskedLM", "BertConfig", BERT | {
        "intermediate_size": 40, "layer_norm_eps": 1e-3, "type_vocab_size": 3,
    }),
    "bert-untied": ("BertForMaskedLM", "BertConfig", BERT | {
        "intermediate_size": 56, "hidden_act": "gelu_new", "tie_word_embeddings": False,
    }),
    "bert-encoder": ("BertModel", "BertConfig", BERT | {
        "intermediate_size": 40, "hidden_act": "relu", "layer_norm_eps": 0.02,
        "num_attention_heads": 4,
    }),
    "llama-untied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {
        "intermediate_size": 40, "rms_norm_eps": 1e-3, "rope_theta": 37.0,
    }),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA | {
        "intermediate_size": 56, "rms_norm_eps": 0.02, "num_attention_heads": 3,
        "num_key_value_heads": 3, "tie_word_embeddings": True,
    }),
    "qwen3-untied": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {
        "intermediate_size": 40, "rms_norm_eps": 0.01, "head_dim": 6, "rope_theta": 37.0,
        "num_attention_heads": 5, "num_key_value_heads": 1,
    }),
}  # fmt: skip


def fill(model, rng):
    """Give every parameter random values: weights of norms around 1, others around 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = rng.standard_normal(tuple(parameter.shape), np.float32) * 0.2
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(torch.from_numpy(values + (1 if is_norm else 0)))


def inputs(model, rng):
    """Return token ids as long as the model takes, for BERT with types and lengths too."""
    tokens = rng.integers(0, VOCAB, (3, LIMIT))
    if model.config.model_type != "bert":
        return {"tokens": tokens}
    types = rng.integers(0, model.config.type_vocab_size, (3, LIMIT))
    return {"tokens": tokens, "types": types, "lengths": np.array([LIMIT, 1, 6])}


def expected(model, given):
    """Return the results of a model as arrays."""
    tokens = {"input_ids": torch.from_numpy(given["tokens"])}
    if "types" in given:
        mask = np.arange(LIMIT) < given["lengths"][:, None]
        tokens |= {"token_type_ids": torch.from_numpy(given["types"]),
                   "attention_mask": torch.from_numpy(mask)}  # fmt: skip
    with torch.no_grad():
        out = model(**tokens)
    names = {"logits": "logits", "states": "last_hidden_state", "pooled": "pooler_output"}
    found = {ours: getattr(out, name, None) for ours, name in names.items()}
    return {name: value.numpy() for name, value in found.items() if value is not None}


def main(folder):
    for seed, (name, (kind, config, settings)) in enumerate(MODELS.items()):
        rng = np.random.default_rng(seed)
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
        fill(model, rng)
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        given = inputs(model, rng)
        np.savez_compressed(folder / name / "expected.npz", **given, **expected(model, given))


def check(folder):
    """Load what gpuattn saved; fail where a tensor is missing or left over, or results differ."""
    for path in sorted(folder.iterdir()):
        kind = json.loads((path / "config.json").read_text())["architectures"][0]
        model, told = getattr(transformers, kind).from_pretrained(path, output_loading_info=True)
        assert not any(told.values()), (path.name, told)
        results = dict(np.load(path / "expected.npz"))
        given = {n: results.pop(n) for n in ("tokens", "types", "lengths") if n in results}
        found = expected(model.eval(), given)
        real = np.arange(LIMIT) < given.get("lengths", np.full(3, LIMIT))[:, None]
        real = {name: real if name != "pooled" else slice(None) for name in results}
        far = {n: np.abs(a[real[n]] - found[n][real[n]]).max() for n, a in results.items()}
        print(path.name, kind, {name: f"{value:.1e}" for name, value in far.items()})
        assert max(far.values()) <= 1e-5


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
