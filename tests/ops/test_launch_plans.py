"""Launches of every kernel on every GPU: they fit the GPU's limits, and the kernels compile."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from checks import sampled
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

import gpuattn
from gpuattn import Tensor
from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import compiler, sources
from gpuattn.engine.steps.row_step import row_embedding
from gpuattn.errors import KernelCompileError
from gpuattn.ops.attention.step_attention import step_attention
from gpuattn.ops.attention.store_rows import store_rows
from gpuattn.ops.image_patches import image_patches
from gpuattn.ops.sampling.beam_update import Beams, beam_update, best_texts
from gpuattn.ops.sampling.text_rules import TextRules, text_rules
from gpuattn.ops.sampling.text_update import Texts, text_update
from gpuattn.ops.scalars import add_product, product, take_mean
from gpuattn.optim import ExponentialAverage
from gpuattn.runtime.graph_arrays import Ring

FLOAT32, FLOAT16 = np.dtype("float32"), np.dtype("float16")
DTYPES = FLOAT32, BFLOAT16
TENSOR_CORES = {
    "attention/cache/decode_attention.cu", "attention/flash_attention_short.cu",
    "attention/flash_attention_forward_ampere.cu", "attention/flash_attention_backward_ampere.cu",
    "attention/flash_attention_backward_ampere_extras.cu",
}  # fmt: skip
STATIC_TOO = (  # files with kernels that also declare static shared memory
    "loss/cross_entropy.cu", "attention/cache/decode_attention.cu",
    "norm/dropout_add_norm_backward.cu", "norm/layer_norm_backward.cu", "embedding_backward.cu",
)  # fmt: skip
CLUSTERS = {
    "loss/cross_entropy_cluster.cu", "sampling/sample_tokens_cluster.cu", "softmax_hopper.cu",
}  # fmt: skip
ROOMY = {  # for 9.0 and 10.x
    "attention/flash_attention_backward_simt_whole.cu", "sampling/beam_step_block.cu",
}  # fmt: skip
MOST_THREADS, MOST_ROWS = 1024, 65535  # per block; grid size along y and z
COLUMNS = (64, 256, 384, 768, 1000, 2048, 4096, 8192, 16392, 40000)
VOCABULARIES = (100, 1000, 2000, 5000, 20000, 50000, 60000, 120000, 300000)
HEAD_SIZES = (32, 64, 96, 128, 192, 256)


def floats(dtype, *shape):
    return as_array(np.ones(shape, dtype))


def wanting(*arrays):
    return [Tensor(x, requires_grad=True) for x in arrays]


def back(out):
    """Run the backward pass of an op's result, or of several."""
    for y in out if isinstance(out, tuple) else (out,):
        y.backward(np.ones_like(y.data), retain_graph=True)


def rows(dtype, cols):
    """Ops along rows."""
    x, residual = (floats(dtype, 5, cols) for _ in range(2))
    weight, bias = floats(dtype, cols), floats(dtype, cols)
    back(gpuattn.softmax(*wanting(x)))
    back(gpuattn.softmax(*wanting(x), mask=residual[0] > 0, dropout_p=0.5, seed=1))
    back(gpuattn.layer_norm(*wanting(x, weight, bias)))
    back(gpuattn.rms_norm(*wanting(x, weight)))
    back(gpuattn.dropout_add_norm(*wanting(x, residual, weight, bias), p=0.1, seed=1))
    (x_bias,) = wanting(bias)
    back(gpuattn.dropout_add_norm(*wanting(x, residual, weight), x_bias=x_bias))
    normed, _ = gpuattn.dropout_add_norm(
        *wanting(x, residual, weight), x_bias=x_bias, p=0.1, seed=1
    )
    back(gpuattn.relu(normed) + gpuattn.silu(normed))  # two gradients of one array
    back(gpuattn.gelu(*wanting(x, bias)))
    back(gpuattn.relu(*wanting(x, bias)))
    back(gpuattn.dropout(*wanting(x), 0.1, seed=1))
    one, other = wanting(x, residual)
    back(one * other)


