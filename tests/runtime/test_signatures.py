"""Keys of captured calls: functions written for each form of arguments, against a plain walk."""

from collections import namedtuple

import numpy as np
from captured import full
from in_threads import in_threads

import gpuattn
from gpuattn import Tensor
from gpuattn.autodiff import tape
from gpuattn.impls import use_impl
from gpuattn.runtime import signature
from gpuattn.runtime.signature import Signatures, is_leaf

Pair = namedtuple("Pair", "one other")


def walked(args, kwargs):
    """Return (what identifies a call, its leaves), as a walk through its arguments finds them."""
    leaves = []

    def described(value):
        kind = type(value)
        if is_leaf(value):
            leaves.append(value)
            data = tape.raw(value)
            grad = value.requires_grad if kind is Tensor else None
            if type(data) is np.ndarray:
                return kind, grad, "numpy"
            return kind, grad, type(data), data.shape, data.strides, data.dtype.str
        if kind is dict:
            return kind, *((key, described(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return kind, *map(described, value)
        return kind, repr(value)

    return (described(args), described(kwargs)), leaves


def random_value(rng, cp, depth):
    kind = rng.integers(12 if depth else 8)
    if kind < 3:
        x = full(cp, 1, [(2, 3), (3, 2), (6,)][rng.integers(3)], ["f4", "f8"][rng.integers(2)])
        return x.T if rng.integers(2) else x
    if kind == 3:
        return Tensor(full(cp, 1), requires_grad=bool(rng.integers(2)))
    if kind == 4:
        return [np.ones(2), Tensor(np.ones(3))][rng.integers(2)]
    if kind < 8:
        numbers = 0.0, -0.0, 1.0, 1, True, False, 0, np.float32(0), np.float32(-0.0)
        plain = *numbers, None, "a", (), {}
        return plain[rng.integers(len(plain))]
    items = [random_value(rng, cp, depth - 1) for _ in range(rng.integers(4))]
    if kind == 8:
        return items
    if kind == 9:
        return tuple(items)
    if kind == 10:
        return Pair(*(items + [0, 1])[:2])
    return dict(zip(rng.permutation(["a", "b", "c"]).tolist(), items, strict=False))


def test_random_calls(cp, rng, monkeypatch):
    """Two calls have the same key exactly where the walk finds the same, and its leaves."""
    monkeypatch.setattr(signature, "MOST_FORMS", 1 << 30)
    signatures, keys, wants = Signatures(cp, (set(), set())), {}, {}
    for _ in range(600):
        args = tuple(random_value(rng, cp, 2) for _ in range(rng.integers(3)))
        names = rng.permutation(["p", "q"])[: rng.integers(3)].tolist()
        kwargs = {name: random_value(rng, cp, 1) for name in names}
        wanted, leaves = walked(args, kwargs)
        key, found = signatures.last(args, kwargs) or signatures.find(args, kwargs)
        assert list(map(id, found)) == list(map(id, leaves))
        assert wants.setdefault(key, wanted) == wanted and keys.setdefault(wanted, key) == key
    assert 100 < len(signatures._forms) < len(keys) < 600


def test_forms_used_last_are_kept(cp, monkeypatch):
    monkeypatch.setattr(signature, "MOST_FORMS", 3)
    signatures = Signatures(cp, (set(), set()))
    first = [signatures.find((1,) * n, {})[0] for n in range(3)]
    assert signatures.find((1,) * 0, {})[0] == first[0]
    signatures.find((1,) * 3, {})  # in place of the form of one argument
    assert [signatures.find((1,) * n, {})[0] == first[n] for n in (0, 2, 1)] == [True, True, False]
    assert len(signatures._forms) == 3


def test_what_is_set_outside_counts(cp):
    signatures, x = Signatures(cp, ({0}, {"x"})), full(cp, 1)

    def key(*args, **kwargs):
        return (signatures.last(args, kwargs) or signatures.find(args, kwargs))[0]

    plain = key(x, 1)
    assert key(x, 1) == plain != key(full(cp, 1), 1)  # its address
    with tape.no_grad():
        assert key(x, 1) != plain
    with use_impl(relu="reference"):
        assert key(x, 1) != plain
    with use_impl():
        assert key(x, 1) == plain
    assert key(x=x) != key(x=full(cp, 1)) and key(y=x) == key(y=full(cp, 1))
    assert key([x]) != key([full(cp, 1)])  # donated with all that it holds


def test_forms_in_turns_keep_their_graphs(cp):
    f = gpuattn.capture(lambda x: (x["a"] if type(x) is dict else x[0]) + 1)
    for i in range(8):
        for x in ({"a": full(cp, i)}, [full(cp, i)], (full(cp, i), 2)):
            assert (f(x).get() == i + 1).all()
    assert f.graphs == 3


def test_forms_of_several_threads(cp):
    signatures, wrong = Signatures(cp, (set(), set())), []

    def call(number):
        x = full(cp, number)
        for i in range(300):
            values = [x] * ((number + i) % 9) + [number]
            key, leaves = signatures.last((values,), {}) or signatures.find((values,), {})
            if key[-1] != number or len(leaves) != len(values) - 1:
                wrong.append(key)

    in_threads(call, range(4))
    assert not wrong and len(signatures._forms) == 9
