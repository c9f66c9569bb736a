"""Embedding: values, positions, dropout, gradients with ``order``, slots, ids out of range."""

import numpy as np
import pytest
from checks import DTYPES, check_gradient, check_implementation, dtype_of, implementations

from gpuattn import Tensor, arrays
from gpuattn import rng as random
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import backward_pass
from gpuattn.ops.embedding import IMPLS, ORDERED, _argsort, embedding

V, P = 11, 9
# (shape of tokens), D; 33 columns are not a multiple of 16 bytes, 520 need one thread more than a
# block has; 600 tokens repeat every id often, in several chunks
SHAPES = {
    "one": ((1,), 1),
    "odd": ((3, 7), 33),
    "stacked": ((2, 2, 5), 8),
    "long": ((600,), 5),
    "wide": ((70,), 520),
    "scalar": ((), 4),
    "empty": ((0,), 4),
}
PARAMS = {"scale": 2.5, "p": 0.0, "key": None}


def order_of(tokens):
    """Return the loader's ``order`` arrays, computed independently of the loader."""
    flat = tokens.ravel()
    order = sorted(range(flat.size), key=lambda i: (flat[i], i))
    ids = sorted(set(flat.tolist()))
    segments = [int((flat < i).sum()) for i in ids]
    return tuple(np.array(part, np.int32) for part in (order, segments, ids))


def check(rng, name, where, shape, cols, dtype, p, form, ordered, deterministic=True):
    tokens = rng.integers(0, V, shape).astype(np.int32)
    weight, table = rng.standard_normal((V, cols)), None
    positions = None
    if form != "plain":
        table = rng.standard_normal((max(P, *shape, 1) if shape else P, cols))
    if "positions" in form:
        positions = rng.integers(0, P, shape).astype(np.int64)
    order = order_of(tokens) if ordered else (None,) * 3
    inputs = [tokens, weight, positions, table, *order]
    needs = (False, True, False, table is not None and "fixed" not in form, *[False] * 3)
    params = {"scale": 2.5, "p": p, "key": random.Key(7, 3, 5) if p else None}
    params["deterministic"] = deterministic
    slack = 4 if shape and max(shape) > 100 else 1  # long sums, in another order
    check_implementation(IMPLS, name, where, inputs, dtype, needs=needs, slack=slack, **params)


