"""Batches made by a thread: the same, in order, not too many, errors where they belong."""

import gc
import threading
import time

import pytest

from gpuattn.data.ahead import Ahead


@pytest.fixture
def gone():
    """Return a function that waits until the threads of a test have ended."""
    before = set(threading.enumerate())

    def wait():
        new = set(threading.enumerate()) - before
        for thread in new:
            thread.join(5)
        return not any(thread.is_alive() for thread in new)

    return wait


def test_items_come_in_order_and_the_end_is_known(gone):
    items = Ahead(iter(range(50)), 3)
    for i in range(50):
        assert not items.ended() and next(items) == i
    assert items.ended() and next(items, None) is None and items.ended()
    assert list(Ahead(iter(()))) == [] and gone()


def test_no_more_are_made_than_asked_for(gone):
    made = []
    items = Ahead((made.append(i) or i for i in range(100)), 3)
    assert next(items) == 0
    for _ in range(100):
        time.sleep(0.001)
    assert len(made) == 4  # one taken, three wait
    del items
    gc.collect()
    assert gone() and len(made) <= 5


def test_an_error_is_raised_where_its_item_would_be(gone):
    items = Ahead(map((4).__floordiv__, (4, 2, 0, 1)))
    assert [next(items), next(items)] == [1, 2]
    assert not items.ended()
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert items.ended() and gone()
