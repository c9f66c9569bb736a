"""gpuattn evaluate and average."""

import json

import pytest

from gpuattn.runs.folder import RunFolder

from .conftest import TINY, by_ranks

KEYS = {
    "exact_match", "exact_by_kind", "bleu", "bleu_signature", "chrf", "sentences",
    "tokens_per_second",
}  # fmt: skip


def test_json_on_the_held_out_pairs(call, trained):
    result = call("evaluate", trained, "--json")
    row = json.loads(result.stdout)
    assert set(row) == KEYS and row["sentences"] == 1 and row["tokens_per_second"] > 0


def test_files_and_settings_of_bleu(call, trained, corpus):
    files = [corpus / "src", corpus / "tgt"]
    row = json.loads(call("evaluate", trained, *files, "--json").stdout)
    assert row["sentences"] == 80 and "tok:13a" in row["bleu_signature"]
    folded = call("evaluate", trained, *files, "--json", "--lowercase", "--tokenize", "none")
    assert "case:lc" in folded.stdout and "tok:none" in folded.stdout
    lower = call("evaluate", trained, corpus / "src", corpus / "src", "--json", "--lowercase")
    assert json.loads(lower.stdout)["bleu"] == row["bleu"]
    shown = call("evaluate", trained, *files)
    assert "BLEU" in shown.stdout and "nrefs:1" in shown.stdout


def test_a_source_that_is_too_long_costs_its_own_line(call, trained, tmp_path):
    (tmp_path / "src").write_text("red cat\n\n" + "cat " * 60 + "\nold house\n")
    (tmp_path / "tgt").write_text("RED CAT\nX\nCAT\nOLD HOUSE\n")
    result = call("evaluate", trained, tmp_path / "src", tmp_path / "tgt", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["sentences"] == 3
    (message,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert "line 3: translate: the line is 60 tokens long; accepted: up to 40" in message
    (tmp_path / "tgt").write_bytes(b"RED CAT\nX\nCAT\nB\xe4r\n")
    result = call("evaluate", trained, tmp_path / "src", tmp_path / "tgt")
    assert result.exit_code == 1 and "tgt, line 4, byte 2, is not UTF-8" in result.stderr


def test_refusals_of_evaluate(call, trained, corpus, tmp_path):
    assert call("evaluate", trained, corpus / "src").exit_code == 2
    result = call("evaluate", trained, corpus / "src", corpus / "tgt", "--tokenize", "13b")
    assert result.exit_code == 2 and "Did you mean '13a'" in result.stderr
    (tmp_path / "short").write_text("A\n")
    result = call("evaluate", trained, corpus / "src", tmp_path / "short")
    assert result.exit_code == 1 and "80 lines" in result.stderr and "has 1" in result.stderr
    assert call("evaluate", tmp_path).exit_code == 1


def test_a_built_in_task_is_scored_by_kind_on_unseen_pairs(call, tmp_path, monkeypatch):
    monkeypatch.setattr("gpuattn.tasks.texts.GENERATED_PAIRS", 200)
    out = tmp_path / "run"
    result = call("train", "dates", *TINY, "--vocab-size", "384", "--for", "2u", "--out", out)
    assert result.exit_code == 0, result.stderr
    row = json.loads(call("evaluate", out, "--json", "--beam", "1").stdout)
    assert row["sentences"] >= 500 and set(row["exact_by_kind"]) == {"dates"}


def test_average_of_one_run_and_of_several(call, corpus, tmp_path):
    runs = []
    for seed in (1, 2):
        runs.append(tmp_path / f"run{seed}")
        command = ["train", corpus / "src", corpus / "tgt", *TINY, "--for", "4u", "--seed", seed]
        command += ["--valid", corpus / "src", corpus / "tgt", "--average", "2"]
        call(*command, "--eval-every", "2u", "--out", runs[-1])
    result = call("average", runs[0], "--out", tmp_path / "one")
    assert result.exit_code == 0 and "2 checkpoints" in result.stderr
    assert len(RunFolder(runs[0]).snapshots()) == 2
    result = call("average", *runs, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.stderr
    assert call("translate", tmp_path / "both", input="red\n").exit_code == 0
    result = call("average", *runs, "--out", tmp_path / "both")
    assert result.exit_code == 2 and f"{tmp_path / 'both'} is a run already" in result.stderr


def test_a_run_without_kept_checkpoints_cannot_be_averaged(call, trained, tmp_path):
    result = call("average", trained, "--out", tmp_path / "mean")
    assert result.exit_code == 2 and "--average N" in result.stderr


def test_hidden_tokens_of_a_run(call, tmp_path):
    (tmp_path / "text").write_text("a red cat\nthe old house\n" * 30)
    sizes = "--dim 16 --heads 2 --layers 1 --block 16 --batch 64 --for 2u --tokenizer chars"
    run = ["--out", tmp_path / "run", "--device", "numpy"]
    result = call("train", "--lm", tmp_path / "text", "--mask", "20%", *sizes.split(), *run)
    assert result.exit_code == 0
    assert f"echo 'a red cat' | gpuattn embed {tmp_path / 'run'}" in " ".join(result.stderr.split())
    row = json.loads(call("evaluate", tmp_path / "run", "--json").stdout)
    assert set(row) == {"accuracy", "loss", "tokens", "tokens_per_second"}
    best = RunFolder(tmp_path / "run").metrics.read("valid")[-1]
    assert row["loss"] == pytest.approx(best["loss"], rel=1e-5)
    shown = call("evaluate", tmp_path / "run", tmp_path / "text").stdout
    assert "% of the hidden tokens" in shown and "nats a hidden token" in shown
    for more in (["--beam", "2"], [tmp_path / "text"] * 2):
        assert call("evaluate", tmp_path / "run", *more).exit_code == 2
    vectors = call("embed", tmp_path / "run", input="a red cat\n\n").stdout.splitlines()
    assert [len(json.loads(line)) for line in vectors] == [16, 16]
    result = call("train", "--model", "gpt2", "--lm", tmp_path / "text", "--mask", "15%")
    assert result.exit_code == 2 and "mask is for --model bert, not gpt2" in result.stderr


def test_ranks_evaluate_to_the_same_scores(call, trained):
    alone = json.loads(call("evaluate", trained, "--json").stdout)
    shared = by_ranks(2, "evaluate", trained, "--json", text="")
    assert shared.returncode == 0, shared.stderr
    shared = json.loads(shared.stdout)
    for row in (alone, shared):
        del row["tokens_per_second"]
    assert shared == alone
