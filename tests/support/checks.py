"""Checks that every op must pass. A test file supplies its op and its shapes."""

import warnings

import compiled
import numpy as np
import pytest

from gpuattn import arrays
from gpuattn.autodiff import backward_pass
from gpuattn.cuda import sources
from gpuattn.impls import choose_backward

DTYPES = ("float32", "float16", "bfloat16")


def dtype_of(name):
    return arrays.BFLOAT16 if name == "bfloat16" else np.dtype(name)


def sampled(cases, count):
    """Return pytest parameters; without --all only the first ``count`` run."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    exhaustive = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases[count:]]
    return [*(pytest.param(*case) for case in cases[:count]), *exhaustive]


def implementations(impls):
    """Return pytest parameters (name, array module) for every implementation of an op.

    The reference runs on NumPy and CuPy, Numba on CuPy and in the simulator, others on CuPy.
    """
    cases = [pytest.param("reference", "numpy", id="reference-numpy")]
    cases.append(pytest.param("reference", "cupy", id="reference-cupy", marks=pytest.mark.gpu))
    for impl in impls:
        if impl.name == "reference":
            continue
        cases.append(pytest.param(impl.name, "cupy", id=f"{impl.name}-cupy", marks=pytest.mark.gpu))
        if impl.name == "numba":
            cases.append(
                pytest.param("numba", "numpy", id="numba-simulator", marks=pytest.mark.simulator)
            )
    return cases


def module_named(name):
    """Return numpy or cupy; without a GPU, cupy skips the test."""
    if name == "numpy":
        return np
    cupy = pytest.importorskip("cupy", reason="no CuPy")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")
    return cupy


def find(impls, name):
    return next(impl for impl in impls if impl.name == name)


def check_implementation(
    impls,
    name,
    where,
    inputs,
    dtype,
    *,
    needs=None,
    repeat=True,
    factor=(2, 3),
    slack=1,
    **params,
):
    """Check one implementation, forward and backward, against the reference in float64.

    ``inputs``: NumPy arrays (float ones are cast to ``dtype``) or None. FlashAttention's rule: the
    error may be at most ``factor`` (forward, backward) times that of the reference in ``dtype``,
    plus ``slack`` roundings. The implementation must also accept the arguments, leave its inputs
    unchanged and, if ``repeat``, give the same bits twice.
    """
    xp, impl, reference = (
        module_named(where),
        find(impls, name),
        find(impls, "reference"),
    )
    rng = np.random.default_rng(7)
    needs = needs or tuple(x is not None and x.dtype.kind == "f" for x in inputs)
    rounded = [_cast(x, dtype) for x in inputs]
    exact = [_cast(x, "float64") if _is_float(x) else x for x in rounded]
    mine = [None if x is None else xp.asarray(x) for x in rounded]
    reason = impl.refuse(*mine, needs=(), **params) if impl.refuse else None
    assert reason is None, f"{name} refused: {reason}"

    want, want_saved = reference.forward(*exact, needs=needs, **params)
    wants = _tuple(want)
    grads = [rng.standard_normal(w.shape) if w.dtype.kind == "f" else None for w in wants]
    rounded_grads = [
        None if g is None else _cast(g, _grad_dtype(dtype, w))
        for g, w in zip(grads, _outs(reference, rounded, needs, params), strict=True)
    ]
    exact_grads = [None if g is None else _cast(g, "float64") for g in rounded_grads]
    plain, plain_saved = reference.forward(*rounded, needs=needs, **params)
    got, saved = impl.forward(*mine, needs=needs, **params)
    for i, (g, p, w) in enumerate(zip(_tuple(got), _tuple(plain), wants, strict=True)):
        _compare(g, p, w, factor[0], slack, f"{name} output {i}")
    if repeat:
        again, _ = impl.forward(*mine, needs=needs, **params)
        for g, a in zip(_tuple(got), _tuple(again), strict=True):
            assert _bytes(g) == _bytes(a), f"{name}: the second run gave other bits"

    if any(needs) and impl.backward is not None:
        into = (None,) * len(inputs)
        want = reference.backward(want_saved, *exact_grads, needs=needs, into=into, **params)
        plain = reference.backward(plain_saved, *rounded_grads, needs=needs, into=into, **params)
        my_grads = [None if g is None else xp.asarray(g) for g in rounded_grads]
        rule = choose_backward(impls, impl, mine, name, needs=needs, **params)
        got = rule.backward(saved, *my_grads, needs=needs, into=into, **params)
        for i, need in enumerate(needs):
            if need:
                _compare(
                    got[i],
                    plain[i],
                    want[i],
                    factor[1],
                    2 * slack,
                    f"{name} gradient {i}",
                )
    for x, m in zip(rounded, mine, strict=True):
        assert x is None or _bytes(x) == _bytes(m), f"{name} changed an input"


def _outs(reference, rounded, needs, params):
    return _tuple(reference.forward(*rounded, needs=needs, **params)[0])


def _grad_dtype(dtype, out):
    return "float32" if out.dtype == np.float32 and dtype != "float64" else dtype


def _is_float(x):
    return x is not None and arrays.is_floating(x.dtype)


def _cast(x, dtype):
    if x is None or not _is_float(x):
        return x
    return x.astype(dtype_of(dtype))


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)


def _bytes(x):
    return np.ascontiguousarray(arrays.to_cpu(x)).tobytes()


def _compare(got, plain, want, factor, slack, name):
    got, plain = arrays.to_cpu(got), arrays.to_cpu(plain)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    assert got.dtype == plain.dtype, f"{name}: dtype {got.dtype}, want {plain.dtype}"
    if not arrays.is_floating(got.dtype):
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    got, plain, want = (a.astype(np.float64) for a in (got, plain, want))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=f"{name}: not finite")
    if not finite.any():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = np.abs(got - want)[finite].max()
        baseline = np.abs(plain - want)[finite].max()
        scale = np.abs(want[finite]).max()
    limit = factor * baseline + slack * 4e-7 * max(scale, 1.0)
    assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g} (plain {baseline:.3g})"


def check_gradient(fun, *inputs, eps=1e-6, tol=1e-6):
    """Check that the gradient agrees with a central difference along a random direction.

    ``fun`` takes and returns arrays or Tensors; ``inputs`` are float64 NumPy arrays.
    """
    from gpuattn import Tensor

    rng = np.random.default_rng(1)
    boxes = [Tensor(a.copy(), requires_grad=True) for a in inputs]
    outs = _tuple(fun(*boxes))
    weights = [rng.standard_normal(o.data.shape) for o in outs]
    found = backward_pass.gradients(list(outs), weights, boxes)
    steps = [rng.standard_normal(a.shape) for a in inputs]

    def along(sign):
        outs = _tuple(fun(*[a + sign * eps * s for a, s in zip(inputs, steps, strict=True)]))
        return sum((w * o).sum() for w, o in zip(weights, outs, strict=True))

    numeric = (along(1) - along(-1)) / (2 * eps)
    exact = sum((g * s).sum() for g, s in zip(found, steps, strict=True) if g is not None)
    assert abs(numeric - exact) <= tol * max(1, abs(exact)), f"numeric {numeric}, exact {exact}"


def check_hopper_compiles(file, shared_bytes, *claims, **constants):
    """Check that a Hopper kernel compiles without spills and uses ``shared_bytes``; return the log.

    Needs the fixture ``nvrtc``, no GPU. ptxas reports C7512 or C7514 where it serializes wgmma; the
    log must have neither. ``claims``: more conditions for ``static_assert``.
    """
    claims = f"SHARED == {shared_bytes}", *claims
    asserts = "".join(f'static_assert({x}, "the host code assumes this");\n' for x in claims)
    text = sources.source_text(file, scalar="bf16", **constants)
    compiled.check_front_end(f"{text}\n{asserts}", "sm_90a", file)
    _, log = compiled.machine_code(text, "sm_90a", file)
    assert "C7512" not in log and "C7514" not in log and "0 bytes spill stores" in log, log
    return log


def check_no_float64(kernel, *types):
    """Check that a Numba kernel compiles to PTX without double arithmetic; return the PTX.

    Needs the fixture ``nvvm``, no GPU. ``types``: Numba's types of the arguments, such as
    ``numba.float32[:, ::1]``.
    """
    from types import SimpleNamespace
    from unittest import mock

    from numba import cuda
    from numba.cuda import dispatcher

    # Numba compiles device functions for the current device; stand in for one
    hopper = SimpleNamespace(compute_capability=(9, 0))
    with mock.patch.object(dispatcher, "get_current_device", lambda: hopper):
        ptx, _ = cuda.compile_ptx(kernel.py_func, types, cc=(9, 0))
    assert ".entry" in ptx
    lines = [line for line in ptx.splitlines() if ".f64" in line]
    assert not lines, f"{kernel.py_func.__name__} computes in float64:\n" + "\n".join(lines)
    return ptx
