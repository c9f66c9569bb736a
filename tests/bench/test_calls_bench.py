"""bench calls: expressions equal ops, what is timed, loops, first calls, files, the command."""

import contextlib
import json
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import gpuattn
from gpuattn.bench import results, timing
from gpuattn.bench.calls import captured, cases, first, loops, measure, ops
from gpuattn.bench.calls.cases import COLD, CUPY, EAGER, GRAPH, HOST, WARM, WHOLE, Called
from gpuattn.bench.fused import cases as fused_cases
from gpuattn.bench.peers import calls as peers
from gpuattn.bench.train import measure as train
from gpuattn.cli.main import main
from gpuattn.errors import UnsupportedError

CEILINGS = {"copy_tbs": 4.0, "matmul_tflops": 800.0}
SMALL = {
    cell.op: cell.case
    for cell in reversed(cases.NUMPY_TABLE)
    if cell.op in cases.AXES and cell.case.timed == WHOLE
}


def cell_of(op, table=cases.NUMPY_TABLE, timed=WHOLE, direction="forward"):
    return next(
        cell for cell in table
        if (cell.op, cell.case.timed, cell.direction) == (op, timed, direction)
    )  # fmt: skip


# ---- cells --------------------------------------------------------------------------------------


def test_cases_survive_files():
    for cell in [*cases.TABLE, *cases.NUMPY_TABLE]:
        row = json.loads(json.dumps({"op": cell.op, "case": cell.case.as_dict()}))
        assert Called.from_row(row) == cell.case and cell.is_of(row | {"direction": cell.direction})


def test_every_op_has_a_call_an_expression_and_a_peer():
    assert cases.AXES.keys() == ops.CALLS.keys() == peers.CALLS.keys()
    assert {cell.op for cell in cases.TABLE} == {*cases.AXES, cases.LAYER, "train", "loop"}
    assert {cell.case.timed for cell in cases.TABLE} == {*cases.TIMED}


# ---- right results only -------------------------------------------------------------------------


@pytest.mark.parametrize("op", SMALL)
def test_an_op_is_its_expression(op):
    case = replace(SMALL[op], shape=tuple(min(n, 16) for n in SMALL[op].shape))
    inputs = ops.draw(case, np)
    calls, missing = measure.right_calls(case, np, inputs, False, ())
    assert list(calls) == ["ours", "bare"] and not missing
    if op not in cases.FORWARD_ONLY:
        calls, missing = measure.right_calls(case, np, inputs, True, ())
        assert list(calls) == ["ours"] and not missing


