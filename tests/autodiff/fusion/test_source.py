"""Generated kernels: their text, run on the host, computes what NumPy computes; NVRTC takes it."""

import re
from types import SimpleNamespace as Space

import compiled
import emulator
import numpy as np
import pytest
from checks import sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.autodiff.fusion import launch, source
from gpuattn.autodiff.fusion.gradient import Gradient
from gpuattn.autodiff.fusion.launch import Launcher
from gpuattn.autodiff.fusion.source import Layout
from gpuattn.autodiff.fusion.trace import FUNCTIONS, trace
from gpuattn.errors import UnsupportedError

SHAPE = (3, 8)


@pytest.fixture
def on_host(monkeypatch, host_compiler):
    """Kernels of GPU arrays, which are NumPy's here, run as host code. Yields the Layouts."""
    machine, layouts = emulator.Machine(seed=1), []

    def kernel(device, launcher, layout):
        layouts.append(layout)
        parameters = source.parameters(launcher.program, layout)
        text = source.text(launcher.program, layout)
        return machine.kernel_of(text, "fused", parameters)

    monkeypatch.setattr(launch, "_kernel", kernel)
    monkeypatch.setattr(launch, "import_cupy", fake_cupy)
    monkeypatch.setattr(launch, "empty", lambda like, shape, dtype: gpu(np.empty(shape, dtype)))
    return layouts


def fake_cupy():
    return Space(cuda=Space(runtime=Space(getDevice=lambda: 0)))


def gpu(x):
    return emulator.as_array(x)


def check(program, arrays, scalars=(), unit=None):
    """Compare the kernel with the program as NumPy computes it."""
    with np.errstate(all="ignore"):
        wanted = program.evaluate(arrays, scalars)
    got = Launcher(program)([gpu(x) for x in arrays], scalars)
    for k, (mine, other, symbol) in enumerate(zip(got, wanted, program.outputs, strict=True)):
        shape = np.broadcast_shapes(*[x.shape for x in arrays])
        assert mine.dtype == other.dtype == symbol.dtype and mine.shape == shape
        mine, other = np.asarray(mine), np.broadcast_to(other, shape)
        if mine.dtype.kind in "biu":
            np.testing.assert_array_equal(mine, other)
        else:
            known = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-14}
            rtol = unit or known.get(mine.dtype.name, 3e-6)
            mine, other = mine.astype(np.float64), other.astype(np.float64)
            np.testing.assert_allclose(mine, other, rtol=rtol, atol=rtol, err_msg=str(k))


def every_function(x, y, low):
    """Return the values of all functions: of one argument, of two, and the others."""
    found = []
    for function in sorted(FUNCTIONS - {np.where, np.clip}, key=lambda f: f.__name__):
        arguments = (x, y)[: function.nin]
        if function in (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert):
            arguments = tuple([a > 0 for a in arguments])
        found.append(function(*arguments))
    found += [
        np.where(x > y, x, 2.0),
        np.clip(x, low, 0.5),
        np.clip(y, None, x),
        np.clip(x, y, None),
    ]
    found += [x**3, x**0, y**0.5, 2**x, x**-1, x.astype(np.float16) * 1.0, -x, abs(y), ~(x > 0), +x]
    return tuple(found)


@pytest.mark.parametrize("dtype", sampled([np.float32, np.float64], 1))
def test_every_function(on_host, rng, dtype):
    x, y = rng.uniform(-2, 2, (2, *SHAPE)).astype(dtype)
    x.flat[:6] = np.nan, np.inf, -np.inf, 0, -0.0, 1
    y.flat[:7] = 1, np.inf, -np.inf, 0, 0, np.nan, -3
    program = trace(every_function, (x.dtype, y.dtype, float), ())
    check(program, [x, y], [-0.25], unit=2**-10 if dtype == np.float32 else None)


def test_integers_and_booleans(on_host, rng):
    def f(i, j, b):
        return (
            i + j, i * j - 7, -j, abs(j), np.square(i), i / j, np.maximum(i, j), j**3, np.sign(j),
            np.where(b, i, j), np.exp(i / 8), i & 3, i | j, ~j, i > j, (i > 2) & b, b ^ (j < 0),
            np.logical_and(i, j), np.clip(j, -1, 1), np.floor(j), i.astype(np.int8), b + b,
            np.isnan(j), j + 0.5, i * True, j + 2**40, np.sqrt(b),
        )  # fmt: skip

    i = rng.integers(1, 200, SHAPE).astype(np.uint8)
    j = rng.integers(-9, 9, SHAPE).astype(np.int64) * 2 + 1
    b = rng.integers(0, 2, SHAPE).astype(bool)
    check(trace(f, (i.dtype, j.dtype, b.dtype), ()), [i, j, b])


def mixed(x, y, z, p):
    inner = np.tanh(x * p + y) * z
    return np.where(inner > 0, inner, np.maximum(x, z)) + np.exp(-(x**2)) / (1 - p**2)


@pytest.mark.parametrize("dtypes", [("f4", "f4", "f4"), (BFLOAT16, "f4", BFLOAT16)], ids=str)
def test_a_gradient(on_host, rng, dtypes):
    arrays = [rng.standard_normal(SHAPE).astype(dtype) for dtype in dtypes]
    program = trace(mixed, (*[x.dtype for x in arrays], float), ())
    check(program, arrays, [0.3])
    gradient = Gradient(program, (True, True, False), (True,))
    assert gradient.gives == [0, 1] and gradient.reads == [0, 1, 2]
    grad = rng.standard_normal(SHAPE).astype(program.outputs[0].dtype)
    check(gradient.program, [*arrays, grad], [0.3])


