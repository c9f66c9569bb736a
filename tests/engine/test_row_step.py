"""A decoding step by ``row_linear``: its order of norms and sums on NumPy, its numbers on a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from checks import dtype_of
from decoder_steps import (
    Case,
    Search,
    assert_as_accurate,
    host,
    model_of,
    skip_without,
    take_weights,
)
from fake_gpu import GPUS
from fake_launches import as_array, launches_on
from memory_formula import attention

from gpuattn.arrays import BFLOAT16
from gpuattn.engine import Engine
from gpuattn.engine.steps import row_step
from gpuattn.engine.steps.cluster_step import ClusterStep
from gpuattn.engine.steps.decoder_step import DecoderStep
from gpuattn.engine.steps.projected_attention import blocks_of
from gpuattn.engine.steps.row_step import RowStep
from gpuattn.ops.embedding import embedding

GPT, PRE, POST = {"inner": 128}, {"norm": "pre", "ffn": 128}, {"norm": "post", "ffn": 128}
CASES = {
    "gpt2": Case(5, 1, {**GPT, "layers": 3}),
    "grouped heads, no bias, relu": Case(3, 1, {**GPT, "bias": False, "activation": "relu"}),
    "pre-norm": Case(2, 3, {**PRE, "layers": (1, 2)}),
    "post-norm": Case(2, 3, {**POST, "layers": (1, 3), "activation": "gelu"}),
    "rows of beams are listed": Case(37, 4, {**PRE, "layers": (1, 2)}, room=64),
}


def statistics_of(x, parts=2):
    x = x.reshape(len(x), parts, -1)
    mean = x.mean(-1)
    return np.stack([mean, ((x - mean[..., None]) ** 2).sum(-1)], -1)


def known_of(statistics, width, eps):
    """Return the means and 1 / the standard deviations (rows, 1) that statistics tell."""
    each, squares = statistics[..., 0], statistics[..., 1].sum(-1)
    mean = each.mean(-1, keepdims=True)
    squares = squares + ((each - mean) ** 2).sum(-1) * width / each.shape[1]
    return mean, 1 / np.sqrt(squares[:, None] / width + eps)


def on_host(
    x, weight, bias=None, *, folded=None, statistics=None, residual=None, gain=None, shift=None,
    activation=None, eps=1e-5,
):  # fmt: skip
    y = x @ weight.T
    if folded is not None:
        mean, rate = known_of(statistics, x.shape[1], eps)
        y = rate * (y - mean * folded[:, 1]) + folded[:, 0]
    if bias is not None:
        y = y + bias
    if activation == "relu":
        y = np.maximum(y, 0)
    elif activation == "gelu":
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    if residual is None:
        return y.astype(np.float32), None
    if statistics is not None and folded is None:
        mean, rate = known_of(statistics, residual.shape[1], eps)
        residual = (residual - mean) * rate * (1 if gain is None else gain)
        residual = residual + (0 if shift is None else shift)
    y = (y + residual).astype(np.float32)
    return y, statistics_of(y)


def attention_on_host(
    x, weight, bias, folded, statistics, keys, values, lengths, *, eps, blocks
):  # fmt: skip
    assert blocks == "as a test chose"
    queries, _ = on_host(x, weight, bias, folded=folded, statistics=statistics, eps=eps)
    queries = queries.reshape(len(keys), -1, *keys.shape[2:])
    return attention(queries, keys, values, lengths).astype(np.float32)


def embedding_on_host(
    tokens, positions, weight, position_weight=None, *, scale=1.0, used=None, measured=True,
    beams=None, listed=None,
):  # fmt: skip
    states = scale * weight[:used][tokens]
    if position_weight is not None:
        states = states + position_weight[positions]
    return states.astype(np.float32), statistics_of(states, 1) if measured else None


class OnHost(RowStep):
    def _fold(self, linear, norm, first):
        weight, gain = linear.weight.data, norm.weight.data
        product, offsets = weight * gain, np.zeros(len(weight), np.float32)
        if norm.bias is not None:
            offsets = offsets + weight @ norm.bias.data
        if linear.bias is not None:
            offsets = offsets + linear.bias.data
        self._folded[id(linear)] = product, np.stack([offsets, product.sum(-1)], -1)
        return np.zeros((), row_step.FOLDING)


@pytest.mark.parametrize("blocks", [None, "as a test chose"])
@pytest.mark.parametrize("name", CASES)
def test_the_order_of_norms_and_sums(name, blocks, monkeypatch):
    monkeypatch.setattr(row_step, "blocks_of", lambda *_: blocks)
    monkeypatch.setattr(row_step, "projected_attention", attention_on_host)
    monkeypatch.setattr(row_step, "row_linear", on_host)
    monkeypatch.setattr(row_step, "row_embedding", embedding_on_host)
    case = CASES[name]
    model = model_of(case, 1, np.float32, np.float32)
    known, search = (Search(case, 1, np.float32, model) for _ in range(2))
    step = OnHost(model, *search.own)
    for n in range(3):
        if n:
            known.advance()
            search.advance()
        np.testing.assert_allclose(step(), known.by_ops(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("rows, outputs, inputs, tile", [
    (64, 2304, 768, (64, 2, 6)), (64, 768, 768, (64, 4, 3)), (64, 768, 3072, (64, 8, 6)),
    (128, 512, 512, (32, 1, 12)), (128, 512, 2048, (64, 4, 8)), (512, 1536, 512, (128, 1, 4)),
    (512, 768, 256, (64, 1, 4)), (512, 512, 2048, (64, 2, 10)), (33, 320, 320, (64, 1, 4)),
])  # fmt: skip
def test_tiles(rows, outputs, inputs, tile):
    assert row_step.tile_of(rows, outputs, inputs, 132)[:3] == tile
    assert row_step.shared_bytes(row_step.Tile(*tile)) <= 232448


@pytest.mark.parametrize("tile", [tile for _, *tiles in row_step.TILES for tile in tiles])
def test_a_cluster_shares_weights_or_the_depth(tile):
    assert 1 in (tile.splits, tile.share) and tile.outputs % (8 * tile.share) == 0


@pytest.mark.parametrize("rows, beam, heads, size, room, found", [
    (128, 1, 8, 64, 32, (8, 8)), (128, 4, 8, 64, 32, (8, 2)), (256, 4, 8, 64, 32, (16, 4)),
    (512, 4, 8, 64, 32, (16, 4)), (512, 1, 8, 64, 32, (8, 8)), (512, 4, 4, 64, 32, (8, 2)),
    (15, 5, 8, 64, 100, (8, 1)), (128, 1, 8, 64, 112, None), (18, 9, 8, 64, 32, None),
    (128, 1, 4, 128, 32, None), (128, 2, 5, 64, 32, None), (64, 2, 2, 32, 9, (8, 4)),
])  # fmt: skip
def test_blocks_of_attention_over_memories(rows, beam, heads, size, room, found):
    with launches_on(GPUS["9.0"]):
        x = as_array(np.zeros((rows, heads * size), np.float16))
        keys = as_array(np.zeros((rows // beam, room, heads, size), np.float16))
        blocks = blocks_of(x, rows // beam, SimpleNamespace(heads=heads), keys)
    assert blocks == found
    grouped = SimpleNamespace(heads=2 * heads)
    with launches_on(GPUS["9.0"]):
        assert blocks_of(x, rows // beam, grouped, keys) is None


REFUSALS = [  # settings of GPT-2, rows, dtype, GPU, what is said
    (GPT, 512, "bfloat16", "9.0", None),
    (GPT, 513, "bfloat16", "9.0", "there are 513 rows of width 64; beyond 512 kernels of"),
    ({"d_model": 768, "heads": 12}, 129, "float16", "9.0", "rows of width 768; beyond 128 kernels"),
    ({"d_model": 832, "heads": 13}, 9, "float16", "9.0", "9 rows of width 832; beyond 0 kernels"),
    (GPT, 4, "float16", "10.0", "capability is 10.0, the kernel needs 9.0"),
    (GPT, 4, "float32", "9.0", "the weights are float32, the kernel takes float16 or bfloat16"),
    ({**GPT, "positions": "rotary"}, 4, "float16", "9.0", "queries and keys are rotated"),
    ({**GPT, "activation": "silu"}, 4, "float16", "9.0", "the activation is not ReLU"),
    ({"inner": 96}, 4, "float16", "9.0", "a weight is (96, 64), the kernel takes multiples of 64"),
]


@pytest.mark.parametrize("settings, rows, dtype, card, said", REFUSALS)
def test_refusal(settings, rows, dtype, card, said):
    with launches_on(GPUS[card]):
        model = model_of(Case(1, 1, settings), 1, np.float32, dtype_of(dtype), as_array)
        found = row_step.refusal(model, rows)
        assert found is None if said is None else said in found


def test_which_step_a_search_has():
    with launches_on(GPUS["9.0"]) as noted:
        for rows, more, kind in (
            (15, {}, DecoderStep), (16, {}, RowStep), (15, {"paged": True}, RowStep),
            (16, {"batch_invariant": True}, DecoderStep), (513, {}, type(None)),
        ):  # fmt: skip
            case = Case(rows, 1, GPT)
            search = Search(case, 1, BFLOAT16, model_of(case, 1, BFLOAT16, BFLOAT16, as_array))
            step = row_step.step_of(search.model, search.state, search.caches, **more)
            assert type(step) is kind
            if kind is RowStep:
                noted.clear()
                step.pack()
                assert [launch.name for launch in noted] == ["fold_norm"]
                step()
                names = [x.name for x in noted]
                assert names[1:3] == ["row_embedding", "row_linear"]
                assert names.count("row_linear") == 4 * 2
                assert names.count("layer_norm_forward") == 1  # before the logits
        for sentences, more, kind in (
            (2, {}, ClusterStep), (2, {"batch_invariant": True}, ClusterStep), (161, {}, RowStep),
        ):  # fmt: skip
            case = Case(sentences, 3, {**PRE, "d_model": 128})
            search = Search(case, 1, BFLOAT16, model_of(case, 1, BFLOAT16, BFLOAT16, as_array))
            step = row_step.step_of(search.model, *search.own, **more)
            assert type(step) is kind
            if kind is RowStep:
                noted.clear()
                step()
                names = [x.name for x in noted]
                assert names.count("projected_attention") == 2
                assert names.count("row_linear") == 2 * 5


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_numbers(gpu, name, dtype):
    """As accurate as the step op by op; the same bits twice; new weights are taken over."""
    case, dtype = CASES[name], dtype_of(dtype)
    exact, by_ops, search = (
        Search(case, 1, dtype, model_of(case, 1, dtype, of, gpu.asarray))
        for of in (np.float32, dtype, dtype)
    )
    skip_without(row_step.FILE, search.model)
    step = RowStep(search.model, *search.own)
    assert (step.listed is not None) == ("listed" in name)
    step.pack()
    found = step().copy()
    assert host(step()).tobytes() == host(found).tobytes()
    logits = found, by_ops.by_ops(), exact.by_ops()
    assert_as_accurate(*(host(x)[:, : search.model.config.vocab] for x in logits))
    take_weights(search.model, model_of(case, 7, dtype, dtype, gpu.asarray))
    step.pack()
    fresh = RowStep(search.model, *search.own)
    fresh.pack()
    assert host(fresh()).tobytes() == host(step()).tobytes() != host(found).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 320, 512, 768])
def test_embedding(gpu, width, dtype):
    """As ``embedding``, and statistics of what it rounds to."""
    dtype, rng = dtype_of(dtype), np.random.default_rng(width)
    weight, places = (
        gpu.asarray((rng.standard_normal((n, width)) + 2).astype(dtype)) for n in (90, 30)
    )
    for rows in (1, 7, 512):
        tokens, positions = (
            gpu.asarray(rng.integers(0, n, rows).astype(np.int32)) for n in (80, 30)
        )
        for scale, table in ((width**0.5, places), (1.0, None)):
            of = {"positions": positions, "position_weight": table} if table is not None else {}
            want = embedding(tokens, weight, **of, scale=scale, vocab_size=80, impl="raw-simt")
            states, found = row_step.row_embedding(
                tokens, positions, weight, table, scale=scale, used=80
            )
            exact, other = (host(x).astype(np.float64) for x in (states, want))
            np.testing.assert_allclose(exact, other, rtol=2**-7)
            exact = statistics_of(exact, 1)
            np.testing.assert_allclose(host(found), exact, rtol=1e-5)
            again, none = row_step.row_embedding(
                tokens, positions, weight, table, scale=scale, used=80, measured=False
            )
            assert none is None and host(again).tobytes() == host(states).tobytes()


def test_the_engine_uses_it(gpu):
    model = model_of(Case(1, 1, GPT), 1, BFLOAT16, BFLOAT16, gpu.asarray)
    skip_without(row_step.FILE, model)
    with Engine(model) as engine:
        engine.generate([[5, 6, 7]] * 70, limits=[6] * 70, seed=1)
        (search,) = engine._searches.kept.values()
        assert type(search.decoder) is RowStep
