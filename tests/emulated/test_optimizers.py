"""Optimizer kernels, emulated on any CPU with threads in random order, against NumPy."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import emulator
import numpy as np
import pytest
from checks import dtype_of
from fake_gpu import GPUS

from gpuattn import OptimizerState, TensorTable, adamw, gradient_statistics, lamb, lion, sgd
from gpuattn.ops.update import flat_update
from gpuattn.ops.update import gradient_statistics as statistics
from gpuattn.ops.update import lamb as lamb_module

SIZE, STARTS, ADAPTED = 70 * 128, (0, 128, 17 * 128, 60 * 128), (True, True, True, False)
DTYPES = [  # gradients, weights, the model's copy
    ("float32", "float32", None), ("float16", "float32", "float16"),
    ("bfloat16", "float32", "bfloat16"), ("bfloat16", "bfloat16", None),
]  # fmt: skip
RULES = {
    "adamw": lambda x, impl: adamw(*x.buffers, x.state, **x.options, impl=impl),
    "adam": lambda x, impl: adamw(*x.buffers, x.state, **x.options, decoupled=False, impl=impl),
    "lamb": lambda x, impl: lamb(
        *x.buffers,
        x.state,
        x.tensors,
        model=x.options["model"],
        weight_decay=0.1,
        seed=3,
        impl=impl,
    ),
    "lion": lambda x, impl: lion(*x.buffers[:3], x.state, **x.options, impl=impl),
    "sgd": lambda x, impl: sgd(*x.buffers[:2], None, x.state, **x.options, impl=impl),
    "nesterov": lambda x, impl: sgd(
        *x.buffers[:3], x.state, **x.options, momentum=0.75, nesterov=True, impl=impl
    ),
}


pytestmark = pytest.mark.usefixtures("host_compiler")
GPU = replace(GPUS["9.0"], multiprocessors=1)


@contextlib.contextmanager
def emulated(seed):
    """Replace GPU kernels by emulated ones; three thread blocks run at a time."""
    machine = emulator.Machine(seed, multiprocessors=3)
    with contextlib.ExitStack() as stack:
        for module in (statistics, flat_update, lamb_module):
            changes = {"kernel": machine.kernel, "refuse_buffers": lambda **_: None}
            if module is lamb_module:
                changes |= {"gpu": lambda _: GPU, "on_gpu": lambda _: True}
                arrays = SimpleNamespace(to_gpu=np.asarray, zeros=lambda _, *x: np.zeros(*x))
                changes["arrays"] = arrays
            names = {name: x for name, x in changes.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **names))
        yield


def problem(grad, weight, model, tensors):
    rng = np.random.default_rng(5)
    p, g, m, v = rng.standard_normal((4, SIZE), dtype=np.float32)
    flat = p.astype(dtype_of(weight)), g.astype(dtype_of(grad)), m, v * v
    decay = (np.arange(SIZE // 128) % 3 > 0).astype(np.uint8)
    copy = None if model is None else np.zeros(SIZE, dtype_of(model))
    options = {"model": copy, "decay": decay, "weight_decay": 0.1, "seed": 3}
    state = OptimizerState(p, learning_rate=0.01)
    buffers = [emulator.as_array(x) for x in flat]
    return SimpleNamespace(buffers=buffers, options=options, state=state, tensors=tensors)


def run(rule, dtypes, impl, tensors, updates=2):
    x = problem(*dtypes, tensors)
    for _ in range(updates):
        gradient_statistics(x.buffers[1], x.state, max_norm=1.0, impl=impl)
        RULES[rule](x, impl)
    return x


CASES = [
    pytest.param(rule, dtypes, id="-".join(map(str, (rule, *dtypes))))
    for rule in RULES
    for dtypes in (DTYPES if rule in ("adamw", "lamb") else DTYPES[::3])
]


@pytest.mark.parametrize("rule, dtypes", CASES)
def test_update(rule, dtypes):
    want = run(rule, dtypes, "reference", TensorTable(np.zeros(1), STARTS, SIZE, ADAPTED))
    results = []
    for seed in (1, 2):
        with emulated(seed):
            table = TensorTable(np.zeros(1), STARTS, SIZE, ADAPTED)
            got = run(rule, dtypes, "raw-simt", table)
        results.append(got)
        assert got.state.norm == pytest.approx(want.state.norm, rel=1e-6)
        for a, b in zip(got.buffers, want.buffers, strict=True):
            tolerance = 2**-7 if a.dtype == dtype_of("bfloat16") else 2e-6
            np.testing.assert_allclose(
                a.astype(np.float32), b.astype(np.float32), rtol=tolerance, atol=2e-6
            )
        if dtypes[1] == "bfloat16":
            assert (
                got.buffers[0] != want.buffers[0]
            ).mean() < 1e-3  # rounding of a last bit that differs
        if got.options["model"] is not None:
            rounded = got.buffers[0].astype(dtype_of(dtypes[2]))
            assert got.options["model"].tobytes() == rounded.tobytes()
    first, second = ([a.tobytes() for a in x.buffers] for x in results)
    assert first == second, "the result depends on the order of threads"
    if rule == "lamb":
        assert table.control[:3].tolist() == [0, 0, 2] and not table.control[3::2].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 129, 40_003])
def test_gradient_norm(size, dtype):
    g = np.full(size + 64, np.nan, dtype_of(dtype))[:size]
    g[:] = np.random.default_rng(0).standard_normal(size).astype(g.dtype)
    states = []
    for seed in (1, 2):
        states.append(OptimizerState(g, divisor=5.0))
        with emulated(seed):
            gradient_statistics(g, states[-1], max_norm=0.5, impl="raw-simt")
    want = np.sqrt((g.astype(np.float64) ** 2).sum()) / 5
    assert states[0].norm == pytest.approx(want, rel=1e-6)
    assert states[0].array.tobytes() == states[1].array.tobytes()
