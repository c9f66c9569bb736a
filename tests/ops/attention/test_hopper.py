"""raw-hopper: tests beyond those that every implementation must pass."""

import itertools

import compiled
import emulator
import numpy as np
import pytest
from attention_formula import assert_close, gradients
from attention_problems import whole_head_arguments
from checks import find, sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import sources
from gpuattn.errors import UnsupportedError
from gpuattn.ops.attention import hopper as attention_hopper
from gpuattn.ops.attention import hopper_backward
from gpuattn.ops.attention.flash_attention import IMPLS, flash_attention

FILE = "attention/flash_attention_forward_hopper.cu"
FLAGS = list(itertools.product((False, True), repeat=4))


def constants(width, queries, *flags):
    return {"scalar": "bf16", **attention_hopper.variant(width, queries, *flags)}


def test_every_tile_in_use_is_compiled_in_the_tests():
    listed = sources.variants(FILE)
    edges = (
        attention_hopper.TALL_TILES, attention_hopper.TALL_TILES_BANDED,
        attention_hopper.TALL_TILES_DROPOUT, attention_hopper.LONG_TILES,
    )  # fmt: skip
    lengths = 1, *edges, *(edge + 1 for edge in edges)
    for width, queries in itertools.product(attention_hopper.WIDTHS, lengths):
        for flags in FLAGS:
            used = constants(width, queries, *flags)
            assert used in listed, f"{used} is not on the header's Constants lines"


@pytest.mark.parametrize("width", sampled(attention_hopper.WIDTHS, 1))
@pytest.mark.parametrize("bias", [False, True])
def test_matrix_products_are_not_serialised(nvrtc, width, bias):
    """ptxas prints C75xx where it waits after each wgmma, which is about 3 times slower."""
    text = sources.source_text(FILE, **constants(width, 4096, True, bias, False, False))
    _, log = compiled.machine_code(text, "sm_90a", FILE)
    assert "C75" not in log, log


@pytest.mark.parametrize("width", attention_hopper.WIDTHS)
@pytest.mark.parametrize("bias, extras", [(False, False), (True, False), (False, True)])
def test_shared_memory_size_equals_the_kernel_layout(nvrtc, width, bias, extras):
    """The host computes the exact size: with this assertion, no other size compiles."""
    used = constants(width, 4096, False, bias, extras, False)
    size = attention_hopper.shared_bytes(used)
    check = f'\nstatic_assert(SHARED_BYTES == {size}, "the host asks for another size");\n'
    compiled.check_front_end(sources.source_text(FILE, **used) + check, "sm_90a", FILE)


FULL, CAUSAL = {"window": (None, None)}, {"window": (None, 0)}
AHEAD = [  # changes; whether keys are loaded ahead, and the tiles in turn where they are
    ({"T": 512, **FULL}, True, 4),
    ({"T": 512, **FULL, "dropout_p": 0.1}, True, 4),
    ({"T": 300, **CAUSAL}, True, 3),
    ({"T": 513, **FULL}, True, 1),
    ({"T": 513, **FULL, "dropout_p": 0.1}, False, None),  # measured slower
    ({"T": 200, "S": 330, **CAUSAL}, True, 3),
    ({"T": 256, "S": 330, **CAUSAL, "align": "top_left"}, False, None),  # none sees the last tile
    ({"T": 257, "S": 330, **CAUSAL, "align": "top_left"}, True, 3),
    ({"T": 330, "S": 200, **FULL}, True, 1),
    ({"T": 512, "window": (100, 0)}, False, None),
    ({"T": 512, **FULL, "D": 72}, False, None),
    ({"T": 512, **FULL, "deterministic": True}, False, None),
    ({"T": 512, **FULL, "softcap": 3.0}, False, None),
    ({"T": 512, **FULL, "key_lengths": 1}, False, None),
    ({"T": 512, **FULL, "scale": -1.0}, True, 1),
    ({"T": 512, **FULL, "B": 3, "H": 5}, True, 1),  # 15 heads on 12 multiprocessors
]


@pytest.mark.parametrize("changes, ahead, in_turn", AHEAD)
def test_which_gradients_load_keys_ahead(changes, ahead, in_turn):
    inputs, params = whole_head_arguments(np, **changes)
    inputs[:3] = map(emulator.as_array, inputs[:3])
    with emulator.Machine(seed=1, multiprocessors=12).in_place():
        assert hopper_backward.loads_ahead(*inputs, **params) is ahead
        if ahead:
            assert hopper_backward.tiles_in_turn(*inputs[:2], **params) == in_turn


def hopper(xp):
    """Return q, k, v that the kernel accepts; skips on other GPUs."""
    rng = np.random.default_rng(0)
    qkv = [xp.asarray(rng.standard_normal((4, 700, 8, 64), np.float32).astype(BFLOAT16))] * 3
    try:
        flash_attention(*qkv, impl="raw-hopper")
    except (UnsupportedError, ValueError) as error:
        pytest.skip(str(error))
    return qkv


def test_concurrent_launches_share_no_counter(gpu):
    qkv = hopper(gpu)
    want = flash_attention(*qkv, causal=True, impl="raw-hopper").view(np.uint16)
    streams = [gpu.cuda.Stream(non_blocking=True) for _ in range(4)]
    gpu.cuda.Device().synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with stream:
                found.append(flash_attention(*qkv, causal=True, impl="raw-hopper"))
    for stream in streams:
        stream.synchronize()
    assert all((out.view(np.uint16) == want).all() for out in found)


def test_graph_replays_between_eager_calls(gpu):
    qkv = hopper(gpu)
    want = flash_attention(*qkv, causal=True, impl="raw-hopper").view(np.uint16)
    stream, other = (gpu.cuda.Stream(non_blocking=True) for _ in range(2))
    gpu.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured = [flash_attention(*qkv, causal=True, impl="raw-hopper") for _ in range(3)]
        graph = stream.end_capture()
    for _ in range(20):
        graph.launch(other)
        with stream:
            eager = flash_attention(*qkv, causal=True, impl="raw-hopper")
    for each in (stream, other):
        each.synchronize()
    assert all((out.view(np.uint16) == want).all() for out in (*captured, eager))


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_computes_all_tiles_of_a_head(gpu, causal):
    """One KV head with few tiles per multiprocessor: dq is stored, not added to zeros."""
    hopper(gpu)  # skips on other GPUs
    heads = gpu.cuda.Device().attributes["MultiProcessorCount"]
    shape = {"queries": 450, "keys": 500, "heads": 2 * heads, "kv_heads": heads}
    found = gradients(find(IMPLS, "raw-hopper"), gpu, **shape, causal=causal)
    assert_close(found, gradients(find(IMPLS, "reference"), gpu, **shape, causal=causal))
