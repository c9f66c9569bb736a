"""gpuattn embed and info with a folder of Hugging Face: vectors as JSON lines or .npy."""

import json

import numpy as np
import pytest

import gpuattn
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.models import Bert, BertConfig
from gpuattn.tasks.users.embedder import BATCH

LINES = ["abc", "cab" * 4, "", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small encoder of letters. Tests must not change it."""
    path = tmp_path_factory.mktemp("bert") / "small encoder"
    config = BertConfig(7, 12, 3, 1, 16, max_length=16, masked=True, dropout=0.0)
    gpuattn.save_pretrained(Bert(config, seed=1), path, CharTokenizer("abc"))
    return path


def vectors(folder, **settings):
    return gpuattn.load_run(folder, device="numpy").embed(LINES, **settings)


def test_a_vector_for_each_line(call, folder, tmp_path, monkeypatch):
    text = "".join(f"{line}\n" for line in LINES)
    result = call("embed", folder, input=f"\ufeff{text}")
    assert result.exit_code == 0 and result.stderr == ""
    found = np.array([json.loads(line) for line in result.stdout.splitlines()], np.float32)
    np.testing.assert_array_equal(found, vectors(folder))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), [1, 1, 1, 1], atol=1e-6)
    (tmp_path / "text").write_text(text.rstrip("\n"))
    arguments = ["--input", tmp_path / "text", "--output", tmp_path / "out.npy"]
    assert call("embed", folder, *arguments, "--raw", "--pool", "first").exit_code == 0
    raw = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(raw, vectors(folder, pool="first", normalised=False))
    assert raw.dtype == np.float32 and np.abs(np.linalg.norm(raw[0]) - 1) > 0.1
    monkeypatch.setattr("gpuattn.cli.embed.LINES", 3)
    monkeypatch.setitem(BATCH, "cpu", 4)
    again = call("embed", folder, input=text).stdout
    np.testing.assert_allclose(
        [json.loads(line) for line in again.splitlines()], found, rtol=1e-5, atol=1e-6
    )


def test_no_lines_give_no_vectors(call, folder, tmp_path):
    assert call("embed", folder, input="").stdout == ""
    assert call("embed", folder, "--output", tmp_path / "none.npy", input="").exit_code == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 12)


def test_a_long_line_is_an_error_or_is_cut(call, folder, tmp_path):
    long = "abc" * 6
    arguments = ["embed", folder, "--output", tmp_path / "out"]
    result = call(*arguments, input=f"a\n{long}\n")
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert "line 2 is 20 tokens long; accepted: up to 16" in result.stderr
    assert "--truncate" in result.stderr
    both = call("embed", folder, "--truncate", input=f"{long}\n{long[:14]}\n").stdout
    one, other = both.splitlines()  # the mark at the end stays
    assert one == other


@pytest.mark.parametrize("data, message", [
    (b"a\n\xff\n", "line 2 is not UTF-8, from byte 1 on"),
    (b"ab\ndog\n", "line 2: CharTokenizer.encode: character 'd' at 0"),
])  # fmt: skip
def test_lines_that_are_no_text(folder, call, data, message):
    result = call("embed", folder, input=data)
    assert result.exit_code == 1 and message in result.stderr


def test_other_commands_say_what_the_folder_is_for(call, folder, tmp_path):
    for command in ("sample", "translate"):
        result = call(command, folder)
        assert result.exit_code == 2
        assert f"{folder} is a bert, to be used by: gpuattn embed '{folder}'" in result.stderr
    for command in ("evaluate", "score"):
        result = call(command, folder)
        assert result.exit_code == 2 and "an encoder, which has no scores" in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    for command in ("embed", "info", "sample"):
        result = call(command, tmp_path)
        assert result.exit_code == 1 and "model_type is 'mamba'; accepted: " in result.stderr


def test_info_of_a_folder(call, folder):
    shown = " ".join(call("info", folder).stdout.split())
    assert "small encoder: bert for embedding" in shown and "7 tokens" in shown
    assert "d_model 12, heads 3, layers 1, ffn 16" in shown
    found = json.loads(call("info", folder, "--json").stdout)
    model = gpuattn.load_pretrained(folder)
    padding = (64 - 7) * 12 + (64 - 7)
    assert found["parameters"] == sum(p.size for p in model.parameters()) - padding
    assert found["dtype"] == "float32" and found["ignored"] == found["copies"] == []
