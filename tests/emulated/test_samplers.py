"""Beam steps and sampling, emulated on any CPU."""

import itertools

import emulator
import numpy as np
import pytest
from checks import sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.ops.sampling import beam_step as beams
from gpuattn.ops.sampling import sample_tokens as samples
from gpuattn.rng import Key

CARDS = ["9.0", "7.5"]
pytestmark = pytest.mark.usefixtures("host_compiler")


def run(op, machine, inputs, **params):
    """Return the results of the CUDA form of an op, as NumPy arrays."""
    form = next(impl for impl in op.IMPLS if impl.name == "raw-simt")
    with machine.in_place():
        found, _ = form.forward(
            *map(emulator.as_array, inputs), needs=(False,) * len(inputs), **params
        )  # fmt: skip
    return [np.asarray(x) for x in found]


def logits_of(random, rows, vocab, kind, dtype):
    """Return (rows, vocab) logits with columns of NaN behind them that are not to be read."""
    padding = int(random.integers(0, 9))
    x = 3 * random.standard_normal((rows, vocab + padding))
    if kind == "ties":
        x = np.round(x)
    elif kind == "equal":
        x[:] = 0
    elif kind == "half -inf":
        x[0, : vocab // 2] = -np.inf
        x[-1] = -np.inf
    elif kind == "NaN":
        x[-1, vocab // 2], x[0, vocab - 1] = np.nan, np.inf
    elif kind == "in one group":
        x[:, vocab // 3 :: 128] += 30
    elif kind == "best are banned":
        x[:, [0, 1, vocab // 2, vocab - 1]] += 30
    elif kind == "overflow":  # far above and below the first elements
        x[:, vocab // 2] += 200
        x[-1, :300] = -np.inf
        x[-1, 300:] -= 900
    elif kind == "forced":
        x[:] = -np.inf
        x[:, vocab - 9] = 0
    elif kind == "lowest":
        x[:, 1:] = np.finfo(np.float32).min
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    x[:, vocab:] = np.nan
    return x


BEAMS = [  # sentences, beam, vocabulary, kind, dtype, bans, penalties of a row
    (3, 4, 4099, "usual", BFLOAT16, False, 0), (1, 3, 9000, "ties", np.float16, True, 0),
    (2, 2, 2049, "equal", np.float32, False, 5), (2, 5, 257, "half -inf", BFLOAT16, True, 3),
    (2, 4, 4099, "NaN", np.float32, False, 0), (3, 1, 3, "usual", np.float16, False, 2),
    (1, 33, 1025, "in one group", BFLOAT16, False, 0), (2, 3, 1030, "lowest", np.float32, False, 0),
    (3, 2, 9, "ties", np.float32, True, 0), (1, 8, 5001, "in one group", np.float16, True, 7),
    (2, 4, 9001, "best are banned", BFLOAT16, "tokens", 0),
    (2, 2, 5001, "overflow", np.float32, False, 0), (2, 3, 700, "forced", BFLOAT16, "tokens", 0),
    (1, 3, 2050, "best are banned", np.float32, "tokens", 4),
    (2, 2, 4099, "NaN", np.float16, "tokens", 0),
]  # fmt: skip

LAUNCHES = {
    "usual": {"TEAMS": 0}, "long slices": {"TEAMS": 0, "BLOCKS": 2, "GROUPS": 32},
    "a block per sentence": {"FEW_STAGES": 99, "MOST_STAGES": 99},
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("sizes", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize("sentences, beam, vocab, kind, dtype, bans, count", sampled(BEAMS, 4))
def test_beam_step(monkeypatch, sentences, beam, vocab, kind, dtype, bans, count, sizes, card):
    for name, size in sizes.items():
        monkeypatch.setattr(beams, name, size)
    random, rows = np.random.default_rng(vocab), sentences * beam
    logits = logits_of(random, rows, vocab, kind, dtype)
    scores = -3 * random.random((sentences, beam)).astype(np.float32)
    scores[random.random(scores.shape) < 0.3] = -np.inf
    scores[0, 0] = -1
    banned = random.random(vocab) < 0.1 if bans else None
    if bans == "tokens":
        banned = np.array([vocab - 1, 0, vocab // 2, 1, 0, vocab // 3], np.int32)
    listed = amounts = None
    if count:
        listed = random.integers(-1, vocab, (rows, count)).astype(np.int32)
        listed[:, -1] = listed[:, 0]
        amounts = random.standard_normal((rows, count)).astype(np.float32)
        amounts[:, ::3] = np.inf
    inputs = logits, scores, banned, listed, amounts
    given = {"vocab_size": vocab, "count": [2, 3][vocab % 2] * beam}
    found = run(beams, emulator.Machine(beam, 3, card=card), inputs, **given)
    with np.errstate(invalid="ignore"):
        want, _ = beams._forward_reference(*inputs, needs=(False,) * 5, **given)
    np.testing.assert_allclose(found[0], want[0], rtol=4e-6, atol=4e-6)
    np.testing.assert_array_equal(found[1], want[1])
    np.testing.assert_array_equal(found[2], want[2])


BLOCKS = [  # beam, vocabulary, kind, dtype, number of bans, continuations
    (1, 2049, "usual", BFLOAT16, 0, 2), (4, 4099, "usual", BFLOAT16, 1, 8),
    (8, 1030, "usual", np.float16, 2, 16), (4, 2050, "best are banned", np.float32, 32, 8),
    (2, 9001, "best are banned", BFLOAT16, 32, 4), (4, 4099, "many equal", BFLOAT16, 2, 8),
    (8, 1025, "many equal", np.float32, 1, 24), (3, 700, "NaN", np.float16, 32, 9),
    (1, 5000, "forced", np.float32, 1, 16), (5, 40, "half -inf", BFLOAT16, 32, 10),
]  # fmt: skip


@pytest.mark.parametrize("beam, vocab, kind, dtype, bans, count", BLOCKS)
def test_beam_step_of_a_block_per_sentence(monkeypatch, beam, vocab, kind, dtype, bans, count):
    """With each number of bans, beams that are dead, and a sentence that has ended."""
    monkeypatch.setattr(beams, "FEW_STAGES", 99)
    monkeypatch.setattr(beams, "MOST_STAGES", 99)
    random = np.random.default_rng(vocab)
    logits = logits_of(random, 3 * beam, vocab, kind, dtype)
    if kind == "many equal":  # more candidates than lanes
        logits[:, 5 : vocab : vocab // 50] = 30
    scores = -3 * random.random((3, beam)).astype(np.float32)
    scores[0, 1:] = scores[1] = scores[2, : beam // 2] = -np.inf
    banned = random.integers(0, vocab, bans).astype(np.int32)
    banned[: bans // 2] = [vocab - 1, *range(40)][: bans // 2]  # some in one vector
    inputs = logits, scores, banned, None, None
    given = {"vocab_size": vocab, "count": count}
    machine = emulator.Machine(beam, 3, card="9.0")
    found = run(beams, machine, inputs, **given)
    with np.errstate(invalid="ignore"):
        want, _ = beams._forward_reference(*inputs, needs=(False,) * 5, **given)
    np.testing.assert_allclose(found[0], want[0], rtol=4e-6, atol=4e-6)
    np.testing.assert_array_equal(found[1], want[1])
    np.testing.assert_array_equal(found[2], want[2])
    settled = run(beams, emulator.Machine(beam, 3, card="9.0"), inputs, settled=True, **given)
    assert [x.tobytes() for x in settled] == [x.tobytes() for x in found]
    monkeypatch.setattr(beams, "TEAMS", 0)
    by_many = run(beams, emulator.Machine(beam, 3, card="9.0"), inputs, **given)
    assert [x.tobytes() for x in by_many] == [x.tobytes() for x in found]


def test_scores_that_a_launch_copies_are_not_read_before_it_is_over(monkeypatch):
    seen, kernel = [], emulator.Machine.kernel

    def recorded(machine, file, name, **constants):
        seen.append((name, constants.get("SETTLED")))
        return kernel(machine, file, name, **constants)

    monkeypatch.setattr(emulator.Machine, "kernel", recorded)
    random = np.random.default_rng(1)
    logits = random.standard_normal((4, 99)).astype(np.float32)
    wide = -random.random((2, 4)).astype(np.float32)
    bans = np.arange(4, dtype=np.int32)
    found = []
    for scores, banned in ((wide[:, ::2].copy(), bans[::2].copy()), (wide[:, ::2], bans[::2])):
        inputs = logits, scores, banned, None, None
        given = {"vocab_size": 99, "count": 4, "settled": True}
        machine = emulator.Machine(1, 3, card="9.0")
        found.append([x.tobytes() for x in run(beams, machine, inputs, **given)])
    assert seen == [("beam_step_block", 1), ("beam_step_block", 0)] and found[0] == found[1]


def test_teams_of_a_block_cover_the_rows():
    """And their slices are those that the kernel computes by a multiplication."""
    for beam, vocab, itemsize, most in itertools.product(
        range(1, 10), (2, 1000, 8000, 8193, 32000), (2, 4), (1, 2, 99)
    ):
        if teams := beams._teams(beam, vocab, itemsize, most):
            threads, slices, stages, parts = teams
            assert beam * slices <= threads // beams.BLOCK <= beams.TEAMS and stages <= most
            assert slices * stages * beams.BLOCK * beams.STAGE * 16 >= vocab * itemsize
            assert parts == beams._stages_of_row(vocab, itemsize, beams.BLOCK) * beams.BLOCK // 32
            every = range(beams.TEAMS)
            assert [t * -(-256 // slices) >> 8 for t in every] == [t // slices for t in every]


def test_bits_of_a_beam_step_do_not_depend_on_the_launch(monkeypatch):
    """Few rows and many, aligned rows and others, and slices of any length give the same bits."""
    random = np.random.default_rng(4)
    logits = (3 * random.standard_normal((6, 9000))).astype(BFLOAT16)
    scores = -random.random((3, 2)).astype(np.float32)
    moved = np.zeros((6, 9008), BFLOAT16)[:, 3:9003]
    moved[...] = logits
    found = set()
    for blocks, groups, teams in ((1056, 1024, 0), (6, 1024, 0), (1, 64, 0), (1, 64, 8)):
        monkeypatch.setattr(beams, "BLOCKS", blocks)
        monkeypatch.setattr(beams, "GROUPS", groups)
        monkeypatch.setattr(beams, "TEAMS", teams)
        monkeypatch.setattr(beams, "FEW_STAGES", 2)
        for x in (logits, moved):
            inputs = x, scores, None, None, None
            results = run(beams, emulator.Machine(1, 3), inputs, vocab_size=9000, count=4)
            found.add(b"".join(x.tobytes() for x in results))
            alone = x[2:4], scores[1:2], None, None, None
            one = run(beams, emulator.Machine(2, 3), alone, vocab_size=9000, count=4)
            assert [a[0].tobytes() for a in one] == [a[1].tobytes() for a in results]
    assert len(found) == 1


EVERYTHING = {"temperature": 1.3, "top_k": 100, "top_p": 0.9, "min_p": 0.02}
SAMPLES = [  # rows, vocabulary, kind, dtype, bans, settings
    (2, 4099, "usual", BFLOAT16, False, {"top_k": 50}), (1, 9001, "usual", np.float32, True, {}),
    (3, 2500, "ties", np.float16, False, {"top_p": 0.9}),
    (2, 2049, "equal", BFLOAT16, True, {"top_k": 50, "top_p": 0.7}),
    (3, 40, "usual", np.float32, False, EVERYTHING | {"top_k": 9}),
    (2, 3000, "half -inf", np.float32, False, {"top_p": 0.9}),
    (2, 2500, "NaN", np.float16, False, {"top_k": 5}),
    (1, 4099, "usual", np.float32, True, EVERYTHING),
    (1, 5001, "in one group", BFLOAT16, False, {"top_k": 300}),
    (2, 2100, "lowest", np.float32, False, {"top_k": 3}),
    (2, 4099, "usual", np.float32, False, {"top_k": 700, "temperature": 1e3}),
    (2, 9001, "usual", BFLOAT16, False, {"top_p": 0.6, "temperature": 0.3}),
    (2, 4099, "ties", np.float32, True, {"min_p": 0.05}),
    (3, 300, "ties", BFLOAT16, True, EVERYTHING),  # a block per row
    (2, 2000, "usual", np.float32, False, {"top_p": 0.5}),
    # candidates are gathered: the least and the most of them, fewer kept, at the same probability
    (2, 4099, "usual", BFLOAT16, False, {"top_k": 1}),
    (4, 13001, "usual", BFLOAT16, False, {"top_k": 200, "temperature": 1e3}),
    (2, 9001, "ties", np.float32, True, {"top_k": 200, "top_p": 0.8, "min_p": 0.01}),
    (2, 13001, "ties", np.float16, False, {"top_k": 100, "min_p": 0.3}),
    (4, 9001, "usual", np.float16, True, {"top_k": 100, "temperature": 1e3}),
    (6, 5001, "ties", BFLOAT16, False, {"top_k": 50, "temperature": 1e3}),
    (4, 5001, "ties", np.float16, False, {"top_k": 50, "top_p": 0.5, "temperature": 3.0}),
    (2, 4099, "usual", BFLOAT16, False, {"top_k": 30, "min_p": 1.0}),
    (2, 4099, "usual", np.float32, False, {"top_k": 65, "top_p": 1e-6}),
    (4, 2000, "ties", BFLOAT16, False, {"top_k": 64, "temperature": 1e3}),  # by 128 threads
    (3, 1500, "usual", np.float16, True, {"top_k": 33, "top_p": 0.7, "min_p": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("rows, vocab, kind, dtype, bans, settings", sampled(SAMPLES, 5))
def test_sample_tokens(rows, vocab, kind, dtype, bans, settings, card):
    random = np.random.default_rng(vocab + rows)
    logits = logits_of(random, rows, vocab, kind, dtype)
    banned = random.random(vocab) < 0.1 if bans else None
    call = samples.sample_tokens.prepare(
        logits, seed=Key(7, 1, 4), banned=banned, vocab_size=vocab, **settings
    )
    found = run(samples, emulator.Machine(vocab, 9, card=card), call.inputs, **call.params)
    with np.errstate(invalid="ignore"):
        want, _ = samples._forward_reference(*call.inputs, needs=(False,) * 4, **call.params)
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_allclose(found[1], want[1], rtol=3e-6, atol=3e-6)
