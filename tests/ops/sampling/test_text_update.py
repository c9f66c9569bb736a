"""The update of texts: what done texts keep, and the same state from both implementations.

``tests/engine/test_generation.py`` compares whole texts with ``gpuattn.decode``.
"""

import numpy as np
import pytest

from gpuattn.arrays import to_cpu
from gpuattn.ops.sampling.text_update import NAME, Texts, text_update

EOS, OTHER, NONE = 2, 3, -np.inf


def begun(xp, limits):
    texts, count = Texts(xp.zeros(1, np.float32), len(limits), 9), len(limits)
    first = xp.arange(count, dtype=np.int32)
    texts.start(first + 10, first, xp.asarray(limits, np.int32), xp.ones((count, 4), np.uint32))
    return texts


def marks(xp):
    return xp.asarray([EOS, OTHER], np.int32)


def test_an_end_a_dead_end_a_limit_and_done_texts(xp):
    texts = begun(xp, [0, 5, 5, 1, 5])
    assert int(texts.live[0]) == 4
    logprobs = xp.asarray([-1, -2, NONE, -4, -5], np.float32)
    text_update(xp.asarray([7, OTHER, 7, 7, 8], np.int32), logprobs, texts, eos=marks(xp))
    found = {name: to_cpu(getattr(texts, name)).tolist() for name in Texts.NAMES}
    assert found["done"] == [True, True, True, True, False] and found["live"] == [1]
    assert found["ended"] == [False, True, False, False, False]
    assert found["lengths"] == [0, 0, 0, 1, 1] and found["scores"] == [0, -2, NONE, -4, -5]
    assert found["tokens"] == [10, 11, 12, 13, 8] and found["positions"] == [0, 1, 2, 3, 5]
    assert found["key_counts"] == [1, 2, 3, 4, 6]
    assert [key[3] for key in found["keys"]] == [1, 1, 1, 1, 2]
    assert [row[0] for row in found["history"]][3:] == [7, 8]


def test_shapes_that_do_not_fit(xp):
    with pytest.raises(ValueError, match=f"{NAME}: chosen.shape is"):
        text_update(
            xp.zeros(3, np.int32), xp.zeros(2, np.float32), begun(xp, [1, 1]), eos=marks(xp)
        )


def test_a_start_on_a_gpu_leaves_the_state_of_one_on_numpy(gpu):
    rng = np.random.default_rng(0)
    both = [Texts(xp.zeros(1, np.float32), 300, 5) for xp in (gpu, np)]
    for _ in range(3):
        given = rng.integers(-1, 4, (3, 300)).astype(np.int32)
        keys = rng.integers(0, 9, (300, 4)).astype(np.uint32)
        for texts, xp in zip(both, (gpu, np), strict=True):
            texts.start(*map(xp.asarray, given), xp.asarray(keys))
        for name in Texts.NAMES:
            there, here = (to_cpu(getattr(texts, name)) for texts in both)
            np.testing.assert_array_equal(there, here, err_msg=name)


@pytest.mark.parametrize("settled", [False, True])
def test_both_implementations_leave_the_same_state(gpu, settled):
    rng = np.random.default_rng(0)
    limits = rng.integers(0, 7, 300).tolist()
    both = [begun(gpu, limits) for _ in range(2)]
    for _ in range(9):
        tokens = gpu.asarray(rng.integers(0, 9, 300), np.int32)
        logprobs = np.where(rng.random(300) < 0.05, NONE, -rng.random(300))
        for texts, impl in zip(both, ("raw-simt", "reference"), strict=True):
            figures = gpu.asarray(logprobs, np.float32)
            text_update(tokens, figures, texts, eos=marks(gpu), settled=settled, impl=impl)
        for one, other in zip(*(texts.arrays() for texts in both), strict=True):
            assert to_cpu(one).tobytes() == to_cpu(other).tobytes()
    assert int(both[0].live[0]) == 0
