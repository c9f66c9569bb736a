"""Every implementation of an op, timed as a user calls it, host included.

A result is compared with the reference before it is timed.
"""

import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

import gpuattn
from gpuattn.arrays import is_array, on_gpu, to_cpu
from gpuattn.bench import timing
from gpuattn.bench.samples import SAMPLES, sample
from gpuattn.impls import OPS, explain

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}


def measure(
    name: str, shape: tuple[int, ...] | None, dtype: str | None, xp: ModuleType
) -> Iterator[dict[str, Any]]:
    """Yield a row of results for each implementation that accepts and each direction.

    ``shape``, ``dtype``: of the op's sample; by default its own shape, in bfloat16 or, on NumPy,
    float32. ``xp``: numpy or cupy. Raises ConfigError for an unknown op or shape, AssertionError
    for a wrong result.
    """
    dtype = dtype or ("float32" if xp is np else "bfloat16")
    op, args, kwargs = sample(name, shape, dtype, xp)
    for impl, refusal in explain(op, *args, **kwargs).reasons:
        if refusal is None:
            yield from _rows(name, op, args, kwargs, impl, shape or SAMPLES[name].shape, dtype)


def _rows(name, op, args, kwargs, impl, shape, dtype):
    _check(op, args, kwargs, impl, dtype)
    gpu = any(map(on_gpu, args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = timing.time_call(lambda: op(*args, impl=impl, **kwargs), gpu)
        yield _row(name, shape, dtype, "forward", impl, samples)
        if next(i for i in OPS[name] if i.name == impl).backward is None:
            return

        def step():
            out = op(*leaves, impl=impl, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(np.ones_like(out.data))

        leaves = [
            gpuattn.Tensor(a, requires_grad=True) if is_array(a) and a.dtype.kind not in "iu" else a
            for a in args
        ]
        samples = timing.time_call(step, gpu)
        yield _row(name, shape, dtype, "forward+backward", impl, samples)


def _row(name, shape, dtype, direction, impl, samples):
    us = timing.median(samples)
    passes, gbs = SAMPLES[name].passes, None
    if passes:
        count = passes[0] if direction == "forward" else sum(passes)
        width = {"float64": 8, "float32": 4}.get(dtype, 2)
        gbs = count * width * float(np.prod(shape)) / us / 1e3
    case = {"shape": list(shape), "dtype": dtype}
    return {"op": name, "case": case, "direction": direction, "impl": impl, "us": us,
            "samples_us": samples, "gbs": gbs, "peers": {}, "peers_missing": {}}  # fmt: skip


def _check(op, args, kwargs, impl, dtype):
    def first(out):
        return to_cpu(out[0] if isinstance(out, tuple) else out).astype(np.float64)

    got, want = first(op(*args, impl=impl, **kwargs)), first(op(*args, impl="reference", **kwargs))
    error = np.abs(got - want).max() / max(1.0, np.abs(want).max())
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(
            f"{op.__name__} {impl}: error {error:.2g}; a wrong result is not timed"
        )
