"""The cost model of many GPUs: what was measured comes out again, and the rest moves as it must."""

import itertools
import json

import pytest
from click.testing import CliRunner

from gpuattn.bench import scale
from gpuattn.cli.main import main

GPT2 = scale.Job(124.4e6, 18.4, 0.93)
MODELS = {  # parameters, ms of a step, of its update
    "gpt2": GPT2, "base": scale.Job(61e6, 7.8, 0.46), "big": scale.Job(210e6, 20.8, 1.57),
    "letters": scale.Job(10.5e6, 2.5, 0.08),
}  # fmt: skip


@pytest.mark.parametrize("name", scale.MEASURED)
def test_what_was_measured_comes_out_again(name):
    for mib, us in scale.MEASURED[name]:
        assert scale.inside(scale.Machine(), name, mib * scale.MIB, 2) == pytest.approx(us)
    assert scale.inside(scale.Machine(), name, 1e8, 1) == 0


def test_between_sizes_and_beyond_them_times_rise():
    sizes = [2**n for n in range(10, 34)]
    for name, ranks in itertools.product(scale.MEASURED, (2, 3, 8)):
        times = [scale.inside(scale.Machine(), name, size, ranks) for size in sizes]
        assert times == sorted(times)
    two, eight = (scale.inside(scale.Machine(), "all_reduce", 2**28, n) for n in (2, 8))
    assert 1.5 * two < eight < 2 * two  # (n - 1) / n of the bytes, from a half to 7 / 8


def test_a_world_of_one_is_the_step_of_one():
    for strategy in scale.STRATEGIES:
        found = scale.predict(GPT2, scale.Machine(), 1, strategy)
        assert found.step == GPT2.step and found.efficiency == 1 and found.wire == 0


@pytest.mark.parametrize("name, at_two", [
    ("gpt2", (0.95, 0.965)), ("base", (0.945, 0.965)), ("big", (0.93, 0.95)),
    ("letters", (0.955, 0.975)),
])  # fmt: skip
def test_two_gpus_lie_where_the_limits_of_an_all_reduce_say(name, at_two):
    job, machine = MODELS[name], scale.Machine()
    low, high = at_two
    assert low <= scale.predict(job, machine, 2, "all-reduce").efficiency <= high
    shared = scale.predict(job, machine, 2, "node")
    assert shared.step - shared.wire == pytest.approx(job.step - job.update / 2)
    assert shared.state == 11 and scale.predict(job, machine, 2, "all-reduce").state == 16


@pytest.mark.parametrize("name, at_two", [
    ("gpt2", (0.98, 1.0)), ("base", (0.975, 1.0)), ("big", (0.98, 1.0)),
    ("letters", (0.965, 0.985)),
])  # fmt: skip
def test_two_gpus_overlapped_lie_where_the_limits_say(name, at_two):
    job, machine = MODELS[name], scale.Machine()
    shared = scale.predict(job, machine, 2, "node")
    assert at_two[0] <= shared.overlapped_efficiency <= at_two[1]
    assert (shared.overlapped < shared.step) == (name != "letters")  # which has one bucket
    whole = scale.predict(job, machine, 2, "all-reduce")
    assert whole.overlapped <= whole.step


def test_what_an_overlapped_step_exposes():
    job = scale.Job(1e9, 40.0, 10.0)  # 20 ms of backward pass
    assert scale._exposed(job, 0.5, 10) == pytest.approx(0.5 + 0.1 * 4.5)  # the last bucket
    assert scale._exposed(job, 4.0, 10) == pytest.approx(2 + 40 - 20 + 0.1 * 18)  # a slow wire
    assert scale._exposed(job, 3.0, 1) == pytest.approx(3.0)


def test_many_hosts_break_what_is_flat_and_not_what_shares_inside_a_host():
    rows = {(r.world, r.strategy): r for r in scale.table(GPT2, scale.Machine(), 1024)}
    assert rows[1024, "flat"].efficiency < 0.8 < 0.85 < rows[1024, "node"].efficiency
    for strategy in scale.STRATEGIES:
        of = [row.efficiency for (_, name), row in rows.items() if name == strategy]
        assert of == sorted(of, reverse=True)
    slow = scale.Machine(port=1.0)  # 10 Gbit/s
    assert scale.predict(GPT2, slow, 16, "node").efficiency < 0.5
    assert scale.breaks(scale.table(GPT2, slow, 64), 0.9) == 16
    assert scale.breaks(list(rows.values()), 0.5) is None


def test_worlds():
    assert list(scale.worlds(64, 8)) == [1, 2, 4, 8, 16, 32, 64]
    assert list(scale.worlds(20, 6)) == [1, 2, 4, 6, 12]
    assert list(scale.worlds(2, 8)) == [1, 2]


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "scale", *map(str, arguments)])


def test_the_command_says_what_is_measured_and_what_is_not(tmp_path):
    given = ("--parameters", "124M", "--step", "18.4")
    text = call(*given, "--world", 16)
    assert text.exit_code == 0 and "Predicted. Measured are the step of one GPU" in text.stdout
    assert "16" in text.stdout and "assumed are" in text.stdout
    found = json.loads(call(*given, "--world", 16, "--json").stdout)
    assert [row["world"] for row in found["predictions"]][::3] == [1, 2, 4, 8, 16]
    slow = tmp_path / "wire.json"
    table = {name: [[1, 1000], [256, 100_000]] for name in scale.MEASURED} | {"ranks": 2}
    slow.write_text(json.dumps(table))
    found = json.loads(call(*given, "--world", 2, "--wire", slow, "--json").stdout)
    assert found["breaks"] == 2


def test_what_is_no_wire_or_no_step_is_refused(tmp_path):
    wrong = tmp_path / "wire.json"
    for text in (
        "",
        "{}",
        '{"ranks": 1}',
        json.dumps({n: [[2, 1], [1, 2]] for n in scale.MEASURED} | {"ranks": 2}),
    ):
        wrong.write_text(text)
        result = call("--parameters", "1M", "--step", "1", "--wire", wrong)
        assert result.exit_code == 2 and "is no table of collectives; accepted" in result.stderr
    result = call("--parameters", "124M", "--step", "0.5")
    assert result.exit_code == 2 and "accepted: less than --step, 0.5 ms" in result.stderr
