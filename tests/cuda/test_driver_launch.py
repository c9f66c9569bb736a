"""Programmatic dependent launches: the driver arguments, and no access before the wait."""

import ctypes
import functools
from types import SimpleNamespace

import numpy as np
import pytest

import gpuattn
from gpuattn import arrays
from gpuattn.autodiff.arithmetic import by_kernel
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench.timing import Graph
from gpuattn.cuda import compiler, driver_launch, kernels, sources
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.engine.steps.projected_attention import Blocks, projected_attention
from gpuattn.engine.steps.row_step import row_embedding, row_linear
from gpuattn.ops.attention import hopper_head
from gpuattn.ops.attention.step_attention import step_attention
from gpuattn.ops.linear import gelu_hopper, hopper, weight_gradients
from gpuattn.ops.linear import linear_dropout_add_norm as row_products
from gpuattn.ops.sampling.beam_update import Beams, beam_update, best_texts
from gpuattn.ops.sampling.text_rules import TextRules, text_rules
from gpuattn.ops.sampling.text_update import Texts, text_update
from gpuattn.rng import Key
from gpuattn.runtime import graph_arrays

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
    """A fake of CuPy and the driver: ``calls`` are recorded, ``answers`` are returned."""
    cuda = SimpleNamespace(
        calls=[], answers=[], used=[], get_current_stream=lambda: SimpleNamespace(ptr=77)
    )
    cuda.Device = lambda: SimpleNamespace(use=lambda: cuda.used.append(1))
    cuda.driver = SimpleNamespace(check_status=_fail)

    def launch(config, function, places, extra):
        assert function == 99 and extra is None
        first, *_, last = (ctypes.c_size_t * len(KINDS)).from_address(places)
        config = Config.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(Config)))
        attribute = Attribute.from_buffer_copy(config.attributes[0])
        cuda.calls.append((config, attribute, ctypes.string_at(first, last + 4 - first)))
        return cuda.answers.pop() if cuda.answers else 0

    monkeypatch.setattr(driver_launch, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver_launch, "_driver_launch", lambda: launch)
    monkeypatch.setattr(driver_launch, "pointer", int)
    return cuda


def _fail(status):
    raise RuntimeError(f"status {status}")


def begin(grid=(5,), block=(128,), shared=0):
    x = SimpleNamespace(data=SimpleNamespace(ptr=4096))
    problem = np.array([3, 4], np.int64).view("V16")
    args = x, None, np.uint64(8192), True, 2**40, np.int32(-7), problem, 0.5
    run = kernels.Kernel(SimpleNamespace(ptr=99), "k", [(k, "") for k in KINDS], dependent=True)
    run(grid, block, *args, shared_bytes=shared)


def test_arguments_have_the_layout_of_cuda_h(cuda):
    begin((5, 2), (64, 1, 3), 1024)
    ((config, attribute, packed),) = cuda.calls
    assert (*config.grid, *config.block) == (5, 2, 1, 64, 1, 3)
    assert (config.shared, config.stream, config.count) == (1024, 77, 1)
    assert attribute.id == driver_launch.PROGRAMMATIC and attribute.value[0] == 1
    assert len(packed) == Parameters.eps.offset + 4
    got = Parameters.from_buffer_copy(packed.ljust(ctypes.sizeof(Parameters)))
    assert (got.x, got.missing, got.tickets, got.flag) == (4096, None, 8192, True)
    assert (got.rows, got.cols, *got.problem, got.eps) == (2**40, -7, 3, 4, 0.5)


def test_each_parameter_is_given_by_its_address(cuda, monkeypatch):
    """The compiler decides where 64-byte aligned maps lie among the parameters."""
    kinds = ["TensorMap", "int", "scalar*", "TensorMaps", "Problem"]
    sizes, seen = [128, 4, 8, 128, 12], []

    def launch(config, function, places, extra):
        found = (ctypes.c_void_p * len(kinds)).from_address(places)
        pairs = zip(found, sizes, strict=True)
        seen.extend(ctypes.string_at(place, size) for place, size in pairs)
        return 0

    monkeypatch.setattr(driver_launch, "_driver_launch", lambda: launch)
    maps = [np.arange(n, n + 128, dtype=np.uint8).view("V128") for n in (0, 99)]
    args = maps[0], 7, np.uint64(4096), maps[1], np.array([1, 2, 3], np.int32).view("V12")
    run = kernels.Kernel(SimpleNamespace(ptr=99), "k", [(k, "") for k in kinds], dependent=True)
    run((1,), (32,), *args)
    numbers = np.int32(7).tobytes(), np.uint64(4096).tobytes()
    assert seen == [maps[0].tobytes(), *numbers, maps[1].tobytes(), args[4].tobytes()]


