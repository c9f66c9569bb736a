"""TensorBoard events: each row of the metrics once, also after a resume."""

import dataclasses
import sys

import pytest

from gpuattn.errors import CheckpointError, UnsupportedError
from gpuattn.runs import events
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.folder import RunFolder
from gpuattn.train.session import train


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40, dim=16, heads=2, layers=1, ffn=16, batch=100,
        warmup=4, length="60u", eval_every="20u", score_pairs=4, average=2,
    )  # fmt: skip


@pytest.fixture
def accumulator():
    """Return TensorBoard's own reader of a folder of events."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return lambda run: EventAccumulator(str(run / events.FOLDER), {"scalars": 0}).Reload()


def points(found):
    """Return {tag: [(update, value)]}."""
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def stop_after(updates):
    """Return a ``stop`` function that is true after a number of updates."""
    left = iter(range(updates - 1))
    return lambda: next(left, None) is None


def expected(run):
    """Return the rows of metrics.jsonl in the form of ``points``."""
    found = {}
    for row in RunFolder(run).metrics.read():
        part = "averaged" if "averaged" in row else row["event"]
        for name, tag in events.TAGS.items() if part in ("train", "valid", "averaged") else ():
            if name in row:
                point = row["update"], pytest.approx(row[name])
                found.setdefault(f"{part}/{tag}", []).append(point)
    return found


def test_events_are_the_rows_of_the_metrics_also_after_a_resume(config, accumulator, tmp_path):
    run = tmp_path / "run"
    assert not train(config, run, device="numpy", stop=stop_after(50), tensorboard=True).finished
    found = accumulator(run)  # like a TensorBoard that keeps running
    assert points(found) == expected(run)
    # Killed: rows after the saved state stay in the log, and in the events.
    metrics = RunFolder(run).metrics
    metrics.add("train", update=70, seconds=9.0, loss=1.0)
    with events.written(RunFolder(run)):
        pass
    assert points(found.Reload())["train/loss"][-1] == (70, 1.0)
    assert train(config, run, device="numpy", tensorboard=True).finished
    after = points(found.Reload())
    assert after == points(accumulator(run)) == expected(run)
    tags = {"loss", "tokens_per_second", "milliseconds_per_update", "learning_rate"}
    assert {f"train/{tag}" for tag in tags} <= after.keys()
    assert [update for update, _ in after["valid/bleu"]] == [20, 40, 60]
    assert [update for update, _ in after["averaged/loss"]] == [60]
    updates = [update for update, _ in after["train/loss"]]
    assert updates == sorted(set(updates)) and updates[-1] == 60
    sizes = [path.stat().st_size > 0 for path in (run / events.FOLDER).iterdir()]
    assert sizes.count(True) == 1  # no reader finds an update twice


def test_times_of_events_continue_from_each_start(accumulator, tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.add("start", update=0, date="2026-01-01 00:00:00+00:00")
    run.metrics.add("train", update=1, seconds=5.0, loss=1.0)
    run.metrics.add("start", update=1, date="2026-01-02 00:00:00+00:00")
    run.metrics.add("train", update=2, seconds=7.0, loss=1.0)
    with events.written(run):
        run.metrics.rewind(2)
        run.metrics.add("train", update=3, seconds=8.0, loss=1.0)
    first, second, third = accumulator(tmp_path).Scalars("train/loss")
    assert second.wall_time - first.wall_time == 24 * 3600 + 2 - 5
    assert third.wall_time - second.wall_time == 1


def test_a_finished_run_gets_its_events_too(config, accumulator, tmp_path):
    short = dataclasses.replace(config, length="20u", average=0)
    train(short, tmp_path / "run", device="numpy")
    assert not (tmp_path / "run" / events.FOLDER).exists()
    train(short, tmp_path / "run", device="numpy", tensorboard=True)
    assert points(accumulator(tmp_path / "run")) == expected(tmp_path / "run")


def test_a_failed_run_keeps_its_events(accumulator, tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(RuntimeError, match="lost"), events.written(run):
        run.metrics.rewind(0)
        run.metrics.add("train", update=1, seconds=5.0, loss=1.0)
        raise RuntimeError("lost")
    assert points(accumulator(tmp_path)) == {"train/loss": [(1, 1.0)]}
    run.metrics.add("train", update=2, seconds=6.0, loss=1.0)  # not written: the run has failed
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write .*file"):
        events.EventLog(tmp_path / "file").begin([])


def test_without_tensorboard_the_error_names_the_package(config, tmp_path, monkeypatch):
    for name in ("tensorboard.compat.proto.event_pb2", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'gpuattn\[tensorboard\]'"):
        train(config, tmp_path / "run", device="numpy", tensorboard=True)
    assert not (tmp_path / "run").exists()
    assert train(config, tmp_path / "run", device="numpy", stop=stop_after(1)).update == 1
