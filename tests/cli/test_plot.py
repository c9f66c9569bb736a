"""gpuattn plot: pictures of a run; without matplotlib, what to install."""

import struct
import sys

import numpy as np
import pytest

from gpuattn.train.plot import attention_of
from gpuattn.train.run import load_run


def test_three_pictures(call, trained, tmp_path):
    pytest.importorskip("matplotlib")
    result = call("plot", trained, "--out", tmp_path / "plots")
    assert result.exit_code == 0, result.stderr
    names = ["curves.png", "attention.png", "overview.png"]
    assert result.stdout.splitlines() == [str(tmp_path / "plots" / name) for name in names]
    for name in names:
        data = (tmp_path / "plots" / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 300 and height > 200


def test_a_sentence_of_ones_own(call, trained, tmp_path):
    pytest.importorskip("matplotlib")
    chosen = ["--sentence", "old red cat", "--out", tmp_path]
    assert call("plot", trained, *chosen).exit_code == 0
    result = call("plot", trained, "--sentence", "cat " * 60, "--out", tmp_path)
    assert result.exit_code == 1 and "60 tokens long" in result.stderr


def test_no_run_no_picture(call, tmp_path):
    pytest.importorskip("matplotlib")
    result = call("plot", tmp_path)
    assert result.exit_code == 1 and "no config.toml" in result.stderr


def test_without_matplotlib_it_says_what_to_install(call, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("plot", trained)
    assert result.exit_code == 1 and "pip install 'gpuattn[plots]'" in result.stderr


def test_attention_is_drawn_between_words_and_still_sums_to_one(trained):
    translator = load_run(trained, device="numpy")
    maps = attention_of(translator, "old red cat")
    assert maps.source == ["old", "red", "cat", "(end)"]
    assert " ".join(maps.target[:-1]) == translator.translate(["old red cat"])[0]
    for weights in maps.layers:
        assert weights.shape[1:] == (len(maps.target), 4)
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_a_translation_that_is_too_long_is_cut(trained):
    translator = load_run(trained, device="numpy")
    maps = attention_of(translator, "old red cat", "e\N{REPLACEMENT CHARACTER}" * 99)
    assert maps.layers[0].shape[1:] == (len(maps.target), 4)
