"""gpuattn train: options, origins of their values, resuming, and refusals."""

import html
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from gpuattn.cli.shared.training import HELP
from gpuattn.runs.config import OPTIONS, option_key
from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint

from .conftest import ROOT, TINY


def files(corpus):
    return [corpus / "src", corpus / "tgt"]


def test_every_option_of_a_config_is_a_flag_with_help(call):
    explained = {name for group in HELP.values() for name in group}
    positional = {"task", "source", "target", "valid_source", "valid_target"}
    assert explained | positional == set(OPTIONS)
    text = call("train", "--help").stdout
    for name in explained:
        assert f"--{option_key(name)} " in text
    for heading in HELP:
        assert f"{heading}:" in text


def test_stdout_is_empty_and_the_first_lines_describe_the_run(call, corpus, tmp_path):
    result = call("train", *files(corpus), *TINY, "--for", "2u", "--out", tmp_path / "run")
    assert result.exit_code == 0 and result.stdout == ""
    topics = [line.split()[0] for line in result.stderr.splitlines()]
    assert topics[:7] == ["device", "gpuattn", "data", "data", "model", "update", "folder"]
    assert topics[-2:] == ["done", "next"]
    assert f"gpuattn translate {tmp_path / 'run'}" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("options, warned", [
    (["--quiet"], True), (["--log-level", "warning"], True), (["--log-level", "error"], False),
])  # fmt: skip
def test_a_quiet_run_prints_warnings_only(call, corpus, tmp_path, monkeypatch, options, warned):
    monkeypatch.setattr("gpuattn.runtime.precision._warned", set())
    command = ["train", *files(corpus), *TINY, "--for", "2u", "--out", tmp_path / "run"]
    result = call(*command, *options, "--precision", "bf16")
    assert result.exit_code == 0 and result.stdout == ""
    said = [line.split(" is one batch")[0] for line in result.stderr.splitlines()]
    assert said == warned * [
        "gpuattn: warning: precision bf16 needs a GPU; on NumPy everything is computed in fp32",
        "warning  all of the text",
    ]
    result = call(*command, "--quiet", "--dim", "32")
    assert result.exit_code == 2 and "--dim was 16, now 32" in result.stderr
    result = call(*command, "--quiet", "--log-level", "debug")
    assert result.exit_code == 2 and "accepted: one of them" in result.stderr


def test_the_next_command_is_quoted(call, corpus, tmp_path):
    out, text = tmp_path / "my run", tmp_path / "my text.txt"
    result = call("train", *files(corpus), *TINY, "--for", "1u", "--out", out)
    assert shlex.split(result.stderr.splitlines()[-1])[-3:] == ["gpuattn", "translate", str(out)]
    assert f"gpuattn profile '{out}'" in html.unescape((out / "report.html").read_text())
    result = call("sample", out)
    assert shlex.split(result.stderr)[-3:] == ["gpuattn", "translate", str(out)]
    text.write_bytes(b"B\xe4r\n")
    result = call("train", text)
    assert f"--lm '{text}'" in result.stderr
    result = call("train", "--lm", text, "--out", tmp_path / "other")
    assert shlex.split(result.stderr.splitlines()[-1])[-6:-1] == [
        "iconv", "-f", "ISO-8859-1", "-t", "UTF-8"
    ]  # fmt: skip
    assert result.stderr.endswith(f" '{text}'\n")


def test_flag_beats_variable_beats_file_beats_preset(call, corpus, tmp_path, monkeypatch):
    (tmp_path / "x.toml").write_text('dim = 24\nheads = 3\nffn = 24\nfor = "1u"\nlayers = 1\n')
    monkeypatch.setenv("GPUATTN_TRAIN_FFN", "40")
    monkeypatch.setenv("GPUATTN_TRAIN_LR", "0.5")
    monkeypatch.setenv("GPUATTN_TRAIN_DETERMINISTIC", "1")
    result = call(
        "train", *files(corpus), "--config", tmp_path / "x.toml", "--preset", "small",
        "--lr", "0.25", "--vocab-size", "400", "--device", "numpy", "--out", tmp_path / "run",
        "--no-pad-vocab",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "run/config.toml").read_text()
    assert "pad-vocab = false  # command line" in text
    assert "deterministic = true  # environment" in text
    assert "ffn = 40  # environment" in text and "lr = 0.25  # command line" in text
    assert "dim = 24  # " in text and "x.toml" in text and "seed = 1\n" in text
    config = RunFolder(tmp_path / "run").config()
    assert (config.dim, config.layers) == (24, (1, 1))
    monkeypatch.delenv("GPUATTN_TRAIN_LR")
    again = call("train", "--config", tmp_path / "run/config.toml", "--out", tmp_path / "run")
    assert again.exit_code == 0 and "finished before" in again.stderr
    assert (tmp_path / "run/config.toml").read_text() == text


