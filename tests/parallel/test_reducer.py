"""Sums of gradients over replicas: the same tree for any number of ranks."""

import numpy as np
import pytest

from gpuattn.parallel.communicator import Single, add_in_pairs
from gpuattn.parallel.reducer import Reducer


class Step:
    """Has the "gradient" of a batch: the batch, an array. Notes the draws."""

    def __init__(self, size):
        self.workspace = self
        self.grads, self.more = np.full(size, np.nan, np.float32), False
        self.draws, self.lasts, self.update_tokens, self.tokens = [], [], 0, None

    def add(self, batch, draw, last=False):
        self.draws.append(draw)
        self.lasts.append(last)
        self.update_tokens += 1
        self.grads[...] = self.grads + batch if self.more else batch
        self.more = True

    def take(self):
        self.more = False
        return self.grads

    def put(self, tokens):
        self.tokens = tokens


class Ranks(Single):
    """One of several ranks, of which all say the same."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def gather(self, value):
        return [value] * self.size


@pytest.fixture
def gradients():
    """Gradients of 3 batches of each of 8 replicas, whose sums depend on the order."""
    return np.random.default_rng(0).standard_normal((3, 8, 1000), dtype=np.float32)


def computed(gradients, rank, size, ordered=True):
    """Return (the part of the sum that a rank has, its Reducer): ``apply`` sums over ranks."""
    ranks = Ranks(rank, size)
    reducer = Reducer(Step(gradients.shape[2]), ranks, gradients.shape[1], ordered)
    rounds = ((5 + i, [some[replica] for replica in reducer.mine])
              for i, some in enumerate(gradients))  # fmt: skip
    reducer.compute(rounds)
    return reducer.step.grads, reducer


def test_the_bits_of_an_ordered_sum_do_not_depend_on_the_number_of_ranks(gradients):
    sums = {
        size: add_in_pairs([computed(gradients, rank, size)[0] for rank in range(size)])
        for size in (1, 2, 4, 8)
    }
    np.testing.assert_allclose(sums[1], gradients.sum((0, 1)), atol=1e-5)
    for size, found in sums.items():
        assert found.tobytes() == sums[1].tobytes(), size
    in_turn, _ = computed(gradients, 0, 1, ordered=False)
    np.testing.assert_allclose(in_turn, sums[1], atol=1e-5)
    assert in_turn.tobytes() != sums[1].tobytes()  # else this test would prove nothing


@pytest.mark.parametrize("ordered", [False, True])
def test_dropout_is_numbered_by_draw_and_replica_and_tokens_are_those_of_all(gradients, ordered):
    draws = []
    for rank in range(4):
        _, reducer = computed(gradients, rank, 4, ordered)
        draws += reducer.step.draws
        assert reducer.step.tokens == 3 * 8
    assert sorted(draws) == list(range(5 * 8, 8 * 8))
    assert computed(gradients[:, :1], 0, 1)[1].step.draws == [5, 6, 7]  # as without replicas


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_any_number_of_replicas_is_summed(gradients, count):
    for size in (n for n in range(1, count + 1) if count % n == 0):
        parts = [computed(gradients[:, :count], rank, size)[0] for rank in range(size)]
        np.testing.assert_allclose(add_in_pairs(parts), gradients[:, :count].sum((0, 1)), atol=1e-5)


def test_the_last_batch_of_an_update_is_told(gradients):
    """But where a tree is added up behind it."""
    for ordered, size in ((False, 4), (True, 8)):
        lasts = computed(gradients, 1, size, ordered)[1].step.lasts
        assert lasts == [False] * (len(lasts) - 1) + [True]
    assert not any(computed(gradients, 1, 4, True)[1].step.lasts)
