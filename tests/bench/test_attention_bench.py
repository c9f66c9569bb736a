"""bench attention: FLOPs of cells, wrong results refused, peers or reasons, files, the command."""

import functools
import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.bench import cases, comparison, correctness, results, timing
from gpuattn.bench.cases import Attention, Cell
from gpuattn.bench.peers import attention
from gpuattn.bench.peers import timing as peers
from gpuattn.cli.bench import attention as command
from gpuattn.cli.main import main
from gpuattn.errors import ConfigError, UnsupportedError

CEILINGS = {"copy_tbs": 4.0, "matmul_tflops": 800.0}
KINDS = {
    "causal": Attention((1, 64, 2, 64), causal=True),
    "window": Attention((1, 128, 2, 64), causal=True, window=16),
    "groups": Attention((2, 64, 4, 64), kv_heads=2),
    "dropout": Attention((2, 64, 2, 64), dropout=0.1),
    "bias": Attention((2, 64, 2, 64), bias=True),
    "captions": Attention((1, 128, 2, 64), captions=True),
}
DECODING = Attention((8, 1, 8, 64), kv_heads=2, keys=96)


# ---- cells --------------------------------------------------------------------------------------


def test_the_table_is_the_fields():
    assert len({str(cell) for cell in cases.TABLE}) == len(cases.TABLE) == 48
    for cell in cases.TABLE:
        batch, tokens, heads, head_dim = cell.case.shape
        assert batch * tokens == 16384
        assert heads * head_dim == 2048
    assert {cell.direction for cell in cases.TABLE} == {"forward", "backward"}
    assert set(cases.TABLE) < set(cases.REQUIRED)
    assert {name for cell in cases.REQUIRED for name in cell.peers} <= set(attention.PEERS)


@pytest.mark.parametrize("cell", cases.REQUIRED + cases.PUBLISHED, ids=str)
def test_a_case_survives_json(cell):
    assert Attention.from_dict(json.loads(json.dumps(cell.case.as_dict()))) == cell.case


@pytest.mark.parametrize("window", [0, 3, 63, 64, 100])
def test_pairs_in_a_window(window):
    i, j = np.mgrid[:64, :64]
    seen = ((j <= i) & (i - j <= window)).sum()
    case = Attention((3, 64, 1, 8), causal=True, window=window)
    assert case.pairs() == 3 * (64 * 64 / 2 if window >= 64 else seen)


def test_flops_and_bytes_as_the_field_counts_them():
    full, causal = (Attention((1, 16384, 16, 128), causal=causal) for causal in (False, True))
    assert full.flops("forward") == 4 * 16384**2 * 16 * 128
    assert causal.flops("backward") == 2.5 * full.flops("forward") / 2
    assert full.bytes("forward") == 4 * 16384 * 2048 * 2
    assert full.bytes("backward") == 8 * 16384 * 2048 * 2
    grouped = Attention((4, 4096, 32, 128), kv_heads=8)
    assert grouped.bytes("forward") == 2 * 16384 * (32 + 8) * 128 * 2
    biased = Attention((4, 4096, 16, 128), bias=True)
    assert biased.bytes("forward") == 4 * 16384 * 2048 * 2 + 16 * 4096**2 * 2

    decoding = Attention((64, 1, 32, 128), kv_heads=8, keys=8192)
    assert decoding.flops("forward") == 4 * 64 * 32 * 128 * 8192
    assert decoding.bytes("forward") == 2 * 64 * (32 + 8 * 8192) * 128 * 2


def test_captions_fill_the_tokens():
    lengths = cases.caption_lengths(8192)
    assert sum(lengths) == 8192
    assert 1 <= lengths[-1] <= 41
    assert set(lengths[:-1]) <= set(range(5, 42))
    drawn = sum(n * count for n, count in enumerate(cases.CAPTIONS, 5)) / sum(cases.CAPTIONS)
    assert np.mean(lengths) == pytest.approx(drawn, rel=0.01)
    assert sum(cases.CAPTIONS) == 29000


# ---- correctness first --------------------------------------------------------------------------


PROBLEMS = [
    *[Cell("flash_attention", case, "forward", ()) for case in KINDS.values()],
    *[Cell("flash_attention", case, "backward", ()) for case in KINDS.values()],
    Cell("decode_attention", DECODING, "forward", ()),
]


