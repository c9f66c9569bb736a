"""gpuattn profile: FLOPs and bytes of every op, and the parts sum to the whole."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.autodiff.hooks import hooked
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench import op_work, profile
from gpuattn.data.tokenizer import SPECIALS
from gpuattn.ops.attention.flash_attention import flash_attention
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.runs.config import TrainConfig
from gpuattn.tasks.registry import task_of

WIDTH, OPS = 32, ("linear", "flash_attention", "embedding", "cross_entropy")


class Seen:
    """Records FLOPs and bytes of each call, without timing it."""

    def __init__(self):
        self.calls = []

    def __call__(self, op, direction, function):
        def noted(*arguments, **given):
            result = function(*arguments, **given)
            flops = op_work.flops(op, direction, arguments, given)
            self.calls.append(
                (op, direction, flops, op_work.moved(op, direction, arguments, given, result))
            )
            return result

        return noted


def work_of(call):
    """Return [(op, direction, FLOPs, bytes)] of a call and its gradient."""
    with hooked(seen := Seen()):
        out = call()
        out.backward(np.ones_like(out.data))
    call()  # not recorded
    return seen.calls


def test_a_linear_layer(rng):
    x, w = (
        Tensor(rng.standard_normal(s, np.float32), requires_grad=True) for s in ((6, 4), (5, 4))
    )
    forward, backward = work_of(lambda: linear(x, w))
    assert forward == ("linear", "forward", 2 * 6 * 4 * 5, 4 * (24 + 20 + 30))
    assert backward == ("linear", "backward", 4 * 6 * 4 * 5, 4 * (24 + 20 + 30 + 24 + 20))
    w.requires_grad = False
    assert work_of(lambda: linear(x, w))[1][2] == 2 * 6 * 4 * 5


def test_attention_counts_the_pairs_that_see_each_other(rng):
    q, k, v = (
        Tensor(rng.standard_normal((2, 4, 3, 8), np.float32), requires_grad=True) for _ in range(3)
    )
    full = work_of(lambda: flash_attention(q, k, v))
    assert [c[2] for c in full] == [4 * 8 * 3 * 2 * 16, 2.5 * 4 * 8 * 3 * 2 * 16]
    causal = work_of(lambda: flash_attention(q, k, v, causal=True))
    assert causal[0][2] == 4 * 8 * 3 * 2 * 10
    near = work_of(lambda: flash_attention(q, k, v, causal=True, window=1))
    assert near[0][2] == 4 * 8 * 3 * 2 * 7
    lengths = np.array([1, 4])
    assert work_of(lambda: flash_attention(q, k, v, key_lengths=lengths))[0][2] == 4 * 8 * 3 * 20
    packed = [Tensor(x.data.reshape(8, 3, 8), requires_grad=True) for x in (q, k, v)]
    cu = np.array([0, 3, 8], np.int32)
    found = work_of(lambda: flash_attention(*packed, cu_seqlens_q=cu, causal=True))
    assert found[0][2] == 4 * 8 * 3 * (6 + 15)


def test_views_move_nothing_and_updates_read_and_write(rng):
    x = Tensor(rng.standard_normal((4, 6), np.float32), requires_grad=True)
    assert [c[3] for c in work_of(lambda: np.reshape(x, (6, 4)))] == [0, 0]
    n, flat = 256, lambda: np.zeros(256, np.float32)
    arguments = (flat(), flat(), flat(), flat(), np.zeros(16, np.float32), None, None)
    moved = op_work.moved("adamw", "forward", arguments, {"needs": ()}, (arguments[4], None))
    assert moved == 4 * (4 * n + 16) + 4 * 3 * n


def test_donated_logits_are_read_and_overwritten(rng):
    x = Tensor(rng.standard_normal((4, 6), np.float32), requires_grad=True)
    labels = np.zeros(4, np.int32)
    once = work_of(lambda: cross_entropy(x * 1, labels))
    donated = work_of(lambda: cross_entropy(x * 1, labels, donate=True))
    moved = [{c[:2]: c[3] for c in calls}["cross_entropy", "forward"] for calls in (once, donated)]
    assert moved[1] >= 2 * x.data.nbytes and moved[0] >= x.data.nbytes
    done = (([], None, None, None, (4, 6)), np.ones((), np.float32))
    given = {"donate": True, "needs": (True, False, False)}
    assert op_work.moved("cross_entropy", "backward", done, given, (x.data, None, None)) == 0


def new_task(tmp_path, model):
    if model == "gpt2":
        (tmp_path / "text").write_text("a rose is a rose is a rose\n" * 60)
        data = {"lm": str(tmp_path / "text"), "tokenizer": "chars", "block": 32, "layers": 2}
    else:
        words = ["red", "green", "blue", "old", "new", "cat", "dog", "tree", "house"]
        lines = [" ".join(np.roll(words, i)[: 2 + i % 5]) for i in range(60)]
        for name in ("src", "tgt"):
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        data = {"source": str(tmp_path / "src"), "target": str(tmp_path / "tgt"), "max_len": 40,
                "ffn": WIDTH, "layers": (1, 2)}  # fmt: skip
    config = TrainConfig(
        model=model, **data, dim=WIDTH, heads=2, dropout=0.1, batch=128, warmup=1, vocab_size=300,
        length="9u",
    )  # fmt: skip
    return task_of(config)(config)


@pytest.mark.parametrize("model", ["translation", "gpt2"])
def test_a_profile_on_numpy(tmp_path, model):
    task = new_task(tmp_path, model)
    document = json.loads(json.dumps(profile.profile(task, "numpy")))
    check(document, task)
    check_padding(document["vocabulary"], task)
    assert sum(row["us"] for row in document["rows"]) == pytest.approx(document["step_us"])


def test_what_is_computed_again_is_seen(tmp_path):
    counts = {}
    for level in ("none", "block"):
        config = dataclasses.replace(new_task(tmp_path, "gpt2").config, checkpoint=level)
        document = profile.profile(task := task_of(config)(config), "numpy")
        rows = {(row["op"], row["direction"]): row["calls"] for row in document["rows"]}
        counts[level] = rows["linear", "forward"], rows["linear", "backward"]
        assert "checkpoint" not in {op for op, _ in rows}
        check_padding(document["vocabulary"], task)
    assert counts["block"][0] > counts["none"][0] and counts["block"][1] == counts["none"][1]


def check(document, task):
    rows = {(row["op"], row["direction"]): row for row in document["rows"]}
    for op in OPS:
        assert {(op, "forward"), (op, "backward")} <= rows.keys()
    assert rows["adamw", "update"]["calls"] == rows["gradient_statistics", "update"]["calls"] == 1
    assert rows["linear", "forward"]["calls"] == rows["linear", "backward"]["calls"]
    layers = sum(task.config.layers) if task.config.model == "translation" else 2
    crossing = task.config.layers[1] if task.config.model == "translation" else 0
    assert rows["flash_attention", "forward"]["calls"] == layers + crossing
    assert sum(row["share"] for row in document["rows"]) == pytest.approx(1)
    times = [row["us"] for row in document["rows"]]
    assert times == sorted(times, reverse=True)
    products = sum(
        row["flops"]
        for row in document["rows"]
        if row["op"] in ("linear", "linear_dropout_add_norm")
    )
    pairs = rows["flash_attention", "forward"]["flops"] * 3
    # less than what is computed: padding, of batches and of the vocabulary, is left out
    assert 0.2 < document["model_flops"] / (products + pairs) <= 1.01
    for row in document["rows"]:
        assert row["roof"] is None or row["roof"] > 0


def check_padding(found, task):
    size = len(task.corpus.tokenizer)
    assert (found["size"], found["rows"]) == (size, -(-size // 64) * 64) and found["pads"]
    assert 32 <= found["tokens"] <= 128  # of targets in the batch, with padding on a GPU
    assert found["padded_us"] > 0 and found["plain_us"] > 0


def test_padding_is_timed_where_there_is_some(tmp_path):
    task = new_task(tmp_path, "gpt2")
    config = dataclasses.replace(task.config, pad_vocab=False, checkpoint="full")
    found = profile.profile(task_of(config)(config), "numpy")["vocabulary"]
    assert not found["pads"] and found["rows"] == 64 > found["size"]
    (tmp_path / "text").write_text("".join(map(chr, range(200, 264 - SPECIALS))) * 30)
    assert profile.profile(task_of(task.config)(task.config), "numpy")["vocabulary"] is None


def test_calls_are_alike_by_shapes_and_by_which_bounds():
    a, b = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    cu, other = np.array([0, 2], np.int32), np.array([0, 2], np.int32)
    kind = profile._kind
    assert kind((a, cu, {"p": 0.1})) == kind((b, cu, {"p": 0.1}))
    assert kind((a, cu)) != kind((a, other)) and kind((a,)) != kind((a.T,))
    assert kind({"p": 0.1}) != kind({"p": 0.2}) and kind((a, None)) != kind((a, True))
    fresh = profile._fresh((a, [1, 2]))
    assert fresh[0] is a and fresh[1] == [1, 2]


def test_a_rest_is_what_ops_do_not_take():
    call = {"op": "linear", "direction": "forward", "us": 30.0, "launches": 1, "bytes": 4e6,
            "flops": 8e9}  # fmt: skip
    view = call | {"op": "np.reshape", "us": 0.0, "launches": 0, "bytes": 0, "flops": 0}
    reach = {"matmul_tflops": 800.0, "copy_tbs": 4.0}
    linear, rest = profile._rows([call, call, view], 100.0, reach)
    assert (linear["calls"], linear["launches"], linear["us"]) == (2, 2, 60)
    assert linear["share"] == 0.6 and linear["roof"] == pytest.approx(2 * 10 / 60)
    assert rest["op"] == profile.REST and rest["us"] == 40 and rest["roof"] is None
    (alone,) = profile._rows([call], 20.0, None)
    assert alone["share"] == 1 and alone["roof"] is None


def test_without_graphs_it_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "capture_refusal", lambda: "no nvmath")
    with pytest.raises(profile.UnsupportedError, match="CUDA graphs.*no nvmath"):
        profile.profile(SimpleNamespace(), "cuda")


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("model", ["translation", "gpt2"])
def test_a_profile_on_a_gpu(gpu, tmp_path, model):
    if missing := profile.capture_refusal():
        pytest.skip(missing)
    task = new_task(tmp_path, model)
    document = profile.profile(task, "cuda")
    check(document, task)
    check_padding(document["vocabulary"], task)
    for row in document["rows"]:
        assert row["us"] > 0 and (row["calls"] is None or row["launches"] != 0)
    ops = sum(row["us"] for row in document["rows"] if row["calls"])
    assert 0.3 * document["step_us"] < ops < 3 * document["step_us"]


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["block", "full"])
def test_what_is_computed_again_is_timed_on_a_gpu(gpu, tmp_path, level):
    if missing := profile.capture_refusal():
        pytest.skip(missing)
    config = dataclasses.replace(new_task(tmp_path, "gpt2").config, checkpoint=level)
    document = profile.profile(task := task_of(config)(config), "cuda")
    rows = {(row["op"], row["direction"]): row for row in document["rows"]}
    assert rows["linear", "forward"]["calls"] > rows["linear", "backward"]["calls"]
    head = "linear_cross_entropy" if level == "full" else "cross_entropy"
    assert rows[head, "forward"]["us"] > 0 and document["step_us"] > 0
    check_padding(document["vocabulary"], task)


def test_a_second_gradient_adds_no_product():
    x, weight, dy = np.zeros((6, 4)), np.zeros((5, 4)), np.zeros((6, 5))
    saved, given = ("none", x, weight), {"needs": (True, True, True)}
    counted = [
        op_work.flops("linear_dropout_add_norm", "backward", (saved, *gradients), given)
        for gradients in ((dy, None), (dy, None, dy))
    ]
    assert counted == [2 * (2 * 6 * 4 * 5)] * 2
