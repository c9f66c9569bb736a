"""The files and initial weights that a run began with are identified by their content."""

import dataclasses
import gzip
import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from kill_drill import new_config
from stopping import After, assert_same_bits

from gpuattn.errors import CheckpointError, ConfigError, DataError
from gpuattn.runs.averaging import average_runs
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run
from gpuattn.runtime import checkpoint
from gpuattn.tensor_file import digest
from gpuattn.train.session import Session, train


@pytest.fixture
def config(tmp_path):
    config = new_config(tmp_path, "numpy", kills=0)
    for name in ("valid_src", "valid_tgt"):
        (tmp_path / name).write_text("a b c\nd e f\n")
    files = {
        "valid_source": str(tmp_path / "valid_src"),
        "valid_target": str(tmp_path / "valid_tgt"),
    }
    return dataclasses.replace(config, length="8u", average=0, **files)


FILES = ("source", "target", "valid_source", "valid_target")


# ---- files ----


def test_files_may_have_other_names(config, tmp_path, monkeypatch):
    train(config, tmp_path / "whole", device="numpy")
    train(config, tmp_path / "run", device="numpy", stop=After(3))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    named = {name: os.path.relpath(getattr(config, name)) for name in FILES}
    with gzip.open("src.gz", "wb") as file:
        file.write(Path(config.source).read_bytes())
    named["source"] = "src.gz"
    assert train(dataclasses.replace(config, **named), tmp_path / "run", device="numpy").finished
    assert RunFolder(tmp_path / "run").config().source == "src.gz"
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("same_name", [True, False])
def test_files_of_other_content_are_refused_by_name(config, tmp_path, name, same_name):
    train(config, tmp_path / "run", device="numpy", stop=After(3))
    path = Path(getattr(config, name)) if same_name else tmp_path / "other"
    lines = Path(getattr(config, name)).read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], "h g f"]) + "\n")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(DataError) as error:
        train(dataclasses.replace(config, **{name: str(path)}), tmp_path / "run", device="numpy")
    kind = "validation" if "valid" in name else "training"
    assert f"the {kind} text {path} is not the one that {tmp_path / 'run'}" in str(error.value)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_run_without_digests_compares_names_and_stores_digests(config, tmp_path):
    run = RunFolder(tmp_path / "run")
    train(config, run.path, device="numpy", stop=After(3))
    digests = run.digests()
    assert set(digests) == set(FILES)
    text = Path(config.source).read_bytes()
    assert digests["source"] == hashlib.sha256(text).hexdigest()
    (run.path / "digests.toml").unlink()
    shutil.copy(config.valid_source, tmp_path / "copy")
    moved = dataclasses.replace(config, valid_source=str(tmp_path / "copy"))
    with pytest.raises(ConfigError, match="--valid-source was .*valid_src, now .*copy"):
        train(moved, run.path, device="numpy")
    train(config, run.path, device="numpy", stop=After(2))
    assert run.digests() == digests
    assert train(moved, run.path, device="numpy").finished


def test_files_of_a_run_that_never_began_are_not_compared(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/digests.toml").write_text('source = "0"\n')
    train(config, tmp_path / "run", device="numpy", stop=After(3))
    assert train(config, tmp_path / "run", device="numpy").finished


def test_a_text_to_continue(tmp_path):
    (tmp_path / "text").write_text("red cat, blue dog. " * 40)
    config = TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=16, heads=2, layers=1,
        block=8, batch=16, length="4u", warmup=0,
    )  # fmt: skip
    train(config, tmp_path / "run", device="numpy", stop=After(1))
    shutil.copy(tmp_path / "text", tmp_path / "copy")
    moved = dataclasses.replace(config, lm=str(tmp_path / "copy"))
    assert train(moved, tmp_path / "run", device="numpy", stop=After(1)).update == 2
    (tmp_path / "copy").write_text("red cat, blue dog. " * 39 + "red cat, blue cat. ")
    with pytest.raises(DataError, match=f"the training text {tmp_path / 'copy'} is not the one"):
        train(moved, tmp_path / "run", device="numpy")


# ---- weights of another run ----


@pytest.fixture
def origin(config, tmp_path):
    """A run on other text, with a different tokenizer."""
    (tmp_path / "words").write_text("".join(f"{word} cat\n" for word in ("red", "old", "big") * 9))
    text = dict.fromkeys(("source", "target"), str(tmp_path / "words"))
    text |= dict.fromkeys(("valid_source", "valid_target"))
    train(dataclasses.replace(config, seed=3, **text), tmp_path / "origin", device="numpy")
    return RunFolder(tmp_path / "origin")