@pytest.mark.parametrize("cell", PROBLEMS, ids=lambda cell: f"{cell.case}-{cell.direction}")
def test_right_results_pass_and_wrong_ones_get_no_figure(cell):
    ours = comparison.KINDS[cell.op][0](cell.case, cell.direction, np)
    inputs, dout = ours.draw(0)
    call = ours.call(ours.choose(inputs), inputs, dout)
    ours.check(call(), inputs, dout)
    for i in range(len(call())):
        wrong = call()
        wrong[i][...] *= 1.1  # views of all heads
        with pytest.raises(AssertionError, match=f"result {i}: error .* is not timed"):
            ours.check(wrong, inputs, dout)


def test_one_wrong_tile_does_not_drown():
    want = np.ones((1, 16384, 1, 64))
    got = want.copy()
    got[0, 640:704] = 0
    with pytest.raises(AssertionError, match="error 1;"):
        correctness.compare(got, want, 3e-2, "out")
    got[0, 640:704] = np.nan
    with pytest.raises(AssertionError, match="error nan"):
        correctness.compare(got, want, 3e-2, "out")


def test_rounding_of_almost_nothing_is_no_error(rng):
    """dq of a query that sees one key is 0 with rounding errors that differ between libraries."""
    want = rng.standard_normal((4, correctness.BLOCK)).astype("f4")
    want[0] *= 1e-3
    got = want.copy()
    got[0] = -want[0]
    correctness.compare(got, want, 3e-2, "dq")
    got[0] *= 50
    with pytest.raises(AssertionError, match="dq: error 0.5"):
        correctness.compare(got, want, 3e-2, "dq")


# ---- peers --------------------------------------------------------------------------------------


def capture(name, kind):
    make = functools.partial(attention.Call, name, KINDS[kind], "forward")
    return peers.capture(name, make, [((None,) * 9, None)])


@pytest.mark.parametrize("name", attention.PEERS)
def test_a_missing_peer_has_a_reason(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    peers.torch_here.cache_clear()
    with pytest.raises(UnsupportedError, match="PyTorch cannot be imported"):
        capture(name, "causal")
    peers.torch_here.cache_clear()


def test_a_peer_that_lacks_a_feature_is_not_timed_without_it():
    for name, kind in (("flash-attn-4", "dropout"), ("torch-cudnn", "window")):
        with pytest.raises(UnsupportedError, match=f"{name} does not support {kind}"):
            capture(name, kind)
    for cell in cases.REQUIRED:
        for name in cell.peers:
            assert cell.case.features().keys() <= attention.PEERS[name][1]


@pytest.mark.gpu
@pytest.mark.parametrize("cell", PROBLEMS, ids=lambda cell: f"{cell.case}-{cell.direction}")
def test_graphs_beside_peers(gpu, monkeypatch, cell):
    monkeypatch.setattr(timing, "REST", 0)
    monkeypatch.setattr(comparison, "INPUT_BYTES", 1e6)
    cell = cell._replace(peers=("torch-fa2", "torch-varlen", "flash-attn-4"))
    row = comparison.measure(cell, gpu, CEILINGS, with_peers=True)
    assert all(len(part) >= 20 for part in (row["samples_us"], *row["peer_samples_us"].values()))
    assert {*row["peers"], *row["peers_missing"]} == set(cell.peers)
    assert all(row["peers_missing"].values())
    assert ("plain_us" in row) == (cell.case.plain() is not None)


# ---- files --------------------------------------------------------------------------------------


def row_of(cell, us=100.0, peer=110.0, impl="raw-hopper"):
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction, "impl": impl,
        "us": us, "samples_us": [us] * 20, "peers": dict.fromkeys(cell.peers, peer),
        "peer_samples_us": {name: [peer] * 20 for name in cell.peers}, "peers_missing": {},
    }  # fmt: skip
    return results.rated(row, CEILINGS)


def document_of(rows, **changes):
    return {
        "gpu": "one", "commit": "c", "digest": "d", "command": "gpuattn bench attention",
        "ceilings": CEILINGS, "rows": rows, **changes,
    }  # fmt: skip