def table(dtype, cols):
    tokens = as_array(np.arange(6, dtype=np.int32).reshape(2, 3))
    for deterministic in (True, False):
        weight, places = wanting(floats(dtype, 9, cols), floats(dtype, 9, cols))
        more = {"p": 0.1, "seed": 1, "deterministic": deterministic}
        y = gpuattn.embedding(tokens, weight, position_weight=places, **more)
        for tensor in (weight, places):
            tensor.grad_slot = floats(dtype, *tensor.data.shape)
        back(y)
        back(y)  # adds to what the slots hold


def logits(dtype, size):
    """Run the ops along the vocabulary."""
    x, labels = floats(dtype, 4, size), as_array(np.arange(4))
    for dloss in (None, floats(np.float32).reshape(())):
        back(gpuattn.cross_entropy(*wanting(x), labels, label_smoothing=0.1, dloss=dloss))
    gpuattn.cross_entropy(x, labels)
    gpuattn.topk_logprobs(x, 8)
    gpuattn.topk_logprobs(x, 99)
    gpuattn.beam_step(x, floats(np.float32, 2, 2))
    gpuattn.beam_step(x, floats(np.float32, 2, 2), banned=as_array(np.zeros(size, bool)))
    for more in ({}, {"top_k": 9}, {"top_p": 0.5}):
        gpuattn.sample_tokens(x, seed=1, **more)
    texts, slots = Texts(x, len(x), 9), as_array(np.zeros((2, 2, 9), np.int16))
    beams = Beams(x, 2, 2, 9, float)
    for more in ({}, {"on_logits": True}, {"prefix_room": 3}, {"no_repeat_ngram": 2}):
        rules = TextRules(x, 2, eos=(2,), min_length=3, **more)
        given = beams.scores, beams.positions, beams.history, slots
        text_rules(x, *given, rules)
    drawn = gpuattn.sample_tokens(x, keys=texts.keys)
    text_update(*drawn, texts, eos=as_array(np.array([2], np.int32)))


def beginnings(dtype, width):
    """States of a decoding step; only 16-bit models have such steps."""
    if dtype == FLOAT32:
        return
    ids, table = as_array(np.arange(9, dtype=np.int32)), floats(dtype, 20, width)
    row_embedding(ids, ids, table, table)
    row_embedding(ids, ids, table, measured=False)


def attention(dtype, size):
    for length in (40, 200):
        q, k, v = (floats(dtype, 2, length, 2, size) for _ in range(3))
        for more in (
            {},
            {"causal": True, "deterministic": True},
            {"dropout_p": 0.1, "seed": 1},
            {"bias": floats(dtype, 2, 2, length, length)},
            {"softcap": 9.0},
        ):
            back(gpuattn.flash_attention(*wanting(q, k, v), **more))
        if dtype == FLOAT32:
            back(gpuattn.flash_attention(*wanting(q, k, v), tf32=True))
    q, k, v, bias = wanting(q, k, v, floats(dtype, 2, 2, length, length))
    back(gpuattn.flash_attention(q, k, v, bias=bias))


def decoding(dtype, size):
    cache, new = floats(dtype, 3, 640, 2, size), floats(dtype, 3, 1, 2, size)
    lengths = as_array(np.full(3, 600, np.int32))
    gpuattn.append_kv(cache, cache.copy(), new, new, lengths)
    for more in ({}, {"splits": 4}, {"batch_invariant": True}):
        gpuattn.decode_attention(floats(dtype, 3, 1, 8, size), cache, cache, lengths, **more)
    beams = Beams(new, 3, 1, 9, float)
    beams.start(1, [9, 9, 9])
    store_rows([(cache, new[:, 0])], lengths, lengths)
    step_attention(new, new, new, cache[:, :9].copy(), cache[:, :9].copy(), lengths, beams.slots)
    pages = floats(dtype, 4, 64, 2, size)
    table = as_array(np.array([[1, 2]] * 3, np.int32))
    step_attention(new, new, new, pages, pages.copy(), lengths, page_table=table)
    found = gpuattn.beam_step(floats(dtype, 3, 99), beams.scores)
    beam_update(*found, beams, eos=as_array(np.array([2], np.int32)))
    best_texts(beams)
    back(gpuattn.rotary(*wanting(floats(dtype, 2, 9, 4, size), floats(dtype, 2, 9, 2, size))))


