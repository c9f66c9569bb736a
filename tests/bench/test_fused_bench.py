"""bench fused: bytes of cells, wrong results refused, peers or reasons, files, the command."""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.bench import comparison, results, roofline, timing
from gpuattn.bench.cases import Cell
from gpuattn.bench.fused import cases as fused_cases
from gpuattn.bench.fused import measure as fused
from gpuattn.bench.fused.cases import Fused
from gpuattn.bench.peers import precompile
from gpuattn.bench.peers import timing as peers
from gpuattn.bench.peers.fused import Call
from gpuattn.cli.bench import fused as command
from gpuattn.cli.main import main
from gpuattn.errors import UnsupportedError

CEILINGS = {"copy_tbs": 4.0, "matmul_tflops": 800.0}
NAMES = {"torch", "torch-compile", "torch-fused", "quack", "liger"}
SMALL = [
    *fused_cases.SMALL,
    *[
        Cell(case.op, case, direction, ())
        for case in (
            Fused("dropout_add_norm", (64, 256), "float32", dropout=0.1),
            Fused("dropout_add_norm", (64, 256), "float32", rms=True),
            Fused("cross_entropy", (64, 1000), "float32", smoothing=0.1),
            Fused("gelu", (64, 256), "float32"),
            Fused("topk_logprobs", (8, 1000), "float32"),
        )
        for direction in fused_cases.FLOPS[case.op]
    ],
]


def name_of(cell):
    return f"{cell.op} {cell.case} {cell.direction}"


# ---- cells --------------------------------------------------------------------------------------


def test_the_tables_are_complete():
    required = fused_cases.REQUIRED
    assert len({str(cell) for cell in required}) == len(required)
    assert {name for cell in required for name in cell.peers} == NAMES
    assert set(fused_cases.TABLES) == {cell.op for cell in fused_cases.SMALL}
    assert {cell.op for cell in roofline.CELLS} >= set(fused_cases.TABLES)
    shapes = {cell.case.shape for cell in required if cell.op == "softmax"}
    assert shapes == {(32768, n) for n in (256, 512, 768, 1024, 4096)} | {(16384, 8192)}
    for cell in (*required, *SMALL, *roofline.CELLS):
        as_read = json.loads(json.dumps(cell.case.as_dict()))
        assert results.case_of({"op": cell.op, "case": as_read}) == cell.case
        assert cell.case.bytes(cell.direction) > 0
        assert cell.case.flops(cell.direction) > 0


def test_bytes_as_the_field_counts_them():
    rows = Fused("layer_norm", (32768, 1024))
    assert rows.bytes("forward") == 2 * 2 * 32768 * 1024
    assert rows.bytes("backward") == 3 * 2 * 32768 * 1024
    assert Fused("adamw", (1280,)).bytes("step") == 30 * 1280
    assert Fused("beam_step", (8, 4, 100)).bytes("forward") == 2 * 3200
    kept, dropped = (Fused("dropout_add_norm", (8, 64), dropout=p) for p in (0.0, 0.1))
    assert (kept.bytes("backward"), dropped.bytes("backward")) == (4 * 1024, 5 * 1024)
    words = Fused("embedding", (8192, 32768, 512))
    used = len(np.unique(fused_cases.zipf_tokens(8192, 32768)))
    assert words.bytes("forward") == (8192 + used) * 1024
    assert words.bytes("backward") == (8192 + 32768) * 1024


def test_token_frequencies_fall_as_words_do():
    counts = np.bincount(fused_cases.zipf_tokens(200_000, 1000))
    assert counts[0] / counts[9] == pytest.approx(10**fused_cases.ZIPF, rel=0.1)


# ---- correctness first --------------------------------------------------------------------------


@pytest.mark.parametrize("cell", SMALL, ids=name_of)
def test_right_results_pass_and_wrong_ones_get_no_figure(cell):
    ours = fused.Ours(cell.case, cell.direction, np)
    inputs, douts = ours.draw(0)
    call = ours.call(ours.choose(inputs), inputs, douts)
    ours.check(call(), inputs, douts)
    if ours.edits:
        ours.restart([(inputs, douts)])
        ours.check(call(), inputs, douts)
    for i, result in enumerate(got := call()):
        if result.dtype.kind != "f" or ours.edits:
            continue
        wrong = [x * np.float32(1.1) if i == j else x for j, x in enumerate(got)]
        with pytest.raises(AssertionError, match="error .* is not timed"):
            ours.check(wrong, inputs, douts)


