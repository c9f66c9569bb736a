"""The dtypes of a run, loss scaling on a toy problem, and when a run is stopped."""

import dataclasses
import warnings

import numpy as np
import pytest
from fake_gpu import GPUS
from fake_launches import launches_on

from gpuattn import Tensor
from gpuattn.errors import ConfigError
from gpuattn.optim import AdamW
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import precision
from gpuattn.runtime.precision import PRECISIONS, choose, trouble
from gpuattn.runtime.workspace import Workspace

CONFIG = TrainConfig(task="toy", lr=0.5, clip=1.0)


class Line:
    def __init__(self):
        self.weight = Tensor(np.zeros((4, 3), np.float32), requires_grad=True)
        self.bias = Tensor(np.zeros(3, np.float32), requires_grad=True)

    def named_parameters(self):
        yield "weight", self.weight
        yield "bias", self.bias


def test_auto_selects_the_best_precision_of_the_device():
    assert choose("auto", "cuda").name == "bf16"
    assert choose("auto", "numpy").name == "fp32"
    assert choose("fp16", "cuda").dtype == "float16"


@pytest.mark.parametrize("name", ["bf16", "pure-bf16", "fp16"])
def test_numpy_uses_fp32_with_one_warning(monkeypatch, name):
    monkeypatch.setattr(precision, "_warned", set())
    with pytest.warns(UserWarning, match=f"precision {name} needs a GPU; on NumPy .* fp32"):
        assert choose(name, "numpy").name == "fp32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(name, "numpy").name == "fp32"
        assert choose("fp32", "numpy").name == "fp32"


def test_before_8_0_fp16_is_the_best_and_bf16_warns_once(monkeypatch):
    monkeypatch.setattr(precision, "_warned", set())
    with launches_on(GPUS["7.5"]):
        assert choose("auto", "cuda").name == "fp16"
        with pytest.warns(UserWarning, match=r"below 8\.0: bfloat16 .* float16 \(--precision fp16"):
            assert choose("bf16", "cuda").name == "bf16"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose("pure-bf16", "cuda").name == "pure-bf16"
            assert choose("fp32", "cuda").name == "fp32"
    with launches_on(GPUS["8.0"]):
        assert choose("auto", "cuda").name == "bf16"


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(
        ConfigError, match="'bf61'; accepted: auto, fp32, bf16, pure-bf16, fp16. Did you mean"
    ):
        choose("bf61", "cuda")


def test_micro_batches_are_summed_in_float32():
    assert PRECISIONS["bf16"].grad_dtype(1) == "bfloat16"
    assert PRECISIONS["bf16"].grad_dtype(4) == "float32"


def run(xp, name, updates, loss_of):
    """Train a line in a precision; return (workspace, optimizer)."""
    chosen, model = PRECISIONS[name], Line()
    device = "numpy" if xp is np else "cuda"
    w = Workspace(model, device, chosen.dtype, masters=chosen.masters)
    optimizer = AdamW(
        w, loss_scale=chosen.loss_scale, growth_interval=chosen.growth_interval, max_norm=1.0
    )
    for n in range(updates):
        w.begin()
        with np.errstate(over="ignore", invalid="ignore"):
            w.backward(loss_of(model, n), optimizer.state.field("loss_scale"))
        w.finish()
        optimizer.update(0.05)
    return w, optimizer


@pytest.mark.parametrize("name", PRECISIONS)
def test_learns_a_line_in_every_precision(xp, name):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    true = rng.standard_normal((4, 3)).astype(np.float32)
    x, y = xp.asarray(x), xp.asarray(x @ true + 0.5)

    def loss(model, _):
        h = x @ model.weight.astype("float32") + model.bias.astype("float32")
        return np.mean((h - y) ** 2)

    w, optimizer = run(xp, name, 300, loss)
    found = w.weights()["weight"]
    found = found if xp is np else found.get()
    np.testing.assert_allclose(found, true, atol=2e-2 if "bf16" in name else 3e-3)
    state = optimizer.state.read()
    assert state["step"] + state["skipped"] == 300
    assert state["skipped"] < 10


def test_fp16_gradients_that_would_vanish_are_kept_by_the_scale(xp):
    """The gradient, 1e-8, underflows in float16; multiplied by 65536 it does not."""
    w, _ = run(xp, "fp16", 1, lambda model, n: np.sum(model.weight.astype("float32")) * 1e-8)
    assert (w.weights()["weight"] != 0).all()


def test_overflow_halves_the_scale_and_continues(xp):
    def loss(model, n):
        return np.sum(model.weight.astype("float32")) * (4.0 if n == 2 else 0.5)

    w, optimizer = run(xp, "fp16", 5, loss)
    state = optimizer.state.read()
    assert (state["skipped"], state["step"], state["loss_scale"]) == (1, 4, 32768)


def values(**changes):
    at_start = {"skipped": 0, "skipped_in_a_row": 0, "loss_scale": 1.0, "clamped": 0, "step": 5}
    return at_start | changes


def test_skipped_updates_are_reported():
    w = Workspace(Line())
    assert trouble(values(), values(step=25), w, CONFIG) == []
    assert trouble(values(), values(skipped=2), w, CONFIG) == [
        "2 updates were skipped: inf or NaN in their gradients"
    ]
    assert trouble(values(loss_scale=8.0), values(skipped=1, loss_scale=4.0), w, CONFIG) == [
        "1 update was skipped: inf or NaN in their gradients; the loss scale is 4"
    ]
    assert trouble(values(), values(clamped=1), w, CONFIG) == [
        "the loss scale is at its smallest, 1, and stays there"
    ]
    assert (
        "at its largest, 4.29497e+09"
        in trouble(values(clamped=1), values(clamped=2, loss_scale=2.0**32), w, CONFIG)[0]
    )
    assert trouble(values(clamped=3, skipped=4), values(clamped=3, skipped=4), w, CONFIG) == []


def test_a_run_that_cannot_continue_stops_and_names_the_parameter():
    w, optimizer = run(np, "fp32", 10, lambda model, n: np.sum(model.bias * np.float32(np.nan)))
    now = optimizer.state.read()
    assert now["skipped_in_a_row"] == 10 and now["step"] == 0
    with pytest.raises(
        FloatingPointError, match=r"10 updates in a row .*, first in bias \(1 of 2\)"
    ):
        trouble(values(), now, w, CONFIG)
    with pytest.raises(FloatingPointError, match=r"--lr than 0.5, or a longer --warmup$"):
        trouble(values(), now, w, CONFIG)
    for clip in (0.0, 2.0):
        config = dataclasses.replace(CONFIG, clip=clip)
        with pytest.raises(FloatingPointError, match=r"--warmup, or --clip 1$"):
            trouble(values(), now, w, config)
    assert trouble(values(), now | {"loss_scale": 2.0}, w, CONFIG), "the scale can still be halved"
