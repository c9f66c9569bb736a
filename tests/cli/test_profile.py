"""gpuattn profile and gpuattn report: from runs and options; tables, files and figures."""

import json

import pytest

from gpuattn.report.page import PAGE, PROFILE
from gpuattn.runs.folder import RunFolder

from .conftest import TINY

MODEL = [*TINY[: TINY.index("--beam")], "--device", "numpy"]  # the options that affect a step


@pytest.fixture
def run(call, corpus, tmp_path):
    """A run of two updates, which the test may change."""
    command = ["train", corpus / "src", corpus / "tgt", *TINY, "--for", "2u", "--out"]
    assert call(*command, tmp_path / "run").exit_code == 0
    return tmp_path / "run"


def test_a_run_is_profiled_into_its_folder_and_its_report(call, run):
    result = call("profile", run, "--device", "numpy")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == [
        "where",
        "model",
        "update",
        "ceilings",
        "step",
    ]
    assert "flash_attention" in result.stdout and "of the roof" in lines[5]
    assert lines[-1].startswith("ops") and "of the step" in lines[-1]
    assert lines[-2].startswith("kinds") and "matrix products" in lines[-2]
    assert lines[-3].startswith("stages") and "backward" in lines[-3] and "update" in lines[-3]
    assert lines[-4].startswith("padding") and "with 448 rows" in lines[-4]
    assert {row["op"] for row in json.loads((run / PROFILE).read_text())["rows"]} > {"linear"}
    assert "gradient_statistics" not in (run / PAGE).read_text()
    result = call("report", run)
    assert result.exit_code == 0 and result.stdout == f"{run / PAGE}\n"
    assert "gradient_statistics" in (run / PAGE).read_text()


def test_options_are_profiled_without_a_run(call, corpus, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    files = ["--json", "step.json", "--plot", "step.png"]
    result = call("profile", corpus / "src", corpus / "tgt", *MODEL, *files, "--accumulate", "4")
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"step.json", "step.png"}
    assert (tmp_path / "step.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((tmp_path / "step.json").read_text())
    updates = [row for row in document["rows"] if row["op"] == "adamw"]
    assert [row["calls"] for row in updates] == [1]
    assert document["model"].startswith("1+1 layers, width 16")


def test_refusals_of_profile_and_report(call, tmp_path):
    result = call("profile", tmp_path, "--device", "numpy")
    assert result.exit_code == 2 and "is a folder" in result.stderr
    result = call("profile", "toyy", "--device", "numpy")
    assert result.exit_code == 2 and "Did you mean 'toy'" in result.stderr
    result = call("profile", "toy", "--batch", "auto", "--device", "numpy")
    assert result.exit_code == 2 and "give a number" in result.stderr
    result = call("report", tmp_path)
    assert result.exit_code == 1 and "no config.toml" in result.stderr


def test_the_end_of_a_run_shows_its_cost(call, corpus, tmp_path):
    command = ["train", corpus / "src", corpus / "tgt", *TINY, "--for", "5u", "--out"]
    result = call(*command, tmp_path / "run")
    lines = result.stderr.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["trained", "report", "done", "next"]
    assert "tokens in" in lines[-4] and "tokens/s in updates" in lines[-4]
    start, *_, end = RunFolder(tmp_path / "run").metrics.read()
    assert start["command"].startswith("gpuattn train ") and start["versions"]["numpy"]
    spent = end["spent"]
    assert spent["tokens"] > 0 and spent["flops"] > 0 and spent["joules"] == 0
    assert 0 < spent["seconds"] < end["seconds"] + 0.1
    row = RunFolder(tmp_path / "run").metrics.read("train")[-1]
    assert row["milliseconds"] > 0 and not {"mfu", "watts", "joules"} & row.keys()
    assert call(*command, tmp_path / "run", "--for", "9u").exit_code == 0
    (end,) = RunFolder(tmp_path / "run").metrics.read("end")
    assert end["spent"]["tokens"] > spent["tokens"]
