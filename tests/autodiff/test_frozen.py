"""Arrays stay read-only exactly as long as some record needs them, whoever drops it and when."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuattn import Tensor
from gpuattn.autodiff import frozen


def test_read_only_until_the_last_record_is_dropped():
    a = np.ones(3)
    x = Tensor(a, requires_grad=True)
    first, second = x * x, x * x
    del first
    assert not a.flags.writeable
    del second
    assert a.flags.writeable


def test_a_view_is_given_back_after_its_base():
    a = np.ones(4)
    view = a[:2]
    whole, part = [], []
    frozen.freeze(a, whole)
    frozen.freeze(view, part)
    frozen.thaw(part)
    assert not view.flags.writeable
    frozen.thaw(whole)
    assert a.flags.writeable
    assert view.flags.writeable


def test_threads_may_share_an_array():
    a = np.ones(3)
    x = Tensor(a, requires_grad=True)

    def work(_):
        for _ in range(500):
            (x * x).sum()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))  # raises what they raised
    finally:
        sys.setswitchinterval(interval)
    assert a.flags.writeable
    assert not frozen._frozen


def test_garbage_collected_in_the_middle_is_given_back_afterwards(monkeypatch):
    a, b = np.ones(3), np.ones(3)
    garbage = []
    frozen.freeze(a, garbage)

    class Interrupted(dict):
        def get(self, *args):
            frozen.thaw(garbage)  # as if a record died just now
            return super().get(*args)

    monkeypatch.setattr(frozen, "_frozen", Interrupted(frozen._frozen))
    mine = []
    frozen.freeze(b, mine)
    assert a.flags.writeable
    assert not b.flags.writeable
    frozen.thaw(mine)


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    assert not frozen._frozen
    yield
    gc.collect()
    assert not frozen._frozen
