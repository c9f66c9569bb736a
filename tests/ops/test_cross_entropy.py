"""Cross entropy: both smoothing rules, ignored and wrong labels, padding, donation."""

import numpy as np
import pytest
from checks import DTYPES, check_gradient, check_implementation, dtype_of, implementations

from gpuattn import Tensor, arrays
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import tape
from gpuattn.errors import GradientError
from gpuattn.ops.cross_entropy import IMPLS, _shares, cross_entropy

# (rows), columns, vocabulary; 257 and 300 are past one block
SHAPES = {
    "one": ((1,), 1, 1),
    "odd": ((5,), 257, 257),
    "stacked": ((2, 3), 64, 50),
    "rows": ((300,), 7, 6),
    "scalar": ((), 9, 9),
    "empty": ((0,), 9, 9),
}
SMOOTHING = {"none": (0.0, "uniform"), "uniform": (0.1, "uniform"), "others": (0.3, "others")}


def settings(vocab_size, eps=0.0, rule="uniform", reduction="mean", donate=False):
    q, u = _shares(vocab_size, eps, rule)
    return {
        "vocab_size": vocab_size, "label_share": q, "other_share": u, "ignore_index": -100,
        "reduction": reduction, "donate": donate,
    }  # fmt: skip


def draw(rng, rows, cols, vocab, dtype=np.int32):
    logits = 3 * rng.standard_normal((*rows, cols)) + 2
    logits[..., vocab:] = np.nan  # padding is never read
    labels = np.where(rng.random(rows) < 0.2, -100, rng.integers(0, vocab, rows)).astype(dtype)
    return logits, labels