def layers(dtype, cols):
    x, weight, bias = floats(dtype, 40, cols), floats(dtype, cols, cols), floats(dtype, cols)
    for activation in (None, "relu", "gelu"):
        back(gpuattn.linear(*wanting(x, weight, bias), activation=activation))
    norm = floats(dtype, cols)
    back(gpuattn.linear_dropout_add_norm(*wanting(x, weight, x, norm, norm), p=0.1, seed=1))
    labels = as_array(np.arange(40) % cols)
    back(gpuattn.linear_cross_entropy(*wanting(x, weight), labels))


def pictures(dtype, size):
    images = as_array(np.zeros((3, size + 1, size, 3), np.uint8))
    options = {"patch": 2, "size": size, "mean": [0.5] * 3, "std": [0.5] * 3, "dtype": dtype}
    image_patches(images, **options, seed=1, mix=floats(np.float32, 3))
    image_patches(images[..., :1], **options | {"mean": [0.5], "std": [0.5]})


def updates(dtype, size):
    params, *moments = (floats(np.float32, size) for _ in range(3))
    grads, decay = floats(dtype, size), as_array(np.ones(size // 128, np.uint8))
    model = None if dtype == FLOAT32 else floats(dtype, size)
    state = gpuattn.OptimizerState(params)
    gpuattn.gradient_statistics(grads, state)
    gpuattn.adamw(params, grads, *moments, state, decay=decay, model=model)
    gpuattn.lion(params, grads, moments[0], state, decay=decay, model=model)
    gpuattn.sgd(params, grads, moments[0], state, decay=decay, momentum=0.9, model=model)
    tensors = gpuattn.TensorTable(params, [0, 128], size, [True, False])
    gpuattn.lamb(params, grads, *moments, state, tensors, model=model)
    share = as_array(np.ones((), np.float32))
    ExponentialAverage(SimpleNamespace(masters=params if model is None else model)).update(share)
    add_product(state.field("divisor"), share, product(share, share))
    take_mean(share, 3)


def copies(dtype, size):
    """Copy at both ends of a captured graph."""
    cuda = SimpleNamespace(
        Event=lambda **_: None, runtime=SimpleNamespace(getDevice=lambda: 0)
    )  # fmt: skip
    ring = Ring(SimpleNamespace(zeros=lambda *args: as_array(np.zeros(*args)), cuda=cuda), None)
    ring.copy_in([floats(dtype, size)] * 70)
    ring.copy_out([floats(dtype, size)])


CASES = [
    *[(rows, cols) for cols in COLUMNS], *[(table, cols) for cols in (64, 384, 1000, 4096)],
    *[(logits, size) for size in VOCABULARIES], *[(attention, size) for size in HEAD_SIZES],
    *[(decoding, size) for size in HEAD_SIZES], (layers, 64), (layers, 384), (updates, 1024),
    *[(beginnings, width) for width in (64, 512, 768)], (pictures, 14), (pictures, 224),
    (copies, 5), (copies, 1 << 20),
]  # fmt: skip


def plans(record):
    """Return the Launches of all cases on a GPU with this Gpu record."""
    with launches_on(record) as noted:
        for run, size in CASES:
            for dtype in DTYPES if record.has_bfloat16 else (*DTYPES, FLOAT16):
                run(dtype, size)
    return noted


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
@pytest.mark.parametrize("name", sampled(dict.fromkeys(["7.5", "8.6", "9.0", "12.0", *GPUS]), 4))
def test_every_launch_fits_the_gpu(name):
    record = GPUS[name]
    noted = plans(record)
    launched = {launch.file for launch in noted}
    portable = {file for file in sources.files() if "sm_75" in sources.architectures(file)}
    if not record.has_bfloat16:
        kinds = {
            dict(launch.constants)["scalar"] for launch in noted if launch.file in TENSOR_CORES
        }
        assert kinds == {"f16"}
    assert portable <= launched
    assert all(sources.serves(file, record.capability) for file in launched)
    assert launched & CLUSTERS == (CLUSTERS if record.capability // 10 in (9, 10) else set())
    assert launched & ROOMY == (ROOMY if record.capability // 10 in (9, 10) else set())
    assert record.has_clusters or not launched & CLUSTERS
    for launch in noted:
        parameters = sources.signatures(launch.file)[launch.name]
        assert record.has_tma or not any("TensorMap" in kind for kind, _ in parameters), launch
        assert record.has_wgmma or "sm_90a" not in sources.architectures(launch.file), launch
        assert launch.shared_bytes <= record.shared_bytes, launch
        assert np.prod(launch.block) <= MOST_THREADS, launch
        assert max(launch.grid[1:], default=0) <= MOST_ROWS, launch


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
@pytest.mark.parametrize("name, much", [("7.5", 24), ("12.0", 90)])
def test_static_and_dynamic_shared_memory_fit_together(nvrtc, name, much):
    """Checks the largest launch of each file of STATIC_TOO on the GPUs with the least of it.

    ``much``: KiB that each of these launches exceeds.
    """
    record, largest = GPUS[name], {}
    for launch in plans(record):
        before = largest.setdefault(launch.file, launch)
        if launch.shared_bytes > before.shared_bytes:
            largest[launch.file] = launch
    for file in STATIC_TOO:
        size, constants = largest[file].shared_bytes, largest[file].constants
        assert size > much << 10, "no launch uses almost all shared memory"
        text = sources.source_text(file, **dict(constants))
        _, log = compiler.compile_text(text, sources.arch_for(file, record.capability), file)
        declared = max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0)
        assert size + declared <= record.shared_bytes, file


@pytest.mark.parametrize("record", GPUS.values(), ids=GPUS)
def test_a_kernel_compiles_for_the_gpu_itself(nvrtc, record):
    arch = sources.arch_for("update/sgd.cu", record.capability)
    assert arch == f"sm_{record.capability}"  # the NVRTC of the tests knows this architecture
    text = sources.source_text("update/sgd.cu", **sources.variants("update/sgd.cu")[0])
    assert compiler.compile_text(text, arch, "update/sgd.cu")[0].startswith(b"\x7fELF")


def test_an_older_nvrtc_compiles_for_the_same_major_version(monkeypatch):
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "12.8")
    monkeypatch.setattr(compiler, "nvrtc_architectures", lambda: [75, 80, 86, 89, 90, 100, 120])
    assert sources.arch_for("update/sgd.cu", 103) == "sm_100"
    assert sources.arch_for("update/sgd.cu", 121) == "sm_120"
    assert sources.arch_for("attention/flash_attention_forward_hopper.cu", 90) == "sm_90a"
    monkeypatch.setattr(compiler, "nvrtc_architectures", lambda: [75, 80, 86, 89, 90])
    with pytest.raises(KernelCompileError, match=r"compute capability 12\.0; it knows up to sm_90"):
        sources.arch_for("update/sgd.cu", 120)


def test_which_files_serve_a_gpu():
    def served(capability):
        return {file for file in sources.files() if sources.serves(file, capability)}

    portable = served(80)
    assert (
        portable
        == served(70)
        == served(75)
        == served(87)
        == served(89)
        == served(120)
        == served(121)
    )
    assert served(100) == served(103) == portable | CLUSTERS | ROOMY
    assert served(90) == set(sources.files())
