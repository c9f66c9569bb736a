"""Functions as CUDA graphs: the values of plain calls, a new graph where anything else changes."""

import contextlib
from unittest import mock

import numpy as np
import pytest
from captured import check, full, scaled_class
from in_threads import in_threads

import gpuattn
from gpuattn import nn
from gpuattn.arrays import to_cpu
from gpuattn.errors import UnsupportedError
from gpuattn.runtime import capture as module

SCALE = 2.0  # a global that tests replace


def test_values_of_a_nested_call(cp):
    @gpuattn.capture
    def f(pair, options, scale):
        x, y = pair
        return {"sum": x + y, "more": [options["z"] * scale, (x, 7, None)], "T": (x - y).T}

    kept = []
    for i in range(5):
        x, y, z = full(cp, i), full(cp, 1), full(cp, i, (4,), "int32")
        kept.append((i, x, f((x, y), {"z": z}, scale=3)))
    assert f.graphs == 1 and f.reason is None
    for i, x, out in kept:  # a later replay writes none of them
        check(out["sum"], i + 1)
        check(out["T"], i - 1)
        check(out["more"][0], 3 * i)
        assert out["more"][1][0] is x and out["more"][1][1:] == (7, None)
        assert out["T"].shape == (3, 2) and out["T"].strides == (x - 1).T.strides


def test_shapes_strides_dtypes_and_values_are_signatures(cp):
    f = gpuattn.capture(lambda x, scale: x * scale)
    arguments = [
        (full(cp, 1), 2.0), (full(cp, 1, (3, 2)), 2.0), (full(cp, 1, (3, 2)).T, 2.0),
        (full(cp, 1, dtype="float64"), 2.0), (full(cp, 1, (2, 6))[:, ::2], 2.0),
        (full(cp, 1), 2), (full(cp, 1), True), (full(cp, 0, (0, 3)), 2.0), (full(cp, 1, ()), 2.0),
    ]  # fmt: skip
    for _ in range(3):
        for x, scale in arguments:
            out = f(x, scale)
            assert out.dtype == (x * scale).dtype and out.strides == (x * scale).strides
            check(out, scale)
    assert f.graphs == len(arguments)
    one, zeros = full(cp, 1), [0.0, -0.0]
    for zero in zeros * 3:
        assert np.signbit(to_cpu(f(one, zero))).all() == np.signbit(zero)


def test_a_random_sequence_of_calls(cp, rng, monkeypatch):
    """Whatever changes between calls, a result is that of the function then."""
    replay = mock.Mock(side_effect=module.Captured._replay)
    monkeypatch.setattr(module.Captured, "_replay", lambda *args: replay(*args))
    weights = [full(cp, 1, (n,)) for n in (1, 3)]
    held = scaled_class()(2.0)
    f = gpuattn.capture(lambda x, y, p, w: (x * p + weights[-1], (x - y) * held.by + w), donate="w")
    stay = [full(cp, n, (3,)) for n in range(2)]
    changes = {
        "weight": lambda: weights.__setitem__(-1, full(cp, int(rng.integers(9)), (3,))),
        "inside": lambda: weights[-1].fill(int(rng.integers(9))),
        "held": lambda: setattr(held, "by", float(rng.integers(9))),
        "donated": lambda: stay[0].fill(int(rng.integers(9))),
        "nothing": lambda: None,
    }
    for _ in range(300):
        changes[rng.choice(list(changes), p=[0.03, 0.1, 0.03, 0.1, 0.74])]()
        shape, dtype = ((3,), (2, 3))[rng.integers(2)], rng.choice(["f4", "f8"])
        x, y = (full(cp, int(rng.integers(9)), shape, dtype) for _ in range(2))
        if rng.random() < 0.2:
            x = x[..., ::-1]
        p, w = float(rng.integers(2)), stay[rng.integers(2)]
        for mine, other in zip(f(x, y, p, w), f.function(x, y, p, w), strict=True):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(to_cpu(mine), to_cpu(other))
    assert replay.call_count > 100


def test_the_least_recent_signature_goes(cp, monkeypatch):
    monkeypatch.setattr(module, "MOST_SIGNATURES", 2)
    f = gpuattn.capture(lambda x: x + 1)
    for n in (1, 1, 2, 2, 1, 3, 3, 1):  # 3 takes the place of 2
        check(f(full(cp, n, (n,))), n + 1)
    assert f.graphs == 2 and len(f._entries) == 2


