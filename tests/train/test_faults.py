"""Gradients with inf or NaN: skipped with a warning; ten in a row end the run, which is saved."""

import dataclasses
import re

import numpy as np
import pytest
from checks import sampled
from kill_drill import new_config
from stopping import assert_same_bits

from gpuattn.arrays import to_cpu
from gpuattn.errors import CheckpointError
from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint, precision
from gpuattn.runtime.feed import DeviceFeed, HostFeed
from gpuattn.runtime.precision import PRECISIONS
from gpuattn.tasks.translation import TranslationTask
from gpuattn.train.progress import Listener
from gpuattn.train.session import Session, train
from gpuattn.train.state import tensors_of
from gpuattn.train.trainer import Trainer

UPDATES, SPOILED = 25, (7, 8, 21)


class Warned(Listener):
    def __init__(self):
        self.warnings = []

    def say(self, topic, text):
        if topic == "warning":
            self.warnings.append(text)


def spoiling(load, spoiled, value):
    """Return a ``load`` of a feed that makes the gradients of some batches inf or NaN."""

    def loading(*batch, **numbers):
        if "weight" in numbers and spoiled(numbers["draw"]):
            numbers["weight"] = value
        load(*batch, **numbers)

    return loading


@pytest.mark.parametrize(
    "name, value", sampled([("fp16", np.inf), *((name, np.nan) for name in PRECISIONS)], 2)
)
def test_nonfinite_updates_are_skipped_with_a_warning(tmp_path, monkeypatch, name, value):
    train_spoiled("numpy", tmp_path, monkeypatch, name, value)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_nonfinite_updates_are_skipped_in_graphs_too(gpu, tmp_path, monkeypatch, name):
    trainer = train_spoiled("cuda", tmp_path, monkeypatch, name, np.inf)
    captured = {name for (name, _), graph in trainer.step.calls.graphs.items() if graph is not None}
    assert captured == {"gradients", "more gradients", "update"}


def train_spoiled(device, tmp_path, monkeypatch, name, value):
    """Check a run in a precision with some nonfinite updates; return its Trainer."""
    monkeypatch.setattr(precision, "choose", lambda *_: PRECISIONS[name])  # on NumPy too
    config = dataclasses.replace(new_config(tmp_path, "numpy", 0), schedule="constant")
    config = dataclasses.replace(config, length=f"{UPDATES}u", eval_every=f"{UPDATES}u")
    report, seen = Warned(), []
    trainer = Trainer(TranslationTask(config), device, report)
    batches = {config.accumulate * n for n in SPOILED}  # the first batch of an update
    trainer.step.feed.load = spoiling(trainer.step.feed.load, batches.__contains__, value)

    def look():
        seen.append(to_cpu(trainer.workspace.masters).tobytes())
        return False

    look()
    with np.errstate(invalid="ignore", over="ignore"):
        assert trainer.run(look, lambda: {"loss": 0.0, "score": 0.0}, lambda row: None)
    assert [n for n in range(UPDATES) if seen[n] == seen[n + 1]] == list(SPOILED)
    state = trainer.optimizer.state.read()
    assert (state["skipped"], state["step"]) == (len(SPOILED), UPDATES - len(SPOILED))
    assert sum(int(said.split()[0]) for said in report.warnings) == len(SPOILED)
    assert all("skipped: inf or NaN in their gradients" in said for said in report.warnings)
    halved = 2 ** len(SPOILED) if name == "fp16" else 1
    assert state["loss_scale"] == PRECISIONS[name].loss_scale / halved
    assert (f"the loss scale is {state['loss_scale']:g}" in report.warnings[-1]) == (halved > 1)
    arrays = (to_cpu(array).astype("f") for array in tensors_of(trainer.step).values())
    assert all(np.isfinite(array).all() for array in arrays)
    return trainer


def test_ten_in_a_row_end_the_run_which_is_saved_and_resumes(xp, tmp_path, monkeypatch):
    config = dataclasses.replace(
        new_config(tmp_path, "numpy", 0), length="45u", eval_every="45u", average=0
    )
    device, feed = ("numpy", HostFeed) if xp is np else ("cuda", DeviceFeed)
    with monkeypatch.context() as patch:
        patch.setattr(feed, "load", spoiling(feed.load, lambda draw: draw >= 20, np.nan))
        with pytest.raises(FloatingPointError) as error, np.errstate(invalid="ignore"):
            train(config, tmp_path / "run", device=device)
    said = str(error.value)
    found = re.match(r"(\d+) updates in a row had gradients with inf or NaN, first in ", said)
    assert found and int(found[1]) >= 10, said  # reports also come at intervals of time
    assert "the last good one was number 10. Start again with a smaller --lr" in said
    assert said.endswith("All is saved as it was then")
    tensors, at = checkpoint.load(tmp_path / "run", "state")
    assert all(np.isfinite(a.astype("f")).all() for a in tensors.values())
    assert train(config, tmp_path / "run", device=device).update == 45
    # equal to an uninterrupted run that skipped these updates
    spoiled = range(20, 2 * at["update"])
    with monkeypatch.context() as patch:
        patch.setattr(feed, "load", spoiling(feed.load, spoiled.__contains__, np.nan))
        patch.setattr(precision, "MOST_SKIPPED", 100)
        train(config, tmp_path / "skipped", device=device)
    assert_same_bits(tmp_path / "skipped", tmp_path / "run")


@pytest.mark.parametrize("interval", ["5u", "100u"])
def test_nonfinite_parameters_are_never_saved(tmp_path, interval):
    """Both saves are refused: at an evaluation and after ten skipped updates."""
    config = dataclasses.replace(
        new_config(tmp_path, "numpy", 0), length="100u", eval_every=interval, average=0
    )
    folder = RunFolder(tmp_path / "run")
    session = Session(config, folder, "numpy", Listener(), begun=False)
    folder.create(config, {}, session.task.corpus.tokenizer)

    def spoil():
        if session.trainer.at.update == 7:
            session.trainer.workspace.weights()["encoder_norm.weight"][0] = np.nan

    ends = pytest.raises((CheckpointError, FloatingPointError), match="holds inf or NaN")
    with ends as error, np.errstate(invalid="ignore"):
        session.run(spoil)
    assert "start again with a smaller --lr" in str(error.value).lower()
    assert len(checkpoint.generations(folder.path, "state")) == (interval == "5u")
