"""The whole program: quick help, exit codes, no tracebacks."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
from click.testing import CliRunner
from imported import imported

from gpuattn import errors
from gpuattn.cli import main as program
from gpuattn.cli.main import COMMANDS

from .conftest import ROOT


def test_help_names_every_command(call):
    result = call("--help")
    assert result.exit_code == 0
    for name, summary in COMMANDS.items():
        assert f"  {name}" in result.stdout and summary.split(";")[0] in result.stdout


@pytest.mark.parametrize("typed, found", [
    ("tr", ["train", "translate"]), ("--v", ["--version"]), ("train --opti", ["--optimizer"]),
    ("train --optimizer a", ["adamw", "adam"]), ("nosuch --x", []),
])  # fmt: skip
def test_a_shell_completes_commands_options_and_values(typed, found):
    words = f"gpuattn {typed}"
    given = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner(env=given | {"_GPUATTN_COMPLETE": "bash_complete"}).invoke(
        program.main, [], prog_name="gpuattn"
    )
    lines = filter(None, result.stdout.splitlines())
    assert [line.split(",")[1] for line in lines] == found
    assert result.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_debug(call, name):
    result = call(name, "-h")
    assert result.exit_code == 0 and "--debug" in result.stdout
    assert call(name, "--nonsense").exit_code == 2


def test_help_imports_few_modules():
    packages, own = imported("""from gpuattn.cli.main import main
try: main(["--help"])
except SystemExit: pass""")
    assert packages == ["click", "gpuattn", "ml_dtypes", "numpy", "rawkernels"] and own <= 130


def test_a_misspelt_command_or_option_names_the_nearest(call):
    result = call("trian")
    assert result.exit_code == 2 and "Did you mean 'train'" in result.stderr
    result = call("train", "--lrr", "1")
    assert result.exit_code == 2 and "--lr" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("error, code, message", [
    (errors.ConfigError("odd value"), 2, "odd value"),
    (errors.DeviceMissingError("no GPU"), 3, "no GPU"),
    (errors.DataError("bad line"), 1, "bad line"),
    (errors.CheckpointError("damaged"), 1, "damaged"),
    (OSError(28, "No space left on device"), 1, "No space left"),
    (MemoryError("8 GiB wanted"), 1, "out of memory: 8 GiB wanted"),
    (KeyError("x"), 1, "--debug"), (ValueError("wrong shape"), 1, "wrong shape"),
    (KeyboardInterrupt(), 130, ""),
], ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "")  # fmt: skip
def test_exit_codes(call, monkeypatch, trained, error, code, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("gpuattn.cli.info.summary", fail)
    result = call("info", trained)
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 1


@pytest.mark.parametrize("arguments, where, advice", [
    (["train", "reverse"], "gpuattn.cli.train.train", "wanted. Try a smaller --batch, with"),
    (["translate", "RUN"], "gpuattn.cli.translate.load_run", "wanted. Try a smaller --beam"),
    (["info", "RUN"], "gpuattn.cli.info.summary", "wanted"),
])  # fmt: skip
def test_advice_for_missing_memory_fits_the_command(
    call, monkeypatch, trained, arguments, where, advice
):
    def fail(*_, **__):
        raise MemoryError("8 GiB wanted")

    monkeypatch.setattr(where, fail)
    result = call(*(trained if word == "RUN" else word for word in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"gpuattn: error: out of memory: 8 GiB {advice}")
    assert ("Try" in result.stderr) == ("Try" in advice)


def test_debug_shows_the_traceback(run_process, tmp_path):
    assert b"Traceback" not in run_process("info", tmp_path).stderr
    assert b"Traceback" in run_process("info", tmp_path, "--debug").stderr
    assert b"Traceback" in run_process("info", tmp_path, GPUATTN_DEBUG="1").stderr


def test_warnings_are_one_line(call, monkeypatch, trained):
    def warn(*_):
        warnings.warn("mind the gap", stacklevel=1)
        return {}

    monkeypatch.setattr("gpuattn.cli.info.summary", warn)
    assert call("info", trained, "--json").stderr == "gpuattn: warning: mind the gap\n"


def test_a_full_disk_for_standard_output_is_one_error(run_process, trained):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    for arguments in (["--help"], ["info", trained], ["kernels"]):
        command = [sys.executable, "-m", "gpuattn", *map(str, arguments)]
        with open("/dev/full", "w") as full:
            run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        assert run.returncode == 1
        assert run.stderr == "gpuattn: error: No space left on device\n"


def test_version(call):
    assert call("--version").stdout.startswith("gpuattn ")


def test_info_shows_a_run(call, trained):
    result = call("info", trained)
    assert "finished after 60 updates" in result.stdout and "vocab-size 400" in result.stdout
    found = json.loads(call("info", trained, "--json").stdout)
    assert found["updates"] == 60 and found["best"]["bleu"] >= 0
    assert found["parameters"] > 1000


def test_info_checks_the_weights(call, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert "damaged" not in call("info", run).stdout
    (newest,) = run.glob("best-*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-7])
    said = " ".join(call("info", run).stdout.split())
    assert "finished after 60 updates, " in said and f", but damaged: {newest.name} has" in said
    assert newest.name in json.loads(call("info", run, "--json").stdout)["faults"][0]
    newest.unlink()
    said = " ".join(call("info", run).stdout.split())
    assert f"but damaged: {newest.name} cannot be read: No such file" in said


def test_a_damaged_log_is_named(call, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("5\n{}\n")
    result = call("info", run)
    assert result.exit_code == 0 and "finished after 60 updates" in result.stdout
    assert f"gpuattn: warning: {run / 'metrics.jsonl'} is damaged: left out line" in result.stderr


@pytest.mark.parametrize("arguments, name", [
    (["train", "--out", ""], "--out"), (["train", "--valid", "", ""], "--valid"),
    (["train", "--config", ""], "--config"), (["average", "a", "--out", ""], "--out"),
    (["info", ""], "DIR"), (["translate", "RUN", "--input", ""], "--input"),
])  # fmt: skip
def test_an_empty_name_is_refused(call, trained, arguments, name):
    result = call(*(trained if word == "RUN" else word for word in arguments))
    assert result.exit_code == 2 and f"'{name}': the name is empty" in result.stderr


def test_every_file_with_a_command_is_registered():
    assert program.COMMANDS.keys() >= {"train", "translate", "evaluate", "doctor", "kernels"}
    folder = program.__file__.rsplit("/", 1)[0]
    import pathlib

    files = [*pathlib.Path(folder).glob("*.py"), *pathlib.Path(folder).glob("*/__init__.py")]
    commands = [path for path in files if "def command(" in path.read_text()]
    found = {path.parent.name if path.stem == "__init__" else path.stem for path in commands}
    assert found == set(COMMANDS)
