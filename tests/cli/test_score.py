"""gpuattn score: log-probabilities of given translations, and of lines of text."""

import json
import math

import numpy as np
import pytest

from gpuattn.errors import DataError
from gpuattn.runs.loading import load_run
from gpuattn.tasks.corpus import held_out


@pytest.fixture(scope="module")
def translator(trained):
    return load_run(trained, device="numpy")


def test_scores_are_the_losses_of_the_run(call, trained, translator, tmp_path):
    """Minus the mean over the validation pairs is the loss at the run's best evaluation."""
    pairs = held_out(translator.config)
    for side in ("source", "target"):
        (tmp_path / side).write_text("".join(f"{getattr(pair, side)}\n" for pair in pairs))
    result = call("score", trained, tmp_path / "source", tmp_path / "target", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    loss = -sum(row["score"] for row in rows) / sum(row["tokens"] for row in rows)
    best = json.loads(call("info", trained, "--json").stdout)["best"]
    assert len(rows) == len(pairs) and loss == pytest.approx(best["loss"], rel=1e-5)


def test_the_score_of_a_translation_is_that_of_the_search(translator):
    lines = ["red cat", "old green house dog", "tree"]
    best = translator.nbest(lines, 3, beam=4, length_penalty=1.0)
    pairs = [(line, found.text) for line, n in zip(lines, best, strict=True) for found in n]
    scored = translator.score(pairs, batch_tokens=8)
    searched = [found.score for n in best for found in n]
    means = [one.normalised for one in scored]
    # a text that was cut has no end mark, and one may be spelled in other subwords
    same = [i for i, one in enumerate(scored) if abs(means[i] - searched[i]) < 1e-4]
    assert len(same) >= len(lines) and len(pairs) == 9
    for one in scored:
        assert one.score == pytest.approx(sum(one.logprobs))
        assert one.pieces[-1] == "</s>" and len(one.pieces) == len(one.logprobs)
    alone = [translator.score([pair])[0].score for pair in pairs]
    np.testing.assert_allclose([one.score for one in scored], alone, rtol=1e-5)
    assert translator.score([]) == []


def test_columns_and_lines_without_a_score(call, trained, tmp_path):
    (tmp_path / "src").write_bytes(b"red cat\nB\xe4r\n\ncat\n" + b"cat " * 60 + b"\nold house\n")
    (tmp_path / "tgt").write_text("RED CAT\nBEAR\n\n\nCAT\nOLD HOUSE")
    result = call("score", trained, tmp_path / "src", tmp_path / "tgt", "--tokens")
    assert result.exit_code == 1
    lines = result.stdout.split("\n")
    assert len(lines) == 7 and lines[1] == lines[3] == lines[4] == lines[6] == ""
    assert lines[2] == "0.0000\t0.0000\t"
    total, mean, tokens = lines[5].split("\t")
    values = list(map(float, tokens.split()))
    assert float(total) == pytest.approx(sum(values), abs=1e-3)
    assert float(mean) == pytest.approx(float(total) / len(values), abs=1e-3)
    assert [line.split(": ", 2)[2].split(";")[0] for line in result.stderr.splitlines()] == [
        "line 2: not UTF-8", "line 4: score: the target is empty",
        "line 5: score: the source is 60 tokens long",
    ]  # fmt: skip
    rows = call("score", trained, tmp_path / "src", tmp_path / "tgt", "--json").stdout
    rows = [json.loads(line) for line in rows.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[1] == {"line": 2, "error": "not UTF-8"} and rows[2]["tokens"] == 0
    assert f"{rows[5]['score']:.4f}" == total and len(rows[5]["pieces"]) == len(values)


def test_files_that_do_not_fit(call, trained, tmp_path):
    (tmp_path / "src").write_text("red\ncat\nold\n")
    (tmp_path / "tgt").write_text("RED\nCAT\n")
    for files, code, message in (
        (["src", "tgt"], 1, "has 3 lines"), (["src", "none"], 1, "cannot read"),
        (["src"], 2, "a source and a target file"), (["src"] * 3, 2, "a source and a target file"),
    ):  # fmt: skip
        result = call("score", trained, *(tmp_path / name for name in files))
        assert result.exit_code == code and result.stdout == "" and message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    (tmp_path / "empty").write_text("")
    result = call("score", trained, tmp_path / "empty", tmp_path / "empty")
    assert result.exit_code == 0 and result.stdout == ""


def test_one_dtype_on_numpy(call, trained, tmp_path):
    (tmp_path / "src").write_text("red\n")
    command = ["score", trained, tmp_path / "src", tmp_path / "src", "--device", "numpy"]
    plain = call(*command)
    assert plain.stderr == "" and call(*command, "--dtype", "float32").stderr == ""
    half = call(*command, "--dtype", "bfloat16")
    assert half.exit_code == 0 and half.stdout == plain.stdout
    assert half.stderr == (
        "gpuattn: warning: dtype bfloat16 needs a GPU; on NumPy everything is computed in float32\n"
    )
    for name in ("translate", "evaluate"):
        assert call(name, trained, "--dtype", "bfloat16").stderr.count(half.stderr) == 1
    wrong = call(*command, "--dtype", "bloat16")
    assert wrong.exit_code == 2 and "Did you mean 'bfloat16'" in wrong.stderr


def test_on_a_gpu_a_run_is_loaded_in_bfloat16(trained, translator, monkeypatch):
    """Arrays stay on NumPy here, which computes with 16 bits as a GPU does, more slowly."""
    monkeypatch.setattr("gpuattn.runs.loading.choose_device", lambda _: ("cuda", ""))
    monkeypatch.setattr("gpuattn.runs.loading.to_gpu", lambda array: array)
    monkeypatch.setattr("gpuattn.runs.loading.start_libraries", lambda dtype: None)
    pairs = [("red cat", "RED CAT"), ("old house", "OLD HOUSE")]
    exact = [one.score for one in translator.score(pairs)]
    for dtype, wanted in (("auto", "bfloat16"), ("bfloat16",) * 2, ("float32",) * 2):
        loaded = load_run(trained, dtype=dtype)
        assert {str(p.dtype) for p in loaded.model.parameters()} == {wanted}
        scores = [one.score for one in loaded.score(pairs)]
        assert (scores == exact) == (wanted == "float32")
        assert scores == pytest.approx(exact, rel=0.05)


def test_errors_of_the_library(translator):
    with pytest.raises(DataError, match="score: the source is empty; accepted: text on both"):
        translator.score([("", "RED")])
    with pytest.raises(DataError, match="score: the target is 60 tokens long; accepted: up to 40"):
        translator.score([("red", "cat " * 60)])
    (nothing,) = translator.score([("", " ")])
    assert nothing.logprobs == [] and nothing.normalised == 0.0 and math.exp(nothing.score) == 1
