"""Programmatic dependent launches: what the driver is told, and that nobody begins too early."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import gpuattn
from gpuattn import arrays, kernels, launch
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench.timing import Graph

ALLOCATE = arrays.allocate


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]  # fmt: skip


class Parameters(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p), ("missing", ctypes.c_void_p), ("tickets", ctypes.c_void_p),
        ("flag", ctypes.c_bool), ("rows", ctypes.c_longlong), ("cols", ctypes.c_int),
        ("problem", ctypes.c_longlong * 2), ("eps", ctypes.c_float),
    ]  # fmt: skip


KINDS = ["scalar*", "float*", "int*", "bool", "long long", "int", "Problem", "float"]


@pytest.fixture
def cuda(monkeypatch):
    """What stands in for CuPy and the driver: ``calls`` that it got, ``answers`` that it gives."""
    cuda = SimpleNamespace(
        calls=[], answers=[], used=[], get_current_stream=lambda: SimpleNamespace(ptr=77)
    )
    cuda.Device = lambda: SimpleNamespace(use=lambda: cuda.used.append(1))
    cuda.driver = SimpleNamespace(check_status=_fail)

    def driver_launch(config, function, parameters, extra):
        names = (ctypes.c_size_t * 5).from_address(extra)
        assert function == 99 and parameters is None
        assert names[0] == 1 and names[2] == 2 and names[4] == 0
        size = ctypes.c_size_t.from_address(names[3]).value
        config = Config.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(Config)))
        attribute = Attribute.from_buffer_copy(config.attributes[0])
        cuda.calls.append((config, attribute, ctypes.string_at(names[1], size)))
        return cuda.answers.pop() if cuda.answers else 0

    monkeypatch.setattr(launch, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "_driver_launch", lambda: driver_launch)
    return cuda


def _fail(status):
    raise RuntimeError(f"status {status}")


def begin(grid=(5,), block=(128,), shared=0):
    x = SimpleNamespace(data=SimpleNamespace(ptr=4096))
    problem = np.array([3, 4], np.int64).view("V16")
    args = x, None, np.uint64(8192), True, 2**40, np.int32(-7), problem, 0.5
    run = kernels.Kernel(SimpleNamespace(ptr=99), "k", [(k, "") for k in KINDS], dependent=True)
    run(grid, block, *args, shared_bytes=shared)


def test_the_driver_reads_what_cuda_h_lays_out(cuda):
    begin((5, 2), (64, 1, 3), 1024)
    ((config, attribute, packed),) = cuda.calls
    assert (*config.grid, *config.block) == (5, 2, 1, 64, 1, 3)
    assert (config.shared, config.stream, config.count) == (1024, 77, 1)
    assert attribute.id == launch.PROGRAMMATIC_STREAM_SERIALIZATION and attribute.value[0] == 1
    assert len(packed) == Parameters.eps.offset + 4
    got = Parameters.from_buffer_copy(packed.ljust(ctypes.sizeof(Parameters)))
    assert (got.x, got.missing, got.tickets, got.flag) == (4096, None, 8192, True)
    assert (got.rows, got.cols, *got.problem, got.eps) == (2**40, -7, 3, 4, 0.5)


def test_a_thread_without_a_context_gets_one(cuda):
    cuda.answers = [0, launch.INVALID_CONTEXT]
    begin()
    assert len(cuda.calls) == 2 and cuda.used


def test_an_error_of_the_driver_is_raised(cuda):
    cuda.answers = [1]
    with pytest.raises(RuntimeError, match="status 1"):
        begin()


def test_only_a_first_statement_counts(tmp_path, monkeypatch):
    (tmp_path / "k.cu").write_text(
        'extern "C" __global__ void first(\n    int n) {  // (so)\n    grid_dependency_wait();\n}\n'
        'extern "C" __global__ void later(int n) {\n    n += 1;\n    grid_dependency_wait();\n}\n'
    )
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    assert [kernels.waits_first("k.cu", name) for name in ("first", "later")] == [True, False]
    kernels.waits_first.cache_clear()


def test_the_small_kernels_wait():
    assert kernels.waits_first("softmax.cu", "softmax_forward")
    assert kernels.waits_first("column_sum.cu", "column_sums")


# ---- on a GPU: the same bits, whoever begins when ------------------------------------------------


def results(x, weight, bias):
    """Return what small kernels, some of few blocks, make of each other's results."""
    found = []
    for _ in range(2):
        x = gpuattn.softmax(x)
        tensors = [Tensor(a, requires_grad=True) for a in (x, weight, bias)]
        y = gpuattn.layer_norm(*tensors)
        y.backward(x)  # the sums over rows are a launch of their own
        x = gpuattn.dropout_add_norm(y.data, tensors[0].grad, tensors[1].grad, p=0.1, seed=3)[0]
        x = gpuattn.gelu(x, tensors[2].grad)
        scores = x[: len(x) // 4 * 4, 0].reshape(-1, 4).astype(np.float32)  # CuPy's kernels
        found += [x, *(t.grad for t in tensors), *gpuattn.beam_step(x, scores)]
    return found


def differences(some, others):
    pairs = zip(some, others, strict=True)
    return sum((a.view(np.uint8) != b.view(np.uint8)).sum() for a, b in pairs)


@pytest.fixture
def launched(gpu, monkeypatch):
    """``launched(dependent, call)``: call() with such launches or without them."""
    if kernels.gpu(0)[0] != launch.CAPABILITY:
        pytest.skip("not a Hopper GPU")
    monkeypatch.setattr(arrays, "allocate", ALLOCATE)  # poison would be a kernel in between

    def run(dependent, call):
        monkeypatch.setattr(kernels, "supported", lambda capability: dependent)
        kernels._kernel.cache_clear()
        return call()

    yield run
    kernels._kernel.cache_clear()


@pytest.mark.parametrize("rows, cols", [(40, 512), (36, 1001), (6000, 512)])
def test_the_same_bits_as_one_after_the_other(gpu, launched, rows, cols):
    random = gpu.random.default_rng(rows)

    def draw(*shape):
        return random.standard_normal(shape, dtype=np.float32).astype(arrays.BFLOAT16)

    x, weight, bias, inputs = draw(rows, cols), draw(cols), draw(cols), draw(3, rows, cols)

    def call():
        return results(x, weight, bias)

    with gpu.cuda.Stream(non_blocking=True):
        plain, dependent = (launched(d, lambda: Graph([call])) for d in (False, True))
        wrong = gpu.zeros((), np.int64)
        for replay in range(200):
            gpu.copyto(x, inputs[replay % 3])  # so that what is read too early shows
            plain()
            dependent()
            wrong += differences(dependent.results[0], plain.results[0])
            if replay < 6:
                wrong += differences(call(), plain.results[0])  # in the stream
        kept = kernels.kernel("column_sum.cu", "column_sums", scalar="bf16", BLOCK=128)
        assert isinstance(kept.launch, launch.DependentLaunch)
        assert int(wrong) == 0
