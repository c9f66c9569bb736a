"""Forms of 7.5 that load what later GPUs copy by cp.async, emulated on any CPU."""

import emulator
import numpy as np
import pytest
from checks import find, sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.ops import embedding as tables
from gpuattn.ops.loss import cross_entropy as losses
from gpuattn.ops.sampling import topk_logprobs as best
from gpuattn.rng import Key, keep_mask

pytestmark = pytest.mark.usefixtures("host_compiler")
UNITS = {np.float32: 2.0**-20, np.float16: 2.0**-10, BFLOAT16: 2.0**-7}


def machine(seed):
    return emulator.Machine(seed, multiprocessors=3, card="7.5")


def ids_of(kind, random, tokens, rows):
    if kind == "one":
        return np.full(tokens, rows // 2)
    if kind == "few, and not of the table":
        return random.choice([-1, 0, 1, rows - 1, rows], tokens)
    return np.minimum(random.zipf(1.3, tokens) - 1, rows - 1)


@pytest.mark.parametrize("adds", [False, True], ids=["writes", "adds"])
@pytest.mark.parametrize("kind, tokens, shape, dtype, p", sampled([
    ("usual", 211, (150, 264), np.float16, 0.0), ("one", 99, (7, 8), np.float32, 0.0),
    ("few, and not of the table", 75, (9, 7), np.float16, 0.5),
    ("usual", 40, (300, 132), np.float32, 0.3), ("usual", 97, (20, 1040), BFLOAT16, 0.0),
], 3))  # fmt: skip
def test_the_gradient_of_a_table(kind, tokens, shape, dtype, p, adds):
    """Also of tokens without a row, of widths without packs, and of blocks with fewer threads."""
    random, (rows, cols), scale = np.random.default_rng(tokens), shape, 0.5
    ids = ids_of(kind, random, tokens, rows).astype([np.int32, np.int64][tokens % 2])
    dy = random.standard_normal((tokens, cols)).astype(dtype)
    table = random.standard_normal(shape).astype(dtype)
    want = table.astype(np.float64) if adds else np.zeros(shape)
    key = Key(3, 1, 4) if p else None
    mask = keep_mask(np, dy.shape, p, key) / (1 - p) if p else 1
    known = (ids >= 0) & (ids < rows)
    np.add.at(want, ids[known], (scale * mask * dy.astype(np.float64))[known])
    out = table.copy()
    with machine(tokens).in_place():
        order = emulator.as_array(np.argsort(ids, kind="stable").astype(np.int32))
        arrived = emulator.as_array(np.zeros(tables._chunks(tokens)[1] * cols, np.uint32))
        given = (emulator.as_array(x) for x in (dy, ids))
        tables._add_in_order(
            *given, order, (shape, table.dtype), scale, tables._dropout_arguments(p, key), arrived,
            (emulator.as_array(out), adds),
        )  # fmt: skip
    assert not arrived.any()
    unit = UNITS[dtype]
    size = tokens**0.5 if kind == "one" else 4
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=unit, atol=unit * size)


@pytest.mark.parametrize("rows, vocab, k, kind, dtype", sampled([
    (2, 16500, 8, "usual", np.float16), (1, 33000, 5, "NaN", BFLOAT16),
    (3, 9, 3, "ties", np.float32), (2, 2049, 20, "-inf", np.float16),
    (1, 9001, 200, "ties", np.float32),
], 3))  # fmt: skip
def test_the_best_of_each_row(rows, vocab, k, kind, dtype):
    """Of rows that begin at any address, in slices of eight vectors for each thread and fewer."""
    random = np.random.default_rng(vocab)
    x = np.full((rows, vocab + 3), np.nan)
    x[:, :vocab] = 3 * random.standard_normal((rows, vocab))
    if kind == "ties":
        x = np.round(x)
    elif kind == "NaN":
        x[0, [vocab // 2, vocab - 1]] = np.nan, np.inf
    elif kind == "-inf":
        x[0, : vocab // 2] = x[1, :vocab] = -np.inf
    x = x.astype(dtype)
    given = {"k": k, "vocab_size": vocab, "needs": (False,)}
    with np.errstate(invalid="ignore"):
        want, _ = find(best.IMPLS, "reference").forward(x, **given)
    with machine(k).in_place():
        found, _ = find(best.IMPLS, "raw-simt").forward(emulator.as_array(x), **given)
    np.testing.assert_array_equal(found[1], want[1])
    np.testing.assert_allclose(found[0], want[0], rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("rows, vocab, smoothing, dtype", sampled([
    (2, 36001, 0.1, np.float16), (3, 5003, 0.0, BFLOAT16), (2, 17003, 0.1, np.float32),
    (3, 2500, 0.2, np.float16), (2, 27500, 0.0, BFLOAT16), (70, 250, 0.1, np.float16),
], 3))  # fmt: skip
def test_cross_entropy_and_its_gradient(rows, vocab, smoothing, dtype):
    """Of rows that fit shared memory, and of such that are read twice from somewhere on."""
    random = np.random.default_rng(vocab)
    x = (3 * random.standard_normal((rows, vocab + 2))).astype(dtype)
    labels = random.integers(0, vocab, rows)
    labels[-1] = -100
    share = smoothing / vocab
    given = {
        "reduction": "mean", "ignore_index": -100, "accuracy": True, "donate": True,
        "vocab_size": vocab, "label_share": 1 - smoothing + share, "other_share": share,
        "z_loss": 1e-3,
    }  # fmt: skip
    needs, one = (True, False, False), np.ones((), np.float32)
    reference = find(losses.IMPLS, "reference")
    exact = x.astype(np.float64)
    (want, right), saved = reference.forward(exact, labels, needs=needs, **given)
    gradient = reference.backward(
        saved, one.astype(np.float64), needs=needs, into=(None,) * 3, **given
    )
    with machine(vocab).in_place():
        inputs = [emulator.as_array(a) for a in (x, labels, one)]
        forward, plain = find(losses.IMPLS, "raw-simt").forward, given | {"accuracy": False}
        alone, _ = forward(*inputs, needs=(False,) * 3, **plain)
        (found, count), _ = forward(*inputs, needs=needs, **given)
    np.testing.assert_allclose((alone, found), (want, want), rtol=1e-5)
    assert count == right
    # the gradient replaced the logits
    unit = max(UNITS[dtype], 2.0**-16)
    np.testing.assert_allclose(x.astype(np.float64), gradient[0], rtol=unit, atol=unit * 1e-3)
