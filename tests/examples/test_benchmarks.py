"""The benchmarks in examples/ run with --smoke. Their times are not judged."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def smoke(script, *options):
    run = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--smoke", *options],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_cpu_step():
    assert re.search(r"gpuattn on NumPy .*: \d+\.\d ms", smoke("cpu_step.py"))


@pytest.mark.exhaustive
def test_cpu_decoding(tmp_path):
    before = ["--before", str(BENCHMARKS.parents[1])]
    output = smoke("cpu_decoding.py", "--repeat", "1", *before, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["decoding"]
    assert [row["case"]["flags"]["beam"] for row in rows] == [5, 1] and "now" in output
    assert all(min(row["tokens_per_s_now"], row["tokens_per_s_before"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_multi30k(tmp_path):
    output = smoke("multi30k.py", "--seeds", "1", "2", "--json", tmp_path / "out.json")
    assert output.count(" updates in ") == 2 and "required 41, NOT reached" in output
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["seed"] for row in found["seeds"]] == [1, 2] and found["command"]
    bleus = [row["test"]["bleu"] for row in found["seeds"]]
    assert found["mean_bleu"] == sum(bleus) / 2 and found["versions"]


@pytest.mark.exhaustive
def test_each_kind_of_batch_is_timed(tmp_path):
    output = smoke("multi30k.py", "--compare-batching", "--json", tmp_path / "out.json")
    rates = json.loads((tmp_path / "out.json").read_text())["sentences_per_second"]
    assert list(rates) == ["packed", "bucketed", "padded"] and min(rates.values()) > 0
    assert "packed / padded: " in output


def test_largest_batch(tmp_path):
    output = smoke("largest_batch.py", "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["largest"]) == ["none", "block"] and output.count("tried") == 2
    for row in found["largest"].values():
        assert row["texts"] == 20 == max(int(n) for n, fits in row["tried"].items() if fits)
        assert min(int(n) for n, fits in row["tried"].items() if not fits) == 21
        assert row["planned_bytes"] > 0 and row["losses"][-1] < row["losses"][0]


def test_own_model(tmp_path):
    output = smoke("own_model.py", "--json", tmp_path / "out.json")
    sizes = json.loads((tmp_path / "out.json").read_text())["sizes"]
    assert [size["case"]["flags"]["model"] for size in sizes] == ["example", "gpt2-124m"]
    for size in sizes:
        assert size["losses"]["one call"] == size["losses"]["plain loop"]
        own, other = (size["tokens_per_s"][name] for name in ("one call", "gpuattn train"))
        assert size["ratios"]["one call / gpuattn train"] == own / other
    assert output.count("one call / gpuattn train: ") == 2


def test_loading(tmp_path):
    output = smoke("loading.py", "--repeat", "2", "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["parameters"] == 155_968 and found["largest_bytes"] == 640 * 64 * 2
    low, high = sorted(sample["seconds"] for sample in found["samples"])
    assert 0 < low <= found["seconds"] <= high and "155,968 parameters in " in output


def test_shakespeare(tmp_path):
    output = smoke("shakespeare.py", "--seeds", "3", "--json", tmp_path / "out.json")
    assert re.search(r"seed 3: loss \d\.\d{4} .* at update [24]; ", output)
    (row,) = json.loads((tmp_path / "out.json").read_text())["seeds"]
    assert [evaluation["update"] for evaluation in row["evaluations"]] == [2, 4]
    assert row["best"]["val"] == min(evaluation["val"] for evaluation in row["evaluations"])
