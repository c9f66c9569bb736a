"""The meter: unknown figures are omitted, a GPU's peak rates are measured once."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import ceilings, power
from gpuattn.cuda.ceilings import rates
from gpuattn.cuda.power import Draw, PowerMeter
from gpuattn.train import meter
from gpuattn.train.meter import SPENT, Meter
from gpuattn.units import short


class Card:
    """A fake power meter; energy grows by ``joules`` with each reading."""

    def __init__(self, joules, watts=300.0):
        self.joules, self.watts, self.total = joules, watts, 5000.0

    def read(self, now=False):
        self.total += self.joules
        return Draw(self.watts, self.total)


def batch(tokens):
    return SimpleNamespace(all_tokens=tokens)


def metered(peak=None, card=None):
    found = Meter(np, "float32", lambda batches: 1e9 * len(batches))
    found.peak, found._power = peak, card
    found._draw = card and card.read(now=True)
    return found


def nothing():
    return dict.fromkeys(SPENT, 0.0)


def test_on_numpy_only_times_are_known():
    found, spent = metered(), nothing()
    found.batches += [batch(100), batch(60)]
    time.sleep(0.01)
    facts = found.facts(2, spent)
    assert facts.keys() == {"rate", "milliseconds"}
    assert facts["rate"] == pytest.approx(160 / spent["seconds"])
    assert facts["milliseconds"] == pytest.approx(500 * spent["seconds"]) and spent["seconds"] > 0
    assert (spent["tokens"], spent["flops"], spent["joules"]) == (160, 2e9, 0)
    assert found.batches == []


def test_a_gpu_shows_mfu_and_energy():
    found, spent = metered(1e12, Card(30.0)), nothing()
    for _ in range(2):
        found.batches.append(batch(100))
        time.sleep(0.002)
        facts = found.facts(1, spent)
    assert 0 < facts["mfu"] < 0.5 and facts["watts"] == 300
    assert facts["joules"] == spent["joules"] == 60
    found.energy(spent, now=True)
    text = found.describe({**spent, "seconds": 2.0, "tokens": 3e6, "flops": 5e11}, 2.4)
    assert text == "3M tokens in 2 s, 1.5M tokens/s in updates, MFU 25 % of 1 TFLOP/s, 0.09 kJ"


def test_figures_that_a_gpu_does_not_report_are_omitted():
    spent = nothing()
    card = Card(0.0)
    card.read = lambda now=False: Draw(250.0, None)
    assert metered(None, card).energy(spent) == {"watts": 250.0}
    card.read = lambda now=False: Draw()
    assert metered(None, card).energy(spent) == {} and spent["joules"] == 0


def test_without_nvml_nothing_is_known(monkeypatch):
    monkeypatch.setattr(power, "LIBRARY", "libnot-there.so.1")
    assert PowerMeter().read(now=True) == Draw(None, None)


def test_peak_rates_are_amounts_over_times():
    found = rates({"copy": (None, 8e6), "product": (None, 2e9)}, {"copy": 2.0, "product": 4.0})
    assert found == {"copy_tbs": 4.0, "matmul_tflops": 500.0}
    here = ceilings.ceilings(np, np.float32)
    assert 1e-4 < here["copy_tbs"] < 2 and 1e-3 < here["matmul_tflops"] < 50


def test_short_numbers():
    assert [short(n) for n in (812, 24_600, 1.2e6, 3e9)] == ["812", "24.6k", "1.2M", "3G"]


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timing
def test_peak_rates_are_measured_once_and_cached(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ceilings, "SIZES", {"cupy": (1 << 24, 2048)})
    before = gpu.get_default_memory_pool().total_bytes()
    found = ceilings.ceilings(gpu, BFLOAT16)
    assert found["matmul_tflops"] > 20 and found["copy_tbs"] > 0.2
    assert gpu.get_default_memory_pool().total_bytes() - before < 100 << 20
    (path,) = tmp_path.glob("ceilings-*.json")
    assert json.loads(path.read_text()) == {"bfloat16": found}
    monkeypatch.setattr(ceilings, "problems", None)
    assert ceilings.ceilings(gpu, BFLOAT16) == found


@pytest.mark.gpu
@pytest.mark.timing
def test_the_energy_of_a_gpu_grows_by_its_power(gpu):
    card = PowerMeter()
    first, begin = card.read(now=True), time.perf_counter()
    if first.joules is None:
        pytest.skip("the driver's library does not tell energy here")
    time.sleep(0.5)
    last = card.read(now=True)
    watts = (last.joules - first.joules) / (time.perf_counter() - begin)
    assert 10 < last.watts < 2000 and 10 < watts < 2000
    assert card.read() is last  # no new reading within FRESH
    found = meter.Meter(gpu, BFLOAT16, sum)
    found.measure()
    assert found.peak > 1e13
