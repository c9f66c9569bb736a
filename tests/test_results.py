"""Recorded results follow from their own samples, and comparisons are complete."""

import json
import statistics
from pathlib import Path

import pytest

from gpuattn.bench import results
from gpuattn.bench.calls.cases import FIRST
from gpuattn.bench.fused import cases as fused_cases

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks" / "results"
DOCUMENTS = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
DOCUMENTS = {name: document for name, document in DOCUMENTS.items() if "rows" in document}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_names_its_machine_versions_and_command(name):
    document = DOCUMENTS[name]
    for key in ("gpu", "driver"):
        assert bool(document[key]) != name.endswith("-cpu.json"), key
    for key in ("versions", "date", "digest", "command"):
        assert document[key], key
    assert document["ceilings"]["copy_tbs"] > 0
    assert document["ceilings"]["matmul_tflops"] > 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_times_are_medians_of_samples(name):
    for row in DOCUMENTS[name]["rows"]:
        check_times(row["us"], row["samples_us"], row)
        for name in ("plain", "first_token", "bare"):
            if f"{name}_us" in row:
                check_times(row[f"{name}_us"], row[f"{name}_samples_us"], row)
        for peer, us in row["peers"].items():
            if us == results.OUT_OF_MEMORY:
                assert row["peers_missing"][peer]
            else:
                check_times(us, row["peer_samples_us"][peer], row)