def test_a_row_is_rated():
    row = row_of(cases.TABLE[0], 1000.0, 900.0)
    assert row["tflops"] == pytest.approx(cases.TABLE[0].case.flops("forward") / 1e9)
    assert row["ceiling_share"] == pytest.approx(row["tflops"] / 800)
    assert row["ratio_to_best_peer"] == pytest.approx(0.9)
    row["peers"]["torch-cudnn"] = results.OUT_OF_MEMORY
    assert results.rated(row, CEILINGS)["ratio_to_best_peer"] == pytest.approx(0.9)
    assert results.rated(row | {"peers": {}}, CEILINGS)["ratio_to_best_peer"] is None


def test_runs_share_a_file(tmp_path):
    path, (first, second) = tmp_path / "r.json", cases.TABLE[:2]
    results.write(path, document_of([row_of(first), row_of(second)]))
    higher = {"copy_tbs": 3.0, "matmul_tflops": 1000.0}
    newer = document_of(
        [row_of(second, us=50.0, impl="raw-simt")], ceilings=higher, command="again"
    )
    written = results.write(path, newer)
    assert json.loads(path.read_text()) == written
    assert [row["us"] for row in written["rows"]] == [100.0, 50.0]
    assert written["ceilings"] == {"copy_tbs": 4.0, "matmul_tflops": 1000.0}
    shares = [row["ceiling_share"] for row in written["rows"]]
    assert shares == [row["tflops"] / 1000 for row in written["rows"]]
    assert written["command"] == "gpuattn bench attention && again"
    assert path.read_text().count("\n") < 200, "samples stand on one line"
    with pytest.raises(ConfigError, match="holds results of commit c, these are of x"):
        results.write(path, document_of([], commit="x"))


def test_rows_of_ops_stay_as_they_are(tmp_path):
    path, row = tmp_path / "r.json", {"op": "softmax", "case": {"shape": [8, 8]}, "us": 1.0}
    row |= {"direction": "forward", "impl": "reference", "peers": {}, "peers_missing": {}}
    for _ in range(2):
        results.write(path, document_of([row]))
    results.write(path, document_of([row_of(cases.TABLE[0])]))
    assert json.loads(path.read_text())["rows"][0] == row


def test_what_is_absent_is_named():
    rows = [row_of(cell) for cell in cases.REQUIRED]
    assert results.absent(rows) == []
    assert results.absent([]) == results.absent([{"op": "softmax", "peers": {}}]) == []
    assert len(results.absent(rows[1:])) == 1
    del rows[3]["peers"]["flash-attn-4"]
    assert results.absent(rows)[0].endswith("forward: neither flash-attn-4 nor why")
    rows[3]["peers_missing"]["flash-attn-4"] = ""
    assert len(results.absent(rows)) == 1
    rows[3]["peers_missing"]["flash-attn-4"] = "not installed"
    assert results.absent(rows) == []


def test_the_verdict_counts_the_table():
    rows = [row_of(cell) for cell in cases.REQUIRED]
    rows[0] = row_of(cases.TABLE[0], peer=99.0)
    assert results.verdict(rows, cases.TABLE).startswith(
        "ahead in 47 of 48 cells, geometric mean 1.10"
    )
    assert "2 measured cells" in results.verdict(rows[:2], cases.TABLE)
    assert "no cell" in results.verdict([], cases.TABLE)


# ---- times --------------------------------------------------------------------------------------


class Clock:
    """A fake of a GPU and of ``time``, whose launches take given times."""

    def __init__(self):
        self.now, self.cuda, clock = 0.0, self, self

        class Event:
            def record(self):
                self.at = clock.now

            def synchronize(self):
                pass

        self.Event = Event

    def get_elapsed_time(self, begin, end):
        return (end.at - begin.at) * 1e3

    def sleep(self, seconds):
        self.now += seconds

    def launch(self, seconds):
        return lambda: self.sleep(seconds)


def test_the_longer_a_launch_the_fewer_samples(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "import_cupy", lambda: clock)
    monkeypatch.setattr(timing, "time", clock)
    lengths = {"short": 1e-4, "middle": 4e-3, "long": 0.3}
    times = timing.alternate({name: clock.launch(length) for name, length in lengths.items()})
    assert {name: len(samples) for name, samples in times.items()} == {
        "short": timing.TURNS * timing.MOST, "middle": timing.TURNS * 7, "long": 20,
    }  # fmt: skip
    for name, length in lengths.items():
        assert times[name] == pytest.approx([length * 1e6] * len(times[name]))
    assert clock.now < 21 * 0.3 + 1.5