@pytest.mark.parametrize(
    "form, p, ordered",
    [
        ("plain", 0.0, False), ("plain", 0.3, True), ("index", 0.3, False),
        ("positions", 0.0, True), ("positions", 0.3, False), ("fixed positions", 0.0, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, cols", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", implementations(IMPLS))
def test_implementations(rng, name, where, shape, cols, dtype, p, form, ordered):
    check(rng, name, where, shape, cols, dtype, p, form, ordered)


@pytest.mark.parametrize("form, p", [("index", 0.3), ("positions", 0.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, cols", SHAPES.values(), ids=SHAPES)
def test_atomics(gpu, rng, shape, cols, dtype, form, p):
    check(rng, "raw-simt", "cupy", shape, cols, dtype, p, form, False, deterministic=False)


@pytest.mark.parametrize("positions", [None, np.array([[4, 0, 4], [1, 1, 2]])])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradient(rng, p, positions):
    tokens = np.array([[3, 0, 3], [3, 1, 0]])

    def fun(weight, table):
        return embedding(
            tokens, weight, positions=positions, position_weight=table, scale=3, p=p, seed=5
        )

    check_gradient(fun, rng.standard_normal((5, 4)), rng.standard_normal((6, 4)))


def test_written_out_definition(xp, rng):
    tokens, places = rng.integers(0, V, (4, 6)), rng.integers(0, P, (4, 6))
    weight, table = (rng.standard_normal((n, 5)) for n in (V, P))
    on = [xp.asarray(a) for a in (tokens, weight, places, table)]
    got = embedding(*on[:2], positions=on[2], position_weight=on[3], scale=0.5)
    np.testing.assert_allclose(to_cpu(got), 0.5 * weight[tokens] + table[places], rtol=1e-12)
    got = embedding(*on[:2], position_weight=on[3])
    np.testing.assert_allclose(to_cpu(got), weight[tokens] + table[:6], rtol=1e-12)


def test_dropout_depends_on_the_key_alone(xp):
    tokens, weight = xp.zeros((40, 5), np.int32), xp.ones((1, 50), np.float32)
    key = random.Key(1, 2, 3)
    once, again = (to_cpu(embedding(tokens, weight, p=0.25, seed=key)) for _ in range(2))
    other = to_cpu(embedding(tokens, weight, p=0.25, seed=key._replace(step=4)))
    keep = random.keep_mask(np, once.shape, 0.25, key)
    np.testing.assert_array_equal(once, np.where(keep, np.float32(1 / 0.75), 0))
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()
    assert abs(keep.mean() - 0.75) < 0.02
    assert not to_cpu(embedding(tokens, weight, p=1.0, seed=1)).any()


@pytest.mark.parametrize("ordered", [False, True, "atomics"])
@pytest.mark.parametrize("slot_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_written_to_its_slot(xp, rng, dtype, slot_dtype, ordered):
    host = rng.integers(0, V - 1, 50).astype(np.int32)  # the last row is never used
    tokens, order = xp.asarray(host), None
    if ordered is True:
        order = tuple(xp.asarray(part) for part in order_of(host))
    weight = Tensor(xp.ones((V, 3), np.float32).astype(dtype_of(dtype)), requires_grad=True)
    flat = xp.full(V * 3 + 2, np.nan, np.float32).astype(dtype_of(slot_dtype))
    weight.grad_slot = flat[1:-1].reshape(V, 3)
    dy = rng.integers(-2, 3, (50, 3)).astype(dtype_of(dtype))  # whole numbers: sums are exact
    want = np.zeros((V, 3))
    np.add.at(want, host, dy.astype(np.float64))
    for times in (1, 2):  # first written, then added to
        y = embedding(tokens, weight, scale=2, order=order, deterministic=ordered != "atomics")
        backward_pass.backward(y, xp.asarray(dy))
        got = to_cpu(flat).astype(np.float64)
        np.testing.assert_array_equal(got[1:-1].reshape(V, 3), 2 * times * want)
        assert np.isnan(got[[0, -1]]).all()


@pytest.mark.parametrize("ordered", [False, True])
def test_the_gradient_has_the_same_bits_every_time(xp, rng, ordered):
    host = rng.integers(0, 4, 2000).astype(np.int32)
    order = tuple(map(xp.asarray, order_of(host))) if ordered else None
    dy = xp.asarray(rng.standard_normal((2000, 40)).astype(np.float32))
    seen = set()
    for _ in range(3):
        weight = Tensor(xp.ones((4, 40), np.float32), requires_grad=True)
        backward_pass.backward(embedding(xp.asarray(host), weight, p=0.1, seed=3, order=order), dy)
        seen.add(to_cpu(weight.grad).tobytes())
    assert len(seen) == 1


def zipf(rng, count, vocabulary):
    """Return token ids with a Zipf distribution: a few are frequent, many occur once."""
    chance = 1 / np.arange(1, vocabulary + 1) ** 1.1
    return rng.choice(vocabulary, count, p=chance / chance.sum()).astype(np.int32)


@pytest.mark.parametrize("name", ["zipf", "one id", "all different", "ends of chunks"])
@pytest.mark.parametrize("cols", [3, 64, 516])
def test_runs_of_any_length(xp, rng, name, cols):
    """Runs within a chunk of 32, across its end, across many; unused rows are zeroed."""
    count, rows = 1000, 1200
    tokens = {
        "zipf": zipf(rng, count, rows),
        "one id": np.full(count, 7, np.int32),
        "all different": rng.permutation(rows)[:count].astype(np.int32),
        "ends of chunks": rng.permutation(np.repeat(np.arange(0, rows, 30), 32)[:count]),
    }[name].astype(np.int32)
    dy = rng.integers(-4, 5, (tokens.size, cols)).astype(np.float32)  # sums are exact
    want = np.zeros((rows, cols))
    np.add.at(want, tokens, dy)
    weight = Tensor(xp.zeros((rows, cols), np.float32), requires_grad=True)
    y = embedding(xp.asarray(tokens), weight)
    for times in (1, 2):  # backward may run twice on a record
        backward_pass.backward(y, xp.asarray(dy), retain_graph=True)
        np.testing.assert_array_equal(to_cpu(weight.grad), times * want)


def test_rows_with_gaps_are_not_copied(xp, rng):
    """Tables and gradients with gaps between their rows."""
    tokens = xp.asarray(rng.integers(0, V, (3, 20)).astype(np.int32))
    whole, above = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((V, 24), (3, 20, 24))
    )
    found = []
    for cut in (np.s_[..., 8:16], np.s_[..., 3:11]):
        dy = xp.asarray(above[..., 8:16])
        weight, table = (
            Tensor(xp.asarray(np.roll(whole, cut[-1].start - 8, 1))[cut], requires_grad=True)
            for _ in range(2)
        )
        y = embedding(tokens[:, :P], weight, position_weight=table, p=0.1, seed=1)
        padded = xp.full((3, P, 24), np.nan, np.float32)
        padded[cut] = dy[:, :P]
        grads = backward_pass.gradients([y], [padded[cut]], [weight, table])
        found.append([to_cpu(a) for a in (y.data, *grads)])
    for aligned, other in zip(*found, strict=True):
        np.testing.assert_allclose(aligned, other, rtol=1e-6, atol=1e-6)


def test_graph_replays_equal_eager_calls(gpu, rng):
    tokens, rows, cols = zipf(rng, 3000, 400), 400, 64
    order = tuple(map(gpu.asarray, order_of(tokens)))
    weight = Tensor(gpu.zeros((rows, cols), arrays.BFLOAT16), requires_grad=True)
    weight.grad_slot = gpu.zeros((rows, cols), np.float32)
    dy = gpu.asarray(rng.standard_normal((tokens.size, cols)).astype(arrays.BFLOAT16))
    tokens = gpu.asarray(tokens)

    def step():
        weight.grad_started = False
        backward_pass.backward(embedding(tokens, weight, p=0.1, seed=3, order=order), dy)

    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        step()
        want = to_cpu(weight.grad_slot)
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for _ in range(2):
            weight.grad_slot.fill(np.nan)
            graph.launch(stream)
            np.testing.assert_array_equal(to_cpu(weight.grad_slot), want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_skips_ids_out_of_range(gpu, deterministic):
    """Ids out of range are reported once, and nothing is written for them."""
    tokens = gpu.asarray([3, -1, V, 3, 2**31 - 1, 0] * 20, np.int32)
    guarded = gpu.full((V + 2, 4), 7, np.float32)
    weight = Tensor(gpu.ones((V, 4), np.float32), requires_grad=True)
    weight.grad_slot = guarded[1:-1]
    y = embedding(tokens, weight, deterministic=deterministic)
    backward_pass.backward(y, gpu.ones((120, 4), np.float32))
    with pytest.raises(IndexError, match="embedding: tokens is holding"):
        to_cpu(y.data)
    want = np.zeros((V + 2, 4))
    want[[0, -1]], want[1 + 3], want[1 + 0] = 7, 40, 20
    np.testing.assert_array_equal(to_cpu(guarded), want)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint8])
def test_any_integers_and_strides(xp, rng, dtype):
    tokens = xp.asarray(rng.integers(0, V, (6, 8)).astype(dtype))[::2, ::-1]
    weight = xp.asarray(rng.standard_normal((V, 10)).astype(np.float32))[:, 3::2]
    want = to_cpu(weight)[to_cpu(tokens)]
    np.testing.assert_array_equal(to_cpu(embedding(tokens, weight)), want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # the kernel's check and the reference's
@pytest.mark.parametrize("bad", [-1, V, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("what", ["tokens", "positions"])
def test_indices_out_of_range(xp, what, bad, dtype):
    tokens, places = (xp.zeros(5, np.int32) for _ in range(2))
    (tokens if what == "tokens" else places)[2] = bad
    weight = xp.ones((V, 3), dtype)
    with pytest.raises(IndexError, match=rf"embedding: {what} is holding {bad}; accepted: 0 <= "):
        to_cpu(embedding(tokens, weight, positions=places, position_weight=weight))
    arrays.check_indices()  # reported once


def test_padding_rows_are_not_valid_tokens(xp):
    weight = Tensor(xp.ones((V, 3), np.float32), requires_grad=True)
    tokens = xp.asarray([0, 5])
    assert embedding(tokens, weight, vocab_size=6).shape == (2, 3)
    with pytest.raises(IndexError, match="holding 5; accepted: 0 <= index < 5"):
        to_cpu(embedding(tokens, weight, vocab_size=5).data)
    with pytest.raises(ValueError, match=f"vocab_size is 12; accepted: 0 to {V}"):
        embedding(tokens, weight, vocab_size=V + 1)


def test_errors(xp):
    tokens, weight = xp.zeros((2, 3), np.int32), xp.ones((V, 4), np.float32)
    with pytest.raises(TypeError, match="embedding: tokens.dtype is float32"):
        embedding(tokens.astype(np.float32), weight)
    with pytest.raises(TypeError, match="embedding: weight.dtype is int32"):
        embedding(tokens, weight.astype(np.int32))
    with pytest.raises(TypeError, match="share one dtype"):
        embedding(tokens, weight, position_weight=weight.astype(np.float16))
    with pytest.raises(TypeError, match="tokens is a list"):
        embedding([0], weight)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="embedding: p is"):
            embedding(tokens, weight, p=p)
    for scale in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="embedding: scale is"):
            embedding(tokens, weight, scale=scale)
    with pytest.raises(ValueError, match=r"position_weight.shape is \(5, 2\)"):
        embedding(tokens, weight, position_weight=xp.ones((5, 2), np.float32))
    with pytest.raises(ValueError, match=r"tokens.shape\[-1\] is 3"):
        embedding(tokens, weight, position_weight=weight[:2])
    with pytest.raises(ValueError, match="positions without position_weight"):
        embedding(tokens, weight, positions=tokens)
    with pytest.raises(ValueError, match=r"positions.shape is \(3,\)"):
        embedding(tokens, weight, positions=tokens[0], position_weight=weight)
    with pytest.raises(ValueError, match="the sizes of order"):
        embedding(tokens, weight, order=(tokens[0], tokens[0], tokens[0]))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [0, 1, 63, 1024, 1025, ORDERED, ORDERED + 1])
def test_the_order_of_tokens_on_a_gpu(gpu, rng, tokens, dtype):
    ids = rng.integers(-3, 1 + tokens // 2, tokens).astype(dtype)
    order = _argsort(gpu.asarray(ids))
    np.testing.assert_array_equal(to_cpu(order), np.argsort(ids, kind="stable"))


def test_no_fall_back_on_a_gpu(gpu, recwarn):
    embedding(gpu.zeros(3, np.int32), gpu.ones((4, 2), np.float16))
    assert not recwarn.list