def check_times(us, samples, row):
    least = 7 if row["op"] == "decode" else 20  # whole generations
    if row["case"].get("flags", {}).get("timed") in FIRST:
        least = 5  # processes
    assert len(samples) >= least, row["case"]
    assert us == pytest.approx(statistics.median(samples), rel=1e-6), row["case"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rates_and_ratios_follow_from_times(name):
    ceilings = DOCUMENTS[name]["ceilings"]
    for row in DOCUMENTS[name]["rows"]:
        if "ratio_to_best_peer" not in row:
            assert not results.is_comparison(row)
            continue
        best = min((us for us in row["peers"].values() if us > 0), default=None)
        ratio = None if best is None else pytest.approx(best / row["us"], rel=1e-6)
        assert row["ratio_to_best_peer"] == ratio, row["case"]
        if "ceiling_share" in row:
            case = results.case_of(row)
            tflops = case.flops(row["direction"]) / row["us"] / 1e6
            gbs = case.bytes(row["direction"]) / row["us"] / 1e3
            share = max(tflops / ceilings["matmul_tflops"], gbs / 1e3 / ceilings["copy_tbs"])
            assert row["tflops"] == pytest.approx(tflops, rel=1e-6)
            assert row["gbs"] == pytest.approx(gbs, rel=1e-6)
            assert row["ceiling_share"] == pytest.approx(share, rel=1e-6)


def test_efficiencies_of_several_gpus_follow_from_times():
    for row in (row for each in DOCUMENTS.values() for row in each["rows"] if "ranks" in row):
        check_times(row["alone_us"], row["alone_samples_us"], row)
        assert row["ways"]["node"]["us"] == row["us"]
        for way in row["ways"].values():
            check_times(way["us"], way["samples_us"], row)
            assert way["efficiency"] == pytest.approx(row["alone_us"] / way["us"], rel=1e-6)
            assert 0 <= way["wait_share"] < 1
        tokens = row["ranks"] * results.case_of(row).tokens
        assert row["tokens_per_s"] == pytest.approx(tokens / row["us"] * 1e6)


GENERATIONS = [
    (document, row)
    for document in DOCUMENTS.values()
    for row in document["rows"]
    if row["op"] == "decode"
]


def test_rates_of_generations_follow_from_times():
    for document, row in GENERATIONS:
        case = results.case_of(row)
        assert row["tokens_per_s"] == pytest.approx(case.tokens / row["us"] * 1e6)
        assert row["floor_us"] == pytest.approx(case.floor_us(document["ceilings"]))
        assert row["floor_share"] == pytest.approx(row["floor_us"] / row["us"])
        if "step_us" in row:
            rest = row["us"] - row["first_token_us"]
            assert row["step_us"] == pytest.approx(rest / (case.shape[2] - 1))
        assert row["checked"] and {"gpuattn", *row["peers"]} <= set(row["logprobs"])


def test_comparisons_are_complete():
    """An op compared with peers in any file has all required cells, with every peer or a reason."""
    assert results.absent([row for each in DOCUMENTS.values() for row in each["rows"]]) == []


FUSED = [row for name in DOCUMENTS if name.startswith("fused") for row in DOCUMENTS[name]["rows"]]


@pytest.mark.skipif(not FUSED, reason="fused ops were not yet measured beside peers")
def test_the_fused_ops_are_complete():
    compared = {row["op"] for row in FUSED if results.is_comparison(row)}
    assert compared | {"dropout"} == set(fused_cases.TABLES)  # which no file has yet
    assert results.absent(FUSED) == []


def test_readme_times_of_updates_are_the_measured_ones():
    readme = (FOLDER.parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.split("## How long an update takes")[1].split("\n\n")[1]
    names = ("torch-eager", "torch-compile", "torch-graph")
    measured = []
    for row in filter(results.is_comparison, DOCUMENTS["train-h200.json"]["rows"]):
        times = [row["us"], *(row["peers"][name] for name in names)]
        measured.append([*(us / 1000 for us in times), row["ratio_to_best_peer"]])
    shown = [
        [float(cell.strip("* x")) for cell in line.split("|")[2:-1]]
        for line in table.splitlines()[2:]
    ]
    assert len(shown) == len(measured)
    for cells, figures in zip(shown, measured, strict=True):
        assert cells == pytest.approx(figures, rel=0.006)


def test_readme_times_of_models_of_folders_are_the_measured_ones():
    readme = (FOLDER.parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.split("Milliseconds of an update on one H200")[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        name, *cells = line.split("|")[1:-1]
        (row,) = DOCUMENTS[name.split("results/")[1].split(")")[0]]["rows"]
        figures = row["us"] / 1000, row["peers"]["torch-graph"] / 1000, row["ratio_to_best_peer"]
        assert [float(cell.strip("* x")) for cell in cells] == pytest.approx(figures, rel=0.004)


SEEDS = {
    "multi30k": ("mean_bleu", 2, lambda seed: seed["test"]["bleu"]),
    "shakespeare": ("mean_loss", 4, lambda seed: seed["best"]["val"]),
}
OLDER = "multi30k-first-h200.json", "multi30k-later-h200.json", "multi30k-third-h200.json"


@pytest.mark.parametrize("name", [*(f"{run}-h200.json" for run in SEEDS), *OLDER])
def test_readme_has_the_mean_of_seeds(name):
    """The README has those of the latest files; the older ones are only checked in themselves."""
    key, digits, score = SEEDS[name.split("-")[0]]
    document = json.loads((FOLDER / name).read_text())
    scores = [score(seed) for seed in document["seeds"]]
    assert len(scores) >= 3
    assert document[key] == pytest.approx(statistics.mean(scores))
    if name not in OLDER:
        readme = (FOLDER.parents[2] / "README.md").read_text(encoding="utf-8")
        assert f"**{document[key]:.{digits}f}**" in readme


def test_tokens_a_second_of_an_own_model_follow_from_samples():
    for size in json.loads((FOLDER / "own-model-h200.json").read_text())["sizes"]:
        sequences, length = size["case"]["shape"]
        tokens = size["updates"] * sequences * length
        for name, turns in size["seconds"].items():
            assert len(turns) >= 3
            assert size["tokens_per_s"][name] == pytest.approx(tokens / statistics.median(turns))
        for pair, ratio in size["ratios"].items():
            name, other = pair.split(" / ")
            rates = size["tokens_per_s"]
            assert ratio == pytest.approx(rates[name] / rates[other])


def test_figures_of_loading_follow_from_samples():
    found = json.loads((FOLDER / "loading-h200.json").read_text())
    seconds, memory = (
        [sample[name] for sample in found["samples"]] for name in ("seconds", "host_bytes")
    )
    assert len(seconds) >= 5 and found["parameters"] > 1e9
    assert found["seconds"] == statistics.median(seconds) <= 3
    assert found["host_bytes"] == max(memory) <= found["largest_bytes"] + 200_000_000


def test_tokens_a_second_on_cpus_follow_from_samples():
    rows = json.loads((FOLDER / "decode-cpu.json").read_text())["decoding"]
    assert [row["case"]["flags"]["model"] for row in rows] == ["toy"] * 2 + ["gpt2"] * 2
    for row in rows:
        for when in ("now", "before"):
            assert len(row[f"{when}_s"]) >= 5
            rate = row["tokens"] / statistics.median(row[f"{when}_s"])
            assert row[f"tokens_per_s_{when}"] == pytest.approx(rate)
        assert row["tokens_per_s_now"] > row["tokens_per_s_before"]