def test_a_run_begins_with_the_best_weights_and_the_tokenizer(config, origin, tmp_path):
    new = dataclasses.replace(config, init_from=str(origin.path), lr=0.001)
    best, notes = checkpoint.load(origin.path, "best")
    session = Session(new, RunFolder(tmp_path / "new"), "numpy", Quiet(), begun=False)
    found = session.trainer.workspace.weights()
    assert all(np.array_equal(found[name], best[name]) for name in best)
    assert session.trainer.average.average.tobytes() == session.trainer.workspace.masters.tobytes()
    assert session.trainer.optimizer.state.read()["step"] == 0
    train(new, tmp_path / "new", device="numpy")
    run = RunFolder(tmp_path / "new")
    assert run.tokenizer().to_bytes() == origin.tokenizer().to_bytes()
    noted = run.metrics.read("start")[0]["init_from"]
    said = f"the best weights of {origin.path}, of update {notes['update']}"
    assert noted == {"weights": said, "sha256": digest(best)}
    assert run.config().init_from == str(origin.path)
    assert load_run(run.path, device="numpy").translate(["a b"])


class Quiet:
    def say(self, topic, text):
        pass

    progress = say


def test_it_resumes_bit_for_bit_without_the_initial_weights(config, origin, tmp_path):
    new = dataclasses.replace(config, init_from=str(origin.path))
    train(new, tmp_path / "whole", device="numpy")
    train(new, tmp_path / "run", device="numpy", stop=After(3))
    shutil.move(origin.path, tmp_path / "moved")
    moved = dataclasses.replace(new, init_from=str(tmp_path / "moved"))
    train(moved, tmp_path / "run", device="numpy", stop=After(2))
    shutil.rmtree(tmp_path / "moved")
    assert train(moved, tmp_path / "run", device="numpy").finished
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


def test_killed_before_its_first_save_it_begins_with_the_same_weights(config, origin, tmp_path):
    new = dataclasses.replace(config, init_from=str(origin.path))
    train(new, tmp_path / "whole", device="numpy")
    train(new, tmp_path / "run", device="numpy", stop=After(1))
    for name in ("state", "last", "best"):
        for path in (tmp_path / "run").glob(f"{name}-*"):
            path.unlink()
    (tmp_path / "run/metrics.jsonl").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert train(new, tmp_path / "run", device="numpy").finished
    assert_same_bits(tmp_path / "whole", tmp_path / "run")
    weights, notes = checkpoint.load(origin.path, "best")
    name = next(iter(weights))
    checkpoint.save(origin.path, "best", weights | {name: weights[name] + 1}, notes)
    with pytest.raises(
        DataError, match="the weights of --init-from .* are not those that .* began"
    ):
        train(new, tmp_path / "other", device="numpy")


def test_the_last_weights_replace_missing_best_ones_and_a_mean_works(config, origin, tmp_path):
    average_runs([origin.path, origin.path], tmp_path / "mean")
    mean = dataclasses.replace(config, init_from=str(tmp_path / "mean"))
    assert train(mean, tmp_path / "a", device="numpy").finished
    for path in origin.path.glob("best-*"):
        path.unlink()
    train(dataclasses.replace(config, init_from=str(origin.path)), tmp_path / "b", device="numpy")
    (row,) = RunFolder(tmp_path / "b").metrics.read("start")
    assert row["init_from"]["weights"].startswith("the last weights of ")


@pytest.mark.parametrize("change, message", [
    ({"dim": 32, "layers": (2, 1)}, "--dim was 16, now 32; --layers was 1, now 2:1. Give the same"),
    ({"norm": "post"}, "--norm was pre, now post"), ({"heads": 4}, "--heads was 2, now 4"),
    ({"positions": "learned"}, "--positions was sinusoidal, now learned"),
])  # fmt: skip
def test_another_model_is_refused_by_its_options(config, origin, tmp_path, change, message):
    new = dataclasses.replace(config, init_from=str(origin.path), **change)
    with pytest.raises(ConfigError) as error:
        train(new, tmp_path / "new", device="numpy")
    assert message in str(error.value)
    assert f"--config {origin.path / 'config.toml'} has them" in str(error.value)
    assert not (tmp_path / "new").exists()


def test_options_that_do_not_affect_weights_may_change(config, origin, tmp_path):
    new = dataclasses.replace(config, init_from=str(origin.path), max_len=30, dropout=0.0, ema=0.0)
    assert train(new, tmp_path / "new", device="numpy").finished


def test_missing_initial_weights_are_refused(config, origin, tmp_path):
    for given, message in ((tmp_path / "none", "is no run"), (tmp_path / "run", "are both")):
        new = dataclasses.replace(config, init_from=str(given))
        with pytest.raises((CheckpointError, ConfigError), match=message):
            train(new, tmp_path / "run", device="numpy")
    assert not (tmp_path / "run").exists()
    before = {path: path.read_bytes() for path in origin.path.rglob("*") if path.is_file()}
    new = dataclasses.replace(config, init_from=str(origin.path))
    with pytest.raises(ConfigError, match="are both"):
        train(new, origin.path, device="numpy", overwrite=True)
    assert before == {path: path.read_bytes() for path in origin.path.rglob("*") if path.is_file()}
