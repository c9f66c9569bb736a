"""gpuattn train --lm and gpuattn sample: learn and continue a text; refuse other runs."""

import json

import numpy as np
import pytest

from gpuattn.autodiff.tape import raw
from gpuattn.runs.loading import load_run

from .conftest import invoke

LINE = "the cat sat on the mat.\n"
SMALL = [
    "--tokenizer", "chars", "--dim", "32", "--heads", "2", "--layers", "1", "--block", "24",
    "--batch", "192", "--lr", "0.01", "--ema", "0.9", "--device", "numpy",
]  # fmt: skip


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """The folder of a run that learned a text of one line. Tests must not change it."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "cats.txt").write_text(LINE * 20)
    command = ["train", "--model", "gpt2", "--lm", folder / "cats.txt", *SMALL, "--for", "120u"]
    result = invoke(*command, "--out", folder / "cats")
    assert result.exit_code == 0, result.stderr
    topics = [line.split()[0] for line in result.stderr.splitlines()]
    assert topics[:9] == [
        "device", "gpuattn", "data", "data", "model", "update", "folder", "threads", "valid",
    ]  # fmt: skip
    assert result.stderr.splitlines()[-1] == f"next     gpuattn sample {folder / 'cats'}"
    return folder / "cats"


def test_the_text_is_continued(call, language):
    result = call("sample", language, "--prompt", "the cat", "--tokens", "41", "--top-k", "1")
    assert result.exit_code == 0 and result.stdout == LINE * 2 + "\n"
    settings = ["--tokens", "40", "--seed", "5", "--temperature", "3", "--count", "3"]
    result = call("sample", language, *settings)
    assert len(result.stdout.split("\n---\n")) == 3
    assert call("sample", language, *settings).stdout == result.stdout
    narrow = ["--top-p", "0.1", "--min-p", "0.9"]
    assert call("sample", language, *settings, *narrow).stdout != result.stdout


def test_a_streamed_text_is_the_same(call, language, monkeypatch):
    settings = ["--prompt", "the", "--tokens", "60", "--seed", "5", "--count", "2"]
    plain = call("sample", language, *settings).stdout
    parts = []
    monkeypatch.setattr("gpuattn.cli.sample._say", parts.append)
    rest = call("sample", language, *settings, "--stream").stdout
    assert "".join(parts) + rest == plain and len(parts) > 60 and rest.startswith("\n---\n")
    assert call("sample", language, *settings, "--no-kv-cache").stdout == plain
    assert call("sample", language, *settings, "--batch-invariant").stdout == plain
    neither = call("sample", language, *settings, "--batch-invariant", "--no-kv-cache")
    said = "batch_invariant is True; accepted: False without a key-value cache"
    assert neither.exit_code == 2 and said in neither.stderr
    refused = call("sample", language, "--stream", "--json")
    assert refused.exit_code == 2 and "accepted: one of them" in refused.stderr


def test_ctrl_c_keeps_what_was_streamed(call, language, monkeypatch):
    def interrupted(*_, stream, **__):
        stream("the c")
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuattn.tasks.users.sampler.Sampler.generate", interrupted)
    result = call("sample", language, "--stream")
    assert result.exit_code == 130 and result.stdout.startswith("the c")


def test_speculation(call, language):
    """The context is as long as the line, so only parts of words repeat themselves."""
    settings = ["--prompt", LINE * 2, "--tokens", "60", "--temperature", "0", "--json"]
    (plain,) = map(json.loads, call("sample", language, *settings).stdout.splitlines())
    found = call("sample", language, *settings, "--speculate", "7").stdout.splitlines()
    (row,) = map(json.loads, found)
    assert row["text"] == plain["text"] and row["score"] == pytest.approx(plain["score"], abs=1e-4)
    assert 0 < row["acceptance"] < 1 and "acceptance" not in plain


def test_texts_as_json(call, language):
    settings = ["--prompt", "the cat", "--tokens", "17", "--top-k", "1", "--count", "2"]
    rows = [
        json.loads(line)
        for line in call("sample", language, *settings, "--json").stdout.splitlines()
    ]
    assert [row["text"] for row in rows] == [LINE] * 2 and rows[0]["time"] >= 0
    sampler = load_run(language, device="numpy")
    ids = np.array([sampler.tokenizer.encode_text(LINE)], np.int32)
    with sampler.model.evaluating():
        logits = raw(sampler.model.logits(ids[:, :-1]))[0, 6:, 4:]  # without the four marks
    logprobs = np.take_along_axis(logits, ids[0, 7:, None] - 4, 1)[:, 0]
    score = (logprobs - np.log(np.exp(logits[:, : len(sampler.tokenizer) - 4]).sum(-1))).sum()
    for row in rows:
        assert row["tokens"] == 17 and row["score"] == pytest.approx(score, rel=1e-3)


def test_a_prompt_from_a_file_or_standard_input(call, language, tmp_path):
    greedy = ["--tokens", "9", "--temperature", "0"]
    plain = call("sample", language, "--prompt", "the cat", *greedy).stdout
    assert plain == LINE[:16] + "\n"
    assert call("sample", language, "--prompt", "the cat", *greedy).stdout == plain
    (tmp_path / "prompt").write_bytes(b"\xef\xbb\xbfthe cat")
    result = call("sample", language, "--prompt-file", tmp_path / "prompt", *greedy)
    assert result.exit_code == 0 and result.stdout == plain
    assert call("sample", language, "--prompt-file", "-", *greedy, input="the cat").stdout == plain
    (tmp_path / "latin").write_bytes(b"the \xe4")
    for name, message in (("none", "No such file"), ("latin", "not UTF-8, from byte 5 on")):
        result = call("sample", language, "--prompt-file", tmp_path / name)
        assert result.exit_code == 1 and f"{tmp_path / name}" in result.stderr
        assert message in result.stderr
    result = call("sample", language, "--prompt-file", tmp_path / "prompt", "--prompt", "the")
    assert result.exit_code == 2 and "accepted: one of them" in result.stderr


def test_loss_and_perplexity_of_a_text(call, language, tmp_path):
    held_out = json.loads(call("evaluate", language, "--json").stdout)
    best = json.loads(call("info", language, "--json").stdout)["best"]
    assert held_out["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert held_out["perplexity"] == pytest.approx(np.exp(held_out["loss"]))
    assert held_out["tokens"] == len(LINE) * 2 - 1 and held_out["tokens_per_second"] > 0
    (tmp_path / "text").write_text(LINE * 3 + "the c")  # rows of 24 tokens, then one of 4
    sampler = load_run(language, device="numpy")
    ids = np.array([sampler.tokenizer.encode_text((tmp_path / "text").read_text())], np.int32)
    cuts = [(i, min(i + 24, ids.shape[1] - 1)) for i in range(0, ids.shape[1] - 1, 24)]
    with sampler.model.evaluating():
        losses = [sampler.model.loss(ids[:, i:j], ids[:, i + 1 : j + 1]).item() for i, j in cuts]
    total = sum(loss * (j - i) for loss, (i, j) in zip(losses, cuts, strict=True))
    row = json.loads(call("evaluate", language, tmp_path / "text", "--json").stdout)
    assert row["tokens"] == ids.shape[1] - 1
    assert row["loss"] == pytest.approx(total / row["tokens"], rel=1e-5)
    shown = call("evaluate", language, tmp_path / "text").stdout
    assert f"{row['loss']:.4f} nats" in shown and f"perplexity   {row['perplexity']:.3f}" in shown


def test_scores_of_lines(call, language, tmp_path):
    """Each line begins after a line end and has its own; characters are its tokens."""
    (tmp_path / "text").write_text(f"{LINE}\nthe dog\nthe cat sat on the cat on the mat\nmat.\n")
    result = call("score", language, tmp_path / "text", "--json", "--batch-tokens", "30")
    assert result.exit_code == 1
    errors = result.stderr.splitlines()
    assert "line 3: CharTokenizer.encode: character 'd'" in errors[0] and len(errors) == 2
    assert "line 4: score: the line is 34 tokens long with its end; accepted: up to 24" in errors[1]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row.get("tokens") for row in rows] == [24, 1, None, None, 5]
    assert "".join(rows[0]["pieces"]) == LINE and rows[0]["normalised"] > -0.2
    sampler = load_run(language, device="numpy")
    ids = np.array([sampler.tokenizer.encode_text(f"\n{LINE}")], np.int32)
    with sampler.model.evaluating():
        loss = sampler.model.loss(ids[:, :-1], ids[:, 1:]).item()
    assert rows[0]["normalised"] == pytest.approx(-loss, rel=1e-4)
    usage = call("score", language, tmp_path / "text", tmp_path / "text")
    assert usage.exit_code == 2 and "one text file for a language model" in usage.stderr


@pytest.mark.parametrize("arguments, code, message", [
    (["a", "b"], 2, "one text file"), (["text", "--beam", "3"], 2, "--beam is for translators"),
    (["text", "--length-penalty", "0"], 2, "--length-penalty is for translators"),
    (["none"], 1, "cannot read none"), (["odd"], 1, "odd: "), (["short"], 1, "short has 1 token;"),
])  # fmt: skip
def test_refusals_of_evaluate_for_language_models(
    call, language, tmp_path, monkeypatch, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    for name, text in (("text", LINE), ("odd", "a dog"), ("short", "t")):
        (tmp_path / name).write_text(text)
    result = call("evaluate", language, *arguments)
    assert result.exit_code == code and result.stdout == "" and message in result.stderr


@pytest.mark.parametrize("arguments, code, message", [
    (["--prompt", "a dog"], 1, "character 'd' at 2 was not in the training text"),
    (["--temperature", "-1"], 2, "0 or more"), (["--top-p", "1.5"], 2, "up to 1"),
    (["--speculate", "4"], 2, "temperature is 0.8; accepted: 0 with speculate"),
    (["--speculate", "16"], 2, "--speculate"), (["--speculate", "0"], 2, "--speculate"),
    (["--speculate", "4", "--temperature", "0", "--no-kv-cache"], 2, "speculate is 4; accepted"),
    (["--top-k", "0"], 2, "1 or more"), (["--tokens", "-1"], 2, "1 or more"),
])  # fmt: skip
def test_wrong_settings(call, language, arguments, code, message):
    result = call("sample", language, *arguments)
    assert result.exit_code == code and result.stdout == ""
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_each_kind_of_run_names_its_command(call, language, trained):
    result = call("translate", language, input="the cat\n")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"to be used by: gpuattn sample {language}" in result.stderr
    result = call("sample", trained)
    assert result.exit_code == 2
    assert f"to be used by: gpuattn translate {trained}" in result.stderr


def test_info_and_plot(call, language, tmp_path):
    result = call("info", language)
    assert "characters and marks" in result.stdout and "perplexity 1." in result.stdout
    assert "layers 1, block 24" in " ".join(result.stdout.split())
    found = json.loads(call("info", language, "--json").stdout)
    assert found["model"] == "gpt2" and found["best"]["loss"] < 0.15
    pytest.importorskip("matplotlib")
    assert call("plot", language, "--out", tmp_path).stdout == f"{tmp_path / 'curves.png'}\n"
    result = call("plot", language, "--out", tmp_path, "--sentence", "the cat")
    assert result.exit_code == 2 and "does not translate" in result.stderr


@pytest.mark.parametrize("arguments, message", [
    (["toy", "--lm", "text"], "it alone"), (["a", "b", "--lm", "text"], "it alone"),
    (["--lm", "text", "--layers", "4:2"], "layers is 4:2; accepted: one number"),
    (["--model", "gpt2"], "--lm FILE"), (["--model", "gpt"], "Did you mean 'gpt2'"),
    (["--lm", "text", "--model", "translation"], "--model gpt2"),
    (["--lm", "text", "--beam", "3"], "beam is for --model translation"),
    (["--lm", "text", "--valid", "a", "b"], "it alone"), (["text"], "--lm text"),
    (["--lm", "none"], "cannot read none"), (["--lm", "text", "--block", "90"], "smaller --block"),
])  # fmt: skip
def test_wrong_usage(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("few words\n" * 5)
    result = call("train", *arguments, "--tokenizer", "chars")
    assert result.exit_code in (1, 2) and message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_the_same_command_resumes_in_the_folder_of_the_text(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats.txt").write_text(LINE * 8)
    command = ["train", "--lm", "cats.txt", *SMALL, "--for", "2u", "--schedule", "constant"]
    assert call(*command).exit_code == 0
    again = call(*command)
    assert again.exit_code == 0 and "finished before, after 2 updates" in again.stderr
    longer = call(*command, "--for", "3u", "--warmup", "1")
    assert longer.exit_code == 2 and "--warmup was" in longer.stderr
    assert (tmp_path / "runs/cats/tokenizer.model").read_bytes().startswith(b"{")
