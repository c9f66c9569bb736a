"""The states that a decoding step begins with, emulated on any CPU."""

import re
from types import SimpleNamespace

import emulator
import numpy as np
import pytest
from checks import sampled
from seen_rows import list_rows

from gpuattn import arrays
from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import sources
from gpuattn.engine.steps import row_step
from gpuattn.models.translation import TranslationConfig, TranslationModel

pytestmark = pytest.mark.usefixtures("host_compiler")
CASES = [  # dtype, rows, width, scale, positions, statistics, card
    (dtype, rows, width, scale, positions, measured, card)
    for dtype, card in ((BFLOAT16, "9.0"), (np.float16, "9.0"), (np.float16, "7.5"))
    for rows, width in ((1, 64), (9, 256), (5, 320), (6, 512), (3, 768))
    for scale, positions, measured in ((8.0, True, True), (1.0, False, True), (0.5, True, False))
]


def poisoned(xp, shape, dtype):
    return emulator.as_array(np.full(shape, np.nan, dtype))


@pytest.mark.parametrize("dtype, rows, width, scale, positions, measured, card", sampled(CASES, 12))
def test_against_float64(dtype, rows, width, scale, positions, measured, card):
    random = np.random.default_rng(width + rows)

    def draw(*shape):
        return (random.standard_normal(shape) + 3).astype(dtype)

    weight, table = draw(50, width + 8)[:, :width], draw(20, width) if positions else None
    tokens, places = (random.integers(0, n, rows).astype(np.int32) for n in (40, 20))
    machine = emulator.Machine(seed=rows, card=card)
    given = (emulator.as_array(x) for x in (tokens, places, weight, table))
    with machine.in_place(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_step, "kernel", machine.kernel)
        patch.setattr(arrays, "allocate", poisoned)
        states, found = row_step.row_embedding(*given, scale=scale, used=40, measured=measured)
        assert not np.asarray(arrays._flags[0]).any()
    want = scale * weight[tokens].astype(np.float64)
    if positions:
        want += table[places].astype(np.float64)
    unit = 2.0**-8 if dtype == BFLOAT16 else 2.0**-11
    assert (np.abs(states.astype(np.float64) - want) <= unit * np.abs(want)).all()
    if not measured:
        assert found is None
        return
    exact = states.astype(np.float64)
    mean = exact.mean(-1)
    squares = ((exact - mean[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(found, np.stack([mean, squares], -1)[:, None], rtol=1e-5)


def test_an_index_out_of_range_is_flagged():
    weight = emulator.as_array(np.ones((4, 64), BFLOAT16))
    tokens = emulator.as_array(np.array([3, 4, -1], np.int32))
    machine = emulator.Machine(seed=0)
    with machine.in_place(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_step, "kernel", machine.kernel)
        states, _ = row_step.row_embedding(tokens, tokens, weight)
        flags = np.asarray(arrays._flags[0])
        assert flags[flags[:, 1] == 4].shape == (1, 2)
    assert (states.astype(np.float32) == 1).all()


@pytest.mark.parametrize("beam, room", [(2, 5), (3, 128), (4, 129), (5, 300), (8, 66)])
def test_rows_that_beams_see_are_listed(beam, room):
    """Those of old keys: of texts that begin, of beams with common ancestors, and of any slots."""
    random, sentences = np.random.default_rng(beam), 6
    slots = random.integers(0, beam, (sentences, beam, room)).astype(np.int16)
    slots[1] = np.arange(beam)[:, None]
    slots[2, :, : room // 2] = 1
    counts = random.integers(1, room + 1, sentences)
    counts[0], counts[3] = 1, room
    want, numbers = list_rows(slots, counts - 1)
    beams = SimpleNamespace(
        sentences=sentences, beam=beam, room=room, slots=emulator.as_array(slots),
        key_counts=emulator.as_array(counts.repeat(beam).astype(np.int32)),
    )  # fmt: skip
    weight = emulator.as_array(np.ones((4, 64), BFLOAT16))
    tokens = emulator.as_array(np.full(sentences * beam, 3, np.int32))
    listed = [emulator.as_array(np.full_like(x, 99)) for x in (want, numbers)]
    machine = emulator.Machine(seed=beam)
    with machine.in_place(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_step, "kernel", machine.kernel)
        states, _ = row_step.row_embedding(
            tokens, tokens, weight, weight, beams=beams, listed=listed
        )
    assert (states.astype(np.float32) == 2).all()
    rows, found = map(np.asarray, listed)
    np.testing.assert_array_equal(found, numbers)
    used = np.arange(beam * room) < numbers[:, None]
    np.testing.assert_array_equal(rows[used], want[used])
    assert (rows[~used] == 99).all()


def test_lists_only_where_row_linear_waits_before_attention_starts():
    """With fewer rows attention could start before row_embedding has ended."""
    eager = re.search(r"\bEAGER = (\d+);", sources.source_text(row_step.FILE))
    assert int(eager[1]) == row_step.EAGER
    sizes = {"vocab": 50, "d_model": 64, "heads": 4, "ffn": 64, "layers": (1, 2)}
    whole, grouped = (
        TranslationModel(TranslationConfig(**sizes, kv_heads=n)).eval() for n in (4, 2)
    )
    like = np.zeros(0, BFLOAT16)
    for model, sentences, beam, listed in (
        (whole, 32, 4, False), (whole, 33, 4, True), (whole, 65, 2, True), (whole, 15, 9, False),
        (whole, 200, 1, False), (grouped, 33, 4, False),
    ):  # fmt: skip
        state = SimpleNamespace(sentences=sentences, beam=beam, room=9)
        assert (row_step._listed(state, model, like) is not None) == listed