def written_out(logits, labels, eps, rule, reduction, vocab):
    """The definition, row by row, with the target distribution in full."""
    losses = np.zeros(labels.shape)
    for row in np.ndindex(labels.shape):
        if labels[row] == -100:
            continue
        target = np.full(vocab, eps / (vocab if rule == "uniform" else vocab - 1))
        target[labels[row]] = 1 - eps + (eps / vocab if rule == "uniform" else 0)
        x = logits[row][:vocab]
        losses[row] = -(target * (x - np.log(np.exp(x).sum()))).sum()
    if reduction == "none":
        return losses
    return losses.sum() / (max((labels != -100).sum(), 1) if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("eps, rule", SMOOTHING.values(), ids=SMOOTHING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols, vocab", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", implementations(IMPLS))
def test_implementations(rng, name, where, rows, cols, vocab, dtype, eps, rule, reduction):
    logits, labels = draw(rng, rows, cols, vocab)
    params = settings(vocab, eps, rule, reduction)
    check_implementation(IMPLS, name, where, [logits, labels], dtype, **params)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("eps, rule", SMOOTHING.values(), ids=SMOOTHING)
def test_written_out_definition(xp, rng, eps, rule, reduction):
    logits, labels = draw(rng, (4, 5), 12, 11, np.int64)
    want = written_out(logits, labels, eps, rule, reduction, 11)
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 2e-6)):
        got = cross_entropy(
            xp.asarray(logits.astype(dtype)), xp.asarray(labels), label_smoothing=eps,
            smoothing=rule, reduction=reduction, vocab_size=11,
        )  # fmt: skip
        assert got.dtype == dtype
        np.testing.assert_allclose(to_cpu(got), want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("eps, rule", SMOOTHING.values(), ids=SMOOTHING)
def test_gradient(rng, eps, rule, reduction):
    labels = np.array([[0, -100, 3], [5, 5, 1]])

    def fun(logits):
        return cross_entropy(
            logits, labels, label_smoothing=eps, smoothing=rule, reduction=reduction, vocab_size=6
        )

    check_gradient(fun, rng.standard_normal((2, 3, 7)))


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_all_rows_ignored(xp, dtype):
    logits = xp.full((3, 4), np.nan, np.float32).astype(dtype_of(dtype))
    for reduction in ("mean", "sum", "none"):
        x = Tensor(logits, requires_grad=True)
        loss = cross_entropy(x, xp.full(3, 7, np.int32), ignore_index=7, reduction=reduction)
        tape.backward(loss, xp.ones(loss.shape, loss.dtype))
        assert not to_cpu(loss.data).any()
        assert not to_cpu(x.grad).astype(np.float64).any()


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_padding_is_not_read_and_gets_no_gradient(xp, rng, dtype):
    clean = rng.standard_normal((6, 5))
    labels = xp.asarray(rng.integers(0, 5, 6))
    grads = []
    for poison in (np.nan, np.inf, 0):
        padded = np.concatenate([clean, np.full((6, 3), poison)], 1).astype(dtype_of(dtype))
        x = Tensor(xp.asarray(padded), requires_grad=True)
        loss = cross_entropy(x, labels, vocab_size=5, label_smoothing=0.1)
        tape.backward(loss, xp.ones((), loss.dtype))
        grads.append(to_cpu(x.grad).astype(np.float64))
        assert not grads[-1][:, 5:].any()
    np.testing.assert_array_equal(grads[0], grads[1])
    np.testing.assert_array_equal(grads[0], grads[2])
    assert grads[0][:, :5].all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_donated_logits_become_their_gradient(xp, rng, dtype, reduction):
    logits, labels = draw(rng, (2, 9), 12, 10)
    logits = xp.asarray(logits.astype(dtype_of(dtype)))
    grads, rtol = [], 1e-12 if dtype == "float64" else 0  # CuPy sums in blocks of its own
    for donate in (False, True):
        data = logits.copy()
        x = Tensor(data, requires_grad=True)
        # from a Tensor that is no leaf: a leaf would copy its gradient
        y = np.reshape(x, (18, 12))
        kwargs = {"label_smoothing": 0.1, "vocab_size": 10, "reduction": reduction}
        loss = cross_entropy(y, xp.asarray(labels.ravel()), donate=donate, **kwargs)
        weight = xp.asarray(np.linspace(1, 2, loss.data.size).reshape(loss.shape)).astype(
            loss.dtype
        )
        tape.backward(loss, weight, retain_graph=True)
        grads.append(to_cpu(x.grad).astype(np.float64))
        overwritten = to_cpu(data).astype(np.float64).reshape(18, 12)
        if donate:
            np.testing.assert_allclose(overwritten, grads[0].reshape(18, 12), rtol)
            with pytest.raises(GradientError, match="donate=True"):
                tape.backward(loss, weight)
        else:
            untouched = to_cpu(logits).astype(np.float64).reshape(18, 12)
            np.testing.assert_array_equal(overwritten, untouched)
    np.testing.assert_allclose(*grads, rtol)


def test_logits_that_another_op_needs_cannot_be_donated():
    x = np.tanh(Tensor(np.zeros((2, 3)), requires_grad=True))  # keeps its output
    with pytest.raises(ValueError, match="donate=True, but the logits are read-only, or kept"):
        cross_entropy(x, np.zeros(2, int), donate=True)


def test_logits_that_another_op_needs_are_missed_on_a_gpu(gpu):
    x = np.tanh(Tensor(gpu.zeros((2, 3), np.float32), requires_grad=True))
    loss = cross_entropy(x, gpu.zeros(2, int), donate=True) + x.sum()
    with pytest.raises(GradientError, match=r"np\.tanh saved .* was edited in place"):
        loss.backward()


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # the kernel's check and the reference's
@pytest.mark.parametrize("bad", [-1, 5, 6, -(2**31), 2**31 - 1])
def test_labels_out_of_range(xp, bad, dtype):
    labels = xp.zeros(4, np.int32)
    labels[1] = bad
    with pytest.raises(IndexError, match=rf"cross_entropy: labels is holding {bad}; .* < 5"):
        to_cpu(cross_entropy(xp.zeros((4, 6), dtype), labels, vocab_size=5))
    arrays.check_indices()  # said once


def test_large_logits_and_nan_rows(xp, rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)
    labels = xp.asarray(np.array([0, 1, 2, 3]))
    want = to_cpu(cross_entropy(xp.asarray(x), labels, reduction="none"))
    shifted = np.round(x * 256) / 256 + np.float32(8192)  # exact in float32
    got = to_cpu(cross_entropy(xp.asarray(shifted), labels, reduction="none"))
    np.testing.assert_allclose(got, want, atol=0.01)
    x[2, 5] = np.nan
    got = to_cpu(cross_entropy(xp.asarray(x), labels, reduction="none"))
    assert np.isnan(got).tolist() == [False, False, True, False]
    np.testing.assert_allclose(got[[0, 1, 3]], want[[0, 1, 3]], rtol=1e-6)


def test_views_of_any_strides(xp, rng):
    whole = xp.asarray(rng.standard_normal((6, 20)).astype(np.float32))
    labels = xp.asarray(rng.integers(0, 5, 12))[::2]
    for view in (
        whole[:, 3:13],
        whole[:, ::2],
        whole[::-1, ::-1],
        xp.broadcast_to(whole[:1], (6, 20)),
    ):
        x = Tensor(view, requires_grad=True)
        loss = cross_entropy(x, labels)
        tape.backward(loss, xp.ones((), np.float32))
        y = Tensor(to_cpu(view).copy(), requires_grad=True)
        want = cross_entropy(y, to_cpu(labels))
        tape.backward(want, np.ones((), np.float32))
        np.testing.assert_allclose(to_cpu(loss.data), want.data, rtol=1e-6)
        np.testing.assert_allclose(to_cpu(x.grad), y.grad, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8])
def test_any_integer_labels(xp, dtype):
    x = xp.asarray(np.eye(3, dtype=np.float32))
    want = to_cpu(cross_entropy(x, xp.arange(3, dtype=np.int32)))
    assert to_cpu(cross_entropy(x, xp.arange(3, dtype=dtype))) == want


def test_errors(xp):
    x, labels = xp.zeros((2, 3), np.float32), xp.zeros(2, np.int32)
    with pytest.raises(TypeError, match="labels.dtype is float32"):
        cross_entropy(x, labels.astype(np.float32))
    with pytest.raises(TypeError, match="logits.dtype is int32"):
        cross_entropy(x.astype(np.int32), labels)
    with pytest.raises(ValueError, match=r"labels.shape is \(2, 1\)"):
        cross_entropy(x, labels[:, None])
    for vocab_size in (0, 4):
        with pytest.raises(ValueError, match="vocab_size"):
            cross_entropy(x, labels, vocab_size=vocab_size)
    for eps in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="label_smoothing"):
            cross_entropy(x, labels, label_smoothing=eps)
    with pytest.raises(ValueError, match="smoothing is 'fairseq'"):
        cross_entropy(x, labels, smoothing="fairseq")
    with pytest.raises(ValueError, match="reduction is 'avg'; accepted: mean, sum, none"):
        cross_entropy(x, labels, reduction="avg")


def test_no_fall_back_on_a_gpu(gpu, recwarn):
    cross_entropy(gpu.zeros((2, 3), np.float16), gpu.zeros(2, np.int32))
    assert not recwarn.list
