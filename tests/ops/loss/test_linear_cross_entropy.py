"""linear_cross_entropy in chunks of rows: the same results as linear, then cross_entropy."""

import numpy as np
import pytest
from checks import DTYPES, check_gradient, dtype_of
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

import gpuattn
from gpuattn import Tensor, cross_entropy, linear, linear_cross_entropy
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import backward_pass, tape
from gpuattn.modes import without_plans
from gpuattn.ops.loss.linear_cross_entropy import rows_at_a_time

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "smoothing": "others", "z_loss": 1e-3},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "said ahead": {"dloss": 0.5},
}


def draw(rng, rows=23, width=12, cols=40, vocab=37, dtype="float64"):
    """Return arrays with large logits in the padding beyond the vocabulary."""
    x, weight = rng.standard_normal((rows, width)) / 2, rng.standard_normal((cols, width))
    weight[vocab:] = 20
    labels = np.where(rng.random(rows) < 0.2, -100, rng.integers(0, vocab, rows))
    return x.astype(dtype_of(dtype)), weight.astype(dtype_of(dtype)), labels


def numbers(a):
    return to_cpu(tape.raw(a)).astype(np.float64)


@pytest.mark.parametrize("chunk_rows", [None, 1, 7, 23])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_equals_linear_then_cross_entropy(xp, rng, dtype, options, chunk_rows):
    x, weight, labels = draw(rng, dtype=dtype)
    exact = [Tensor(a.astype(np.float64), requires_grad=True) for a in (x, weight)]
    plain = {name: value for name, value in options.items() if name != "dloss"}
    want, right = cross_entropy(linear(*exact), labels, vocab_size=37, accuracy=True, **plain)
    backward_pass.backward(want, np.full((), 0.5))
    boxes = [Tensor(xp.asarray(a), requires_grad=True) for a in (x, weight)]
    loss, got_right = linear_cross_entropy(
        *boxes, xp.asarray(labels), vocab_size=37, accuracy=True, chunk_rows=chunk_rows, **options
    )
    backward_pass.backward(loss, xp.full((), 0.5, loss.dtype))
    rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(numbers(loss), want.data, rtol=rtol)
    if dtype in ("float32", "float64"):
        assert numbers(got_right) == right.data
    for got, box in zip(boxes, exact, strict=True):
        assert got.grad.dtype == dtype_of(dtype) and got.grad.shape == got.shape
        np.testing.assert_allclose(numbers(got.grad), box.grad, atol=rtol * box.grad.max())
    assert not numbers(boxes[1].grad)[37:].any()


@pytest.mark.parametrize("chunk_rows", [None, 7, 23])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_the_loss_alone(xp, rng, dtype, options, chunk_rows):
    x, weight, labels = draw(rng, dtype=dtype)
    plain = {name: value for name, value in options.items() if name != "dloss"}
    logits = linear(x.astype(np.float64), weight.astype(np.float64))
    want, right = cross_entropy(logits, labels, vocab_size=37, accuracy=True, **plain)
    given = [xp.asarray(a) for a in (x, weight, labels)]
    for _ in range(4):  # and by a plan
        loss, got_right = linear_cross_entropy(
            *given, vocab_size=37, accuracy=True, chunk_rows=chunk_rows, **options
        )
        np.testing.assert_allclose(numbers(loss), want, rtol=TOLERANCE[dtype])
        assert loss.shape == got_right.shape == () and got_right.dtype == np.int32
        if dtype in ("float32", "float64"):
            assert numbers(got_right) == right


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
@pytest.mark.parametrize("chunk_rows, sums", [(None, 0), (12, 2)])
def test_rows_of_one_chunk_take_a_product_and_two_launches(chunk_rows, sums):
    with launches_on(GPUS["9.0"]) as noted:
        x, weight = as_array(np.ones((23, 64), np.float16)), as_array(np.ones((99, 64), np.float16))
        with without_plans():
            linear_cross_entropy(x, weight, as_array(np.zeros(23, int)), chunk_rows=chunk_rows)
        names = [launch.name.replace("cross_entropy_", "") for launch in noted]
        chunk = ["rows_short", "sum"]
        apart = ["linear_share", *[*chunk, "linear_add"] * sums]
        assert names == (apart if sums else chunk)


def test_gradient(rng):
    x, weight, labels = draw(rng)
    labels = labels.reshape(23)

    def fun(x, weight):
        return linear_cross_entropy(
            x, weight, labels, label_smoothing=0.2, z_loss=0.01, chunk_rows=5
        )

    check_gradient(fun, x, weight)