def test_donated_arrays_are_used_in_place(cp):
    @gpuattn.capture(donate="weights")
    def descend(weights, gradients):
        for w, g in zip(weights, gradients, strict=True):
            w -= 0.5 * g
        return weights[0], weights[0] * 2

    weights = [full(cp, 8), full(cp, 4)]
    for step in range(1, 5):
        same, twice = descend(weights, [full(cp, step), full(cp, 2)])
        assert same is weights[0]
    check(weights[0], 8 - 0.5 * 10)
    check(twice, 6)
    check(weights[1], 0)
    assert descend.graphs == 1
    others = [full(cp, 8), full(cp, 4)]
    descend(gradients=[full(cp, 2), full(cp, 2)], weights=others)
    check(others[0], 7)  # another address is another signature
    check(weights[0], 3)


def test_what_changes_between_calls_makes_a_new_graph(cp, monkeypatch):
    weight, module_, items = full(cp, 1), scaled_class()(full(cp, 1)), [full(cp, 1)]
    f = gpuattn.capture(lambda x: x * weight * SCALE * module_.by * items[0])
    x = full(cp, 1)

    def three_calls(value):
        for _ in range(3):
            check(f(x), value)
        assert f.graphs == 1

    three_calls(2)
    weight = full(cp, 3)
    three_calls(6)
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    three_calls(12)
    module_.by = full(cp, 2)
    three_calls(24)
    items[0] = full(cp, 5)
    three_calls(120)
    weight[...] = 1  # in place: the same graph
    assert not f._entries.popitem()[1].refused
    three_calls(40)


def test_methods(cp):
    Scaled = scaled_class()
    two, three = Scaled(full(cp, 2)), Scaled(full(cp, 3))
    for _ in range(4):
        check(two(full(cp, 5)), 10)
        check(three(full(cp, 5)), 15)
    assert Scaled.__call__.graphs == 2


def test_one_array_for_two_arguments(cp):
    f = gpuattn.capture(lambda x, y: (x - 2 * y, x))
    x, y = full(cp, 3), full(cp, 5)
    for a, b in ((x, x), (x, x), (x, y), (y, x), (x, x)):
        out, same = f(a, b)
        check(out, float(to_cpu(a)[0, 0]) - 2 * float(to_cpu(b)[0, 0]))
        assert same is a
    assert f.graphs == 1


def test_a_cache_filled_by_the_first_call_is_no_change(cp):
    cache = {}

    def f(x):
        if "ones" not in cache:
            cache["ones"] = full(cp, 1)
        return x + cache["ones"]

    captured = gpuattn.capture(f)
    for i in range(5):
        check(captured(full(cp, i)), i + 1)
    assert captured.graphs == 1 and captured.reason is None


def test_gradients_and_tensors(cp):
    def loss(weight, x):
        return np.sum(np.tanh(x * weight) ** 2)

    both = gpuattn.capture(gpuattn.value_and_grad(loss))
    for i in range(4):
        w, x = full(cp, i), full(cp, 0.5)
        value, slope = both(w, x)
        want, want_slope = gpuattn.value_and_grad(loss)(w, x)
        np.testing.assert_array_equal(to_cpu(value), to_cpu(want))
        np.testing.assert_array_equal(to_cpu(slope), to_cpu(want_slope))
    assert both.graphs == 1

    def inside(x):
        leaf = gpuattn.Tensor(x, requires_grad=True)
        total = np.sum(leaf * leaf)
        total.backward()
        return total, leaf.grad

    captured = gpuattn.capture(inside)
    for i in range(4):
        total, slope = captured(full(cp, i))
        check(slope, 2 * i)
        check(total.data, 6 * i * i)
    assert captured.graphs == 1
    given = gpuattn.capture(lambda t: t * 2)
    with gpuattn.no_grad():
        for i in range(4):
            out = given(gpuattn.Tensor(full(cp, i), requires_grad=True))
            assert isinstance(out, gpuattn.Tensor)
            check(out.data, 2 * i)
    assert given.graphs == 1


def random_values(x):
    """Return random numbers as the ops take them; GPU ops read a step on the device."""
    keys = [gpuattn.rng.as_key(None) for _ in range(2)]
    return tuple([x * 0 + key.step + 100 * key.stream for key in keys]) + tuple(
        [key.seed % 2**32 for key in keys]
    )


