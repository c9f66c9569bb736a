"""bench decode: the floor, checks that refuse wrong texts, files, the chart, the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.bench import charts, results, timing
from gpuattn.bench.decode import cases as decode_cases
from gpuattn.bench.decode import measure as decode
from gpuattn.bench.decode.cases import MODELS, TABLE, Decoding, small
from gpuattn.bench.peers import ctranslate2_process, precompile
from gpuattn.bench.peers.decode import OTHER_PROCESS, Opened, Peer
from gpuattn.cli.bench import decode as command
from gpuattn.cli.main import main
from gpuattn.decode.stepper import Hypothesis
from gpuattn.errors import UnsupportedError

CEILINGS = {"copy_tbs": 4.0, "matmul_tflops": 800.0}
BASE = next(cell.case for cell in TABLE if cell.case.shape[0] == 128)
FREE = next(cell for cell in TABLE if cell.case.workload == "B")
TEXT = next(cell for cell in TABLE if cell.case.workload == "D")
TRANSLATION = next(cell for cell in TABLE if cell.case.workload == "A")


# ---- cells --------------------------------------------------------------------------------------


def test_cases_survive_files():
    cases = [cell.case for cell in TABLE]
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert Decoding.from_dict(json.loads(json.dumps(case.as_dict()))) == case


def test_a_case_says_what_the_issue_asks_for():
    assert BASE.as_dict() == {
        "shape": [128, 32, 64], "dtype": "bfloat16",
        "flags": {"model": "base", "workload": "A", "beam": 4},
    }  # fmt: skip
    assert str(BASE) == "base, beam 4, 128 x (32 + 64)"


@pytest.mark.parametrize("cell", TABLE, ids=lambda cell: str(cell.case))
def test_texts_fit_into_their_models(cell):
    case, config = cell.case, cell.case.config()
    before, new = case.lengths()
    assert len(before) == len(new) == len(case.texts()) == case.shape[0]
    if case.translates:
        assert max(before.max(), new.max() + 1) <= config.max_length
    else:
        assert (before - 1 + new).max() <= config.block
    assert [len(text) + case.translates for text in case.texts()] == before.tolist()


def test_lengths_that_differ():
    source, target = FREE.case.lengths()
    assert source.mean() == pytest.approx(27, rel=0.05)
    assert source.std() > 10 and np.corrcoef(source, target)[0, 1] > 0.9
    assert min(source.min(), target.min()) >= decode_cases.SHORTEST


# ---- the floor ----------------------------------------------------------------------------------


def test_the_floor_of_a_translation():
    """One layer a side, counted by hand: d = 4, hidden = 16, V = 100."""
    config = replace(MODELS["toy"], vocab=100, d_model=4, heads=1, layers=(1, 1), ffn=16)
    case = Decoding("here", (2, 3, 2), "A", beam=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cases, "MODELS", {"here": config})
        encoder = 4 * 16 + 2 * 64 + 2 * 16  # attention, feed-forward, the memory's projection
        decoder = 4 * 16 + 2 * 16 + 2 * 64 + 4 * 100
        kept = 2 * 4 * 2  # bytes of a token's key and value
        before, steps = case.before(), case.steps()
        assert before.flops == 2 * encoder * 6 + 4 * 4 * 2 * 9
        assert before.bytes == 2 * encoder + 6 * kept
        assert steps.flops == 2 * decoder * 8 + 4 * 4 * (2 * 2 * (1 + 2) + 8 * 3)
        keys = 2 * 2 * (1 + 2) + 2 * 2 * 3  # of beams, and of sources
        assert steps.bytes == 2 * decoder * 2 + keys * kept + 2 * 8 * 100 * 2
        slow = {"copy_tbs": 1e-12, "matmul_tflops": 1e6}
        assert case.floor_us(slow) == pytest.approx((before.bytes + steps.bytes) * 1e6)
        assert case.bytes("forward") == before.bytes + steps.bytes


def test_the_floor_of_a_text_step_is_that_of_the_note():
    """GPT-2 124M at 1,024 tokens: 247 MB of weights and 38 MB of keys and values."""
    one, two = (Decoding("gpt2-124m", (1, 1023, new), "D").steps() for new in (1, 2))
    moved = two.bytes - one.bytes
    assert moved == pytest.approx((247 + 38) * 1e6, rel=0.01)
    fewer = Decoding("gpt2-124m", (1, 1023, 1), "D", kv_heads=1).steps().bytes
    assert one.bytes - fewer == pytest.approx(38e6 * 11 / 12 + 11 / 12 * 2 * 768**2 * 24, rel=0.02)


def test_the_floor_of_prompts_has_keys_and_values_alone_in_the_last_layer():
    """Counted by hand: d = 4, hidden = 16; the last token belongs to the first step."""
    config = replace(MODELS["toy-gpt"], d_model=4, heads=1, layers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cases, "MODELS", {"here": config})
        before = Decoding("here", (5, 7, 2), "D").before()
    weights = 3 * 2 * 16 + 2 * (2 * 16 + 2 * 64)
    assert before.flops == 2 * weights * 5 * 6 + 4 * 4 * 2 * 5 * 36 / 2
    assert before.bytes == 2 * weights + 5 * 6 * 3 * 2 * 4 * 2


def test_a_batch_of_free_lengths_reads_weights_for_many():
    one = replace(FREE.case, shape=(1, 27, 27))
    whole, own = FREE.case.steps(), one.steps()
    assert whole.bytes < 3003 * own.bytes / 2
    assert FREE.case.tokens == FREE.case.lengths()[1].sum()


# ---- checks -------------------------------------------------------------------------------------

TOYS = [small(cell.case) for cell in TABLE]
TOYS = list(dict.fromkeys(TOYS))


@pytest.mark.parametrize("case", TOYS, ids=str)
def test_a_generation_is_what_decode_finds(case):
    subject = decode.Subject(case, np)
    assert "texts of 6 tokens as gpuattn.decode's" in subject.check(case)
    texts, limits = case.texts(), case.lengths()[1].tolist()
    found = decode.generate(decode.Engine(subject.model), case, texts, limits)
    said = sum(text.score for text in found) / sum(limits)
    assert subject.logprob(case, [text.tokens for text in found]) == pytest.approx(said, rel=1e-3)


def test_wrong_tokens_are_refused(monkeypatch):
    case = TOYS[0]
    subject = decode.Subject(case, np)
    wrong = [Hypothesis([5] * 6, -1.0, -1.0, False)] * case.shape[0]
    monkeypatch.setattr(decode, "generate", lambda *_: wrong)
    with pytest.raises(AssertionError, match="gpuattn.decode found"):
        subject.check(case)


def test_texts_of_another_length_are_refused():
    case = TOYS[0]
    with pytest.raises(AssertionError, match="texts have"):
        decode.Subject(case, np).logprob(case, [[5] * 5] * case.shape[0])


def test_texts_of_another_probability_are_refused():
    decode._check_logprob("peer", -4.0, -4.1)
    for wrong in (-4.4, -3.8, float("nan")):
        with pytest.raises(AssertionError, match="peer: a token's mean log-probability"):
            decode._check_logprob("peer", wrong, -4.1)


class FakePeers:
    """One peer that is right, two that are not, one that is missing."""

    def __init__(self, right):
        texts = [text.tokens for text in right]
        self.texts = {"right": texts, "short": [text[:-1] for text in texts],
                      "wrong": [[7] * len(text) for text in texts]}  # fmt: skip

    def peer(self, name, case, model):
        if name not in self.texts:
            raise UnsupportedError(f"no {name} here")
        return Peer(lambda: self.texts[name], 2**30 if name == "right" else None)


def test_peers_are_checked_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(timing, "REST", 0)
    case = Decoding("toy", (3, 8, 6), "A", beam=2, dtype="float32")
    subject = decode.Subject(case, np)
    limits = case.lengths()[1].tolist()
    right = decode.generate(decode.Engine(subject.model), case, case.texts(), limits)
    names = ("right", "short", "wrong", "other")
    cell = TABLE[0]._replace(case=case, peers=names)
    row = decode._measured(cell, subject, FakePeers(right), names, CEILINGS)
    assert row["peers"].keys() == {"right"} and row["ratio_to_best_peer"] is not None
    assert row["logprobs"]["right"] == row["logprobs"]["gpuattn"]
    missing = row["peers_missing"]
    assert "texts have [5, 5, 5]" in missing["short"] and missing["other"] == "no other here"
    assert "wrong: a token's mean log-probability" in missing["wrong"]
    assert "right" not in missing and row["peak_bytes"] == {"right": 2**30}


def test_ctranslate2_that_is_not_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(ctranslate2_process.importlib.util, "find_spec", lambda name: None)
    opened = Opened()
    case = TOYS[0]
    with pytest.raises(UnsupportedError, match="CTranslate2 is not installed"):
        opened.peer(decode_cases.CT2, case, decode.random_model(case, np))
    with pytest.raises(UnsupportedError, match="without other models: use --model"):
        opened.peer(decode_cases.HF_STATIC, TEXT.case, None)
    opened.close()


def test_no_cell_before_that_of_the_static_cache_is_of_another_model():
    place = next(i for i, cell in enumerate(TABLE) if decode_cases.HF_STATIC in cell.peers)
    assert {cell.case.model for cell in TABLE[: place + 1]} == {TABLE[place].case.model}


# ---- files and tables ---------------------------------------------------------------------------


def row_of(cell, missing=()):
    times = {"gpuattn": [40000.0] * 8, "first": [4300.0] * 8}
    times |= {name: [60000.0] * 8 for name in cell.peers if name not in missing}
    row = decode._row(cell, times, dict.fromkeys(missing, "not [here]"), CEILINGS, None)
    return row | {"peak_bytes": {"gpuattn": 2**31}, "joules_per_token": 0.00123}


def test_a_row():
    cell = next(cell for cell in TABLE if cell.case == BASE)
    row = row_of(cell)
    assert (row["op"], row["impl"], row["us"]) == ("decode", "engine", 40000)
    assert row["tokens_per_s"] == pytest.approx(128 * 64 / 0.04)
    assert row["ratio_to_best_peer"] == pytest.approx(1.5)
    assert row["step_us"] == pytest.approx((40000 - 4300) / 63)
    assert row["floor_share"] == pytest.approx(BASE.floor_us(CEILINGS) / 40000)
    assert row["floor_share"] >= row["ceiling_share"] > 0
    raised = results.rated(row, {"copy_tbs": 8.0, "matmul_tflops": 1600.0})
    assert raised["floor_share"] == pytest.approx(row["floor_share"] / 2)


def test_what_is_absent_is_named():
    rows = [row_of(cell) for cell in TABLE]
    assert results.absent(rows) == []
    assert len(results.absent(rows[1:])) == 1
    missing = row_of(TABLE[0], missing=TABLE[0].peers[:1])
    assert results.absent([missing, *rows[1:]]) == []


def test_the_table_and_the_chart(tmp_path, capsys):
    rows = [row_of(TRANSLATION, missing=OTHER_PROCESS), row_of(TEXT)]
    command._show([*rows, row_of(FREE) | {"no_graph": "no graphs here"}])
    shown = capsys.readouterr().out
    assert "base, beam 4, 1 x (32 + 64)" in shown and "1,600" in shown and "1.50" in shown
    assert "without ctranslate2: not [here]" in shown and "no graphs here" in shown
    pyplot = pytest.importorskip("matplotlib.pyplot")
    document = {"gpu": "a GPU", "date": "today", "ceilings": CEILINGS, "rows": rows}
    charts.draw_decoding(pyplot, document, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000


def test_clocked_calls_alternate(monkeypatch):
    monkeypatch.setattr(timing, "REST", 0)
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    times = timing.alternate_calls(calls)
    assert all(len(samples) == timing.TURNS * timing.LEAST for samples in times.values())
    turns = "".join(called[2:])[:: timing.LEAST]
    assert turns == "abbaabba"


def test_parts_that_compile_are_compiled_ahead(monkeypatch):
    todo = [name for cell in TABLE for name in cell.peers if name in precompile.COMPILED]
    assert set(todo) == {decode_cases.GRAPH, decode_cases.HF_STATIC}
    monkeypatch.setattr(precompile.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    precompile.compile_ahead(TABLE)


# ---- the command --------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.mark.exhaustive
def test_numpy_runs_small_models_in_two_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "REST", 0)
    path = tmp_path / "rows.json"
    for models in (("gpt2-124m",), ("base", "tiny")):
        named = [word for name in models for word in ("--model", name)]
        result = call("decode", *named, "--device", "numpy", "--peers", "--json", path)
        assert result.exit_code == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [results.case_of(row) for row in rows] == TOYS
    for row in rows:
        assert row["impl"] == "reference" and len(row["samples_us"]) >= 8
        assert row["us"] == timing.median(row["samples_us"])
        assert row["checked"] and row["logprobs"].keys() == {"gpuattn"}
    again = call("decode", "--device", "numpy", "--json", path, "--missing")
    assert again.exit_code == 0, again.stderr
    assert json.loads(path.read_text())["rows"] == rows


def test_cells_can_be_chosen():
    result = call("decode", "--workload", "A", "--sentences", "1", "--device", "numpy")
    assert result.exit_code == 0, result.stderr
    assert "2/2 decode toy, greedy" in result.stderr and "toy-gpt" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bases"], "Did you mean 'base'?"),
        (["--workload", "C"], "'C' is not one of"),
        (["--sentences", "0"], "0 is not in the range"),
        (["--sentences", "7"], "no cell of the table is like that"),
        (["--missing"], "--missing needs the file"),
    ],
)
def test_wrong_usage(arguments, message):
    result = call("decode", *arguments, "--device", "numpy")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", TOYS, ids=str)
def test_a_generation_on_a_gpu(gpu, monkeypatch, case):
    monkeypatch.setattr(timing, "REST", 0)
    monkeypatch.setattr(decode, "METERED", 0)
    sizes = {"toy": {"d_model": 128}, "toy-gpt": {"d_model": 128}}  # heads of 64
    models = {name: replace(MODELS[name], **size) for name, size in sizes.items()}
    monkeypatch.setattr(decode_cases, "MODELS", models)
    case = replace(case, dtype="bfloat16")
    cell = TABLE[0]._replace(case=case, peers=())
    with decode.Bench() as bench:
        row = bench.measure(cell, gpu, CEILINGS)
    assert row["impl"] == ("engine" if case.cache else "reference")
    # of the whole GPU, where other processes may free memory meanwhile
    assert isinstance(row["peak_bytes"]["gpuattn"], int) and row["us"] > 0
    assert ("first_token_us" in row) == (case.cache and case.workload != "B")