@pytest.mark.parametrize("arguments, message", [
    (["--schedule", "cosin"], "Did you mean 'cosine'"),
    (["--device", "cud"], "Did you mean 'cuda'"),
    (["--preset", "tny"], "Did you mean 'tiny'"), (["--for", "30"], "30e, 8000u, 90s"),
    (["--batch", "8kk"], "8k"), (["--lr", "nan"], "nan"), (["--layers", "4:2:1"], "encoder:"),
    (["--heads", "5"], "divisor of dim"), (["--on-long", "skp"], "Did you mean 'skip'"),
    (["toyy"], "Did you mean 'toy'"), (["a", "b", "c"], "3 arguments"), (["a", "b"], "--out DIR"),
    ([__file__], "one file"), (["--config", "none.toml"], "No such file"),
    (["--warmup", "9999", "--for", "10u"], "at most those of the run"), (["--seed", "x"], "whole"),
    (["--beam", "999999"], "accepted: 1 to 200"),
])  # fmt: skip
def test_wrong_usage_is_exit_code_2_with_the_remedy(
    call, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    result = call("train", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_cuda_without_a_gpu_is_exit_code_3(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    result = call("train", "reverse", "--device", "cuda", "--out", tmp_path / "run")
    assert result.exit_code == 3 and "gpuattn doctor" in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_tensorboard_option_names_its_package(call, corpus, tmp_path, monkeypatch):
    command = ["train", *files(corpus), *TINY, "--for", "1u", "--out", tmp_path / "run"]
    with monkeypatch.context() as without:
        for name in ("tensorboard", "tensorboard.compat.proto.event_pb2"):
            without.setitem(sys.modules, name, None)
        result = call(*command, "--tensorboard")
    assert result.exit_code == 1 and "pip install 'gpuattn[tensorboard]'" in result.stderr
    assert not (tmp_path / "run").exists()
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    assert call(*command, "--tensorboard").exit_code == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_the_same_command_resumes_and_a_changed_one_is_refused(call, corpus, tmp_path):
    command = ["train", *files(corpus), *TINY, "--out", tmp_path / "run", "--for", "3u"]
    assert call(*command).exit_code == 0
    again = call(*command)
    assert again.exit_code == 0 and "finished before, after 3 updates" in again.stderr
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    changed = call(*command, "--dim", "32", "--clip", "2")
    assert changed.exit_code == 2
    assert "--dim was 16, now 32; --clip was 1.0, now 2.0" in changed.stderr
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert call(*command, "--dim", "32", "--overwrite").exit_code == 0
    assert RunFolder(tmp_path / "run").config().dim == 32


def bad_corpora(folder):
    (folder / "three").write_text("a cat\na dog\na tree\n")
    (folder / "two").write_text("A CAT\nA TREE\n")
    (folder / "empty").write_text("")
    (folder / "latin").write_bytes("a cat\nein B\xe4r\n".encode("latin-1"))
    (folder / "long").write_text("a cat\n" + "cat " * 90 + "\na tree\n")


@pytest.mark.parametrize("source, target, extra, messages", [
    ("three", "two", [], ["3 lines", "2; accepted", "three, line 2: 'a dog'"]),
    ("empty", "empty", [], ["empty is empty"]),
    ("latin", "two", [], ["latin, line 2", "not UTF-8"]),
    ("long", "three", ["--on-long", "error"], ["line 2 is", "limit is 40"]),
    ("none", "two", [], ["cannot read none", "No such file"]),
])  # fmt: skip
def test_bad_files_are_one_clear_error(
    call, tmp_path, monkeypatch, source, target, extra, messages
):
    monkeypatch.chdir(tmp_path)
    bad_corpora(tmp_path)
    result = call(
        "train", source, target, *TINY, *extra, "--valid", "three", "three", "--out", "run"
    )
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    for message in messages:
        assert message in errors[0]
    assert not (tmp_path / "run").exists()


def test_skipped_lines_are_counted(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad_corpora(tmp_path)
    result = call("train", "long", "three", *TINY, "--for", "1u", "--out", "run",
                  "--valid", "three", "three")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "1 longer than 40 tokens (line 2 first)" in result.stderr


def test_the_same_command_works_after_a_full_disk_at_the_start(call, corpus, tmp_path, monkeypatch):
    command = ["train", *files(corpus), *TINY, "--for", "1u", "--out", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setattr("gpuattn.runs.folder.write_text", raise_full)
        result = call(*command)
        assert result.exit_code == 1 and "No space left" in result.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.model"]
    assert call(*command).exit_code == 0


def raise_full(path, text):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_one_error(call, corpus, tmp_path, monkeypatch):
    command = ["train", *files(corpus), *TINY, "--out", tmp_path / "run", "--schedule", "constant"]
    assert call(*command, "--for", "2u").exit_code == 0

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", full)
        result = call(*command, "--for", "4u")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr and "is intact" in result.stderr
    assert call(*command, "--for", "4u").exit_code == 0


def test_resuming_a_damaged_run_gives_a_warning(call, corpus, tmp_path):
    command = ["train", *files(corpus), *TINY, "--out", tmp_path / "run", "--schedule", "constant"]
    assert call(*command, "--for", "2u").exit_code == 0
    for path in (tmp_path / "run").glob("state-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    result = call(*command, "--for", "4u")
    assert result.exit_code == 1 and "state" in result.stderr and "bytes, want" in result.stderr


def test_ctrl_c_saves_and_names_the_command(corpus, tmp_path):
    command = [sys.executable, "-m", "gpuattn", "train", *files(corpus), *TINY]
    command += ["--for", "9ku", "--out", tmp_path / "run", "--overwrite"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    talk = running.communicate(timeout=60)[1]
    assert running.returncode == 130
    last = talk.splitlines()[-1]
    assert last.startswith("stopped") and "Go on: gpuattn train" in last
    assert "--for 9ku" in last and "--overwrite" not in last
    assert checkpoint.load(tmp_path / "run", "state")[1]["update"] > 0


def test_a_run_continues_when_its_output_is_closed(corpus, tmp_path):
    command = [sys.executable, "-m", "gpuattn", "train", *files(corpus), *TINY]
    command += ["--for", "4u", "--out", tmp_path / "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    running.stderr.close()
    assert running.wait(timeout=60) == 0
    assert checkpoint.load(tmp_path / "run", "state")[1]["update"] == 4


def test_a_terminal_gets_a_bar(corpus, tmp_path):
    """With a pseudo-terminal as standard error, progress is drawn; NO_COLOR is obeyed."""
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-m", "gpuattn", "train", *map(str, files(corpus)), *TINY]
    command += ["--for", "45u", "--out", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "xterm"}
    ours, theirs = pty.openpty()
    running = subprocess.Popen(command, stderr=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux reports a closed other end like this
        pass
    assert running.wait() == 0
    assert b"tokens/s" in shown and b"GiB" in shown and b"s left" in shown
    assert b"\x1b[3" not in shown  # no colour


def test_lost_manifests_are_recovered(call, trained, corpus, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    command = ["train", *files(corpus), *TINY, "--for", "60u", "--out", run]
    for path in run.glob("*.json"):
        path.unlink()
    refused = call(*command)
    assert refused.exit_code == 1 and f"write new ones: gpuattn recover {run}" in refused.stderr
    result = call("recover", run)
    assert result.exit_code == 0 and "state-00000003.safetensors has a manifest" in result.stdout
    assert "nothing to do" in call("recover", run).stdout
    assert "finished before" in call(*command).stderr
    (run / "state-00000003.json").unlink()
    (run / "state-00000003.safetensors").write_bytes(b"")
    result = call("recover", run)
    assert result.exit_code == 1 and "not recovered: state-00000003.safetensors" in result.stderr


def test_a_run_begins_with_the_weights_of_another(call, trained, corpus, tmp_path):
    command = ["train", *files(corpus), *TINY, "--for", "2u", "--init-from", trained]
    result = call(*command, "--lr", "0.001", "--out", tmp_path / "new")
    assert result.exit_code == 0
    assert f"begins   with the best weights of {trained}, of update" in result.stderr
    text = (tmp_path / "new/config.toml").read_text()
    assert f'init-from = "{trained}"  # command line' in text
    result = call(*command, "--dim", "32", "--out", tmp_path / "other")
    assert result.exit_code == 2 and "--dim was 16, now 32" in result.stderr
    taken = ["--config", trained / "config.toml", "--device", "numpy", "--init-from", trained]
    assert call("train", *taken, "--for", "2u", "--out", tmp_path / "other").exit_code == 0