def test_a_thread_without_a_context_gets_one(cuda):
    cuda.answers = [0, driver_launch.INVALID_CONTEXT]
    begin()
    assert len(cuda.calls) == 2 and cuda.used


def test_an_error_of_the_driver_is_raised(cuda):
    cuda.answers = [1]
    with pytest.raises(RuntimeError, match="status 1"):
        begin()


# ---- on a GPU: after a kernel that triggers dependents at once and copies its data much later ---

LATE = """#include "common/grid_dependency.cuh"
extern "C" __global__ void late(const unsigned short* from, unsigned short* to, long long count) {
    grid_launch_dependents();
    for (const long long begin = clock64(); clock64() - begin < 4000000;) {}  // 2 ms
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < count; i += 1024) to[i] = from[i];
}"""
ROWS, COLS = 40, 1024


def gradients(function, dy, *inputs):
    tensors = [Tensor(x, requires_grad=True) for x in inputs]
    function(*tensors).backward(dy)
    return [tensor.grad for tensor in tensors]


def add_norm(x, residual, weight):
    return gpuattn.dropout_add_norm(x, residual, weight, p=0.1, seed=3)[0]


def twice(x):
    """Return x + x, of which x gets two gradients, and no kernel computes them."""
    return x + x


def weight_gradients_of(x, y):
    """Gradients of 256 x 256 weights and their biases, for parts of two matrices."""
    places = [(arrays.empty(x, (256, 256)), False, arrays.empty(x, (256,))) for _ in range(24)]
    weight_gradients.launch_kernel(
        [weight_gradients.Problem(x[:, :256], y[:, :256], *place) for place in places]
    )
    return [array for out, _, bias in places for array in (out, bias)]


def attention_gradients(dout, y):
    q, dout = (x.reshape(1, 80, 8, 64) for x in (y, dout))
    lse = y.view(np.float32).reshape(-1)[: q[..., 0].size].reshape(1, 8, 80)
    params = {
        "window": (None, 0), "align": "bottom_right", "scale": 0.125, "softcap": None,
        "dropout_p": 0, "key": None, "max_seqlen_q": 80, "max_seqlen_k": 80, "deterministic": False,
    }  # fmt: skip
    saved = q, q, q, *[None] * 6, q, lse
    grads = hopper_head.backward(saved, dout, None, needs=None, into=[None] * 9, **params)
    return grads[:3]


def step_attention_of(x, y, scores, tokens):
    """Attention of 8 texts with 4 heads; keys and values come from x, the caches are in y."""
    q, (k_cache, v_cache) = (
        x.reshape(-1)[:2048].reshape(8, 1, 4, 64),
        y.reshape(-1)[:32768].reshape(2, 8, 8, 4, 64),
    )
    key_counts, slots = tokens[-9:-1], scores.view(np.int16).reshape(-1)[:64].reshape(8, 1, 8)
    return step_attention(q, q, q, k_cache, v_cache, key_counts, slots)


def pages_attention_of(x, y, tokens):
    """Attention of 4 texts with a head; keys and values come from x, the pages are y."""
    q, (k_cache, v_cache) = x.reshape(-1)[:256].reshape(4, 1, 1, 64), y.reshape(2, 5, 64, 1, 64)
    table = tokens[-4:].reshape(4, 1)
    return step_attention(q, q, q, k_cache, v_cache, tokens[-9:-5], page_table=table)


