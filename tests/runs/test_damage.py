"""Run folders that lost files: a clear error, nothing overwritten, and equal bits on resume."""

import dataclasses
import shutil

import pytest
from kill_drill import new_config
from stopping import After, assert_same_bits, assert_same_metrics

from gpuattn.errors import CheckpointError, ConfigError
from gpuattn.runs.damage import check_whole, recover
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.runs.loading import load_run
from gpuattn.runtime import checkpoint
from gpuattn.train.progress import Listener
from gpuattn.train.session import train


class Warned(Listener):
    def __init__(self):
        self.warnings = []

    def say(self, topic, text):
        if topic == "warning":
            self.warnings.append(text)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return new_config(tmp_path_factory.mktemp("text"), "numpy", kills=0)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """An undamaged, uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(config, out, device="numpy", command="gpuattn train this")
    return out


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """The same run, stopped midway. Tests must not change it."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    train(config, out, device="numpy", stop=After(15), command="gpuattn train this")
    assert len(checkpoint.generations(out, "state")) == 2
    return out


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of the stopped run."""
    return RunFolder(shutil.copytree(stopped, tmp_path / "run"))


def remove(run, pattern):
    found = sorted(run.path.rglob(pattern))
    assert found
    for path in found:
        path.unlink()


def content(run):
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def assert_refused(config, run, message, error=CheckpointError):
    """Check that training is refused and the folder unchanged; return the text of the error."""
    before = content(run)
    with pytest.raises(error, match=message) as caught:
        train(config, run.path, device="numpy")
    assert content(run) == before
    return str(caught.value)


def assert_goes_on(config, run, whole):
    """Check that the run resumes to the same result as ``whole``; return its warnings."""
    report = Warned()
    assert train(config, run.path, device="numpy", listener=report).finished
    assert_same_bits(whole, run.path)
    return report.warnings


def test_without_any_manifest_a_run_is_refused_but_recoverable(config, run, whole):
    states = [path.name for path in sorted(run.path.glob("state-*.safetensors"), reverse=True)]
    manifests = {path: path.read_bytes() for path in run.path.rglob("*.json")}
    remove(run, "*.json")
    said = assert_refused(config, run, f"no manifest .* is left beside {', '.join(states)}, ")
    assert f"gpuattn recover {run.path}" in said
    assert summary(run.path)["parameters"] == summary(whole)["parameters"]
    with pytest.warns(UserWarning, match="has no manifest"):
        assert load_run(run.path, device="numpy").translate(["a b"])
    done, faults = recover(run)
    assert len(done) == len(manifests) and faults == []
    assert {path: path.read_bytes() for path in run.path.rglob("*.json")} == manifests
    assert assert_goes_on(config, run, whole) == []
    assert_same_metrics(whole, run.path)
    assert recover(run) == ([], [])


@pytest.mark.parametrize("lost", ["state-*.json", "best-*.json", "last-*.json", "update_*.json"])
def test_without_the_manifests_of_one_kind_a_run_is_refused(config, run, whole, lost):
    remove(run, lost)
    assert_refused(config, run, lost.split("*")[0] + r"\d+.* and nothing is written over them")
    recover(run)
    assert_goes_on(config, run, whole)


def test_without_its_newest_manifest_a_run_resumes_from_the_previous_state(config, run, whole):
    newest, before = checkpoint.generations(run.path, "state")
    newest.unlink()
    (warning,) = assert_goes_on(config, run, whole)
    assert f"{newest.stem}.safetensors has no manifest, as a kill during a save" in warning
    assert f"{before.stem} is used" in warning
    assert_same_metrics(whole, run.path)


def test_a_first_save_that_was_killed_is_repeated(config, tmp_path, whole, monkeypatch):
    """Killed between the two renames of the first save: the weights exist, the state does not."""
    run, inner = RunFolder(tmp_path / "run"), checkpoint._write

    def killed(path, data):
        if path.name == "state-00000001.json":
            raise KeyboardInterrupt
        inner(path, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "_write", killed)
        train(config, run.path, device="numpy")
    assert (run.path / "state-00000001.safetensors").exists()
    assert (run.path / "best-00000001.json").exists()
    assert assert_goes_on(config, run, whole) == []
    assert_same_metrics(whole, run.path)


def test_a_saved_state_without_its_manifest_is_not_overwritten(config, tmp_path):
    """The files look like those of a killed save, but the log says that the run stopped."""
    run = RunFolder(tmp_path / "run")
    train(config, run.path, device="numpy", stop=After(1))
    remove(run, "state-*.json")
    assert_refused(config, run, "beside state-00000001.safetensors, and nothing")


def test_without_a_state_a_run_is_refused(config, run, tmp_path):
    remove(run, "state-*")
    said = assert_refused(config, run, "no state to go on from: state-.* are missing")
    assert "left of its checkpoints: best-0" in said and f"--init-from {run.path}" in said
    new = dataclasses.replace(config, init_from=str(run.path), length="4u")
    assert train(new, tmp_path / "new", device="numpy").finished


def test_without_its_config_a_run_is_still_recognised(config, run, whole, tmp_path):
    remove(run, "config.toml")
    said = assert_refused(config, run, "has checkpoints and no config.toml", ConfigError)
    assert said.endswith("writes in another --out: gpuattn train this")
    with pytest.raises(CheckpointError, match="has checkpoints and no config.toml"):
        load_run(run.path)
    with pytest.raises(ConfigError, match="left alone|has checkpoints"):
        train(config, run.path, device="numpy", overwrite=True)
    train(config, tmp_path / "other", device="numpy", stop=After(1))
    shutil.copy(tmp_path / "other/config.toml", run.path)
    assert assert_goes_on(config, run, whole) == []


def test_without_its_metrics_a_run_resumes(config, run, whole):
    before = summary(run.path)
    remove(run, "metrics.jsonl")
    found = summary(run.path)  # from the metadata of the weights
    assert found["updates"] == before["updates"]
    assert found["best"].items() <= before["best"].items()
    (warning,) = assert_goes_on(config, run, whole)
    assert f"{run.metrics.path} is missing: its curves begin where the run goes on" in warning


def test_without_its_best_weights_a_run_resumes(config, run):
    remove(run, "best-*")
    (warning,) = check_whole(run)
    assert "the best weights are missing" in warning and "the last ones are used" in warning
    assert load_run(run.path, device="numpy").translate(["a b"])
    assert train(config, run.path, device="numpy").finished


def test_unrecoverable_files_are_reported(run):
    remove(run, "state-*.json")
    damaged = sorted(run.path.glob("state-*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done, (fault,) = recover(run)
    assert len(done) == 1 and f"{damaged.name} is not a whole safetensors file" in fault
    with pytest.raises(CheckpointError, match="is no run"):
        recover(RunFolder(run.path / "nowhere"))
