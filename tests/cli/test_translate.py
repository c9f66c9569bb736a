"""gpuattn translate: one line in, exactly one line out."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import gpuattn
from gpuattn.errors import CheckpointError, ConfigError
from gpuattn.runs.loading import load_run
from gpuattn.runtime import checkpoint
from gpuattn.tasks.users.translator import Translator

from .conftest import ROOT, by_ranks


def test_one_line_out_for_each_line_in(call, trained):
    result = call("translate", trained, input="red cat\n\n   \nold house")
    assert result.exit_code == 0
    lines = result.stdout.split("\n")
    assert len(lines) == 5 and lines[4] == ""
    assert lines[0] and lines[3] and lines[1] == lines[2] == ""
    library = load_run(trained, device="numpy").translate(["red cat", "old house"])
    assert [lines[0], lines[3]] == library


def test_empty_input_gives_empty_output(call, trained):
    assert call("translate", trained, input="").stdout == ""
    assert call("translate", trained, input="\n").stdout == "\n"


def test_scores_and_nbest(call, trained):
    text = "red cat\n\nold house\n"
    plain = call("translate", trained, input=text).stdout.splitlines()
    scored = call("translate", trained, "--scores", input=text).stdout.splitlines()
    assert [line.split("\t")[1] for line in scored] == plain
    assert all(float(line.split("\t")[0]) <= 0 for line in scored)
    best = call("translate", trained, "--nbest", "2", "--scores", "--beam", "3", input=text)
    rows = [line.split("\t") for line in best.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert float(rows[0][1]) >= float(rows[1][1])


def test_decoding_options(call, trained):
    text = "red cat\nnew blue tree\n"
    fast = call("translate", trained, "--beam", "3", input=text).stdout
    assert call("translate", trained, "--beam", "3", "--no-kv-cache", input=text).stdout == fast
    greedy = call("translate", trained, "--beam", "1", input=text)
    assert greedy.exit_code == 0 and len(greedy.stdout.splitlines()) == 2
    assert call("translate", trained, "--beam", "0", input=text).exit_code == 2
    for option in ("--beam", "--nbest"):
        wide = call("translate", trained, option, "999999", input=text)
        assert wide.exit_code == 2 and "too large; accepted: 1 to 200" in wide.stderr
    with pytest.raises(ConfigError, match="1 and 201; accepted: 1 to 200"):
        load_run(trained, device="numpy").translate(["red"], beam=201)
    assert call("translate", trained, "--length-penalty", "-1", input=text).exit_code == 2


def test_lines_that_cannot_be_translated_stay_in_place(call, trained):
    text = b"red cat\nB\xe4r\n" + b"cat " * 60 + b"\nred cat\n"
    result = call("translate", trained, input=text)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and lines[1] == lines[2] == "" and lines[0] == lines[3] != ""
    errors = result.stderr.splitlines()
    assert "line 2: not UTF-8" in errors[0]
    assert "line 3" in errors[1] and "60 tokens long" in errors[1] and len(errors) == 2


def test_windows_line_ends_and_unusual_characters(call, trained):
    assert len(call("translate", trained, input="red\r\ncat\r\n").stdout.splitlines()) == 2
    result = call("translate", trained, input="red \u2028 \x0b cat\n")
    assert result.exit_code == 0 and result.stdout.count("\n") == 1


def test_a_closed_pipe_is_not_an_error(trained):
    command = [sys.executable, "-m", "gpuattn", "translate", str(trained)]
    running = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    running.stdout.close()
    running.stdin.write(b"red cat\n" * 2000)
    running.stdin.close()
    talk = running.stderr.read().decode()
    assert running.wait() == 0
    assert talk == ""


def test_a_pipe_gets_its_answer_line_by_line(trained):
    command = [sys.executable, "-m", "gpuattn", "translate", str(trained)]
    running = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for _ in range(2):  # the answer arrives while the input is still open
        running.stdin.write(b"red cat\n")
        running.stdin.flush()
        assert running.stdout.readline().strip()
    running.stdin.close()
    assert running.wait() == 0


@pytest.mark.parametrize("damage, message", [
    ("no run", "no config.toml"), ("tokenizer", "tokenizer.model cannot be used"),
    ("truncated", "bytes, want"), ("flipped", "SHA-256"), ("other model", "of another model"),
    ("config", "unknown key"), ("none", "there is no checkpoint"),
])  # fmt: skip
def test_an_unusable_run_is_one_error(call, trained, tmp_path, damage, message):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    weights = sorted(run.glob("best-*.safetensors")) + sorted(run.glob("last-*.safetensors"))
    if damage == "no run":
        (run / "config.toml").unlink()
    elif damage == "tokenizer":
        (run / "tokenizer.model").write_bytes(b"\x00" * 50)
    elif damage == "config":
        (run / "config.toml").write_text("colour = 1\n")
    elif damage == "other model":
        text = (run / "config.toml").read_text().replace("ffn = 16", "ffn = 32")
        (run / "config.toml").write_text(text)
    else:
        for path in weights:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            if damage == "none":
                path.unlink()
                path.with_suffix(".json").unlink()
            else:
                path.write_bytes(data[:-7] if damage == "truncated" else data)
    result = call("translate", run, input="red\n")
    assert result.exit_code == (2 if damage == "config" else 1)
    assert result.stdout == ""
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(call, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    checkpoint.save(run, "best", *checkpoint.load(run, "best"))
    kept = sorted(run.glob("best-*.safetensors"))
    assert len(kept) == 2
    kept[-1].write_bytes(kept[-1].read_bytes()[:-1])
    result = call("translate", run, input="red\n")
    assert result.exit_code == 0 and "is used instead" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_a_terminal_gets_a_prompt(trained):
    """Each line is translated at once; Ctrl-D ends the command."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "gpuattn", "translate", str(trained)], cwd=ROOT, stdin=theirs,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, b"red cat\n")
    answer = running.stdout.readline().decode().strip()
    os.write(ours, b"\x04")
    _, talk = running.communicate(timeout=30)
    os.close(ours)
    assert running.returncode == 0
    assert [answer] == load_run(trained, device="numpy").translate(["red cat"])
    assert b"Ctrl-D" in talk and b"> " in talk


