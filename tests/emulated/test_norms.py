"""Gradients of norms by the kernels of pairs of rows and of two gradients, emulated on any CPU."""

from dataclasses import replace

import emulator
import numpy as np
import pytest
from checks import find, sampled
from fake_gpu import GPUS

from gpuattn.arrays import BFLOAT16
from gpuattn.ops.norm import dropout_add_norm as op
from gpuattn.ops.norm import launch
from gpuattn.rng import Key

pytestmark = pytest.mark.usefixtures("host_compiler")


@pytest.mark.parametrize("dtype, rows, cols, p, rms, needs, with_dh", sampled([
    (BFLOAT16, 47, 384, 0.2, False, (1, 1, 1, 0, 0), True),
    (np.float16, 8, 384, 0.5, False, (1, 1, 1, 1, 0), False),
    (BFLOAT16, 33, 384, 0.0, True, (1, 1, 1, 0, 0), True),
    (BFLOAT16, 37, 256, 0.2, False, (1, 1, 1, 1, 1), True),
    (np.float16, 1, 256, 1.0, True, (1, 1, 0, 0, 1), True),
    (BFLOAT16, 25, 768, 0.1, False, (1, 1, 1, 1, 1), True),
    (np.float16, 9, 1280, 0.0, False, (1, 1, 1, 1, 0), True),
    (BFLOAT16, 14, 1536, 0.2, True, (1, 1, 1, 0, 1), False),
], 3))  # fmt: skip
def test_pairs_of_rows(monkeypatch, dtype, rows, cols, p, rms, needs, with_dh):
    """Odd and even numbers of rows, few and more than a block processes at once, strided rows."""
    machine, random = emulator.Machine(seed=rows), np.random.default_rng(cols)
    monkeypatch.setattr(launch, "gpu", lambda device: replace(GPUS["9.0"], multiprocessors=1))
    monkeypatch.setattr(
        op, "add_parts", lambda parts, *_: [p if p is None else p.sum(0) for p in parts]
    )
    h, dnormed, dh = random.standard_normal((3, rows, cols)).astype(dtype)
    weight = None if not needs[2] else (1 + random.standard_normal(cols) / 9).astype(dtype)
    params = {"p": p, "key": Key(5, 3, 2) if p else None, "rms": rms, "eps": 1e-5}
    grads = dnormed, dh if with_dh else None
    saved, want = wanted(h, weight, *grads, needs, params)
    strided = [None if g is None else np.repeat(g, 2, 0)[::2] for g in grads]
    with machine.in_place():
        given = [emulator.as_array(a) for a in (*saved, *strided)]
        assert launch.pairs_layout(given[0], needs[2:])
        got = find(op.IMPLS, "raw-simt").backward(
            given[:4], *given[4:], needs=needs, into=(None,) * 5, **params
        )
    check(got, want, needs, dtype, rows)


@pytest.mark.parametrize("card, dtype, rows, cols, p, rms, needs, with_dh", sampled([
    ("9.0", BFLOAT16, 21, 768, 0.1, False, (1, 1, 1, 1, 1), False),
    ("9.0", BFLOAT16, 9, 384, 0.2, False, (1, 1, 1, 1, 1), True),
    ("9.0", BFLOAT16, 13, 384, 0.2, False, (1, 1, 1, 1, 0), True),
    ("9.0", np.float16, 7, 1280, 0.1, False, (1, 1, 1, 1, 1), True),
    ("9.0", BFLOAT16, 5, 1024, 0.1, False, (1, 1, 1, 1, 1), False),
    ("9.0", np.float32, 11, 301, 0.5, True, (1, 1, 1, 0, 0), True),
    ("7.5", np.float16, 21, 768, 0.1, False, (1, 1, 1, 1, 1), True),
    ("8.0", np.float16, 3, 9000, 0.0, False, (1, 1, 0, 0, 1), True),
], 3))  # fmt: skip
def test_two_gradients(monkeypatch, card, dtype, rows, cols, p, rms, needs, with_dh):
    """The sum of two gradients of the result is not rounded before the norm's gradient."""
    machine = emulator.Machine(seed=rows, multiprocessors=2, card=card)
    random = np.random.default_rng(cols)
    monkeypatch.setattr(launch, "gpu", lambda device: machine.gpu)
    monkeypatch.setattr(
        op, "add_parts", lambda parts, *_: [p if p is None else p.sum(0) for p in parts]
    )
    h, dnormed, dh, second = random.standard_normal((4, rows, cols)).astype(dtype)
    weight = None if not needs[2] else (1 + random.standard_normal(cols) / 9).astype(dtype)
    params = {"p": p, "key": Key(5, 3, 2) if p else None, "rms": rms, "eps": 1e-5}
    total = dnormed.astype(np.float32) + second.astype(np.float32)
    dh = dh if with_dh else None
    saved, want = wanted(h, weight, total, dh, needs, params)
    strided = [None if g is None else np.repeat(g, 2, 0)[::2] for g in (dnormed, dh, second)]
    with machine.in_place():
        given = [emulator.as_array(a) for a in (*saved, *strided)]
        got = find(op.IMPLS, "raw-simt").backward(
            given[:4], *given[4:], needs=needs, into=(None,) * 5, **params
        )
    check(got, want, needs, dtype, rows)


def wanted(h, weight, dnormed, dh, needs, params):
    """Return (what the kernels' forward saves, the gradients by the reference)."""
    zeros, reference, vectors = np.zeros_like(h), find(op.IMPLS, "reference"), (weight, None, None)
    _, saved = reference.forward(zeros, h, *vectors, needs=needs, **(params | {"p": 0.0}))
    mask = reference.forward(zeros, h, *vectors, needs=needs, **params)[1][3]
    normalized, rstd = saved[:2]
    want = reference.backward(
        (normalized, rstd, weight, mask, h.dtype), dnormed, dh, needs=needs, into=(None,) * 5,
        **params,
    )  # fmt: skip
    exact = h.astype(np.float64)
    mean = (exact.mean(-1) - exact[:, 0]).astype("f")
    return (h, weight, mean, np.ascontiguousarray(rstd.astype("f").ravel())), want


def check(got, want, needs, dtype, rows):
    unit = {np.float16: 2.0**-10, np.float32: 2.0**-18}.get(dtype, 2.0**-7)
    for mine, other, needed in zip(got, want, needs, strict=True):
        assert (mine is None) == (not needed)
        if needed:
            mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(mine, other, rtol=unit, atol=unit / 8 * max(1, rows**0.5))