def beam_update_of(x, scores, tokens):
    """The state of 4 sentences after an update by scores from x, and their best texts."""
    beams, begun = begun_beams()
    found = x.reshape(-1).view(np.float32)[:32].reshape(4, 8)
    parents = scores.view(np.int32).reshape(-1)[:32].reshape(4, 8)
    beam_update(found, parents, tokens[:32].reshape(4, 8), beams, eos=tokens[32:33])
    texts = best_texts(beams, 1)[0][..., :1]
    after = [array.copy() for array in (*beams.arrays(), texts)]
    for array, first in zip(beams.arrays(), begun, strict=True):
        array[...] = first
    return after


@functools.cache
def begun_beams():
    """Return a search for texts of one token that has just begun, and copies of its arrays."""
    beams = Beams(arrays.import_cupy().zeros(1, np.float32), 4, 4, 6, lambda length: length)
    beams.start(1, [1] * 4)
    return beams, [array.copy() for array in beams.arrays()]


def text_update_of(x, tokens):
    """The state of 32 texts after an update by log-probabilities from x."""
    texts, begun = begun_texts()
    text_update(tokens[:32], x.reshape(-1).view(np.float32)[:32], texts, eos=tokens[32:34])
    after = [array.copy() for array in texts.arrays()]
    for array, first in zip(texts.arrays(), begun, strict=True):
        array[...] = first
    return after


@functools.cache
def begun_texts():
    """Return texts of up to two tokens that have just begun, and copies of their arrays."""
    cupy = arrays.import_cupy()
    texts, ones = Texts(cupy.zeros(1, np.float32), 32, 6), cupy.ones(32, np.int32)
    texts.start(ones, ones, 2 * ones, cupy.ones((32, 4), np.uint32))
    return texts, [array.copy() for array in texts.arrays()]


@functools.cache
def begun_rules():
    """Return texts of one token for 4 beams of each sentence, and rules that penalise it."""
    cupy, sentences = arrays.import_cupy(), ROWS // 4
    rules = TextRules(cupy.zeros(1, np.float32), sentences, repetition_penalty=1.3)
    lengths, history = (cupy.zeros((sentences, *n), np.int32) for n in ((4,), (6, 4, 1)))
    return lengths, history, cupy.zeros((sentences, 4, 6), np.int16), rules


def copied_out(x):
    """Return x as the end of a graph copies it."""
    ring, out = begun_ring(graph_arrays.OUT, x.nbytes)
    ring.words = 0
    ring._copy(graph_arrays.OUT, [x], last=True)
    return out.copy()


def copied_in(x):
    """Return x as the beginning of a graph copies it."""
    ring, own = begun_ring(graph_arrays.IN, x.nbytes)
    ring.words = 0
    ring.given.fill(x.data.ptr)
    ring._copy(graph_arrays.IN, [own])
    return own.copy()


@functools.cache
def begun_ring(name, size):
    """Return a Ring for a kernel, of which a slot has the address of an array, and this array."""
    cupy = arrays.import_cupy()
    ring, out = graph_arrays.Ring(cupy, cupy.cuda.Event()), cupy.zeros(size, np.uint8)
    ring.words = 1
    ring.open()
    ring.given.fill(out.data.ptr)
    return ring, out


def row_product(x, y, v):
    given = x.reshape(-1, 128), y.reshape(-1, 128)[:128], y.reshape(-1, 128), v[:128], None, None
    params = {"p": 0.1, "key": Key(3), "rms": False, "eps": 1e-5}
    return row_products.IMPLS[0].forward(*given, needs=(False,) * 6, **params)[0]


def attention_over_memories(x, y, lengths):
    rows, weight = x.reshape(-1, 64)[:16], y.reshape(-1, 64)[:64]
    memory = y.ravel()[: 16 * 9 * 64].reshape(16, 9, 2, 32)
    own = rows, weight, None, None, None, memory, memory, lengths[:16]
    return projected_attention(*own, eps=1e-5, blocks=Blocks(8, 8))


