"""Learning rates: published formulas, runs measured in updates or in time, and refusals."""

import math

import pytest

from gpuattn.errors import ConfigError
from gpuattn.optim import SCHEDULES, Schedule


def test_inverse_square_root_is_the_papers():
    """Vaswani et al., formula 3: d^-0.5 min(step^-0.5, step warmup^-1.5), step from 1."""
    d, warmup = 512, 4000
    schedule = Schedule("invsqrt", (d * warmup) ** -0.5, warmup, total=100_000)
    for update in (0, 1, 3998, 3999, 4000, 50_000):
        step = update + 1
        want = d**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert schedule(update) == pytest.approx(want, rel=1e-12)


def test_cosine_falls_from_the_end_of_the_warmup_to_the_floor():
    schedule = Schedule("cosine", 2.0, 100, total=1100, floor=0.1)
    assert schedule(0) == pytest.approx(0.02)
    assert schedule(49) == pytest.approx(1.0)
    assert schedule(100) == pytest.approx(2.0)
    assert schedule(600) == pytest.approx(2.0 * 0.55)
    assert schedule(850) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(0.75 * math.pi)) / 2))
    assert schedule(1100) == pytest.approx(0.2)
    assert schedule(2000) == pytest.approx(0.2), "constant beyond the end"


def test_linear_and_constant():
    linear = Schedule("linear", 1.0, 0, total=10)
    assert [linear(n) for n in (0, 5, 9, 10)] == pytest.approx([1, 0.5, 0.1, 0])
    constant = Schedule("constant", 3.0, 4)
    assert [constant(n, 0.0) for n in (0, 1, 3, 4, 1000)] == pytest.approx([0.75, 1.5, 3, 3, 3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_share_of_the_run_is_the_same_as_so_many_updates(name):
    by_share = Schedule(name, 1.0, 0.25, total=400)
    by_count = Schedule(name, 1.0, 100, total=400)
    assert [by_share(n) for n in range(400)] == pytest.approx([by_count(n) for n in range(400)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_by_time_follows_its_progress(name):
    by_time = Schedule(name, 1.0, 0.1, floor=0.05)
    by_count = Schedule(name, 1.0, 0.1, total=10_000, floor=0.05)
    for n in range(200, 10_000, 700):
        assert by_time(7, n / 10_000) == pytest.approx(by_count(n), rel=6e-3)
    assert by_time(0, 0.0) == pytest.approx(0.01), "the first update has a learning rate above zero"


def test_a_run_by_time_with_a_warmup_in_updates():
    schedule = Schedule("linear", 1.0, 10)
    assert schedule(4, 0.0) == pytest.approx(0.5)
    assert schedule(4, 0.5) == pytest.approx(0.25)
    assert schedule(50, 0.5) == pytest.approx(0.5)
    assert schedule(50, 1.0) == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_never_above_the_peak_nor_below_zero(name):
    for warmup in (1, 5, 20, 0.01, 0.99):
        schedule = Schedule(name, 0.5, warmup, total=20)
        assert all(0 <= schedule(n) <= 0.5 for n in range(25))
        assert max(schedule(n) for n in range(25)) > 0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "cosin"}, "name is 'cosin'; accepted: .*Did you mean 'cosine'"),
        ({"peak": float("nan")}, "peak is nan"),
        ({"peak": 0.0}, "peak is 0.0"),
        ({"peak": math.inf}, "peak is inf"),
        ({"floor": 1.5}, "floor is 1.5"),
        ({"warmup": -1}, "warmup is -1"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"warmup": float("nan")}, "warmup is nan"),
        ({"warmup": 101}, "warmup is 101; accepted: at most the run's 100 updates"),
        ({"name": "invsqrt", "warmup": 0}, "warmup is 0; accepted: above 0 for invsqrt"),
    ],
)
def test_refuses_by_name(settings, message):
    good = {"name": "cosine", "peak": 1.0, "warmup": 10, "total": 100}
    Schedule(**good)
    with pytest.raises(ConfigError, match=f"Schedule: {message}"):
        Schedule(**(good | settings))