def test_a_gradient_is_part_of_the_call():
    case = SMALL["linear"]
    inputs = ops.draw(case, np)
    x, weight, bias = inputs
    own = ops.ours(case, inputs, True)
    for _ in range(2):  # gradients are those of one call
        y, dx, dweight, dbias = own.results()
        np.testing.assert_allclose(y, x @ weight.T + bias, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(dx, own.gradient @ weight, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(dweight, own.gradient.T @ x, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(dbias, own.gradient.sum(0), rtol=1e-3, atol=1e-3)


def test_a_wrong_result_gets_no_figure(monkeypatch):
    case, right = SMALL["relu"], ops.CALLS["relu"]
    inputs = ops.draw(case, np)
    wrong = right._replace(plain=lambda xp, x: xp.minimum(x, 0))
    monkeypatch.setitem(ops.CALLS, "relu", wrong)
    calls, missing = measure.right_calls(case, np, inputs, False, ())
    assert list(calls) == ["ours"] and "differs from ours in result 0" in missing["bare"]

    def op(x, impl=None):
        return np.maximum(x, 0) if impl else x

    op.prepare = right.op.prepare
    monkeypatch.setitem(ops.CALLS, "relu", right._replace(op=op))
    with pytest.raises(AssertionError, match=r"relu .* result 0: .* a wrong result is not timed"):
        measure.right_calls(case, np, inputs, False, ())


# ---- what is timed ------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that only ``clock.spend(seconds)`` moves."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return SimpleNamespace(spend=lambda seconds: now.__setitem__(0, now[0] + seconds))


def test_the_time_of_the_host_is_that_of_calls_nobody_waits_for(clock):
    made = []

    def call():
        made.append(True)
        clock.spend(1e-6)

    def wait():
        clock.spend(1e-3)

    host = measure.alternate({"ours": call}, wait, 32)["ours"]
    assert host == pytest.approx([1.0] * 24) and len(made) == 4 * (3 + 6 * 32)
    whole = measure.alternate({"ours": call, "peer": wait}, wait, None)
    assert whole["ours"] == pytest.approx([1001.0] * 24)
    assert whole["peer"] == pytest.approx([2000.0] * 24)


class Peer:
    """In place of PyTorch's call: the expression, without gradients."""

    def __init__(self, case, inputs, both, gradient):
        if both:
            raise ValueError("has no gradients here")
        self.call = ops.plain(case, inputs, np)
        self.results, self.run = self.call.results, self.call.run


@pytest.fixture
def card(monkeypatch):
    """NumPy as a module with the streams of CuPy; ``card.waits`` counts synchronizations."""
    xp, waits = ModuleType("cupy"), []

    class Stream:
        def __init__(self, non_blocking):
            assert non_blocking

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def synchronize(self):
            waits.append(True)

    xp.__getattr__ = lambda name: getattr(np, name)
    xp.cuda, xp.waits = SimpleNamespace(Stream=Stream), waits
    xp.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(measure, "Eager", Peer)
    monkeypatch.setattr(measure.peers, "on_stream", lambda stream: contextlib.nullcontext())
    return xp


def test_a_row_on_a_gpu(card):
    case = replace(SMALL["softmax"], timed=HOST)
    cell = cell_of("softmax", cases.TABLE, HOST)._replace(case=case)
    row = measure.measure(cell, card, CEILINGS, with_peers=True)
    assert {*row["peers"]} == {EAGER, CUPY} and "bare_us" not in row and not row["peers_missing"]
    assert row["us"] == timing.median(row["samples_us"]) and len(row["samples_us"]) == 24
    assert row["ratio_to_best_peer"] == min(row["peers"].values()) / row["us"]
    assert len(card.waits) == 3 * 4 * (1 + 6)  # of each turn: after warm-ups, after each sample
    card.waits.clear()
    whole = cell._replace(case=replace(case, timed=WHOLE), direction="forward+backward")
    row = measure.measure(whole._replace(peers=(EAGER,)), card, CEILINGS, with_peers=True)
    assert row["peers"] == {} and row["peers_missing"][EAGER].endswith("has no gradients here")
    assert len(card.waits) > 24


# ---- a captured layer ---------------------------------------------------------------------------


def test_a_captured_layer_is_timed_beside_a_graph_of_pytorch(monkeypatch):
    (cell,) = (cell for cell in cases.NUMPY_TABLE if cell.op == cases.LAYER)
    row = measure.measure(cell, np, CEILINGS)
    assert row["impl"] == "calls" and row["us"] > 0 and row["peers"] == {}

    class Theirs:
        def __init__(self, layer, x):
            with gpuattn.no_grad():
                self.y = layer(x).data

        def result(self):
            return self.y

    monkeypatch.setattr(captured, "GraphedLayer", Theirs)
    _, calls, missing = captured.calls(cell.case, np, [GRAPH])
    assert list(calls) == ["ours", GRAPH] and not missing
    monkeypatch.setattr(Theirs, "result", lambda self: 2 * self.y)
    _, calls, missing = captured.calls(cell.case, np, [GRAPH])
    assert list(calls) == ["ours"] and "differs from ours" in missing[GRAPH]


def test_a_wrong_replay_gets_no_figure(monkeypatch):
    def capture(layer):
        wrong = lambda x: layer(x + 1)  # noqa: E731
        wrong.graphs = 1
        return wrong

    monkeypatch.setattr(captured.gpuattn, "capture", capture)
    (case,) = (cell.case for cell in cases.NUMPY_TABLE if cell.op == cases.LAYER)
    with pytest.raises(AssertionError, match="a captured layer"):
        captured.calls(case, np, ())


# ---- loops --------------------------------------------------------------------------------------

LOOPS = [cell.case for cell in cases.NUMPY_TABLE if cell.direction == "step"]


@pytest.mark.parametrize("case", LOOPS, ids=lambda case: f"{case.op}-{case.model}")
def test_loops_learn(case):
    calls, missing = loops.updates(case, np, ())
    assert list(calls) == ["ours"] and not missing
    own = calls["ours"]
    assert train.losses_of(own, own) == train.losses_of(own, own)  # a restart undoes all updates


def test_a_loop_that_learns_otherwise_gets_no_figure(monkeypatch):
    class Theirs(loops.NetworkLoop):
        def __init__(self, weights, x, settings):
            super().__init__(LOOPS[-1], np)
            for name, parameter in self.network.named_parameters():
                parameter.data[...] = weights[name] * factor
            self._first = self.optimizer.state_dict()

    monkeypatch.setattr(loops, "EagerNetworkLoop", Theirs)
    factor = 1
    calls, missing = loops.updates(LOOPS[-1], np, [EAGER])
    assert list(calls) == ["ours", EAGER] and not missing
    factor = 2
    calls, missing = loops.updates(LOOPS[-1], np, [EAGER])
    assert list(calls) == ["ours"] and "the first loss is" in missing[EAGER]


# ---- first calls --------------------------------------------------------------------------------


def test_a_first_call_runs_in_a_new_process(monkeypatch):
    monkeypatch.setattr(first, "SAMPLES", 1)
    case = replace(SMALL["gelu"], timed=COLD)
    (times,) = first.times(case, np, ())[0].values()
    assert len(times) == 1 and times[0] > 0
    with pytest.raises(UnsupportedError, match="in a new process: KeyError: 'none'"):
        first.times(replace(case, op="none"), np, ())


def test_caches_are_empty_or_filled_by_a_process_before(monkeypatch):
    asked = []

    def process(name, case, xp, caches):
        asked.append((name, caches["GPUATTN_CACHE_DIR"], caches["CUPY_CACHE_DIR"]))
        return float(len(asked))

    monkeypatch.setattr(first, "_in_process", process)
    found, _ = first.times(replace(SMALL["gelu"], timed=COLD), np, ())
    assert found["ours"] == [1, 2, 3, 4, 5] and len(set(asked)) == 5
    asked.clear()
    found, _ = first.times(replace(SMALL["gelu"], timed=WARM), np, [CUPY])
    assert found == {"ours": [2, 3, 4, 5, 6], CUPY: [8, 9, 10, 11, 12]}
    assert len(set(asked)) == 2 and asked[0] == asked[5]


# ---- files and pictures -------------------------------------------------------------------------


def row_of(cell):
    row = {"op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction}
    row |= {"impl": "raw-simt", "us": 10.0, "samples_us": [10.0] * 24}
    row |= {"peers": dict.fromkeys(cell.peers, 12.0), "peers_missing": {}}
    return results.rated(row, CEILINGS)


def test_calls_have_a_ratio_and_no_rates():
    row = row_of(cases.TABLE[0])
    assert row["ratio_to_best_peer"] == pytest.approx(1.2) and "tflops" not in row


def test_calls_and_the_table_of_their_op_are_required_apart():
    rows = [row_of(cell) for cell in cases.TABLE if cell.op == "softmax"]
    assert results.absent(rows) == []
    (lack,) = results.absent(rows[:-1])
    assert lack == "softmax (256, 512) 256x512, first-warm forward: no row"
    fused = [cell for cell in fused_cases.TABLES["softmax"] if cell.peers]
    table = [results.rated(row_of(cell), CEILINGS) for cell in fused]
    assert all("first" not in lack and "host" not in lack for lack in results.absent(table))


def test_pictures(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gpuattn.bench.charts import _smallest, draw_calls

    pyplot.switch_backend("agg")
    rows = [row_of(cell) for cell in cases.TABLE]
    document = {"gpu": "H200", "date": "2026-11-23", "ceilings": CEILINGS, "rows": rows}
    draw_calls(pyplot, document, tmp_path / "calls.png")
    assert (tmp_path / "calls.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    shown = _smallest(rows[::-1], "forward", HOST)
    assert {tuple(row["case"]["shape"]) for row in shown if row["op"] == "gelu"} == {(256, 512)}


# ---- the command --------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "calls", *map(str, arguments)])


def test_numpy_is_shown_beside_the_bare_expression(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "ceilings", lambda xp: CEILINGS)
    path = tmp_path / "rows.json"
    options = ["relu", "--device", "numpy", "--timed", "end-to-end", "--json", path]
    result = call(*options)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert ["bare_us" in row for row in rows] == [True, False, True, False]
    assert f"{rows[0]['us'] - rows[0]['bare_us']:+.1f}" in result.stdout
    again = call(*options, "--missing")
    assert again.exit_code == 0 and json.loads(path.read_text())["rows"] == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sofmax"], "Did you mean 'softmax'?"),
        (["--timed", "hot"], "'hot' is not one of"),
        (["softmax", "--device", "numpy", "--timed", "host"], "no cell of the table is like that"),
        (["softmax", "--missing"], "--missing needs the file"),
    ],
)
def test_wrong_usage(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