CALLS = {  # kernels that read x; other arguments: a matrix, a vector, scores and tokens
    "sum": lambda x, matrix, *_: by_kernel(np.add, x, matrix),
    "softmax": lambda x, *_: gpuattn.softmax(x),
    "softmax, long rows": lambda x, *_: gpuattn.softmax(x.reshape(1, -1)),
    "softmax, gradient": lambda x, y, *_: gradients(gpuattn.softmax, x, y),
    "softmax, long rows, gradient": lambda x, y, *_: gradients(
        gpuattn.softmax, x.reshape(1, -1), y.reshape(1, -1)
    ),
    "layer_norm": lambda x, y, v, *_: gpuattn.layer_norm(x, v, v),
    "layer_norm, gradient": lambda x, y, v, *_: gradients(gpuattn.layer_norm, x, y, v, v),
    "layer_norm, the one after the next": lambda x, y, v, *_: (
        gpuattn.softmax(y), gpuattn.layer_norm(x, v, v)
    ),
    "dropout_add_norm, gradient": lambda x, y, v, *_: gradients(add_norm, x, y, y, v),
    "dropout_add_norm, gradient of two gradients": lambda x, y, v, *_: gradients(
        lambda *given: twice(add_norm(*given)), x, y, y, v
    ),
    "dropout_add_norm, gradient of pairs": lambda x, y, v, *_: gradients(
        add_norm, x.reshape(-1, 256), y.reshape(-1, 256), y.reshape(-1, 256), v[:256]
    ),
    "linear_dropout_add_norm": lambda x, y, v, *_: row_product(x, y, v),
    "row_linear": lambda x, y, *_: row_linear(
        x.reshape(-1, 64)[:100], y.reshape(-1, 64)[:128], residual=x.reshape(-1, 128)[:100]
    ),
    "projected_attention": lambda x, y, _, __, lengths: attention_over_memories(x, y, lengths),
    "gelu": lambda x, y, v, *_: gpuattn.gelu(x, v),
    "gelu, gradient": lambda x, y, v, *_: gradients(gpuattn.gelu, x, y, v),
    "gelu, gradient of a product": lambda x, y, *_: hopper.backward(
        PendingMatmul(x, y.reshape(COLS, ROWS), None), y.reshape(-1, ROWS)[:ROWS], "gelu"
    ),
    "weight_gradients": lambda x, y, *_: weight_gradients_of(x, y),
    "attention, gradient by whole heads": lambda x, y, *_: attention_gradients(x, y),
    "linear, gelu": lambda x, y, *_: gelu_hopper.forward(x, y),
    "linear, gelu alone": lambda x, y, *_: gelu_hopper.forward(x, y, slopes=False)[0],
    "linear, gelu, gradient of a product": lambda x, y, *_: gelu_hopper.backward(
        PendingMatmul(x, y.reshape(COLS, ROWS), None), gelu_hopper.forward(x, y)[1]
    ),
    "linear, gelu, gradient of a product with sums": lambda x, y, *_: (
        gelu_hopper.backward_and_sums(
            PendingMatmul(x, y.reshape(COLS, ROWS), None), gelu_hopper.forward(x, y)[1]
        )
    ),
    "linear, gelu, gradient": lambda x, y, *_: gelu_hopper.backward(
        x[:, :ROWS].copy(), gelu_hopper.forward(x, y)[1]
    ),
    "graph_copy_out": lambda x, *_: copied_out(x),
    "graph_copy_in": lambda x, *_: copied_in(x),
    "rotary": lambda x, *_: gpuattn.rotary(*x.reshape(2, -1, 8, 64)),
    "attention": lambda x, *_: gpuattn.flash_attention(
        *[x.reshape(1, 160, 4, 64)] * 3, causal=True
    ),
    "embedding": lambda x, y, v, scores, tokens: gpuattn.embedding(tokens, x),
    "row_embedding": lambda x, y, v, scores, tokens: row_embedding(
        tokens, tokens, x[:, :768], y[:, :768]
    ),
    "beam_step": lambda x, y, v, scores, _: gpuattn.beam_step(x, scores.reshape(-1, 10)),
    "beam_step_block": lambda x, y, v, scores, _: gpuattn.beam_step(x, scores, settled=True),
    "step_attention": lambda x, y, v, *others: step_attention_of(x, y, *others),
    "step_attention, pages": lambda x, y, v, _, tokens: pages_attention_of(x, y, tokens),
    "beam_update, beam_texts": lambda x, y, v, *others: beam_update_of(x, *others),
    "text_update": lambda x, y, v, scores, tokens: text_update_of(x, tokens),
    "text_rules": lambda x, y, v, scores, _: text_rules(x, scores, *begun_rules()),
    "topk_logprobs": lambda x, *_: gpuattn.topk_logprobs(x, 8),
    "sample_tokens": lambda x, *_: gpuattn.sample_tokens(x, seed=3),
    "sample_tokens_cluster": lambda x, *_: gpuattn.sample_tokens(x.reshape(4, -1), seed=3),
}  # fmt: skip


