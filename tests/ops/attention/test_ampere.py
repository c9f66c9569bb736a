"""The tiles of raw-ampere's gradient fit, and Python counts their bytes as CUDA does."""

import compiled
import numpy as np
import pytest

from gpuattn.cuda import sources
from gpuattn.ops.attention import ampere

LIMITS = {"sm_86": 101_376, "sm_80": 166_912, "sm_90": 232_448}  # bytes of shared memory per block


SIZES = 8, 64, 72, 96, 104, 128, 136, 192, 200, 256


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("size", SIZES)
def test_every_head_size_has_a_tile_that_fits(size, limit):
    tile = ampere.choose_tile(size, limit)
    assert tile[0] >= size and ampere.backward_shared_bytes(*tile) <= limit
    larger = [t for t in ampere.TILES if size <= t[0] < tile[0]]
    # otherwise columns would be wasted
    assert all(ampere.backward_shared_bytes(*t) > limit for t in larger)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_head_size_has_a_fitting_tile_with_extras(size, extras, limit):
    tile = ampere.choose_extras_tile(size, extras, limit)
    assert tile[0] >= size and ampere.extras_shared_bytes(*tile) <= limit
    assert not (extras and tile == ampere.PLAIN_ONLY)
    larger = [t for t in ampere.EXTRAS_TILES if size <= t[0] < tile[0]]
    assert all(ampere.extras_shared_bytes(*t) > limit for t in larger)


def test_hopper_takes_the_large_tiles():
    limit = LIMITS["sm_90"]
    assert ampere.choose_tile(64, limit) == (64, 128, 128, 2)
    assert ampere.choose_tile(128, limit) == (128, 128, 64, 2)
    assert ampere.choose_extras_tile(128, True, limit) == (128, 128, 64, 8, 2, 2)


@pytest.mark.parametrize("tile", (*ampere.TILES, *ampere.TURING_TILES), ids=str)
def test_bytes_are_those_of_the_kernel(nvrtc, tile):
    constants = dict(zip(ampere.CONSTANTS, tile, strict=True), scalar="f16")
    size, threads = ampere.backward_shared_bytes(*tile), ampere.BACKWARD_THREADS
    claim = f"DKV_BYTES == {size} && THREADS == {threads}"
    check_sizes(ampere.BACKWARD_FILE, "__device__", claim, constants, tile in ampere.TURING_TILES)


@pytest.mark.parametrize("tile", (*ampere.EXTRAS_TILES, *ampere.TURING_EXTRAS_TILES), ids=str)
def test_bytes_are_those_of_the_kernel_with_extras(nvrtc, tile):
    constants = dict(zip(ampere.EXTRAS_CONSTANTS, tile, strict=True), scalar="f16", EXTRAS=False)
    size = ampere.extras_shared_bytes(*tile)
    claim = f"(DKV_BYTES > DQ_BYTES ? DKV_BYTES : DQ_BYTES) == {size}"
    older = tile in ampere.TURING_EXTRAS_TILES
    check_sizes(ampere.EXTRAS_FILE, "// ---- from", claim, constants, older)


def check_sizes(file, end, claim, constants, older):
    text = sources.source_text(file, **constants)
    sizes = text[: text.index(end)]
    arch = "sm_75" if older else "sm_80"
    compiled.check_front_end(f'{sizes}\nstatic_assert({claim}, "");', arch, file)


@pytest.mark.parametrize("size", [size for size in SIZES if size <= 192])
def test_tiles_of_7_5_fit_in_64_kib(size):
    assert size <= ampere.MAX_TURING_GRADIENT_HEAD_DIM
    tile = ampere.choose_tile(size, 65536, ampere.TURING_TILES)
    extras = ampere.choose_extras_tile(size, True, 65536, ampere.TURING_EXTRAS_TILES)
    assert size <= tile[0] == extras[0]


@pytest.mark.parametrize("width", ampere.WIDTHS)
@pytest.mark.parametrize("extras, dropout", [(False, False), (True, False), (True, True)])
def test_the_forward_of_7_5_is_that_of_the_kernel(nvrtc, width, extras, dropout):
    file = "attention/flash_attention_forward_ampere.cu"
    rows, keys = ampere.forward_tile(width, 2, extras, dropout, 75)
    size = ampere.forward_shared_bytes(width, 2, rows, keys)
    constants = {"scalar": "f16", "HEAD_DIM": width, "EXTRAS": extras, "DROPOUT": dropout}
    claim = f"ROWS == {rows} && KEYS == {keys} && SHARED_BYTES == {size}"
    check_sizes(file, "// Copies rows", claim, constants, True)
    assert size <= 65536


@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (1, 4, 1, 8), (1, 1, 1, 1), (2, 1, 6, 1)])
def test_strides_of_a_broadcast_bias_reach_its_elements(shape):
    x = np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape)
    batch, row, head, column = ampere._broadcast_strides(x).view(np.int64)
    full = np.broadcast_to(x, (2, 4, 6, 8))
    for b, h, i, j in np.ndindex(full.shape):
        assert x.flat[b * batch + h * head + i * row + j * column] == full[b, h, i, j]
