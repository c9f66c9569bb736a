"""Loading and saving: faults of tensors and configs, dtypes, tasks, heads, and what is written."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gpuattn
from gpuattn import optim
from gpuattn.arrays import BFLOAT16
from gpuattn.errors import CheckpointError, ConfigError, DataError, PretrainedError
from gpuattn.models import GPT2, Bert, BertConfig, GPT2Config, Llama, LlamaConfig, RotaryScaling
from gpuattn.pretrained.architecture import ARCHITECTURES, register
from gpuattn.pretrained.folder import describe_folder
from gpuattn.runtime.workspace import Workspace

GOLDEN = Path(__file__).parent / "golden"
TINY = GPT2Config(vocab=9, d_model=8, heads=2, layers=1, block=6)


@pytest.fixture
def edit(tmp_path):
    """Return a function that copies a golden folder with other tensors and another config."""

    def make(name, tensors=None, drop=(), **config):
        folder = tmp_path / "edited"
        shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
        held = load_file(folder / "model.safetensors") | (tensors or {})
        held = {n: a for n, a in held.items() if n not in drop}
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make


def load(folder, **options):
    return gpuattn.load_pretrained(folder, device="numpy", **options)


def faults(folder, **options):
    with pytest.raises(PretrainedError) as caught:
        load(folder, **options)
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value.faults


def test_all_faults_of_tensors_are_in_one_error(edit):
    attention = "transformer.h.0.attn"
    folder = edit("gpt2-tied", {
        f"{attention}.c_attn.weight": np.zeros((72, 24), "f4"),
        "transformer.h.1.ln_1.weight": np.zeros(24, "i4"),
        "transformer.h.7.ln_1.weight": np.zeros(24, "f4"),
        "wpe.weight": np.zeros((11, 24), "f4"),
        "score.weight": np.zeros((2, 24), "f4"),
        f"{attention}.bias": np.zeros((1, 1, 11, 11), "u1"),  # a mask in old files: no fault
        f"{attention}.masked_bias": np.array(-1e4, "f4"),
    }, drop=["transformer.ln_f.bias"])  # fmt: skip
    assert sorted(faults(folder)) == sorted([
        f"{attention}.c_attn.weight has the shape (72, 24); config.json asks for (24, 72): "
        "it looks transposed",
        "transformer.h.1.ln_1.weight is int32; accepted: float32, float16, bfloat16, float64",
        "transformer.h.7.ln_1.weight (24,) has no place in this gpt2",
        "score.weight (2, 24) has no place in this gpt2",
        "transformer.wpe.weight and wpe.weight are the same tensor of the model",
        "transformer.ln_f.bias is missing",
    ])  # fmt: skip


def test_tensors_of_a_file_that_cannot_be_read_are_not_missing(edit):
    """One fault for one cause; what is missing besides is told where that is known."""
    folder = edit("gpt2-tied", drop=["transformer.wpe.weight"])
    weights = folder / "model.safetensors"
    data, held = weights.read_bytes(), sorted(load_file(weights))
    weights.write_bytes(data[:20])
    (fault,) = faults(folder)
    assert fault.startswith("model.safetensors has 20 bytes and says that its header has")
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    head["transformer.ln_f.bias"]["dtype"] = "F8_E3"
    text = json.dumps(head).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + len(text) :])
    broken, missing = faults(folder)
    assert broken.startswith("transformer.ln_f.bias in model.safetensors is 'F8_E3'")
    assert missing == "transformer.wpe.weight is missing"
    listed = {"weight_map": dict.fromkeys(held, "1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    weights.unlink()
    unread, missing = faults(folder)
    assert unread == "1.safetensors cannot be read: No such file or directory"
    assert missing == "transformer.wpe.weight is missing"


@pytest.mark.parametrize("dtype, value", [("f4", "inf"), ("f2", "nan"), (BFLOAT16, "-inf")])
def test_values_that_are_not_finite(edit, dtype, value):
    names = ["transformer.wte.weight", "transformer.h.1.mlp.c_fc.bias"]
    tensors = load_file(GOLDEN / "gpt2-tied" / "model.safetensors")
    tensors = {name: tensors[name].astype(dtype) for name in tensors}
    for name in names:
        tensors[name].flat[5] = float(value)
    assert sorted(faults(edit("gpt2-tied", tensors))) == sorted(
        f"{n} holds inf or NaN" for n in names
    )
    for name in names:
        tensors[name].flat[5] = np.finfo(np.float16).max
    assert load(edit("gpt2-tied", tensors)).parameters()[0].dtype == np.dtype(dtype)


def test_tied_copies(edit, tmp_path):
    table = load_file(GOLDEN / "gpt2-tied" / "model.safetensors")["transformer.wte.weight"]
    folder = edit("gpt2-tied", {"lm_head.weight": table})
    gpuattn.save_pretrained(load(folder), tmp_path / "saved")
    new = load_file(tmp_path / "saved" / "model.safetensors")
    assert new["lm_head.weight"].tobytes() == table.tobytes()
    other = table.copy()
    other[3, 3] = -other[3, 3]
    (fault,) = faults(edit("gpt2-tied", {"lm_head.weight": other}))
    assert fault.startswith(
        "lm_head.weight is not equal to transformer.wte.weight; accepted: a copy"
    )
    (fault,) = faults(edit("gpt2-untied", drop=["lm_head.weight"]))
    assert fault == 'lm_head.weight is missing; config.json has "tie_word_embeddings": false'


REFUSED = [
    ("gpt2-tied", "scale_attn_by_inverse_layer_idx", True), ("gpt2-tied", "n_layer", "2"),
    ("gpt2-tied", "scale_attn_weights", False), ("gpt2-tied", "activation_function", "silu"),
    ("gpt2-tied", "layer_norm_epsilon", 0), ("gpt2-tied", "n_embd", 10**12),
    ("gpt2-tied", "n_layer", 10**9), ("gpt2-tied", "tie_word_embeddings", "no"),
    ("gpt2-tied", "add_cross_attention", True), ("gpt2-tied", "n_head", 5),
    ("bert-encoder", "position_embedding_type", "relative_key"),
    ("bert-encoder", "is_decoder", True), ("bert-encoder", "hidden_act", ["gelu"]),
    ("bert-encoder", "hidden_dropout_prob", 1.5),
    ("llama-untied", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ("llama-untied", "rope_parameters", {"rope_type": "yarn"}), ("llama-untied", "head_dim", 0),
    ("llama-untied", "partial_rotary_factor", 0.5), ("llama-untied", "attention_bias", True),
    ("llama-untied", "rope_parameters", [1]),
    ("qwen2-tied", "use_sliding_window", True), ("qwen2-tied", "num_key_value_heads", 2),
    ("qwen2-tied", "layer_types", ["full_attention", "sliding_attention"]),
    ("marian-swish", "scale_embedding", False), ("marian-swish", "normalize_before", True),
    ("marian-swish", "share_encoder_decoder_embeddings", False),
    ("marian-swish", "decoder_vocab_size", 68), ("marian-swish", "decoder_attention_heads", 4),
    ("marian-swish", "decoder_ffn_dim", 41), ("marian-swish", "eos_token_id", [0, 1]),
    ("marian-swish", "decoder_start_token_id", 67),
    ("bert-encoder", "type_vocab_size", True), ("bert-encoder", "model_type", "roberta"),
]  # fmt: skip


@pytest.mark.parametrize("name, key, value", REFUSED, ids=[f"{key}={v}" for _, key, v in REFUSED])
def test_a_config_that_changes_the_math_is_refused(edit, name, key, value):
    text = "\n".join(faults(edit(name, **{key: value})))
    assert f"{key} is {value!r}; accepted:" in text or f"heads is {value}; accepted:" in text


def test_rotary_positions_of_old_and_new_files(edit):
    tokens = np.arange(11, dtype=np.int32)[None]
    new = load(GOLDEN / "llama-untied")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, "f4")}
    for scaling in (None, {"type": "default"}):
        old = edit(
            "llama-untied", buffer, rope_parameters=None, rope_theta=37, rope_scaling=scaling
        )
        np.testing.assert_array_equal(load(old).logits(tokens).data, new.logits(tokens).data)
    usual = load(edit("llama-untied", buffer, rope_parameters=None, rope_theta=None))
    assert usual.config.base == 10_000 and new.config.base == 37
    wrong = edit("llama-untied", buffer, rope_parameters={"rope_theta": -1})
    assert faults(wrong) == ("config.json: rope_theta is -1; accepted: a positive number",)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 4}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0}
ROPES = {
    "no factors": (LLAMA3 | {"low_freq_factor": None}, "'llama3' with low_freq_factor"),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "the same for texts of any length"),
    "two kinds": (YARN | {"rope_type": "llama3"}, "one rope_type of 'default', 'linear'"),
    "another key": (YARN | {"mscale": 0.7}, "'yarn' without mscale"),
    "a fraction": (LLAMA3 | {"original_max_position_embeddings": 4.5}, "of tokens whole ones"),
    "a word": ({"type": "linear", "factor": "2"}, "'linear' with numbers"),
    "no list": ([8.0], "rope_scaling is [8.0]; accepted: "),
    "order": (LLAMA3 | {"high_freq_factor": 1.0}, "fast is 1.0; accepted: a number above slow"),
    "smaller": ({"type": "linear", "factor": 0.5}, "factor is 0.5; accepted: a number from 1 on"),
}


@pytest.mark.parametrize("given, sentence", ROPES.values(), ids=ROPES)
def test_rotary_scaling_that_does_not_fit_is_refused(edit, given, sentence):
    (fault,) = faults(edit("llama-untied", rope_parameters=None, rope_scaling=given))
    assert fault.startswith("config.json: rope_scaling is ") and sentence in fault


def test_rotary_scaling_of_old_and_new_files(edit, tmp_path):
    def config(**keys):
        return load(
            edit("llama-untied", **{"rope_parameters": None, "rope_theta": 37} | keys)
        ).config

    new = config(rope_parameters=LLAMA3 | {"rope_theta": 37})
    assert new.scaling == RotaryScaling("llama3", 8.0, 4, 1.0, 4.0)
    assert config(rope_scaling=LLAMA3) == new == config(rope_scaling=LLAMA3, rope_parameters=LLAMA3)
    yarn = config(rope_scaling=YARN).scaling
    assert yarn == RotaryScaling("yarn", 4.0, 11, 1.0, 32.0, True, 0.1 * np.log(4) + 1)
    longer = config(rope_scaling=YARN, original_max_position_embeddings=5).scaling
    assert longer.original == 5
    both = edit("llama-untied", rope_scaling=LLAMA3, rope_parameters={"rope_theta": 37})
    assert "accepted: what rope_parameters says, or one of both" in faults(both)[0]
    gpuattn.save_pretrained(Llama(new), tmp_path / "saved")
    assert load(tmp_path / "saved").config == new
    options = json.loads(json.dumps(describe_folder(tmp_path / "saved")))["options"]
    assert options["scaling"]["kind"] == "llama3"


def test_unknown_keys_are_named_in_one_warning(edit):
    folder = edit("gpt2-tied", new_key=1, other={"a": 2}, embd_pdrop=0.0)
    with pytest.warns(UserWarning, match="not known, and not used: new_key, other") as caught:
        load(folder)
    assert len(caught) == 1 and "resid_pdrop, 0.1, is the dropout of" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in GOLDEN.iterdir():
            load(path)


def test_dtypes(edit, tmp_path):
    assert {p.dtype for p in load(GOLDEN / "gpt2-tied").parameters()} == {np.dtype("float32")}
    small = load(GOLDEN / "gpt2-tied", dtype="bfloat16")
    gpuattn.save_pretrained(small, tmp_path / "small")
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load(tmp_path / "small")
    for p, q in zip(small.parameters(), again.parameters(), strict=True):
        assert p.dtype == BFLOAT16 == q.dtype and p.data.tobytes() == q.data.tobytes()
    norm = load_file(GOLDEN / "gpt2-tied" / "model.safetensors")["transformer.ln_f.bias"]
    mixed = edit("gpt2-tied", {"transformer.ln_f.bias": norm.astype("f8")})
    assert {p.dtype for p in load(mixed).parameters()} == {np.dtype("float64")}
    for wrong in ("int8", "nonsense"):
        with pytest.raises(ConfigError, match=f"dtype is '{wrong}'; accepted: float32"):
            load(GOLDEN / "gpt2-tied", dtype=wrong)


def test_names_of_old_files_and_of_the_body_alone(edit, tmp_path):
    tensors = load_file(GOLDEN / "bert-masked" / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): a
        for name, a in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(11)[None]
    old["cls.seq_relationship.bias"] = np.zeros(2, "f4")
    folder = edit("bert-masked", old, drop=tensors.keys() - old.keys())
    one, other = load(GOLDEN / "bert-masked"), load(folder)
    assert all(a.tobytes() == other.state()[name].tobytes() for name, a in one.state().items())
    gpuattn.save_pretrained(other, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == old.keys()
    assert all(saved[name].tobytes() == a.tobytes() for name, a in old.items())


def test_tasks_choose_the_heads(tmp_path):
    masked = GOLDEN / "bert-masked"
    body = load(masked, task="embedding")
    assert not body.config.masked and body.pooler is None
    gpuattn.save_pretrained(body, tmp_path / "body")
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    assert not any("cls." in n for n in load_file(tmp_path / "body" / "model.safetensors"))
    (missing,) = faults(GOLDEN / "bert-encoder", task="masked")
    assert "no head for masked tokens (cls.predictions); accepted: a BertForMaskedLM" in missing
    with pytest.raises(ConfigError, match="task is 'language'; accepted: 'embedding' or 'masked'"):
        load(masked, task="language")
    with pytest.raises(ConfigError, match="Bert.head: masked is False"):
        body.logits(np.zeros((1, 2), np.int32))
    with pytest.raises(ConfigError, match="Bert.pooled: pooler is False"):
        body.pooled(np.zeros((1, 2, 24), "f4"))


@pytest.mark.parametrize("model", [
    GPT2(TINY, 1), GPT2(GPT2Config(9, 8, 2, 1, 6, inner=5, tied=False, pad_vocab=False), 2),
    Bert(BertConfig(9, 8, 2, 1, 12, max_length=6, masked=True), 3),
    Bert(BertConfig(9, 8, 2, 2, 12, max_length=6, masked=True, tied=False, types=1), 4),
    Llama(LlamaConfig(9, 8, 2, 1, 12, 6, kv_heads=1, base=9.0), 5),
    Llama(LlamaConfig(9, 8, 2, 1, 12, 6, qkv_bias=True, tied=True), 6),
], ids=["gpt2", "untied", "bert", "untied-bert", "llama", "qwen2"])  # fmt: skip
def test_models_made_here_come_back(tmp_path, model):
    gpuattn.save_pretrained(model, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    again, state = load(tmp_path / "out"), model.state()
    assert again.config.eps == model.config.eps and not again.training
    for name, a in again.state().items():
        assert a[: len(state[name])].tobytes() == state[name].tobytes(), name  # padded or not


def test_what_cannot_be_saved(tmp_path):
    slim = GPT2(GPT2Config(9, 8, 2, 1, 6, bias=False, positions="rotary", activation="swiglu"))
    with pytest.raises(ConfigError, match="bias is False.*--bias.*positions is rotary.*swiglu"):
        gpuattn.save_pretrained(slim, tmp_path / "out")
    with pytest.raises(
        ConfigError, match="model is a Linear; accepted: Bert, GPT2, Llama, TranslationModel"
    ):
        gpuattn.save_pretrained(gpuattn.nn.Linear(2, 2), tmp_path / "out")
    model = GPT2(TINY)
    model.norm.weight.data[2] = np.nan
    with pytest.raises(CheckpointError, match="transformer.ln_f.weight hold inf or NaN"):
        gpuattn.save_pretrained(model, tmp_path / "out")
    model.norm.weight.data[2] = 1
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            gpuattn.save_pretrained(model, taken)
    with pytest.raises(CheckpointError, match="cannot save .*; nothing is written"):
        gpuattn.save_pretrained(model, tmp_path / "file" / "out")
    with pytest.raises(DataError, match="the vocabulary is 20 tokens; accepted: up to 9"):
        gpuattn.save_pretrained(model, tmp_path / "out", range(20))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_loaded_model_can_be_trained():
    model = load(GOLDEN / "gpt2-tied").train()
    workspace = Workspace(model)
    optimizer = optim.AdamW(workspace)
    tokens = np.arange(22, dtype=np.int32).reshape(2, 11)
    losses = []
    for _ in range(4):
        workspace.begin()
        loss = model.loss(tokens, tokens + 1)
        workspace.backward(loss)
        optimizer.step(learning_rate=0.01)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_an_architecture_registers_once():
    with pytest.raises(ValueError, match="'gpt2' already"):
        register(ARCHITECTURES["gpt2"])


# ---- images -------------------------------------------------------------------------------------


def test_images_are_normalised_as_the_preprocessor_says(edit):
    folder = edit("vit-head")
    images = np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3), np.uint8)
    for found, mean, std in (
        ({}, (0.5,) * 3, (0.5,) * 3),
        ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.1, 0.2, 1]},
         (0.4, 0.5, 0.6), (0.1, 0.2, 1)),
        ({"do_normalize": False, "image_mean": [0.1] * 3}, (0.0,) * 3, (1.0,) * 3),
    ):  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(found))
        model = load(folder)
        floats = ((images / 255 - mean) / std).astype("f4")
        want = model.logits(floats).data
        np.testing.assert_allclose(model.logits(images).data, want, atol=1e-4)
    for wrong in ({"rescale_factor": 1.0}, {"do_rescale": False}):
        (folder / "preprocessor_config.json").write_text(json.dumps(wrong))
        (fault,) = faults(folder)
        assert fault.startswith("preprocessor_config.json: pixels are not scaled by 1 / 255")
    for wrong in ({"image_mean": [0.5]}, {"image_std": [0, 1, 1]}, {"image_mean": "half"}):
        (folder / "preprocessor_config.json").write_text(json.dumps(wrong))
        (fault,) = faults(folder)
        assert fault.startswith("preprocessor_config.json: image_") and "3 numbers" in fault


def test_the_head_of_a_vit_is_kept_or_left_out(edit):
    assert load(GOLDEN / "vit-head").config.classes == 5
    assert load(GOLDEN / "vit-head", task="features").head is None
    encoder = load(GOLDEN / "vit-encoder")
    assert encoder.config.classes == 0 and not encoder.config.qkv_bias
    assert list(encoder.origin.kept) == ["pooler.dense.bias", "pooler.dense.weight"]
    shape = "vit.embeddings.position_embeddings"
    (fault,) = faults(edit("vit-head", {shape: np.zeros((1, 17, 24), "f4")}))
    assert fault == f"{shape} has the shape (1, 17, 24); config.json asks for (1, 10, 24)"


def test_names_of_classes_come_from_the_config(edit):
    folder = edit("vit-head", id2label={"0": "a", "1": "b", "10": "c", "2": "d", "3": "e"})
    with pytest.raises(PretrainedError, match="id2label names no classes 0, 1, 2"):
        gpuattn.load_run(folder, device="numpy")
    folder = edit("vit-head", id2label={"0": "a", "1": "b", "4": "c", "2": "d", "3": "e"})
    classifier = gpuattn.load_run(folder, device="numpy", task="images")
    assert classifier.tokenizer.names == ("a", "b", "d", "e", "c")
    image = np.zeros((1, 12, 12, 3), np.uint8)
    best = int(classifier.model.logits(image).data.argmax())
    assert classifier.labels(image)[0].name == classifier.tokenizer.names[best]
