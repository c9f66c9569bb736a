"""What a function reaches in Python, and that each change of it is noticed."""

import functools
import types

import numpy as np
import pytest

from gpuattn import Tensor, nn
from gpuattn.autodiff.watch import AT_A_TIME, TRIALS, Watch
from gpuattn.nn.dropout import RandomState

NUMBER = 1000
SETTINGS = types.ModuleType("settings_of_a_user")
SETTINGS.scale, SETTINGS.other = 1, 1


class Config:
    scale = 2.0
    other = 3.0


class Slotted:
    def __init__(self):
        self.value = 5


def helper(x):
    return x * NUMBER


def things():
    """Return (function, {what changes: a function that changes it})."""
    held, items, table = Slotted(), [1, Slotted()], {"a": {"b": 1}}
    layer, tensor, number = nn.Linear(2, 2), Tensor(np.ones(2), requires_grad=True), 7
    array, pair = np.ones(2), (Slotted(), 1)

    def function(x, given=held):
        deep = [lambda y: y * number for _ in range(1)]
        return helper(deep[0](x)) * SETTINGS.scale * Config.scale, items, table, layer, tensor, \
            array, pair  # fmt: skip

    def set_number():
        nonlocal number
        number = 8

    def set_array():
        nonlocal array
        array = np.ones(2)

    changes = {
        "a variable": set_number, "an array": set_array,
        "a default": lambda: setattr(held, "value", 6),
        "a new attribute": lambda: setattr(held, "more", 6),
        "a deleted attribute": lambda: delattr(held, "value"),
        "an item": lambda: items.__setitem__(0, 2),
        "an attribute of an item": lambda: setattr(items[1], "value", 6),
        "a longer list": lambda: items.append(3),
        "an inner dict": lambda: table["a"].update(b=2),
        "a key": lambda: table.pop("a"),
        "a parameter": lambda: setattr(layer.weight, "data", layer.weight.data.copy()),
        "the mode": layer.eval,
        "a new attribute of a module": lambda: setattr(layer, "more", 6),
        "a deleted attribute of a module": lambda: delattr(layer, "bias"),
        "another parameter": lambda: setattr(layer, "weight", nn.Linear(2, 2).weight),
        "a gradient": lambda: setattr(tensor, "grad", np.ones(2)),
        "what a tuple holds": lambda: setattr(pair[0], "value", 6),
    }  # fmt: skip
    return function, changes


@pytest.mark.parametrize("looks", [1, TRIALS + 3])  # by loops, and by code of straight lines
@pytest.mark.parametrize("name", things()[1])
def test_a_change(name, looks):
    function, changes = things()
    watch = Watch(function)
    for _ in range(looks):
        assert watch.same() and watch.change() == ""
    changes[name]()
    assert not watch.same() and watch.change()
    again = watch.again()
    assert again.same()


def test_globals_modules_and_classes(monkeypatch):
    watch = Watch(things()[0])
    for owner, name in ((SETTINGS, "other"), (Config, "other")):  # the code does not name these
        monkeypatch.setattr(owner, name, 100)
        assert watch.same()
    for owner, name in ((SETTINGS, "scale"), (Config, "scale")):
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, 100)
        assert not watch.same() and watch.change() == "'scale'"
        setattr(owner, name, before)
        assert watch.same()
    monkeypatch.setitem(globals(), "NUMBER", 2000)
    assert watch.change() == "'NUMBER'"


def test_partials_methods_and_what_is_apart():
    held, state = Slotted(), RandomState(1)
    held.random = state
    for root in (functools.partial(max, held), functools.partial(max, key=held), held, [held]):
        watch = Watch(root, apart=RandomState)
        assert watch.found == [state]
        state.step += 1
        assert watch.same()
        held.value += 1000
        assert not watch.same()
    watch = Watch(types.MethodType(helper, held))
    held.value += 1
    assert "'value'" in watch.change()


def test_cycles_end_and_long_lists_count_only(monkeypatch):
    held = Slotted()
    held.itself, held.long = held, list(range(5000))
    watch = Watch(held)
    held.long[3] = 0
    assert watch.same()
    held.long.append(1)
    assert watch.change() == "the length of a list"


def test_of_tensors():
    tensor = Tensor(np.ones(2), requires_grad=True)
    watch = Watch(lambda: tensor, of_tensors=("data",))
    tensor.grad = np.ones(2)
    assert watch.same()
    tensor.data = np.ones(2)
    assert not watch.same()


def test_modules_are_looked_at_when_any_module_changed(monkeypatch):
    layers, other = [nn.Linear(2, 2) for _ in range(3)], nn.Linear(2, 2)
    watch, looks = Watch(lambda: layers), []
    look = watch._counted.same
    monkeypatch.setattr(watch._counted, "same", lambda: looks.append(1) or look())
    for _ in range(TRIALS + 3):
        assert watch.same()
    assert not looks
    other.more = 1
    assert watch.same() and watch.same() and len(looks) == 1
    weight, layers[1].weight = layers[1].weight, other.weight
    assert not watch.same() and watch.change() == "'weight'"
    layers[1].weight = weight
    assert watch.same() and watch.same() and len(looks) == 3
    del layers[2].bias
    assert not watch.same()


def test_many_things():
    table = {f"name {i}": object() for i in range(2 * AT_A_TIME + 5)} | {(1, "two"): 3, True: 4}
    watch = Watch(lambda: table)
    for _ in range(TRIALS + 2):
        assert watch.same()
    for key in table:
        before, table[key] = table[key], object()
        assert not watch.same() and watch.change() == repr(key)
        table[key] = before
        assert watch.same()


def test_a_subclass_of_modules_with_a_way_of_its_own():
    class Noting:
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            vars(self).setdefault("noted", []).append(name)

    class Layer(nn.Module, Noting):
        def __init__(self):
            self.scale = 1

    layer = Layer()
    watch = Watch(lambda: layer)
    layer.scale = 2
    assert layer.noted == ["scale", "scale"] and not watch.same()


def test_a_watch_inside_does_not_count():
    """That of a fused function, say, which notes how often it looked."""

    class Fused:
        def __init__(self):
            self.watch = Watch(lambda: 1)

    one = Fused()
    watch = Watch(lambda: one)
    for _ in range(20):
        assert one.watch.same() and watch.same()
    one.watch = Watch(lambda: 2)
    assert not watch.same()