def test_leading_axes_and_inputs_without_gradients(xp, rng):
    x, weight, labels = (xp.asarray(a) for a in draw(rng, rows=24, dtype="float32"))
    flat = linear_cross_entropy(x, weight, labels)
    shaped = x.reshape(2, 3, 4, 12), weight, labels.reshape(2, 3, 4)
    assert to_cpu(linear_cross_entropy(*shaped)) == to_cpu(flat)
    for needs in ((True, False), (False, True)):
        boxes = [Tensor(a, requires_grad=need) for a, need in zip(shaped[:2], needs, strict=True)]
        linear_cross_entropy(*boxes, shaped[2], chunk_rows=7).backward()
        assert [box.grad is not None for box in boxes] == list(needs)
        assert all(box.grad.shape == box.shape for box in boxes if box.grad is not None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weight_may_have_a_slot(xp, rng, dtype):
    """With a slot in a flat buffer, the first gradient overwrites and the next one is added."""
    x, weight, labels = (xp.asarray(a) for a in draw(rng, vocab=40, dtype=dtype))
    alone, slotted = (Tensor(weight, requires_grad=True) for _ in range(2))
    slotted.grad_slot = xp.full(weight.shape, 7, np.float32)
    linear_cross_entropy(x, alone, labels).backward()
    for times in (1, 2):
        linear_cross_entropy(x, slotted, labels).backward()
        want = times * numbers(alone.grad)
        np.testing.assert_allclose(numbers(slotted.grad), want, atol=2e-2 * np.abs(want).max())
    assert slotted.grad is slotted.grad_slot


def test_backward_twice(xp, rng):
    x, weight, labels = (xp.asarray(a) for a in draw(rng, vocab=40, dtype="float32"))
    box = Tensor(x, requires_grad=True)
    loss = linear_cross_entropy(box, weight, labels, chunk_rows=6)
    found = []
    for scale in (3.0, 1.0):
        box.grad = None
        backward_pass.backward(loss, xp.full((), scale, np.float32), retain_graph=True)
        found.append(numbers(box.grad) / scale)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-9)


def test_no_rows_and_all_rows_ignored(xp):
    weight = Tensor(xp.ones((5, 4), np.float32), requires_grad=True)
    for rows in (0, 3):
        x = Tensor(xp.ones((rows, 4), np.float32), requires_grad=True)
        loss = linear_cross_entropy(x, weight, xp.full(rows, -100))
        weight.grad = None
        loss.backward()
        assert to_cpu(loss.data) == 0
        assert not to_cpu(x.grad).any() and not to_cpu(weight.grad).any()


def test_rows_per_chunk():
    assert rows_at_a_time(100_000, 32000, 2, True) == 8384
    assert rows_at_a_time(100_000, 262144, 4, True) == 2048
    assert rows_at_a_time(100, 32000, 2, True) == 100
    assert rows_at_a_time(0, 7, 4, False) == 1


def test_less_memory_than_all_logits(gpu):
    x, weight = gpu.zeros((4096, 64), np.float16), gpu.zeros((16384, 64), np.float16)
    boxes = [Tensor(a, requires_grad=True) for a in (x, weight)]
    pool = gpu.cuda.MemoryPool()
    with gpu.cuda.using_allocator(pool.malloc):
        loss = linear_cross_entropy(*boxes, gpu.zeros(4096, int), chunk_rows=256, dloss=1)
        loss.backward()
    assert pool.total_bytes() < x.shape[0] * len(weight) * x.itemsize / 2


def test_errors(xp):
    x, weight = xp.zeros((3, 4), np.float32), xp.zeros((5, 4), np.float32)
    labels = xp.zeros(3, np.int32)
    with pytest.raises(TypeError, match="linear_cross_entropy: labels.dtype"):
        linear_cross_entropy(x, weight, labels.astype(np.float32))
    with pytest.raises(TypeError, match="share one dtype"):
        linear_cross_entropy(x, weight.astype(np.float64), labels)
    with pytest.raises(ValueError, match=r"weight.shape is \(5,\)"):
        linear_cross_entropy(x, weight[:, 0], labels)
    with pytest.raises(ValueError, match=r"x.shape is \(3, 3\)"):
        linear_cross_entropy(x[:, :3], weight, labels)
    with pytest.raises(ValueError, match=r"labels.shape is \(2,\)"):
        linear_cross_entropy(x, weight, labels[:2])
    for name, values in {"vocab_size": (0, 6), "chunk_rows": (0, -1), "dloss": (0,)}.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                linear_cross_entropy(x, weight, labels, **{name: value})
    with pytest.raises(ValueError, match="reduction is 'none'; accepted: 'mean' or 'sum'"):
        linear_cross_entropy(x, weight, labels, reduction="none")
    with pytest.raises(IndexError, match="labels is holding 5"):
        to_cpu(linear_cross_entropy(x, weight, labels + 5))


def test_explain_gives_reasons(rng):
    x, weight, labels = draw(rng)
    told = gpuattn.explain(linear_cross_entropy, x, weight, labels)
    assert told.chosen == "reference" and "NumPy" in dict(told.reasons)["raw-simt"]
