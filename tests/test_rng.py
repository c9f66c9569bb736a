"""Random bits are a function of (seed, stream, step, index): known answers, statistics, seeds."""

import contextvars
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuattn import manual_seed, rng, to_cpu
from gpuattn.rng import Key

# counter, key and result of philox4x32 with 7 rounds from kat_vectors of Random123
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "4dfccaba 190a87f0 c47362ba b6b5242a"),
]  # fmt: skip


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, want", KNOWN)
def test_published_known_answers(counter, key, want):
    low, high = words(key)
    seed, counters = low | high << 32, words(counter)
    for number in (int, np.uint64, lambda c: np.full(2, c, np.uint64)):
        got = rng.philox(seed, *map(number, counters))
        assert [int(np.ravel(word)[0]) for word in got] == words(want)
    mixed = rng.philox(
        np.full(2, seed, np.uint64), np.full(2, counters[0], np.uint64), *counters[1:]
    )
    assert [int(word[1]) for word in mixed] == words(want)


def test_lanes_are_the_halves_of_the_words(xp):
    key = Key(0x0123456789ABCDEF, 5, 9)
    got = rng.lanes(xp, key, 0, 24).tolist()
    for block in range(3):
        four = rng.philox(key.seed, *(np.uint64(c) for c in (block, 0, key.stream, key.step)))
        want = [half for word in four for half in (int(word) & 0xFFFF, int(word) >> 16)]
        assert got[8 * block : 8 * block + 8] == want


@pytest.mark.parametrize("first", [0, 1, 7, 8, 13, 2**35 - 3])
def test_numbers_depend_on_the_index_alone(xp, first):
    """From 2**35 on the second word of the counter is not zero."""
    key = Key(3, 1, 4)
    whole = rng.lanes(xp, key, first - first % 8, 64).tolist()
    assert rng.lanes(xp, key, first, 40).tolist() == whole[first % 8 :][:40]


def test_each_part_of_the_key_changes_the_numbers():
    keys = [Key(1, 2, 3), Key(0, 2, 3), Key(1, 0, 3), Key(1, 2, 0), Key(1 + (1 << 32), 2, 3)]
    assert len({rng.lanes(np, key, 0, 64).tobytes() for key in keys}) == len(keys)


def test_zero_numbers():
    assert rng.lanes(np, Key(1), 5, 0).shape == (0,)
    assert rng.keep_mask(np, (3, 0), 0.5, Key(1)).shape == (3, 0)


@pytest.mark.parametrize("blocks", [0, 2, 17])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.25, 1.0])
def test_the_mask_is_where_a_lane_is_below_the_threshold(xp, p, blocks):
    size = blocks * rng.BLOCK + 13
    want = to_cpu(rng.lanes(xp, Key(5), 0, size)).astype(int) < rng.threshold(p)
    np.testing.assert_array_equal(to_cpu(rng.keep_mask(xp, (size,), p, Key(5))), want)


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.9, 1.0])
def test_keep_rate(p):
    """Within five standard deviations of the binomial distribution, also in each lane alone."""
    kept = rng.keep_mask(np, (1000, 800), p, Key(7, 2, 1))
    q = rng.threshold(p) / 65536
    assert abs(q - (1 - p)) <= 0.5 / 65536
    for sample in (kept, kept[:, ::8], kept[:, 3::8], kept[:10]):
        assert abs(sample.mean() - q) <= 5 * np.sqrt(q * (1 - q) / sample.size)


def test_neighbours_are_uncorrelated():
    kept = rng.keep_mask(np, (10**6,), 0.5, Key(11)) - 0.5
    for distance in (1, 2, 4, 8, 64):
        assert abs((kept[distance:] * kept[:-distance]).mean()) <= 5 * 0.25 / 1000


def test_a_seed_may_be_an_int_a_key_or_nothing():
    assert rng.as_key(5) == Key(5)
    assert rng.as_key(-1) == Key(2**64 - 1)
    assert rng.as_key(Key(1, 2, 3)) == Key(1, 2, 3)
    assert rng.as_key(None) != rng.as_key(None)


def test_keys_after_manual_seed_repeat_and_are_no_keys_of_a_run():
    drawn = []
    for seed in (1, 1, 2):
        manual_seed(seed)
        drawn.append([rng.as_key(None) for _ in range(3)])
    assert drawn[0] == drawn[1] != drawn[2]
    with rng.numbered(1, 0):
        run = [rng.as_key(None) for _ in range(3)]
    assert len({*drawn[0], *drawn[2], *run}) == 9


def test_after_all_streams_of_a_seed_comes_another_seed():
    with rng.replay((5, 7)):
        early = rng.as_key(None)
    with rng.replay((5, (1 << 32) + 7)):
        late = rng.as_key(None)
    assert early.stream == late.stream == 7 and early.seed != late.seed


def unseeded(function, *args):
    """Call a function where ``manual_seed`` was never called."""
    return contextvars.Context().run(function, *args)


def test_threads_draw_other_keys():
    with ThreadPoolExecutor(4) as pool:
        keys = list(pool.map(lambda _: unseeded(rng.as_key, None), range(400)))
    assert len(set(keys)) == 400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_draws_other_keys():
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads
        child = os.fork()
    if not child:
        os.write(theirs, str(unseeded(rng.as_key, None)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 100).decode() != str(unseeded(rng.as_key, None))
    os.close(ours)
    os.close(theirs)


def test_lanes_are_those_of_their_counters_in_any_order():
    """Lanes of few counters come from a table of several streams."""
    random = np.random.default_rng(3)
    stream = 0
    for _ in range(600):
        stream = stream + 1 if random.random() < 0.7 else int(random.integers(2**32 - 3, 2**32))
        stream = stream if random.random() < 0.95 else int(random.integers(20))
        stream %= 1 << 32
        key = Key(int(random.random() < 0.05), stream, int(random.random() < 0.05))
        first, count = random.integers(0, 5000), random.integers(0, 9000)
        counters = np.arange(first // 8, (first + count + 7) // 8, dtype=np.uint64)
        words = rng.philox(key.seed, counters, 0, key.stream, key.step)
        want = np.stack(words, 1).astype("<u4").view("<u2").ravel()[first % 8 :][:count]
        np.testing.assert_array_equal(rng.lanes(np, key, first, count), want)


def test_manual_seed_repeats():
    drawn = []
    for seed in (1, 1, 2):
        manual_seed(seed)
        drawn.append([rng.fresh_seed() for _ in range(3)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 3


@pytest.mark.parametrize("seed", [1.5, "abc", [1]])
def test_other_seeds_are_refused(seed):
    with pytest.raises(TypeError):
        rng.as_key(seed)
    with pytest.raises(TypeError, match="manual_seed: seed is a .*; accepted: an int"):
        manual_seed(seed)


def test_replay_repeats_a_draw():
    state = rng.remember()
    first = rng.fresh_seed()
    with rng.replay(state):
        assert rng.fresh_seed() == first
    assert rng.fresh_seed() != first


def test_device_arguments():
    assert rng.device_arguments(Key(5 + (6 << 32), 7, 8)) == (5, 6, 7, 8, None)
    step = np.asarray([8], np.uint32)
    assert rng.device_arguments(Key(1, 2, step)) == (1, 0, 2, 0, step)


def test_the_step_may_be_an_array_on_the_device(gpu):
    step = gpu.asarray([8], "uint32")
    want = rng.lanes(np, Key(1, 2, 8), 0, 20).tolist()
    assert rng.lanes(gpu, Key(1, 2, step), 0, 20).tolist() == want
