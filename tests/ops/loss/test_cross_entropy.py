"""Cross entropy: both smoothing rules, z-loss, ignored and wrong labels, padding, donation."""

from dataclasses import replace

import numpy as np
import pytest
from checks import DTYPES, check_gradient, check_implementation, dtype_of, implementations

from gpuattn import Tensor, arrays
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import backward_pass
from gpuattn.cuda import kernels, sources
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.errors import GradientError
from gpuattn.ops.loss import launch
from gpuattn.ops.loss.cross_entropy import IMPLS, _shares, cross_entropy

# (rows), columns, vocabulary; 257 and 300 exceed the threads of one block
SHAPES = {
    "one": ((1,), 1, 1),
    "odd": ((5,), 257, 257),
    "stacked": ((2, 3), 64, 50),
    "rows": ((300,), 7, 6),
    "scalar": ((), 9, 9),
    "empty": ((0,), 9, 9),
}
# rows, columns, vocabulary: several rows or one row per warp, one row per block of 32, 128 or 512
# threads, and per cluster of 2, 6 or 8 blocks; misaligned rows, padding. float32 rows take twice
# the memory
LONG = {
    "four to a warp, also float32": ((67,), 40, 37),
    "four to a warp": ((67,), 72, 65),
    "two to a warp": ((67,), 200, 199),
    "two vectors a lane": ((70,), 250, 250),
    "four": ((41,), 1003, 1000),
    "eight": ((9,), 2001, 2001),
    "32": ((9,), 4000, 4000),
    "128": ((5,), 9728, 9720),
    "anywhere": ((3,), 50257, 50257),
    "padded": ((3,), 50304, 50257),
    "512": ((3,), 50304, 50304),
    "cluster of two": ((3,), 65000, 64999),
    "cluster of six": ((9,), 128256, 128256),
    "cluster of eight": ((2,), 262144, 262140),
}
SMOOTHING = {"none": (0.0, "uniform"), "uniform": (0.1, "uniform"), "others": (0.3, "others")}


def settings(vocab_size, eps=0.0, rule="uniform", reduction="mean", z_loss=0.0):
    q, u = _shares(vocab_size, eps, rule)
    return {
        "vocab_size": vocab_size, "label_share": q, "other_share": u, "ignore_index": -100,
        "reduction": reduction, "donate": False, "z_loss": z_loss, "accuracy": True,
    }  # fmt: skip


def draw(rng, rows, cols, vocab, dtype=np.int32):
    logits = 3 * rng.standard_normal((*rows, cols)) + 2
    logits[..., vocab:] = np.nan  # padding is never read
    labels = np.where(rng.random(rows) < 0.2, -100, rng.integers(0, vocab, rows)).astype(dtype)
    return logits, labels


