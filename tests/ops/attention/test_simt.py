"""The tiles of raw-simt fit on every GPU, and Python counts their bytes as CUDA does."""

import itertools

import compiled
import pytest

from gpuattn.cuda import kernels
from gpuattn.ops.attention import simt

LIMITS = {80: 101_376, 75: 65_536, 90: 232_448, 103: 232_448, 120: 101_376}
"""Bytes that a block may have; for 8.0 those of 8.6."""
FORMS = list(itertools.product(simt.WIDTHS, (False, True)))


@pytest.mark.parametrize(("width", "extras"), FORMS)
@pytest.mark.parametrize("part", ["forward", "dkv", "dq"])
@pytest.mark.parametrize("capability", LIMITS)
def test_tiles_are_those_of_the_kernels(nvrtc, part, width, extras, capability):
    file = f"attention/flash_attention_{'forward' if part == 'forward' else 'backward'}_simt.cu"
    text = kernels.source_text(file, scalar="float", HEAD_DIM=width, EXTRAS=extras)
    sizes = text[: text.index('extern "C"')]
    tile = simt.choose_tile(part, width, extras, capability)
    claim = f"OWN == {tile.own} && STEP == {tile.step} && THREADS == {tile.threads}"
    claim += f" && SHARED_BYTES == {tile.shared_bytes}"
    compiled.check_front_end(f'{sizes}\nstatic_assert({claim}, "");', f"sm_{capability}", file)
    assert tile.shared_bytes <= LIMITS[capability]
