"""The states that a decoding step begins with, emulated on any CPU."""

import emulator
import numpy as np
import pytest
from checks import sampled

from gpuattn import arrays
from gpuattn.arrays import BFLOAT16
from gpuattn.ops import row_embedding as module
from gpuattn.ops.row_embedding import RowEmbedding
from gpuattn.ops.sampling import beam_update as beams_module
from gpuattn.ops.sampling import text_update as texts_module
from gpuattn.ops.sampling.beam_update import Beams, beam_update
from gpuattn.ops.sampling.text_update import Texts, text_update

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
    tokens, places, weight, table = (
        x if x is None else emulator.as_array(x) for x in (tokens, places, weight, table)
    )
    with machine.in_place(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "kernel", machine.kernel)
        patch.setattr(arrays, "allocate", poisoned)
        made = RowEmbedding(rows, weight, table, scale=scale, used=40, measured=measured)
        made(tokens, places)
        states, found = made.states, made.statistics
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
        patch.setattr(module, "kernel", machine.kernel)
        made = RowEmbedding(3, weight)
        made(tokens, tokens)
        flags = np.asarray(arrays._flags[0])
        assert flags[flags[:, 1] == 4].shape == (1, 2)
    assert (made.states.astype(np.float32) == 1).all()


UPDATES = [  # beams (0: texts without), dtype, width, positions, statistics, card
    (beam, dtype, width, positions, measured, card)
    for dtype, card in ((BFLOAT16, "9.0"), (np.float16, "7.5"))
    for beam, width in ((0, 64), (0, 768), (1, 320), (4, 512), (5, 768))
    for positions, measured in ((True, True), (False, True), (True, False))
]


@pytest.mark.parametrize("beam, dtype, width, positions, measured, card", sampled(UPDATES, 8))
def test_updates_make_the_states_of_new_tokens(beam, dtype, width, positions, measured, card):
    """The same bits as the launch that makes those of all texts; others stay as they were."""
    rng, count, room = np.random.default_rng(width + beam), 11, 6
    rows = count * max(beam, 1)

    def draw(*shape):
        return emulator.as_array(rng.standard_normal(shape).astype(dtype))

    tables = (draw(50, width), draw(room, width) if positions else None)
    machine = emulator.Machine(seed=rows, card=card)
    eos, limits = np.array([7, 3], np.int32), rng.integers(0, room, count).astype(np.int32)
    none = np.zeros(count, np.int32)
    with machine.in_place(), pytest.MonkeyPatch.context() as patch:
        for place in (module, beams_module, texts_module):
            patch.setattr(place, "kernel", machine.kernel)
        for place in (beams_module, texts_module):
            patch.setattr(place, "kernel_refusal", lambda *_: None)
        patch.setattr(arrays, "allocate", poisoned)
        own, other = (RowEmbedding(rows, *tables, scale=3.0, measured=measured) for _ in "ab")
        if beam:
            state = Beams(np.zeros(1, np.float32), count, beam, room, lambda length: length + 1)
            state.start(5, limits)
        else:
            state = Texts(np.zeros(1, np.float32), count, room)
            state.start(none + 5, none, limits, np.zeros((count, 4), np.uint32))
        for step in range(room):
            known = [x.copy() for x in (own.states, own.statistics) if x is not None]
            update = {"eos": eos, "settled": True, "embedding": own, "impl": "raw-simt"}
            if beam:
                found = np.sort(-4 * rng.random((count, 3 * beam)).astype(np.float32))[:, ::-1]
                parents, tokens = (
                    rng.integers(0, n, found.shape).astype(np.int32) for n in (beam, 50)
                )
                beam_update(found.copy(), parents, tokens, state, **update)
            else:
                logprobs = -rng.random(count).astype(np.float32)
                text_update(rng.integers(0, 50, count).astype(np.int32), logprobs, state, **update)
            other(state.tokens, state.positions)
            going = np.repeat(~np.asarray(state.done), rows // count)
            assert going.any() or step
            fresh = [x for x in (other.states, other.statistics) if x is not None]
            now = [x for x in (own.states, own.statistics) if x is not None]
            for x, new, old in zip(now, fresh, known, strict=True):
                assert x[going].tobytes() == new[going].tobytes()
                assert x[~going].tobytes() == old[~going].tobytes()
        assert not going.any() and not np.asarray(arrays._flags[0]).any()