def written_out(logits, labels, eps, rule, reduction, vocab, z_loss=0.0):
    """Compute the definition row by row in float64, with the full target distribution."""
    losses = np.zeros(labels.shape)
    for row in np.ndindex(labels.shape):
        if labels[row] == -100:
            continue
        target = np.full(vocab, eps / (vocab if rule == "uniform" else vocab - 1))
        target[labels[row]] = 1 - eps + (eps / vocab if rule == "uniform" else 0)
        x = logits[row][:vocab]
        lse = np.log(np.exp(x).sum())
        losses[row] = -(target * (x - lse)).sum() + z_loss * lse**2
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols, vocab", LONG.values(), ids=LONG)
@pytest.mark.gpu
def test_long_rows(rng, rows, cols, vocab, dtype):
    logits, labels = draw(rng, rows, cols, vocab)
    params = settings(vocab, 0.1, "uniform", "mean", 1e-3)
    check_implementation(IMPLS, "raw-simt", "cupy", [logits, labels], dtype, **params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols, vocab", LONG.values(), ids=LONG)
def test_gradients_in_place(gpu, rng, rows, cols, vocab, dtype):
    """Loss, accuracy and gradient in one pass; ignored rows may hold any values."""
    logits, labels = draw(rng, rows, cols, vocab)
    logits = logits.astype(dtype_of(dtype))
    labels[0] = logits[0, :vocab].astype(np.float32).argmax()
    logits[labels == -100] = np.nan
    kwargs = {"label_smoothing": 0.1, "vocab_size": vocab, "z_loss": 1e-3, "accuracy": True}
    exact = Tensor(logits.astype(np.float64), requires_grad=True)
    want, want_right = cross_entropy(exact, labels, **kwargs)
    backward_pass.backward(want, np.full((), 3.0))
    x = gpu.asarray(logits)
    y = np.reshape(Tensor(x, requires_grad=True), x.shape)
    loss, right = cross_entropy(y, gpu.asarray(labels), donate=True, dloss=3, **kwargs)
    got = to_cpu(x).astype(np.float64)
    np.testing.assert_allclose(to_cpu(loss.data), want.data, rtol=5e-6)
    assert int(to_cpu(right.data)) == int(want_right.data) >= 1
    scale = np.abs(exact.grad).max()
    np.testing.assert_allclose(got, exact.grad, atol=scale * TOLERANCE[dtype])
    assert not got[labels == -100].any() and not got[:, vocab:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [503, 3001, 20000, 128256])
def test_nonfinite_rows_do_not_affect_others(gpu, rng, vocab, dtype):
    huge = 1e4 if dtype == "float16" else 1e30
    logits = 3 * rng.standard_normal((8, vocab))
    logits[1] = -np.inf
    logits[2, :] = -np.inf
    logits[2, 5] = 1
    logits[3, 7] = np.nan
    logits[4] *= huge / 16
    logits[5] = huge
    logits[6, : vocab // 2] = -np.inf
    logits, labels = logits.astype(dtype_of(dtype)), np.array([0, 1, 5, 9, 4, 3, vocab - 1, 2])
    with np.errstate(all="ignore"):
        want = cross_entropy(logits.astype(np.float64), labels, reduction="none")
    x = gpu.asarray(logits)
    y = np.reshape(Tensor(x, requires_grad=True), x.shape)
    got = to_cpu(cross_entropy(x, gpu.asarray(labels), reduction="none"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.isnan(got).tolist() == [False, True, False, True, False, False, False, False]
    cross_entropy(y, gpu.asarray(labels), reduction="sum", donate=True, dloss=1)
    finite = np.isfinite(to_cpu(x).astype(np.float64)).all(1)
    assert finite.tolist() == (~np.isnan(want)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_shared_memory_are_read_twice(gpu, rng, monkeypatch, dtype):
    record = replace(gpu_of(0), shared_bytes=launch.RESERVED_SHARED + (1 << 10))
    monkeypatch.setattr(launch, "gpu", lambda device: record)
    for vocab in (3000, 100003):
        logits, labels = draw(rng, (3,), vocab, vocab)
        params = settings(vocab, 0.1)
        check_implementation(IMPLS, "raw-simt", "cupy", [logits, labels], dtype, **params)


def test_launch_tables():
    for table in (launch.SHORT, launch.LONG):
        assert table == sorted(table)
    for size, (lanes, vectors) in launch.SHORT:
        assert size <= lanes * 16 * vectors
        constants = {"scalar": "bf16", "LANES": lanes, "VECTORS": vectors, "CHECKED": True}
        assert constants in sources.variants("loss/cross_entropy_short.cu")
    for size, (cluster, block) in launch.LONG:
        file = "loss/cross_entropy_cluster.cu" if cluster > 1 else "loss/cross_entropy.cu"
        constants = {"scalar": "bf16", "CLUSTER": cluster, "BLOCK": block, "CHECKED": True}
        assert any(form.items() <= constants.items() for form in sources.variants(file))
        size = min(size, 4 * 262144)
        room = (227 << 10) - launch.RESERVED_SHARED  # shared memory of a block on a Hopper GPU
        assert size <= cluster * room, "a row of 262,144 floats is read once"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("eps, rule", SMOOTHING.values(), ids=SMOOTHING)
def test_written_out_definition(xp, rng, eps, rule, reduction):
    logits, labels = draw(rng, (4, 5), 12, 11, np.int64)
    want = written_out(logits, labels, eps, rule, reduction, 11, 1e-2)
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 2e-6)):
        got = cross_entropy(
            xp.asarray(logits.astype(dtype)), xp.asarray(labels), label_smoothing=eps,
            smoothing=rule, z_loss=1e-2, reduction=reduction, vocab_size=11,
        )  # fmt: skip
        assert got.dtype == dtype
        np.testing.assert_allclose(to_cpu(got), want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("eps, rule", SMOOTHING.values(), ids=SMOOTHING)
def test_gradient(rng, eps, rule, reduction):
    labels = np.array([[0, -100, 3], [5, 5, 1]])

    def fun(logits):
        return cross_entropy(
            logits, labels, label_smoothing=eps, smoothing=rule, z_loss=0.05, reduction=reduction,
            vocab_size=6,
        )  # fmt: skip

    check_gradient(fun, rng.standard_normal((2, 3, 7)))


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_accuracy(xp, dtype):
    rows = {  # logits, label, right?
        "the largest": ([0, 1, 9, 2, 0, 0, 0, 0, 0, 3], 2, 1),
        "another": ([0, 1, 9, 2, 0, 0, 0, 0, 0, 3], 1, 0),
        "first of equal ones": ([5, 5, 1, 0, 5, 0, 0, 0, 0, 5], 0, 1),
        "second of equal ones": ([5, 5, 1, 0, 5, 0, 0, 0, 0, 5], 1, 0),
        "last of equal ones": ([5, 5, 1, 0, 5, 0, 0, 0, 0, 5], 9, 0),
        "the last alone": ([5, 5, 1, 0, 5, 0, 0, 0, 0, 6], 9, 1),
        "ignored": ([9, 1, 0, 2, 0, 0, 0, 0, 0, 3], -100, 0),
        "not a number": ([9, np.nan, 0, 2, 0, 0, 0, 0, 0, 3], 0, 0),
        "some cannot be": ([-np.inf, 1, -np.inf, 0, 0, 0, 0, 0, 0, 0], 1, 1),
        "none can be": ([-np.inf] * 10, 0, 0),
    }
    for case, (logits, label, right) in rows.items():
        # as the only row, and the padding is larger
        x = xp.asarray(np.array([[*logits, 99]]).astype(dtype_of(dtype)))
        with np.errstate(all="ignore"):
            _, got = cross_entropy(x, xp.asarray([label]), vocab_size=10, accuracy=True)
        assert got.dtype == np.int32 and got.shape == ()
        assert int(to_cpu(got)) == right, case
    x = Tensor(xp.asarray(np.eye(3, 12, dtype=np.float32)), requires_grad=True)
    loss, right = cross_entropy(x, xp.arange(3), accuracy=True)
    loss.backward()
    assert int(to_cpu(right.data)) == 3


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_all_rows_ignored(xp, dtype):
    logits = xp.full((3, 4), np.nan, np.float32).astype(dtype_of(dtype))
    for reduction in ("mean", "sum", "none"):
        x = Tensor(logits, requires_grad=True)
        loss = cross_entropy(x, xp.full(3, 7, np.int32), ignore_index=7, reduction=reduction)
        backward_pass.backward(loss, xp.ones(loss.shape, loss.dtype))
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
        backward_pass.backward(loss, xp.ones((), loss.dtype))
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
    grads, rtol = [], 1e-12 if dtype == "float64" else 0  # CuPy sums in another order
    for donate in (False, True):
        data = logits.copy()
        x = Tensor(data, requires_grad=True)
        # from a Tensor that is not a leaf, because a leaf would copy its gradient
        y = np.reshape(x, (18, 12))
        kwargs = {"label_smoothing": 0.1, "vocab_size": 10, "reduction": reduction}
        loss = cross_entropy(y, xp.asarray(labels.ravel()), donate=donate, **kwargs)
        weight = xp.asarray(np.linspace(1, 2, loss.data.size).reshape(loss.shape)).astype(
            loss.dtype
        )
        backward_pass.backward(loss, weight, retain_graph=True)
        grads.append(to_cpu(x.grad).astype(np.float64))
        overwritten = to_cpu(data).astype(np.float64).reshape(18, 12)
        if donate:
            np.testing.assert_allclose(overwritten, grads[0].reshape(18, 12), rtol)
            with pytest.raises(GradientError, match="donate=True"):
                backward_pass.backward(loss, weight)
        else:
            untouched = to_cpu(logits).astype(np.float64).reshape(18, 12)
            np.testing.assert_array_equal(overwritten, untouched)
    np.testing.assert_allclose(*grads, rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_loss_may_be_given_in_advance(xp, rng, dtype):
    """The result is for the gradient passed to backward, whatever was given in advance."""
    logits, labels = draw(rng, (9,), 40, 37)
    logits = logits.astype(dtype_of(dtype))
    kwargs = {"label_smoothing": 0.1, "vocab_size": 37, "z_loss": 1e-3}
    exact = Tensor(logits.astype(np.float64), requires_grad=True)
    backward_pass.backward(cross_entropy(exact, labels, **kwargs), np.full((), 24.0))
    before = launch_count("cross_entropy_gradient")
    for ahead in (None, 24, 8.0, xp.asarray(np.float32(24))):
        x = Tensor(xp.array(logits), requires_grad=True)
        y = np.reshape(x, (9, 40))
        loss = cross_entropy(y, xp.asarray(labels), donate=True, dloss=ahead, **kwargs)
        backward_pass.backward(loss, xp.full((), 24.0, np.float32))
        got = to_cpu(x.grad).astype(np.float64)
        scale = np.abs(exact.grad).max()
        np.testing.assert_allclose(got, exact.grad, atol=scale * TOLERANCE[dtype])
    if xp is not np:  # without a value in advance, float16 computes the gradient in backward
        waited = launch_count("cross_entropy_gradient") - before
        assert waited == (dtype == "float16")


TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}


def launch_count(name):
    return kernels.launches[name]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("columns", [7, 1000, 4000, 9728, 65000])
def test_the_loss_alone_has_the_bits_of_that_with_a_count(xp, rng, columns, reduction, dtype):
    """With a count, a launch of its own checks the labels; without, each row checks its label."""
    for rows in (0, 1, 70):
        logits, labels = draw(rng, (rows,), columns, columns, dtype)
        given = xp.asarray(logits.astype(np.float16)), xp.asarray(labels)
        alone = to_cpu(cross_entropy(*given, reduction=reduction))
        counted, _ = cross_entropy(*given, reduction=reduction, accuracy=True)
        np.testing.assert_array_equal(alone, to_cpu(counted))
    labels[3] = columns
    with pytest.raises(IndexError, match=f"labels.*{columns}"):
        to_cpu(cross_entropy(given[0], xp.asarray(labels), reduction=reduction))


def test_the_same_bits_twice_and_in_a_graph(gpu, rng):
    logits, labels = draw(rng, (70,), 9000, 9000)
    given = gpu.asarray(logits.astype(np.float32))
    x, labels = given.copy(), gpu.asarray(labels)
    dloss, found = gpu.ones((), np.float32), []

    def step():
        x[...] = given
        y = Tensor(x, requires_grad=True)
        loss = cross_entropy(np.reshape(y, (70, 9000)), labels, donate=True, dloss=dloss)
        backward_pass.backward(loss, dloss)
        return loss.data

    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        for _ in range(3):
            loss = step()
            found.append((to_cpu(loss).tobytes(), to_cpu(x).tobytes()))
        stream.begin_capture()
        loss = step()
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch(stream)
            found.append((to_cpu(loss).tobytes(), to_cpu(x).tobytes()))
    assert len(set(found)) == 1


def test_logits_that_another_op_needs_cannot_be_donated():
    x = np.tanh(Tensor(np.zeros((2, 3)), requires_grad=True))  # keeps its output
    with pytest.raises(ValueError, match="donate=True, but the logits are read-only, or kept"):
        cross_entropy(x, np.zeros(2, int), donate=True)


def test_donating_logits_that_another_op_needs_fails_on_a_gpu(gpu):
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
    arrays.check_indices()  # reported once


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
        whole[:, 3:13].T[:6],
    ):
        x = Tensor(view, requires_grad=True)
        loss = cross_entropy(x, labels)
        backward_pass.backward(loss, xp.ones((), np.float32))
        y = Tensor(to_cpu(view).copy(), requires_grad=True)
        want = cross_entropy(y, to_cpu(labels))
        backward_pass.backward(want, np.ones((), np.float32))
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
    for z_loss in (-1e-4, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="z_loss"):
            cross_entropy(x, labels, z_loss=z_loss)
    for dloss in (0, xp.ones(2, np.float32)):
        with pytest.raises(ValueError, match="dloss"):
            cross_entropy(x, labels, dloss=dloss)
    with pytest.raises(TypeError, match=r"dloss\.dtype"):
        cross_entropy(x, labels, dloss=xp.ones((), np.float16))
    with pytest.raises(ValueError, match="smoothing is 'fairseq'"):
        cross_entropy(x, labels, smoothing="fairseq")
    with pytest.raises(ValueError, match="reduction is 'avg'; accepted: 'mean' or 'sum' or 'none'"):
        cross_entropy(x, labels, reduction="avg")


def test_no_fall_back_on_a_gpu(gpu, recwarn):
    cross_entropy(gpu.zeros((2, 3), np.float16), gpu.zeros(2, np.int32))
    assert not recwarn.list
