"""gpuattn plot: figures of a run; without matplotlib, an error that names the package."""

import dataclasses
import struct
import sys

import numpy as np
import pytest

from gpuattn.report.plot import attention_of
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run


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


def test_curves_over_updates_distinguish_losses_and_scores(trained):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gpuattn.report import plot

    rows = [{"update": 20 * n, "seconds": 2.0 * n, "loss": 9.0 / n} for n in range(1, 4)]
    valid = [row | {"exact_match": 50.0, "bleu": 50.0} for row in rows]
    config = RunFolder(trained).config()
    figure, (left, right) = pyplot.subplots(1, 2)
    plot._draw_loss(left, rows, valid, config)
    plot._draw_scores(right, rows, valid, dataclasses.replace(config, task="dates", source=None,
                                                              target=None))  # fmt: skip
    for axis, names in (
        (left, ["training, smoothing 0.1", "validation, unsmoothed"]),
        (right, ["exact match, %", "BLEU"]),
    ):
        assert [text.get_text() for text in axis.get_legend().get_texts()] == names
        first, second = axis.get_lines()
        assert first.get_linestyle() != second.get_linestyle()
        assert first.get_marker() != second.get_marker()
        assert list(first.get_xdata()) == [20, 40, 60] and axis.get_xlabel() == "updates"
        (above,) = axis.child_axes
        assert [text.get_text() for text in above.get_xticklabels()] == [
            f"{n} s" for n in range(1, 7)
        ]
        np.testing.assert_allclose(above.get_xticks(), range(10, 70, 10))
    pyplot.close(figure)


def test_attention_of_a_given_sentence(call, trained, tmp_path):
    pytest.importorskip("matplotlib")
    chosen = ["--sentence", "old red cat", "--out", tmp_path]
    assert call("plot", trained, *chosen).exit_code == 0
    result = call("plot", trained, "--sentence", "cat " * 60, "--out", tmp_path)
    assert result.exit_code == 1 and "60 tokens long" in result.stderr


def test_without_a_run_there_is_no_figure(call, tmp_path):
    pytest.importorskip("matplotlib")
    result = call("plot", tmp_path)
    assert result.exit_code == 1 and "no config.toml" in result.stderr


def test_without_matplotlib_the_error_names_the_package(call, trained, monkeypatch):
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
