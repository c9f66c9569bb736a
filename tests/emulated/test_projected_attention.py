"""Queries of a decoding step and their attention over memories, emulated on any CPU."""

import emulator
import numpy as np
import pytest
from checks import sampled
from memory_formula import attention
from norms_of_rows import folded_norm, norm, parts_of, wide

from gpuattn.arrays import BFLOAT16
from gpuattn.engine.steps.projected_attention import Blocks, shared_bytes

pytestmark = pytest.mark.usefixtures("host_compiler")
FILE = "attention/cache/projected_attention.cu"

CASES = [  # sentences, beam, of a block; heads, head size, inputs; room; has a norm
    (9, 1, 8, (2, 64, 256), 40, True),
    (5, 2, 4, (1, 64, 512), 17, True),
    (7, 4, 4, (2, 32, 128), 70, False),
    (3, 5, 3, (1, 64, 64), 33, True),
    (4, 8, 2, (1, 64, 512), 100, False),
    (17, 1, 16, (1, 32, 384), 16, True),
    (3, 3, 1, (1, 64, 768), 50, True),
]


@pytest.mark.parametrize("dtype, sentences, beam, per_block, sizes, room, normed", sampled(
    [(dtype, *case) for case in CASES for dtype in (BFLOAT16, np.float16)], 7,
))  # fmt: skip
def test_against_float64(dtype, sentences, beam, per_block, sizes, room, normed):
    heads, size, inputs = sizes
    random, rows, outputs = np.random.default_rng(room), sentences * beam, heads * size

    def draw(*shape):
        return random.standard_normal(shape).astype(dtype)

    x, weight, bias = (
        draw(rows, inputs) + np.asarray(2, dtype),
        draw(outputs, inputs),
        draw(outputs),
    )
    weight = (weight.astype(np.float32) * inputs**-0.5).astype(dtype)
    keys, values = (draw(sentences, room, heads, size) for _ in range(2))
    lengths = random.integers(1, room + 1, sentences).astype(np.int32)
    lengths[:2] = room, 1
    for memory in (keys, values):  # nothing behind the end of a sentence is used
        for n, length in enumerate(lengths):
            memory[n, length:] = np.nan
    folded = statistics = None
    queries = wide(x) @ wide(weight).T + wide(bias)
    if normed:
        gain, shift = draw(inputs), draw(inputs)
        folded_weight, folded = folded_norm(weight, bias, gain, shift)
        statistics = parts_of(x, inputs // 32)
        queries = norm(x, wide(gain), wide(shift)) @ wide(weight).T + wide(bias)
        weight = folded_weight
    queries = queries.reshape(sentences, beam, heads, size)
    want = attention(queries, wide(keys), wide(values), lengths).reshape(rows, outputs)
    out = np.full((rows, outputs), np.nan, dtype)
    machine, warps = emulator.Machine(seed=rows), inputs // 64
    most = 8 if per_block * beam <= 8 else 16
    constants = {"HEAD_DIM": size, "WARPS": warps, "ROWS": most}
    with machine.in_place():
        run = machine.kernel(
            FILE, "projected_attention", scalar="bf16" if dtype == BFLOAT16 else "f16", **constants
        )
        run(
            (heads, -(-sentences // per_block)), (32 * warps,), x, weight,
            None if normed else bias, folded, statistics, keys, values, lengths, out, sentences,
            beam, per_block, room, inputs // 32 if normed else 1, 1e-5, size**-0.5,
            shared_bytes=shared_bytes(Blocks(most, per_block), warps, size, room),
        )  # fmt: skip
    error = np.abs(wide(out) - want).max()
    assert error < (0.06 if dtype == BFLOAT16 else 0.008), error