LAYOUTS = {  # name: (the arrays of two, from x (4, 3, 8) and y (3, 8); Layout)
    "rows": (lambda x, y: (x, y), Layout(2, 4, (1, 1), True)),
    "a column": (lambda x, y: (x, y[:, :1]), Layout(3, 4, (1, 0), True)),
    "every second": (lambda x, y: (x[:, :, ::2], y[:, ::2]), Layout(2, 4, (None, None), True)),
    "not aligned": (lambda x, y: (x[:, :, 1:5], y[:, 2:6]), Layout(3, 1, (1, 1), True)),
    "transposed": (lambda x, y: (x.transpose(2, 1, 0), y.T[:, :, None]), None),
    "a vector": (lambda x, y: (x, y[0]), Layout(2, 4, (1, 1), True)),
    "a number": (lambda x, y: (x, y[0, 0, ...]), Layout(1, 4, (1, 0), True)),
    "backwards": (lambda x, y: (x[::-1, ::-1], y[:, ::-1]), Layout(3, 4, (1, None), True)),
    "odd": (lambda x, y: (x[:, :, :7], y[:, 1:]), Layout(3, 1, (1, 1), True)),
    "in pairs": (lambda x, y: (x[:, :, 2:8], y[:, :6]), Layout(3, 2, (1, 1), True)),
    "outer": (lambda x, y: (x[:, :1, :1], y[:1]), Layout(2, 4, (0, 1), True)),
    "one element": (lambda x, y: (x[0, 0, 0], y[0, 0]), Layout(1, 1, (0, 0), True)),
    "packed": (lambda x, y: (x, x), Layout(1, 4, (1, 1), True)),
    "repeated": (lambda x, y: (np.broadcast_to(x[:1], x.shape), y), Layout(2, 4, (1, 1), True)),
}


@pytest.mark.parametrize("name", sampled(LAYOUTS, 3))
def test_layouts(on_host, rng, name):
    make, layout = LAYOUTS[name]
    memory = np.empty(4 * 3 * 8 + 4, "f4")  # aligned to 16 bytes
    start = -memory.ctypes.data % 16 // 4
    x = memory[start : start + 96].reshape(4, 3, 8)
    x[...] = rng.standard_normal(x.shape)
    y = np.empty(28, "f4")
    y = y[-y.ctypes.data % 16 // 4 :][:24].reshape(3, 8)
    y[...] = rng.standard_normal(y.shape)
    arrays = [np.asarray(a) for a in make(x, y)]
    program = trace(lambda a, b: a - 2 * b, [a.dtype for a in arrays], ())
    check(program, arrays)
    assert layout in (None, on_host[0])


def test_what_no_kernel_is_made_for():
    program = trace(lambda a, b: (a + b, a * 2), (np.dtype("f4"),) * 2, ())
    with pytest.raises(UnsupportedError, match="several shapes"):
        Launcher(program).lay_out([gpu(np.zeros((1, 8), "f4")), gpu(np.zeros((3, 8), "f4"))])
    Launcher(program).lay_out([gpu(np.zeros((3, 8), "f4"))] * 2)
    fields = np.zeros(4, [("a", "f4"), ("b", "i1")])["a"]
    with pytest.raises(UnsupportedError, match="strides"):
        Launcher(program).lay_out([gpu(fields)] * 2)
    power = trace(lambda a, b: a**b, (np.dtype("i4"),) * 2, ())
    with pytest.raises(UnsupportedError, match="np.power of integers"):
        source.text(power, Layout(1, 1, (1, 1), True))


def test_many_elements_are_numbered_by_64_bits():
    program = trace(lambda a: a + 1, (np.dtype("f4"),), ())
    big = np.broadcast_to(np.zeros((), "f4"), (1 << 16, 1 << 16))
    shape, layout, lengths, steps, chunks = Launcher(program).lay_out([gpu(big)])
    assert not layout.is_small and chunks * layout.width == 1 << 32 and layout.axes == 1
    assert "unsigned long long chunks" in source.text(program, layout)


KINDS = ("f2", "f4", "f8", BFLOAT16, "i4", bool)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_nvrtc_compiles_the_text(nvrtc, arch):
    kinds = tuple([np.dtype(kind) for kind in KINDS])
    layout = Layout(3, 2, (1, 0, None, 1, 1, 1), arch != "sm_80")
    program = trace(
        lambda a, b, c, d, i, q, p: mixed(a, c, b, p) * d.astype(c.dtype) + i * q,
        (*kinds, float),
        (),
    )
    gradient = Gradient(program, (True, True, True, True, False, False), (True,)).program
    wider = layout._replace(inner=(1,) * len(gradient.trace.inputs))
    for made, how in ((program, layout), (gradient, wider)):
        _, log = compiled.machine_code(source.text(made, how), arch, "fused.cu")
        assert re.findall(r"(\d+) bytes spill stores", log) == ["0"]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_nvrtc_knows_every_function(nvrtc, dtype):
    program = trace(every_function, (np.dtype(dtype),) * 2 + (float,), ())
    text = source.text(program, Layout(1, 1, (1, 1), True))
    compiled.check_front_end(text, "sm_90", "fused.cu")