# ---- the command --------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_numpy_runs_a_small_table(tmp_path):
    path = tmp_path / "rows.json"
    options = ["--device", "numpy", "--peers", "--head-dim", 64, "--causal", "--json", path]
    result = call("attention", *options)
    assert result.exit_code == 0, result.stderr
    assert "No GPU: NumPy on small float32 problems, without peers" in result.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["us"] == timing.median(row["samples_us"]) > 0
        assert row["impl"] == "reference"
        assert row["peers"] == row["peers_missing"] == {}


def test_another_dtype(tmp_path):
    path = tmp_path / "rows.json"
    options = ["--device", "numpy", "--head-dim", 64, "--causal", "--only", "forward"]
    result = call("attention", *options, "--dtype", "float64", "--json", path)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"]["dtype"] == "float64"
    cell = cases.TABLE[0]
    assert command._in_dtype(cell, None) is cell
    assert command._in_dtype(cell, "float16").peers == cell.peers
    single = command._in_dtype(cell, "float32")
    assert (single.case.dtype, single.peers) == ("float32", ("torch-efficient",))
    assert set(single.peers) <= set(attention.PEERS)


def samples_in(path):
    return [row["samples_us"] for row in json.loads(path.read_text())["rows"]]


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    path, measure, cells = tmp_path / "rows.json", comparison.measure, []

    def cut_off(cell, *arguments):
        cells.append(cell)
        if len(cells) == 3:
            raise KeyboardInterrupt
        return measure(cell, *arguments)

    monkeypatch.setattr(comparison, "measure", cut_off)
    options = ["attention", "--device", "numpy", "--head-dim", 64, "--json", path]
    assert call(*options).exit_code != 0
    first = samples_in(path)
    assert len(first) == 2
    result = call(*options, "--missing")
    assert result.exit_code == 0, result.stderr
    every = samples_in(path)
    assert (len(cells), len(every), every[:2]) == (3 + 2, 4, first)
    assert call(*options, "--missing").exit_code == 0
    assert len(cells) == 3 + 2


def test_a_file_of_another_commit_is_refused_at_once(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(document_of([], gpu=None)))
    monkeypatch.setattr(comparison, "measure", None)
    result = call("attention", "--device", "numpy", "--json", path)
    assert result.exit_code == 2
    assert "holds results of commit c" in result.stderr


def test_tables_show_peers_costs_and_memory(capsys):
    features = [row_of(cell) | {"plain_us": 50.0} for cell in cases.FEATURES]
    features[0]["peers_missing"] = {"flash-attn-4": "not [here]"}
    command._show(features, CEILINGS)
    shown = capsys.readouterr().out
    assert shown.index("forward, ours: raw-hopper") < shown.index("backward, ours: raw-hopper")
    assert "2.00 x" in shown
    assert "without flash-attn-4: not [here]" in shown
    assert "buckets" in shown
    published = row_of(cases.PUBLISHED[-1]) | {
        "peak_bytes": {"ours": 3 << 20, "torch-fa2": 5 << 20}
    }
    published["peers"]["torch-math"] = results.OUT_OF_MEMORY
    command._show([published], CEILINGS)
    shown = capsys.readouterr().out
    assert "no memory" in shown
    assert "3 / 5 / -" in shown


def test_a_picture(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gpuattn.bench.charts import draw_attention

    pyplot.switch_backend("agg")
    alone = row_of(cases.TABLE[0], impl="raw-simt") | {"peers": {}}
    for rows in ([alone, *map(row_of, cases.TABLE)], [*map(row_of, cases.SMALL)]):
        path = tmp_path / f"{len(rows)}.png"
        draw_attention(pyplot, document_of(rows, date="today"), path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_is_measured_by_an_implementation_that_does_not_exist(tmp_path):
    path = tmp_path / "rows.json"
    options = ["--device", "numpy", "--impl", "fast", "--length", 256, "--json", path]
    result = call("attention", *options)
    assert result.exit_code == 1
    assert "impl='fast' is not one of" in result.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--shape", "8x8"], "No such option"),
        (["attention", "softmax"], "unexpected extra argument (softmax)"),
        (["fused", "--head-dim", "64"], "No such option"),
        (["attention", "--device", "numpy", "--length", "7"], "no cell of the table is like that"),
        (["attention", "--device", "numpy", "--missing"], "--missing needs the file"),
        (["attention", "--only", "foward"], "Did you mean 'forward'"),
    ],
)
def test_wrong_usage(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