@pytest.fixture
def late(gpu, monkeypatch):
    """``late(a, b)`` copies 16-bit numbers from a to b, after the next kernel could have ended."""
    record = gpu_of(0)
    if not record.has_dependent_launch:
        pytest.skip("not a Hopper GPU")
    monkeypatch.setattr(arrays, "allocate", ALLOCATE)  # poisoning would launch a kernel in between
    module = gpu.cuda.function.Module()
    module.load(compiler.compile_text(LATE, f"sm_{record.capability}", "late.cu")[0])
    run = module.get_function("late")
    return lambda a, b: run((4,), (256,), (a, b, np.int64(a.size)))


@pytest.fixture
def inputs(gpu):
    """Return x before and after ``late`` writes to it, and the other arguments of ``CALLS``."""
    random = gpu.random.default_rng(0)

    def draw(*shape):
        return random.standard_normal(shape, dtype=np.float32).astype(arrays.BFLOAT16)

    scores = gpu.zeros((ROWS // 4, 4), np.float32)
    tokens = gpu.arange(ROWS, dtype=np.int32)[::-1].copy()
    drawn = draw(ROWS, COLS), draw(ROWS, COLS), (draw(ROWS, COLS), draw(COLS), scores, tokens)
    gpu.cuda.Device().synchronize()
    return drawn


def same(some, others):
    some, others = (x if isinstance(x, (tuple, list)) else [x] for x in (some, others))
    pairs = zip(some, others, strict=True)
    return all(bool((a.view(np.uint8) == b.view(np.uint8)).all()) for a, b in pairs)


def test_no_kernel_reads_too_early(gpu, late, inputs):
    before, after, others = inputs
    wrong, x = [], before.copy()
    gpu.cuda.Device().synchronize()
    launches = kernels.launches.copy()
    with gpu.cuda.Stream(non_blocking=True):
        for name, call in CALLS.items():
            want = call(after, *others)

            def run(call=call):
                late(after, x)
                return call(x, *others)

            graph = Graph([run])
            gpu.copyto(x, before)
            if not same(run(), want):
                wrong.append(f"{name}, in a stream")
            gpu.copyto(x, before)
            graph()
            if not same(graph.results[0], want):
                wrong.append(f"{name}, in a graph")
    assert not wrong
    ran = set(kernels.launches - launches)
    assert {"column_sum", "column_sums"} <= ran
    dependent = set().union(*map(sources.dependent_kernels, sources.files()))
    assert dependent <= ran, "dependent kernels without a call in CALLS"


def test_no_kernel_writes_too_early(gpu, late, inputs):
    before, x, _ = inputs
    kept, want = before.copy(), x.copy()
    gpu.cuda.Device().synchronize()
    with gpu.cuda.Stream(non_blocking=True):
        gpuattn.softmax(before, donate=True)
        late(x, kept)
        gpuattn.softmax(x, donate=True)
        assert same(kept, want)
        assert not same(x, want)


def test_clusters_at_once_asks_the_driver(monkeypatch):
    asked, status = [], [0]

    def query(found, function, config):
        one = Config.from_buffer(config)
        cluster = one.attributes[0]
        shape = [*one.grid, *one.block, one.shared, one.count, cluster.id, *cluster.value[:3]]
        asked.append((function, shape))
        found._obj.value = 7
        return status[0]

    library = SimpleNamespace(cuOccupancyMaxActiveClusters=query)
    monkeypatch.setattr(driver_launch.ctypes, "CDLL", lambda name: library)
    function = SimpleNamespace(ptr=5)
    assert driver_launch.clusters_at_once(function, 16, 256, 1000) == 7
    assert asked == [(5, [16, 1, 1, 256, 1, 1, 1000, 1, 4, 16, 1, 1])]
    status[0] = 1
    assert driver_launch.clusters_at_once(function, 16, 256, 1000) == 0