def test_a_run_is_loaded_in_python_too(trained, call):
    lines = ["red cat", "", "old green house"]
    translator = gpuattn.load_run(trained)
    found = translator.translate(lines)
    said = call("translate", trained, input="\n".join(lines) + "\n").stdout
    assert found == said.split("\n")[:3]
    assert found[1] == "" and found[0]
    assert gpuattn.load_run(str(trained), which="last").translate([]) == []
    with pytest.raises(TypeError, match="translate: lines is a str; accepted: a list of str"):
        translator.translate("red cat")
    with pytest.raises(CheckpointError, match="is no run"):
        gpuattn.load_run(trained.parent)


def test_input_and_output_files_and_a_byte_order_mark(call, trained, tmp_path):
    plain = call("translate", trained, input="red cat\nold house\n").stdout
    marked = b"\xef\xbb\xbfred cat\nold house\n"
    assert call("translate", trained, input=marked).stdout == plain
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(marked)
    result = call("translate", trained, "--input", source, "--output", target)
    assert result.exit_code == 0 and result.stdout == "" and target.read_text() == plain
    assert call("translate", trained, "--input", "-", "--output", "-", input=marked).stdout == plain
    result = call("translate", trained, "--input", tmp_path / "none", "--output", target)
    assert result.exit_code == 1 and f"{tmp_path / 'none'}: No such file" in result.stderr
    assert target.read_text() == plain and len(os.listdir(tmp_path)) == 2


LINES = "red cat\n\nold green house\ntree\n"
FIGURES = "text", "score", "normalised", "tokens"


