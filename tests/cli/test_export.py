"""gpuattn export: a run of gpt2 as a folder of Hugging Face, which is then sampled from."""

import json

import numpy as np
import pytest

import gpuattn

from .conftest import invoke

SMALL = [
    "--tokenizer", "chars", "--dim", "16", "--heads", "2", "--layers", "1", "--block", "12",
    "--batch", "48", "--for", "2u", "--device", "numpy",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "text"
    path.write_text("the cat sat on the mat.\n" * 20)
    return path


def language_run(text, *options):
    out = text.with_name("".join(options) or "plain")
    if not out.exists():
        result = invoke("train", "--lm", text, *SMALL, *options, "--out", out)
        assert result.exit_code == 0, result.stderr
    return out


def test_an_exported_run_writes_the_same_texts(call, text, tmp_path):
    run, folder = language_run(text, "--bias"), tmp_path / "folder"
    result = call("export", run, folder)
    assert result.exit_code == 0 and f"gpuattn info {folder}" in result.stderr
    options = ["--prompt", "the", "--tokens", "30", "--seed", "1", "--device", "numpy"]
    assert call("sample", folder, *options).stdout == call("sample", run, *options).stdout
    tokens = np.arange(12, dtype=np.int32)[None]
    one, other = (gpuattn.load_run(path, device="numpy").model for path in (run, folder))
    np.testing.assert_array_equal(one.logits(tokens).data, other.logits(tokens).data)
    rows = [json.loads(call("evaluate", path, text, "--json").stdout) for path in (run, folder)]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert rows[0]["tokens"] == rows[1]["tokens"] == 479
    (line := tmp_path / "line.txt").write_text("the\n")
    run_score, score = (call("score", path, line).stdout.split() for path in (run, folder))
    assert list(map(float, score)) == pytest.approx(list(map(float, run_score)), abs=2e-4)
    result = call("evaluate", folder)
    assert result.exit_code == 2 and "give a text file: this is no run" in result.stderr
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["n_positions"] == 12
    assert json.loads(call("info", folder, "--json").stdout)["model"] == "gpt2"
    result = call("export", run, folder)
    assert result.exit_code == 1 and "exists and is not empty. Choose another" in result.stderr


def test_a_llama_trained_here_becomes_a_folder(call, text, tmp_path):
    run = language_run(text, "--model", "llama", "--ffn", "24", "--kv-heads", "1")
    assert call("export", run, tmp_path / "folder").exit_code == 0
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_key_value_heads"] == 1
    options = ["--prompt", "the", "--tokens", "20", "--temperature", "0", "--device", "numpy"]
    texts = [call("sample", path, *options).stdout for path in (run, tmp_path / "folder")]
    assert texts[0] == texts[1] and len(texts[0]) > 20
    wrong = invoke("train", "--lm", text, *SMALL, "--model", "llama", "--positions", "learned",
                   "--out", tmp_path / "x")  # fmt: skip
    assert "positions is learned; accepted: rotary for llama" in wrong.stderr


def test_what_transformers_lacks_is_refused(call, text, trained, tmp_path):
    run = language_run(text, "--positions", "rotary")
    result = call("export", run, tmp_path / "folder")
    assert result.exit_code == 2 and not (tmp_path / "folder").exists()
    assert "bias is False (train with --bias); positions is rotary" in result.stderr
    result = call("export", trained, tmp_path / "folder")
    assert result.exit_code == 2 and "norm is pre (train with --norm post)" in result.stderr
