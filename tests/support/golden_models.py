"""Write small, odd, randomly filled models with what transformers computes with them.

    python tests/support/golden_models.py tests/pretrained/golden
    python tests/support/golden_models.py --check FOLDER

It needs transformers, PyTorch and sentencepiece; of these the tests need the last alone.
``--check`` compares instead: FOLDER is what ``export_models.py`` wrote with gpuattn. Each model is
a folder in the format of Hugging Face, and ``expected.npz``: inputs and float32 results; beside a
Marian also what ``generate`` and the tokenizer find. The sizes and settings are
unusual on purpose, and no weight is at its initial value: with usual ones a wrong eps or a
forgotten bias would not be seen.
"""

import json
import sys
from pathlib import Path

import numpy as np
import sentencepiece as spm
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
MARIAN = {
    "vocab_size": VOCAB, "max_position_embeddings": 2 * LIMIT, "d_model": 24,
    "scale_embedding": True, "pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1,
    "forced_eos_token_id": None,
}  # fmt: skip
LABELS = "night", "day", "10", "a b", "\u00fc"
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
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
    "marian-swish": ("MarianMTModel", "MarianConfig", MARIAN | {
        "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
        "encoder_attention_heads": 3, "decoder_attention_heads": 3,
        "activation_function": "swish",
    }),
    "marian-relu": ("MarianMTModel", "MarianConfig", MARIAN | {
        "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56,
        "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "activation_function": "relu", "eos_token_id": 5, "decoder_start_token_id": 9,
        "pad_token_id": 9,
    }),
    "vit-head": ("ViTForImageClassification", "ViTConfig", VIT | {
        "intermediate_size": 40, "image_size": 12, "patch_size": 4, "num_labels": 5,
        "layer_norm_eps": 1e-3,
    }),
    "vit-encoder": ("ViTModel", "ViTConfig", VIT | {
        "intermediate_size": 56, "image_size": 6, "patch_size": 2, "num_channels": 1,
        "num_attention_heads": 4, "qkv_bias": False, "hidden_act": "gelu_new",
    }),
    "llama-llama3": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {
        "intermediate_size": 40, "head_dim": 12, "num_hidden_layers": 1, "rope_parameters": {
            "rope_theta": 11.0, "rope_type": "llama3", "factor": 3.0, "low_freq_factor": 0.5,
            "high_freq_factor": 1.5, "original_max_position_embeddings": 7},
    }),
    "llama-linear": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {
        "intermediate_size": 40, "num_hidden_layers": 1, "rope_parameters": {
            "rope_theta": 37.0, "rope_type": "linear", "factor": 2.5},
    }),
    "qwen2-yarn": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA | {
        "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 12, "rope_parameters": {
            "rope_theta": 11.0, "rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0,
            "beta_slow": 0.5, "original_max_position_embeddings": 7},
    }),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", BERT | {
        "intermediate_size": 56, "hidden_act": "gelu_new", "layer_norm_eps": 0.01,
        "type_vocab_size": 3, "num_attention_heads": 4, "classifier_dropout": 0.3,
        "id2label": dict(enumerate(LABELS)), "label2id": {n: i for i, n in enumerate(LABELS)},
    }),
}  # fmt: skip
SOURCES = ["the cat sat", "a mat", "the rat ate the hat", "at a tea"]
TARGETS = ["die matte", "eine katze", "der hut da"]
MARKS = "pad_token_id", "eos_token_id", "decoder_start_token_id"
GENERATION = {
    "num_beams": 4,
    "max_length": LIMIT + 1,
    "length_penalty": 0.8,
    "early_stopping": False,
}
# searches of a Marian, by ``generate``; what is not said is as in GENERATION
SEARCHES = (
    {"num_beams": 1}, {"num_beams": 4}, {"num_beams": 4, "length_penalty": 0.3},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 3, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 3},
    {"num_beams": 4, "no_repeat_ngram_size": 2, "min_length": 4},
)  # fmt: skip