def test_random_numbers_go_on(cp):
    f, x = gpuattn.capture(random_values), full(cp, 0, (1,))
    first = [f(x) for _ in range(5)]
    assert f.graphs == 1
    for i, (a, b, *seeds) in enumerate(first):
        check(a, i)
        check(b, 100 + i)
        assert seeds == list(first[0][2:])
    for _ in range(2):  # repeatable, and other numbers than those before
        gpuattn.manual_seed(3)
        again = [f(x) for _ in range(3)]
        for i, (a, b, *seeds) in enumerate(again):
            check(a, i)
            check(b, 100 + i)
            assert seeds[0] != first[0][2]
    assert gpuattn.rng.manual_state()[1] == 3


def test_a_function_without_random_numbers_takes_none(cp):
    gpuattn.manual_seed(3)
    want = gpuattn.rng.fresh_seed()
    gpuattn.manual_seed(3)
    f = gpuattn.capture(lambda x: x + 1)
    for _ in range(4):
        f(full(cp, 1))
    assert gpuattn.rng.fresh_seed() == want


def test_the_step_of_dropout_layers_may_change(cp):
    drop = nn.Dropout(0.5)

    def f(x):
        return x * 0 + drop.now()[1].step

    captured = gpuattn.capture(f)
    for step in (0, 0, 1, 2, 2, 5):
        drop.random.step = step
        check(captured(full(cp, 1, (1,))), step)
        assert drop.random.step == step
    assert captured.graphs == 1
    drop.eval()
    with pytest.raises(AttributeError):
        captured(full(cp, 1, (1,)))


def test_nested_calls_are_inside_the_outer_graph(cp):
    inner = gpuattn.capture(lambda x: x + 1)
    outer = gpuattn.capture(lambda x: inner(x) * 2)
    for i in range(4):
        check(outer(full(cp, i)), 2 * (i + 1))
    assert outer.graphs == 1 and inner.graphs == 0


def test_debug_and_rehearsals_call_plainly(cp):
    f = gpuattn.capture(lambda x: x + 1)
    with gpuattn.debug():
        for _ in range(3):
            f(full(cp, 1))
    assert f.graphs == 0


def test_streams_wait_for_each_other(cp):
    f, x = gpuattn.capture(lambda x: x * 2), full(cp, 1)
    for _ in range(2):
        f(x)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    for i in range(6):
        x = full(cp, i)
        cp.cuda.get_current_stream().synchronize()
        with streams[i % 2]:
            out = f(x)
        streams[i % 2].synchronize()
        check(out, 2 * i)
    if hasattr(streams[0], "waited"):  # the fake: each call came from the other stream
        assert [len(stream.waited) for stream in streams] == [3, 3]


def test_threads_share_a_function(cp):
    f, wrong = gpuattn.capture(lambda x, y: x * y + 1), []

    def work(number):
        with contextlib.ExitStack() as stack:
            if hasattr(cp, "RawKernel"):
                stream = stack.enter_context(cp.cuda.Stream(non_blocking=True))
            for i in range(20):
                out = f(full(cp, i), full(cp, number))
                if hasattr(cp, "RawKernel"):
                    stream.synchronize()
                if not (to_cpu(out) == i * number + 1).all():
                    wrong.append((number, i))

    work(1)  # the fake captures one thread at a time
    work(1)
    in_threads(work, range(4))
    assert not wrong and f.graphs == 1


def test_numpy_is_just_called(cp):
    seen = []
    f = gpuattn.capture(lambda x: seen.append(x) or x)
    x = np.ones(3)
    for _ in range(3):
        assert f(x) is x
    assert len(seen) == 3 and f.graphs == 0 and f.reason is None


def test_without_cupy():
    @gpuattn.capture(donate=0)
    def f(x):
        """Add one."""
        return x + 1

    assert f(np.ones(2)).tolist() == [2, 2] and f.__doc__ == "Add one." and f.__name__ == "f"


def test_fresh_seeds_in_a_numbered_block():
    with gpuattn.rng.numbered(5, 2) as drawn:
        keys = [gpuattn.rng.as_key(None) for _ in range(2)]
        seed = gpuattn.rng.fresh_seed()
    assert keys == [gpuattn.rng.Key(5, 0, 2), gpuattn.rng.Key(5, 1, 2)] and drawn == [3]
    with gpuattn.rng.numbered(5, 3):
        assert gpuattn.rng.fresh_seed() != seed
    with (
        gpuattn.rng.numbered(5, np.zeros(1, "u4")),
        pytest.raises(UnsupportedError, match="replay"),
    ):
        gpuattn.rng.fresh_seed()
