"""Losses in 16 bits stay near those in float32, on NumPy and on a GPU."""

import dataclasses
import functools

import numpy as np
import pytest
from kill_drill import new_config

from gpuattn.runtime import precision
from gpuattn.runtime.precision import PRECISIONS
from gpuattn.tasks.translation import TranslationTask
from gpuattn.train.progress import Listener
from gpuattn.train.trainer import Trainer

UPDATES = 80
NOISE = {
    "bf16": 0.02,
    "pure-bf16": 0.05,
    "fp16": 0.01,
}  # for comparison, another order of the data gives 1


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return a function of (device, precision) that returns the (UPDATES,) losses of a run."""
    folder = tmp_path_factory.mktemp("losses")
    config = dataclasses.replace(
        new_config(folder, "numpy", 0), dropout=0.0, accumulate=1, batch=200, length=f"{UPDATES}u"
    )

    @functools.cache
    def run(device, name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(precision, "choose", lambda *_: PRECISIONS[name])  # on NumPy too
            trainer, found = Trainer(TranslationTask(config), device, Listener()), []
        with trainer.computing():
            for _ in range(UPDATES):
                trainer.step.clear_loss()
                trainer._update()
                found.append(trainer.step.mean_loss())
        return np.array(found)

    return run


@pytest.mark.parametrize("name", ["bf16", "pure-bf16", "fp16"])
def test_losses_are_near_those_of_float32(xp, losses, name):
    device = "numpy" if xp is np else "cuda"
    exact, found = losses(device, "fp32"), losses(device, name)
    assert exact[-8:].mean() < 0.6 * exact[0]
    assert 0 < abs(found - exact).max() < NOISE[name]