def rows_of(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_has_the_scores_that_score_gives(call, trained, tmp_path):
    (tmp_path / "src").write_text(LINES)
    command = ["translate", trained, "--input", tmp_path / "src", "--json", "--beam", "3"]
    rows = rows_of(call(*command))
    plain = call(*command[:-3], "--beam", "3", "--scores").stdout.splitlines()
    assert [f"{row['normalised']:.4f}\t{row['text']}" for row in rows] == plain
    assert [row["line"] for row in rows] == [1, 2, 3, 4] and rows[1]["tokens"] == 0
    assert all(row["time"] > 0 for row in rows)
    several = rows_of(call(*command, "--nbest", "2"))
    assert [len(row["nbest"]) for row in several] == [2, 1, 2, 2]
    assert [row["nbest"][0]["text"] for row in several] == [row["text"] for row in rows]
    (tmp_path / "tgt").write_text("".join(f"{row['text']}\n" for row in rows))
    scored = rows_of(call("score", trained, tmp_path / "src", tmp_path / "tgt", "--json"))
    same = [(a, b) for a, b in zip(rows, scored, strict=True) if a["tokens"] == b["tokens"]]
    assert len(same) > 2
    for one, other in same:
        assert one["score"] == pytest.approx(other["score"], abs=1e-3)


def test_a_line_that_cannot_be_translated_has_its_error_in_json(call, trained):
    result = call("translate", trained, "--json", input=b"red\nB\xe4r\n")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1 and rows[1] == {"line": 2, "error": "not UTF-8"}
    assert rows[0]["text"] and result.stderr == "gpuattn: error: line 2: not UTF-8\n"


def test_the_same_bits_alone(call, trained):
    given = ["translate", trained, "--batch-invariant", "--json"]
    together = rows_of(call(*given, input=LINES))
    for row, line in zip(together, LINES.splitlines(), strict=True):
        (alone,) = rows_of(call(*given, input=f"{line}\n"))
        assert [alone[name] for name in FIGURES] == [row[name] for name in FIGURES]


@pytest.mark.parametrize("beam", [1, 3])
def test_prefixes(call, trained, tmp_path, beam):
    command = ["translate", trained, "--beam", beam]
    plain = call(*command, input=LINES).stdout.splitlines()
    forced = [*command, "--prefix-file", tmp_path / "prefixes"]
    (tmp_path / "prefixes").write_text("HOUSE TREE\n\nNEW\n\n")
    found = call(*forced, input=LINES).stdout.splitlines()
    assert found[0].startswith("HOUSE TREE") and found[2].startswith("NEW")
    assert found[1] == "" and found[3] == plain[3] and len(found) == 4
    assert call(*forced, "--no-kv-cache", input=LINES).stdout.splitlines() == found
    assert call(*forced, "--batch-tokens", "1", input=LINES).stdout.splitlines() == found
    (tmp_path / "prefixes").write_bytes(b"CAT " * 50 + b"\nB\xe4r\n\n\n")
    result = call(*forced, input=LINES)
    assert result.exit_code == 1 and result.stdout.splitlines() == ["", "", *plain[2:]]
    assert "line 1: translate: the prefix is 50 tokens long; accepted: up to" in result.stderr
    assert "line 2: not UTF-8" in result.stderr and len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize("prefixes, printed", [("\n\n", 2), ("\n" * 6, 4)])
def test_a_prefix_file_of_other_length(call, trained, tmp_path, prefixes, printed):
    """What has a prefix is translated first."""
    (tmp_path / "prefixes").write_text(prefixes)
    result = call("translate", trained, "--prefix-file", tmp_path / "prefixes", input=LINES)
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == printed
    assert f"the prefix file has {len(prefixes)} lines" in result.stderr
    assert "accepted: a line for each" in result.stderr


def test_lengths_and_repetitions(call, trained):
    lines = rows_of(call("translate", trained, "--json", input=LINES))
    short = rows_of(call("translate", trained, "--json", "--max-length", "2", input=LINES))
    assert [row["tokens"] for row in short] == [2, 0, 2, min(2, lines[3]["tokens"])]
    long = ["--min-length", "30", "--max-length", "33"]
    rows = rows_of(call("translate", trained, "--json", *long, input=LINES))
    assert all(31 <= row["tokens"] <= 33 for row in rows if row["text"])
    rule = ["--no-repeat-ngram", "1", "--beam", "1"]
    for row in rows_of(call("translate", trained, "--json", *long, *rule, input=LINES)):
        words = row["text"].split()
        assert len(set(words)) == len(words)
    library = load_run(trained, device="numpy")
    assert library.translate(["red"], min_length=40) and library.translate(
        [""], prefixes=["A"]
    ) == [""]
    with pytest.raises(
        ConfigError, match="prefixes is 2 of them; accepted: a list of str, one for"
    ):
        library.translate(["red"], prefixes=["A", "B"])


@pytest.mark.parametrize("options, message", [
    (["--max-length", "42"], "max_length is 42; accepted: 1 to 41 (--max-len of the run"),
    (["--min-length", "5", "--max-length", "4"], "min_length is 5; accepted: 0 to"),
    (["--min-length", "-1"], "--min-length"), (["--no-repeat-ngram", "x"], "--no-repeat-ngram"),
    (["--batch-tokens", "0"], "--batch-tokens"), (["--stopping", "ct3"], "Did you mean 'ct2'"),
    (["--batch-invariant", "--no-kv-cache"], "batch_invariant is True; accepted: False without"),
    (["--batch-invariant", "--beam", "65"], "the beam is 65, the search on the device takes at"),
    (["--dtype", "float"], "Did you mean 'float32'"), (["--jsn"], "--json"),
])  # fmt: skip
def test_unknown_values(call, trained, options, message):
    result = call("translate", trained, *options, input="red\n")
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_ctrl_c_keeps_the_lines_already_printed(call, trained, tmp_path, monkeypatch):
    nbest, calls = Translator.nbest, []

    def interrupted(self, lines, *arguments, **options):
        calls.append(lines)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return nbest(self, lines, *arguments, **options)

    plain = call("translate", trained, input=LINES).stdout
    monkeypatch.setattr("gpuattn.cli.shared.lines.AT_ONCE", 10)
    monkeypatch.setattr(Translator, "nbest", interrupted)
    result = call("translate", trained, input=LINES)
    assert result.exit_code == 130
    assert (
        result.stdout.split("\n")[:3]
        == [
            *plain.split("\n")[:2],
            "",
        ]
        and len(calls) == 2
    )
    calls.clear()
    (tmp_path / "out").write_text("old\n")
    assert call("translate", trained, "--output", tmp_path / "out", input=LINES).exit_code == 130
    assert (tmp_path / "out").read_text() == "old\n" and len(os.listdir(tmp_path)) == 1


def test_progress_through_a_file(call, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("gpuattn.cli.shared.progress.PLAIN_SECONDS", 0)
    monkeypatch.setattr("gpuattn.cli.shared.lines.AT_ONCE", 24)
    (tmp_path / "in").write_text(LINES * 3)
    result = call("translate", trained, "--input", tmp_path / "in")
    shown = result.stderr.splitlines()
    shares = [int(line.split()[1]) for line in shown]
    assert len(shown) > 2 and shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 100
    assert all("sentences/s" in line and line.endswith(" left") for line in shown)
    assert call("translate", trained, input=LINES * 3).stderr == ""


def test_the_engine_gets_the_same_settings(trained, monkeypatch):
    """As on a GPU; here the engine's searches are those of decode."""
    translator, lines = load_run(trained, device="numpy"), ["red cat", "", "old house", "tree"]
    settings = [
        {"beam": 3}, {"beam": 2, "prefixes": ["", "A", "NEW", ""], "batch_tokens": 1},
        {"beam": 3, "min_length": 4, "max_length": 7, "no_repeat_ngram": 1, "stopping": "hf"},
    ]  # fmt: skip
    wanted = [translator.nbest(lines, 2, **options) for options in settings]
    monkeypatch.setattr(translator, "_on_gpu", lambda: True)
    for options, want in zip(settings, wanted, strict=True):
        done = []
        found = translator.nbest(lines, 2, notify=done.append, **options)
        assert sum(done) == 3
        for one, other in zip(found, want, strict=True):
            assert [t.text for t in one] == [t.text for t in other]
            assert [t.score for t in one] == pytest.approx([t.score for t in other], abs=1e-4)


def test_ranks_share_the_lines_and_keep_their_order(call, trained):
    lines = ["red cat", "", "old house", "new blue tree", "x" * 2000, "cat", "old red tree", "tree"]
    text = "\n".join(lines)
    alone = call("translate", trained, "--scores", "--beam", "2", input=text)
    shared = by_ranks(3, "translate", trained, "--scores", "--beam", "2", text=text)
    assert shared.stdout == alone.stdout and shared.returncode == alone.exit_code == 1
    assert shared.stderr.count("gpuattn: error: line 5: translate: the line is") == 1


def test_ranks_with_prefixes_and_more_ranks_than_lines(call, trained, tmp_path):
    (tmp_path / "prefixes").write_text("rote\n")
    options = ("--prefix-file", tmp_path / "prefixes", "--json")
    alone = call("translate", trained, *options, input="red cat\n")
    shared = by_ranks(3, "translate", trained, *options, text="red cat\n")
    assert shared.returncode == 0, shared.stderr
    rows = [json.loads(text) for text in (alone.stdout, shared.stdout)]
    for row in rows:
        del row["time"]
    assert rows[0]["text"] == rows[1]["text"] and rows[0]["tokens"] == rows[1]["tokens"]


def test_a_run_that_no_rank_can_load_is_told_once(tmp_path):
    result = by_ranks(2, "translate", tmp_path / "none", text="a\n")
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.count("gpuattn: error") == 1 and "there is no such folder" in result.stderr
