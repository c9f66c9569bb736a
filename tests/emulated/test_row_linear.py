"""Linear layers of few rows with norms before them, emulated on any CPU."""

import emulator
import numpy as np
import pytest
from checks import sampled
from norms_of_rows import folded_norm, norm, parts_of, wide

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda.tensor_maps import tensor_map

pytestmark = pytest.mark.usefixtures("host_compiler")
FILE = "linear/row_linear.cu"


def shared_bytes(rows, outputs, splits, stages):
    end = 1024 + stages * 128 * (rows + outputs) + 16 * outputs + 8 * (rows // splits)
    sums = (2 if rows == 64 and outputs == 32 else 1) * rows * outputs // 64 * 272
    return 1024 + end + (sums if splits > 1 else 0)


CASES = [
    # tile: rows, outputs, splits, stages, share; rows, outputs, inputs; norms of x, of the residual
    (BFLOAT16, (64, 64, 1, 3), (70, 128, 256), 0, (False, None)),
    (BFLOAT16, (64, 32, 2, 3), (64, 64, 512), 1, (True, None)),
    (np.float16, (64, 128, 4, 3), (40, 128, 512), 0, (False, True)),
    (BFLOAT16, (64, 64, 8, 4), (100, 64, 1024), 0, (False, False)),
    (BFLOAT16, (64, 64, 1, 4), (130, 128, 320), 2, (True, None)),
    (BFLOAT16, (64, 32, 1, 3), (9, 96, 64), 2, (False, False)),
    (BFLOAT16, (64, 128, 1, 4), (128, 256, 128), 0, (False, True)),
    (BFLOAT16, (64, 128, 1, 3, 2), (130, 256, 512), 2, (True, None)),
    (np.float16, (64, 128, 1, 4, 2), (70, 128, 320), 1, (False, None)),
    (BFLOAT16, (64, 128, 1, 2, 2), (128, 128, 64), 0, (False, True)),
]  # fmt: skip


def ends(tile, norms):
    """Return the values of DIRECT that a case can have."""
    whole = tile[2] == 1 and tile[1] > 32 and norms[1] is None
    return (False, True) if whole else (False,)


@pytest.mark.parametrize("dtype, tile, shape, activation, norms, direct", sampled(
    [(*case, direct) for case in CASES for direct in ends(case[1], case[4])], 14,
))  # fmt: skip
def test_against_float64(dtype, tile, shape, activation, norms, direct):
    (rows, outputs, inputs), (box, each, splits, stages, *share) = shape, tile
    share = share[0] if share else 1
    random, of_x, of_residual = np.random.default_rng(rows), *norms

    def draw(*shape):
        return random.standard_normal(shape).astype(dtype)

    x, weight, bias, residual = (
        draw(rows, inputs) + np.asarray(2, dtype),
        draw(outputs, inputs),
        draw(outputs),
        draw(rows, outputs),
    )
    weight = (weight.astype(np.float32) * inputs**-0.5).astype(dtype)
    gains, shifts = draw(max(inputs, outputs)), draw(max(inputs, outputs))
    if of_x:
        gain, shift = gains[:inputs], shifts[:inputs]
        folded_weight, folded = folded_norm(weight, bias, gain, shift)
        normed = norm(x, wide(gain), wide(shift))
    else:
        folded_weight, folded, normed = weight, None, wide(x)
    want = normed @ wide(weight).T + wide(bias)
    if activation == 1:
        want = np.maximum(want, 0)
    if activation == 2:
        want = want / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (want + 0.044715 * want**3)))
    if of_residual is not None:
        gain, shift = gains[:outputs], shifts[:outputs]
        want += norm(residual, wide(gain), wide(shift)) if of_residual else wide(residual)
    source = x if of_x else residual
    parts = 4 if source.shape[1] % 4 == 0 else 1
    statistics = parts_of(source, parts) if of_x or of_residual else None
    out = np.full((rows, outputs), np.nan, dtype)
    found = np.full((rows, outputs // each, 2), np.nan, np.float32)
    machine = emulator.Machine(seed=rows, multiprocessors=max(2, splits * share))
    constants = {
        "scalar": "bf16" if dtype == BFLOAT16 else "f16",
        "OUTPUTS": each,
        "SPLITS": splits,
        "STAGES": stages,
        "SHARE": share,
        "DIRECT": direct,
    }
    with machine.in_place():
        run = machine.kernel(FILE, "row_linear", **constants)
        maps = [
            tensor_map(emulator.as_array(a)[None, :, None], n)
            for a, n in ((x, box), (folded_weight, each // share))
        ]
        run(
            (splits * share * outputs // each, -(-rows // (box * share))), (320,), *maps,
            None if of_x else bias,
            folded, statistics, None if of_residual is None else residual,
            gains if of_residual else None, shifts if of_residual else None, out,
            None if direct else found, rows,
            outputs, inputs // splits, parts, source.shape[1], activation, 1e-5,
            shared_bytes=shared_bytes(*tile[:4]),
        )  # fmt: skip
    unit = 2.0**-8 if dtype == BFLOAT16 else 2.0**-11
    room = unit * np.abs(want) + (unit * 6 if of_x else unit)
    assert (np.abs(wide(out) - want) <= room).all(), (np.abs(wide(out) - want) / room).max()
    if not direct:
        np.testing.assert_allclose(found, parts_of(out, outputs // each), rtol=1e-4, atol=1e-5)