def fill(model, rng):
    """Give every parameter random values: weights of norms around 1, others around 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = rng.standard_normal(tuple(parameter.shape), np.float32) * 0.2
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(torch.from_numpy(values + (1 if is_norm else 0)))
        if model.config.model_type == "marian":  # no parameter, and the end must come now and then
            signs = rng.choice(np.float32([-1, 1]), model.config.d_model)  # else tokens repeat
            model.model.decoder.layers[-1].final_layer_norm.weight.mul_(torch.from_numpy(signs))
            for parameter in model.model.decoder.layers.parameters():
                parameter.mul_(1 if parameter.ndim == 1 else 2)
            bias = rng.standard_normal((1, VOCAB), np.float32)
            bias[0, model.config.eos_token_id] = 2
            model.final_logits_bias.copy_(torch.from_numpy(bias))


def inputs(model, rng):
    """Return token ids as long as the model takes, for BERT with types and lengths too, for Marian
    of sources and targets; for ViT normalised images (B, H, W, C)."""
    if model.config.model_type == "vit":
        c = model.config
        return {"images": rng.standard_normal((3, *[c.image_size] * 2, c.num_channels), np.float32)}
    tokens = rng.integers(0, VOCAB, (3, LIMIT))
    if model.config.model_type == "marian":
        tokens[[0, 1, 2], [-1, 2, 5]] = model.config.eos_token_id
        target = rng.integers(0, VOCAB, (3, LIMIT))
        target[:, 0] = model.config.decoder_start_token_id
        return {"tokens": tokens, "target": target, "lengths": np.array([LIMIT, 3, 6])}
    if model.config.model_type != "bert":
        return {"tokens": tokens}
    types = rng.integers(0, model.config.type_vocab_size, (3, LIMIT))
    return {"tokens": tokens, "types": types, "lengths": np.array([LIMIT, 1, 6])}


def expected(model, given):
    """Return the results of a model as arrays."""
    if "images" in given:
        with torch.no_grad():
            out = model(pixel_values=torch.from_numpy(given["images"].transpose(0, 3, 1, 2).copy()))
        return {"logits": out.logits.numpy()} if "logits" in out else {
            "states": out.last_hidden_state.numpy()}  # fmt: skip
    tokens = {"input_ids": torch.from_numpy(given["tokens"])}
    if "target" in given:
        tokens["decoder_input_ids"] = torch.from_numpy(given["target"])
    if "lengths" in given:
        mask = np.arange(LIMIT) < given["lengths"][:, None]
        tokens["attention_mask"] = torch.from_numpy(mask)
    if "types" in given:
        tokens["token_type_ids"] = torch.from_numpy(given["types"])
    with torch.no_grad():
        out = model(**tokens)
    names = {"logits": "logits", "states": "last_hidden_state", "pooled": "pooler_output"}
    found = {ours: getattr(out, name, None) for ours, name in names.items()}
    return {name: value.numpy() for name, value in found.items() if value is not None}


def write_pieces(folder):
    """Write SentencePiece models of both sides, and a vocabulary that numbers their pieces anew."""
    pieces = {}
    for name, text in (("source", SOURCES), ("target", TARGETS)):
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(text * 20), model_prefix=str(folder / name), vocab_size=38,
            model_type="unigram", normalization_rule_name="identity", pad_id=-1, bos_id=-1,
            num_threads=1, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
        (folder / f"{name}.vocab").unlink()
        model = spm.SentencePieceProcessor(str(folder / f"{name}.spm"))
        pieces |= dict.fromkeys(map(model.id_to_piece, range(len(model))))
    words = ["</s>", "<unk>", ">>nds<<", *sorted(set(pieces) - {"</s>", "<unk>"}, reverse=True)]
    words = words[: VOCAB - 1]  # what is left out is unknown
    words += [f"unused{i}" for i in range(len(words), VOCAB - 1)] + ["<pad>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, indent=0))


def tokenized(folder, model):
    """Return what transformers makes of texts: ids, texts of ids, translations."""
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    texts = [*SOURCES, *TARGETS, ">>nds<< the cat", "a  zebra!", "▁x", ""]
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, 9)).tolist()
    given = tokenizer(SOURCES, return_tensors="pt", padding=True)
    with torch.no_grad():
        found = model.generate(**given)
    return {
        "sources": [[text, tokenizer(text).input_ids] for text in texts],
        "targets": [[text, tokenizer(text_target=text).input_ids] for text in texts],
        "decoded": [[some, tokenizer.decode(some, skip_special_tokens=True)] for some in ids],
        "translations": tokenizer.batch_decode(found, skip_special_tokens=True),
    }  # fmt: skip


def searched(model, given):
    """Return the SEARCHES of a Marian with what ``generate`` finds: tokens and scores."""
    mask = torch.from_numpy(np.arange(LIMIT) < given["lengths"][:, None])
    marks = model.config.eos_token_id, model.config.pad_token_id
    rows = []
    for settings in SEARCHES:
        with torch.no_grad():
            found = model.generate(
                torch.from_numpy(given["tokens"]), attention_mask=mask, **settings,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        texts = [[t for t in text[1:] if t not in marks] for text in found.sequences.tolist()]
        scores = getattr(found, "sequences_scores", None)
        scores = None if scores is None else scores.tolist()
        rows.append({"settings": settings, "texts": texts, "scores": scores})
    return rows


def main(folder):
    for seed, (name, (kind, config, settings)) in enumerate(MODELS.items()):
        rng = np.random.default_rng(seed)
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
        fill(model, rng)
        model.save_pretrained(folder / name)
        given, generation = inputs(model, rng), folder / name / "generation_config.json"
        if "target" in given:
            generation.write_text(json.dumps(GENERATION | {
                "bad_words_ids": [[model.config.pad_token_id]],
                **{key: getattr(model.config, key) for key in MARKS},
            }, indent=1, sort_keys=True))  # fmt: skip
            model = type(model).from_pretrained(folder / name)
            (folder / name / "searches.json").write_text(json.dumps(searched(model, given)))
            if model.config.eos_token_id == 0:
                write_pieces(folder / name)
                found = json.dumps(tokenized(folder / name, model), ensure_ascii=False, indent=0)
                (folder / name / "tokenized.json").write_text(found)
        else:
            generation.unlink(missing_ok=True)
        np.savez_compressed(folder / name / "expected.npz", **given, **expected(model, given))


def check(folder):
    """Load what gpuattn saved; fail where a tensor is missing or left over, or results differ."""
    for path in sorted(folder.iterdir()):
        kind = json.loads((path / "config.json").read_text())["architectures"][0]
        model, told = getattr(transformers, kind).from_pretrained(path, output_loading_info=True)
        assert not any(told.values()), (path.name, told)
        results = dict(np.load(path / "expected.npz"))
        names = "tokens", "types", "lengths", "target", "images"
        given = {n: results.pop(n) for n in names if n in results}
        found = expected(model.eval(), given)
        tokens_alone = not given.keys() & {"target", "images"}
        lengths = given.get("lengths", np.full(3, LIMIT)) if tokens_alone else np.full(3, LIMIT)
        real = np.arange(LIMIT) < lengths[:, None]
        whole = {n for n, a in results.items() if "images" in given or a.ndim == 2}
        real = {n: slice(None) if n in whole else real for n in results}
        far = {n: np.abs(a[real[n]] - found[n][real[n]]).max() for n, a in results.items()}
        print(path.name, kind, {name: f"{value:.1e}" for name, value in far.items()})
        assert max(far.values()) <= 1e-5


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