def test_a_beam_that_names_the_wrong_token_is_found():
    cell = next(cell for cell in SMALL if cell.op == "beam_step")
    ours = fused.Ours(cell.case, cell.direction, np)
    inputs, _ = ours.draw(0)
    best, parents, tokens = ours.call(ours.choose(inputs), inputs, None)()
    with pytest.raises(AssertionError, match="result 1: error"):
        ours.check([best, parents, tokens ^ 1], inputs, None)


def test_an_update_that_does_nothing_is_found():
    cell = next(cell for cell in SMALL if cell.op == "adamw")
    ours = fused.Ours(cell.case, cell.direction, np)
    (params, _, momentum, squares, *_), _ = ours.draw(0)
    with pytest.raises(AssertionError, match="error"):
        ours.check([params, momentum, squares], None, None)


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_missing_peer_has_a_reason(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    peers.torch_here.cache_clear()
    case = Fused("softmax", (8, 8))
    with pytest.raises(UnsupportedError, match="PyTorch cannot be imported"):
        peers.capture(name, lambda *arrays: Call(name, case, "forward", *arrays), [((), None)])
    peers.torch_here.cache_clear()


def test_a_peer_has_so_many_seconds(monkeypatch):
    monkeypatch.setitem(peers.COMPILE_SECONDS, "slow", 0.05)
    with pytest.raises(UnsupportedError, match="TimeoutError: not compiled after 0 s"):
        peers.capture("slow", lambda: time.sleep(5), [()])
    with pytest.raises(UnsupportedError, match="to compile in one run is used up"):
        peers.capture("slow", lambda: time.sleep(5), [()])


def test_without_pytorch_nothing_is_compiled_ahead(monkeypatch):
    monkeypatch.setattr(precompile.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    precompile.compile_ahead(fused_cases.REQUIRED)


SHOWN = ("softmax", "layer_norm", "cross_entropy", "embedding", "adamw", "beam_step")


@pytest.mark.gpu
@pytest.mark.parametrize("op", SHOWN)
def test_graphs_beside_peers(gpu, monkeypatch, op):
    monkeypatch.setattr(timing, "REST", 0)
    for cell in (cell for cell in fused_cases.SMALL if cell.op == op):
        case = replace(cell.case, dtype="bfloat16")
        monkeypatch.setattr(comparison, "INPUT_BYTES", 3 * case.set_bytes())
        cell = cell._replace(case=case, peers=("torch", "quack", "liger"))
        row = comparison.measure(cell, gpu, CEILINGS, with_peers=True)
        assert all(
            len(part) >= 20 for part in (row["samples_us"], *row["peer_samples_us"].values())
        )
        assert {*row["peers"], *row["peers_missing"]} == set(cell.peers)
        assert all(row["peers_missing"].values())
        assert "differs from ours" not in str(row["peers_missing"])


# ---- files --------------------------------------------------------------------------------------


def row_of(cell, us=100.0, peer=110.0):
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction,
        "impl": cell.impl or "raw-simt", "us": us, "samples_us": [us] * 20,
        "peers": dict.fromkeys(cell.peers, peer), "peers_missing": {},
        "peer_samples_us": {name: [peer] * 20 for name in cell.peers},
    }  # fmt: skip
    return results.rated(row | ({"asked": cell.impl} if cell.impl else {}), CEILINGS)


def document_of(rows):
    return {"gpu": "one", "commit": "c", "digest": "d", "date": "today", "ceilings": CEILINGS,
            "command": "gpuattn bench fused", "rows": rows}  # fmt: skip


def test_a_row_is_rated_by_what_it_moves():
    row = row_of(fused_cases.TABLES["softmax"][0], us=10.0, peer=9.0)
    assert row["gbs"] == pytest.approx(4 * 32768 * 256 / 10 / 1e3)
    assert row["ceiling_share"] == pytest.approx(row["gbs"] / 4000)
    assert row["ratio_to_best_peer"] == pytest.approx(0.9)


def test_what_is_absent_is_named(tmp_path):
    rows = [row_of(cell) for cell in fused_cases.REQUIRED]
    assert results.absent(rows) == []
    for i, cell in enumerate(fused_cases.TABLES["softmax"]):
        assert len(results.absent(rows[:i] + rows[i + 1 :])) == 1, cell
        assert results.holds(rows, cell, with_peers=True)
        assert not results.holds(rows[:i] + rows[i + 1 :], cell, with_peers=True)
    written = results.write(tmp_path / "rows.json", document_of(rows))
    again = results.write(tmp_path / "rows.json", document_of(rows[::-1]))
    assert len(written["rows"]) == len(again["rows"]) == len(rows)


def test_the_verdict_counts_cells_with_peers():
    table = fused_cases.TABLES["softmax"]
    said = results.verdict([row_of(cell) for cell in table], table)
    assert said == "ahead in 12 of 12 cells, geometric mean 1.10 (forward 1.10, backward 1.10)"


def test_pictures(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gpuattn.bench.charts import draw_roofline, draw_shares

    pyplot.switch_backend("agg")
    rows = [row_of(cell) for cell in fused_cases.REQUIRED]
    del rows[0]["peers"]["quack"]
    draw_shares(pyplot, document_of(rows), tmp_path / "shares.png")
    draw_roofline(pyplot, document_of([row_of(c) for c in roofline.CELLS]), tmp_path / "roof.png")
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ---- the command --------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_numpy_runs_every_table(tmp_path):
    path = tmp_path / "rows.json"
    result = call("fused", "--device", "numpy", "--json", path)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["op"] for row in rows] == [cell.op for cell in fused_cases.SMALL]
    assert all(row["impl"] == "reference" and row["us"] > 0 for row in rows)
    again = call("fused", "--device", "numpy", "--json", path, "--missing")
    assert again.exit_code == 0, again.stderr
    assert json.loads(path.read_text())["rows"] == rows


def test_one_cell_that_fails_is_a_line(tmp_path, monkeypatch):
    measure = comparison.measure

    def fails(cell, *arguments):
        if cell.op == "embedding":
            raise ValueError("broken")
        return measure(cell, *arguments)

    monkeypatch.setattr(comparison, "measure", fails)
    path = tmp_path / "rows.json"
    result = call("fused", "embedding", "rms_norm", "--device", "numpy", "--json", path)
    assert result.exit_code == 1
    assert result.stderr.count("ValueError: broken") >= 2
    assert "rms_norm (rows x columns)" in result.stdout
    assert {row["op"] for row in json.loads(path.read_text())["rows"]} == {"rms_norm"}


def test_tables_show_peers(capsys):
    rows = [row_of(cell) for cell in fused_cases.TABLES["cross_entropy"]]
    rows[0] |= {"outside_graphs": ["liger"], "peers_missing": {"quack": "not [here]"}}
    del rows[0]["peers"]["quack"]
    command._show(rows, CEILINGS)
    shown = capsys.readouterr().out
    assert "110.0*" in shown
    assert "* with the host" in shown
    assert "without quack: not [here]" in shown


def test_the_roofline_has_every_op(tmp_path):
    pytest.importorskip("matplotlib.pyplot")
    path = tmp_path / "roof.png"
    result = call("roofline", "--device", "numpy", "--plot", path)
    assert result.exit_code == 0, result.stderr
    assert all(op in result.stdout for op in fused_cases.TABLES)
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fused", "softmax", "linear"], "'linear' is not one of"),
        (["roofline", "--peers"], "No such option"),
        (["ops", "--plot", "x.png"], "No such option"),
        (["fused", "softmax", "layer_norm", "--shape", "8x8"], "--shape is for one op"),
        (["fused", "beam_step", "--shape", "8x8"], "a shape of sentences x beams x vocabulary"),
        (["fused", "softmax", "--device", "numpy", "--missing"], "--missing needs the file"),
    ],
)
def test_wrong_usage(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
