"""Pinned memory that the host fills goes back to its pool only once the GPU has read it."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.engine.inputs import Inputs
from gpuattn.runtime.feed import _Slot


class Event:
    """Of a copy that happens as late as it may: when someone waits for it."""

    def __init__(self, order, **kwargs):
        self.order = order

    def synchronize(self):
        self.order.append("copied")


def inputs(order):
    found = Inputs(np.zeros(1), [3])
    found._sent = Event(order)
    return found


def slot(order):
    event = lambda **_: Event(order)  # noqa: E731
    found = _Slot(SimpleNamespace(cuda=SimpleNamespace(Event=event)))
    found.host = np.zeros(3, np.uint32)
    return found


@pytest.mark.parametrize("new", [inputs, slot])
def test_memory_is_given_back_behind_the_copy(new):
    order = []
    holder = new(order)
    weakref.finalize(holder.host, order.append, "given back")
    del holder
    assert order[-2:] == ["copied", "given back"]


@pytest.mark.parametrize("kind", [Inputs, _Slot])
def test_a_constructor_that_failed(kind):
    kind.__new__(kind).__del__()
