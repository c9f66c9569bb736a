"""Attention's gradient by whole heads: what cases for every implementation do not see."""

import emulator
import numpy as np
import pytest
from attention_problems import whole_head_arguments as arguments
from checks import check_hopper_compiles, find

from gpuattn import rng
from gpuattn.ops.attention import hopper, hopper_backward, hopper_head_backward
from gpuattn.ops.attention.flash_attention import IMPLS


@pytest.mark.parametrize("dropout", [False, True])
def test_compiles_without_spills_for_the_memory_that_the_host_asks_for(nvrtc, dropout):
    size = hopper_head_backward.shared_bytes(dropout)
    check_hopper_compiles(hopper_head_backward.FILE, size, DROPOUT=dropout)


CASES = [  # changes, whether the kernel can, whether it does
    ({}, True, True),
    ({"D": 40, "Dv": 8, "window": (3, 0), "dropout_p": 0.5, "scale": -1.0}, True, True),
    ({"T": 97}, True, True),
    ({"T": 96}, True, False),
    ({"T": 200, "S": 256}, False, False),
    ({"window": (None, None)}, False, False),
    ({"window": (None, 1)}, False, False),
    ({"B": 1}, True, False),
    ({"T": 257}, False, False),
    ({"D": 72}, False, False),
    ({"Dv": 72}, False, False),
    ({"Hk": 3}, False, False),
    ({"S": 0}, False, False),
    ({"softcap": 5.0}, False, False),
    ({"sink": 1}, False, False),
    ({"key_lengths": 1}, False, False),
    ({"cu_q": 1}, False, False),
]


@pytest.mark.parametrize("changes, can, does", CASES)
def test_what_is_taken(changes, can, does):
    (q, *others), params = arguments(np, **changes)
    with emulator.Machine(seed=1, multiprocessors=12).in_place():
        assert hopper_head_backward.fits(q, *others, **params) == can
        assert hopper_head_backward.takes(emulator.as_array(q), *others, **params) == does


@pytest.mark.parametrize(
    "T, left, p", [(256, None, 0.2), (256, 100, 0), (200, None, 0), (128, 40, 0.2)]
)
def test_several_heads_of_each_block(gpu, T, left, p):
    """Against the form by tiles, and the same bits again."""
    key = rng.Key(3, 1, 2) if p else None
    inputs, params = arguments(gpu, B=64, T=T, S=T, window=(left, 0), dropout_p=p, key=key)
    if reason := find(IMPLS, "raw-hopper").refuse(*inputs, **params):
        pytest.skip(reason)
    assert "whole head" in hopper.describe(*inputs, **params)["gradient"]
    needs = (True,) * 3 + (False,) * 6
    dout = arguments(gpu, B=64, T=T, S=T)[0][1]  # other numbers than q's

    def run(backward):
        (out, lse), saved = hopper.forward(*inputs, needs=needs, **params)
        grads = backward(saved, dout, None, needs=needs, into=(None,) * 9, **params)
        return [x.astype(np.float32) for x in (out, lse, *grads[:3])]

    first, again = (run(hopper_head_backward.backward) for _ in range(2))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    for x, want in zip(first, run(hopper_backward.backward), strict=True):
        assert abs(x - want).max() <= 2**-6 * abs(want).max()
