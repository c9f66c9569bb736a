"""The tiles of raw-simt fit on every GPU, and Python counts their bytes as CUDA does."""

import itertools

import compiled
import numpy as np
import pytest
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn import Tensor, flash_attention
from gpuattn.cuda import sources
from gpuattn.ops.attention import simt

LIMITS = {80: 101_376, 75: 65_536, 90: 232_448, 103: 232_448, 120: 101_376}
"""Bytes that a block may have; for 8.0 those of 8.6."""
FORMS = list(itertools.product(simt.WIDTHS, (False, True)))


def check_tile(part, width, extras, capability, **constants):
    file = simt.FILES[part]
    text = sources.source_text(file, scalar="float", HEAD_DIM=width, EXTRAS=extras, **constants)
    sizes = text[: text.index('extern "C"')]
    tile = simt.choose_tile(part, width, extras, capability)
    claim = f"OWN == {tile.own} && STEP == {tile.step} && THREADS == {tile.threads}"
    claim += f" && SHARED_BYTES == {tile.shared_bytes}"
    compiled.check_front_end(f'{sizes}\nstatic_assert({claim}, "");', f"sm_{capability}", file)
    assert tile.shared_bytes <= LIMITS[capability]
    return tile


@pytest.mark.parametrize(("width", "extras"), FORMS)
@pytest.mark.parametrize("part", ["forward", "dkv", "dq"])
@pytest.mark.parametrize("capability", LIMITS)
def test_tiles_are_those_of_the_kernels(nvrtc, part, width, extras, capability):
    check_tile(part, width, extras, capability)


@pytest.mark.parametrize("width", simt.WHOLE_WIDTHS)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("capability", [90, 103])
def test_tiles_of_the_gradient_in_one_launch(nvrtc, width, extras, capability):
    tile = check_tile("whole", width, extras, capability)
    blocks = 256 // tile.threads
    assert blocks * (tile.shared_bytes + 1024) <= 228 << 10


def launched(card, needs=(True, True, True), dtype="float32", size=64, bias=False):
    """Return the names of the kernels that a gradient launches."""
    with launches_on(GPUS[card]) as noted:
        q, k, v = (
            Tensor(as_array(np.ones((1, 200, 2, size), dtype)), requires_grad=need)
            for need in needs
        )
        given = Tensor(as_array(np.ones((1, 2, 200, 200), dtype)), requires_grad=bias)
        out = flash_attention(q, k, v, bias=given if bias else None, impl="raw-simt")
        out.backward(np.ones_like(out.data))
    return [launch.name.removeprefix("flash_attention_") for launch in noted][1:]


def test_which_gradients_take_one_launch():
    """Where one launch has all three, no other computes dq."""
    one, two = ["whole_rows", "whole"], ["delta", "dkv", "dq"]
    for card in ("9.0", "10.0", "10.3"):
        assert [launched(card, size=n) for n in (48, 64, 80, 96, 128)] == [one] * 5
    assert launched("9.0", (True, True, False)) == launched("9.0", (True, False, True)) == one
    for card in ("7.5", "8.0", "8.6", "12.0"):
        assert launched(card) == two
    assert launched("9.0", size=32) == launched("9.0", size=136) == two
    assert launched("9.0", dtype="float16") == launched("9.0", bias=True) == two
    assert launched("9.0", (True, False, False)) == ["delta", "dq"]
    assert launched("9.0", (False, True, True)) == ["delta", "dkv"]
