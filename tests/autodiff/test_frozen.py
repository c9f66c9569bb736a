"""Arrays are read-only while a record needs them, however and whenever the record is dropped."""

import gc

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


def test_a_view_is_writable_again_after_its_base():
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


def test_garbage_collection_during_freeze_thaws_afterwards(monkeypatch):
    a = np.ones(3)
    garbage, mine = [], []
    frozen.freeze(a, garbage)

    class Interrupted(dict):
        def get(self, *args):
            value = super().get(*args)
            frozen.thaw(garbage)  # as if a record were freed at this moment, or in another thread
            return value

    monkeypatch.setattr(frozen, "_frozen", Interrupted(frozen._frozen))
    frozen.freeze(a, mine)
    assert not a.flags.writeable
    frozen.thaw(mine)
    assert a.flags.writeable


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    assert not frozen._frozen
    yield
    gc.collect()
    assert not frozen._frozen
