"""A run computes on its own stream; ``delays`` reveal missing synchronization."""

import contextlib
import dataclasses
from operator import call

import numpy as np
import pytest
from delays import delays
from stopping import After

from gpuattn.optim import ExponentialAverage
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.metrics import MetricsLog
from gpuattn.runtime import checkpoint
from gpuattn.runtime.feed import HostFeed
from gpuattn.runtime.graphs import Calls
from gpuattn.runtime.readback import Reading
from gpuattn.runtime.workspace import Workspace
from gpuattn.tasks.registry import task_of
from gpuattn.tasks.users.translator import Translator
from gpuattn.train.progress import Listener
from gpuattn.train.saving import Saves
from gpuattn.train.session import train
from gpuattn.train.trainer import Trainer


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40, dim=16, heads=2, layers=(1, 1), ffn=16,
        batch=120, lr=1e-2, warmup=2, length="6u", eval_every="2u", score_pairs=3, average=2,
        precision="fp32", beam=1,
    )  # fmt: skip


COMPUTING = [
    (Trainer, "load"), (Trainer, "valid_loss"), (Trainer, "_update"), (Saves, "begin"),
    (Saves, "hold"), (Workspace, "weights"), (Workspace, "load_weights"),
    (Workspace, "load_state_dict"), (Workspace, "sync_model"), (ExponentialAverage, "applied"),
    (ExponentialAverage, "update"), (HostFeed, "load"), (Calls, "__call__"),
    (Translator, "translate"), (Reading, "__init__"), (checkpoint, "save"),
]  # fmt: skip


def test_everything_of_a_run_computes_on_its_stream(config, tmp_path, monkeypatch):
    """A run that is stopped, resumed, and ends with the mean of its checkpoints."""
    inside, outside, called = [], set(), set()

    @contextlib.contextmanager
    def computing(trainer):
        inside.append(trainer)
        yield
        inside.pop()

    def noted(name, function):
        def noting(*args, **kwargs):
            (called if inside else outside).add(name)
            return function(*args, **kwargs)

        return noting

    monkeypatch.setattr(Trainer, "computing", computing)
    for owner, name in COMPUTING:
        title = f"{owner.__name__}.{name}"
        monkeypatch.setattr(owner, name, noted(title, getattr(owner, name)))
    config = dataclasses.replace(config, ema=0.9)
    assert not train(config, tmp_path / "run", device="numpy", stop=After(4)).finished
    assert train(config, tmp_path / "run", device="numpy").finished
    assert MetricsLog(tmp_path / "run/metrics.jsonl").read("valid")[-1]["averaged"] == 2
    assert not outside
    assert called == {f"{owner.__name__}.{name}" for owner, name in COMPUTING}


# ---- the delays themselves ---------------------------------------------------------------------


class Cupy:
    """A fake of CuPy with streams alone."""

    def __init__(self):
        self.cuda, self.stack = self, []

        class Stream:
            def __init__(stream, ptr):
                stream.ptr = ptr

            def __enter__(stream):
                self.stack.append(stream)

            def __exit__(stream, *_):
                self.stack.pop()

            def wait_event(stream, event):
                pass

        self.Stream = Stream
        self.stack.append(Stream("null"))

    def get_current_stream(self):
        return self.stack[-1]


@pytest.mark.parametrize("late, want", [
    ("others", ["main", "side", "side"]), ("steps", ["main", "main"]), ("nothing", []),
])  # fmt: skip
def test_which_stream_is_delayed(late, want):
    cupy, held = Cupy(), []
    main, side = cupy.Stream("main"), cupy.Stream("side")
    steps = Calls(call)
    with delays(cupy, late, hold=lambda: held.append(cupy.get_current_stream().ptr)), main:
        steps("step", None, lambda: None)
        side.wait_event(None)
        with side:
            pass
        with main:
            main.wait_event(None)
        steps("step", None, lambda: None)
    assert held == want
    with side:
        side.wait_event(None)
    steps("step", None, lambda: None)
    assert held == want and len(cupy.stack) == 1


@pytest.mark.timing  # the delay also elapses while other processes use the GPU
def test_without_synchronization_results_are_always_wrong(gpu):
    main, side = (gpu.cuda.Stream(non_blocking=True) for _ in range(2))
    x = gpu.zeros(1000, np.float32)
    gpu.cuda.Device().synchronize()

    def write(value):
        x[...] = value

    for stream in (main, side):  # compile, and fill the memory pool, which synchronizes
        with stream:
            write(0), x.copy().tolist()
    gpu.cuda.Device().synchronize()
    with main, delays(gpu, "others"):
        for turn in range(1, 20):
            with side:
                write(turn)
            early = x.copy()
            main.wait_event(side.record())
            assert early.tolist() == [turn - 1] * 1000 and x.tolist() == [turn] * 1000
    with delays(gpu, "steps"):
        for turn in range(20, 40):
            with main:
                Calls(call)("step", None, lambda: write(turn))  # noqa: B023 called at once
            assert x.tolist() == [turn - 1] * 1000  # on the stream that was current before
            main.synchronize()
            assert x.tolist() == [turn] * 1000


# ---- on a GPU ----------------------------------------------------------------------------------


def test_the_mean_of_checkpoints_is_evaluated_as_it_is(gpu, config, tmp_path, delayed):
    """Its loss is what NumPy computes."""
    train(config, tmp_path / "run", device="cuda")
    *_, last, row = MetricsLog(tmp_path / "run/metrics.jsonl").read("valid")
    assert "averaged" not in last and row["averaged"] == 2
    mean = RunFolder(tmp_path / "run").average_snapshots(2)
    trainer = Trainer(task_of(config)(config), "numpy", Listener())
    trainer.workspace.load_weights(mean)
    assert row["loss"] == pytest.approx(trainer.valid_loss(), rel=1e-3)


def test_a_step_on_another_stream_is_refused(gpu, config):
    trainer = Trainer(task_of(config)(config), "cuda", Listener())
    with pytest.raises(AssertionError, match="computes on another stream"):
        trainer.valid_loss()
    with trainer.computing():
        assert trainer.valid_loss() > 0


def test_a_reading_is_ordered_with_the_stream(gpu, delayed):
    stream, side = (gpu.cuda.Stream(non_blocking=True) for _ in range(2))
    with stream:
        x = gpu.zeros((), np.float32)
        steps, readings = Calls(call), []
        for turn in range(20):
            with side:
                x.copy()
            steps("write", None, lambda: x.fill(turn))  # noqa: B023 called at once
            readings.append(Reading(x, x.reshape(1)))
        for turn, reading in enumerate(readings):
            first, second = reading.values()
            assert reading.ready() and (first, second.tolist()) == (turn, [turn])
