"""Calls with plans give the bits and the errors of calls without, in any order and company."""

import contextlib
import gc
import operator
import re

import numpy as np
import pytest
from in_threads import in_threads

import gpuattn
from gpuattn import Tensor, no_grad
from gpuattn import rng as keys
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import plans
from gpuattn.autodiff.tape import raw
from gpuattn.bench.timing import Graph
from gpuattn.errors import GradientError
from gpuattn.modes import without_plans

SHAPES = (4, 16), (2, 3, 16), (0, 16), (16,), (3, 5)
DTYPES = "float32", "float16", "float64", "int32"
CALLS = 1500


class Sequence:
    """Random calls of ops, good and bad, on the arrays of one module."""

    def __init__(self, xp, seed):
        self.xp, self.rng = xp, np.random.default_rng(seed)

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def array(self, shape, dtype="float32"):
        x = self.rng.normal(size=shape)
        x = self.xp.asarray((3 * x).astype(dtype))
        layout = self.pick("plain", "plain", "fortran", "sliced", "shifted")
        if layout == "fortran":
            return self.xp.asfortranarray(x)
        if layout == "sliced":
            return self.xp.repeat(x, 2, -1)[..., ::2]
        if layout == "shifted":
            return self.xp.concatenate((x.ravel()[:1], x.ravel()))[1:].reshape(x.shape)
        return x

    def given(self, shape, dtype):
        x = self.array(shape, dtype)
        return Tensor(x, requires_grad=True) if dtype != "int32" and self.pick(0, 1) else x

    def call(self):
        """Return (op, arguments, keyword arguments)."""
        shape, dtype = self.pick(*SHAPES), self.pick(*DTYPES, "float32", "float32")
        x = self.given(shape, dtype)
        vectors = [self.given(shape[-1:], self.pick(dtype, dtype, "float16")) for _ in range(2)]
        vectors[1] = self.pick(*vectors)  # sometimes one array in two places
        seed = self.pick(None, 0, 1, 2, keys.Key(3, 4, 5))
        name = self.pick("layer_norm", "rms_norm", "softmax", "gelu", "linear", "dropout", "add",
                         "attention", "entropy", "embedding", "arithmetic")  # fmt: skip
        if name == "arithmetic":
            function = self.pick(operator.add, operator.sub, operator.mul, np.maximum)
            other = self.pick(x, 2.0, vectors[0], *(self.given(shape, dtype) for _ in range(3)))
            return function, [Tensor(x) if not isinstance(x, Tensor) else x, other], {}
        if name == "layer_norm":
            return gpuattn.layer_norm, [x, *vectors], {"eps": self.pick(1e-5, 1, 0, "a")}
        if name == "rms_norm":
            return gpuattn.rms_norm, [x, self.pick(None, vectors[0])], {}
        if name == "softmax":
            more = {"scale": self.pick(1, 1.0, True, -0.0, 0.0), "causal": self.pick(False, True)}
            return gpuattn.softmax, [x], more
        if name == "gelu":
            more = {"bias": self.pick(None, vectors[0]), "p": self.pick(0, 0.5, 2), "seed": seed}
            return gpuattn.gelu, [x], more
        if name == "linear":
            weight = self.given((self.pick(1, 6), shape[-1]), dtype)
            return gpuattn.linear, [x, weight], {"activation": self.pick(None, "relu", "tanh")}
        if name == "dropout":
            return gpuattn.dropout, [x, self.pick(0.0, 0.3, 1)], {"seed": seed}
        if name == "attention":
            q, k, v = (self.given((2, self.pick(3, 3, 4), 2, 8), "float32") for _ in range(3))
            more = {"causal": self.pick(False, True), "window": self.pick(None, 1, (1, None), (1,))}
            return gpuattn.flash_attention, self.pick([q, k, v], [q, q, v]), more
        if name == "entropy":
            labels = self.xp.asarray(self.rng.integers(-1, shape[-1], shape[:-1]))
            return gpuattn.cross_entropy, [x, labels], {"ignore_index": self.pick(-1, -100)}
        if name == "embedding":
            tokens = self.xp.asarray(self.rng.integers(0, 9, shape))
            return gpuattn.embedding, [tokens, self.given((7, 16), "float32")], {}
        return (lambda x, y: x + y), [x, vectors[0]], {}

    def context(self):
        """Return a context in which a call runs: an implementation asked for, or no record."""
        return self.pick(
            contextlib.nullcontext, contextlib.nullcontext, no_grad,
            lambda: gpuattn.use_impl(softmax="reference", layer_norm="reference"),
        )  # fmt: skip


def outcome(op, args, kwargs, context):
    """Return the bytes of the results and of all gradients, or the error."""
    args, kwargs = ([fresh(x) for x in args], {name: fresh(x) for name, x in kwargs.items()})
    leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    try:
        with context():
            out = op(*args, **kwargs)
        found = [numbers(out)]
        if isinstance(out, Tensor) and out.requires_grad:
            out.backward(out.data * 0.5)
            found += [None if x.grad is None else numbers(x.grad) for x in leaves]
        return found
    except IndexError as error:  # on a GPU it names any of the indices that are out of range
        return IndexError, re.sub(r"holding -?\d+", "holding one", str(error))
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error), str(error)


def fresh(x):
    """Return a Tensor of the same array without a gradient; other values as they are."""
    return Tensor(x.data, requires_grad=x.requires_grad) if isinstance(x, Tensor) else x


def numbers(x):
    x = to_cpu(x.data if isinstance(x, Tensor) else x)
    return x.dtype, x.shape, x.tobytes()


@pytest.mark.filterwarnings("ignore")
def test_a_random_sequence_is_computed_as_without_plans(xp):
    sequence, known = Sequence(xp, 0), {*plans.table.old, *plans.table.young}
    errors = 0
    for number in range(CALLS):
        op, args, kwargs = sequence.call()
        context = sequence.context()
        gpuattn.manual_seed(number)
        with without_plans():
            wanted = outcome(op, args, kwargs, context)
        gpuattn.manual_seed(number)
        assert outcome(op, args, kwargs, context) == wanted, (number, op, args, kwargs)
        errors += isinstance(wanted, tuple)
    found = plans.table.old | plans.table.young
    planned = sum(type(plan) is plans.Plan for key, plan in found.items() if key not in known)
    assert errors > CALLS // 10 and planned > 50


def test_one_array_twice_is_not_taken_for_two(xp):
    """Calls of one shape and dtype: an array in two places, then two arrays, and the reverse."""
    x, ones, twos = (xp.asarray(v, np.float32) for v in (np.arange(8), np.ones(8), np.full(8, 2)))
    calls = [
        (gpuattn.layer_norm, (x, ones, ones)), (gpuattn.layer_norm, (x, ones, twos)),
        (gpuattn.layer_norm, (x, twos, ones)), (operator.mul, (Tensor(ones), Tensor(ones))),
        (operator.mul, (Tensor(x), Tensor(twos))), (operator.mul, (Tensor(twos), Tensor(x))),
    ]  # fmt: skip
    with without_plans():
        wanted = [numbers(function(*args)) for function, args in calls]
    for i in (*range(len(calls)), *reversed(range(len(calls)))):
        function, args = calls[i]
        for _ in range(4):
            assert numbers(function(*args)) == wanted[i]


@pytest.mark.parametrize("first", [0, 1])
def test_one_row_with_any_distance_to_the_next(xp, first):
    """Its stride is no part of a signature on a GPU: both kinds of rows share plans."""
    width = 48 + 8 * first  # no plans of the other case
    wide = xp.asarray(np.random.default_rng(first).normal(size=(1, 1, 2, 2 * width)), np.float32)
    rows = wide[..., :width].copy(), wide[..., :width]
    vector, weight = xp.ones(width, np.float32), xp.ones((3, width), np.float32)
    label = xp.zeros(1, np.int32)
    calls = [
        (gpuattn.relu, lambda x: (x[:, :, 0],)), (gpuattn.softmax, lambda x: (x[:, :, 0],)),
        (gpuattn.layer_norm, lambda x: (x[0, :, 0], vector, vector)),
        (gpuattn.linear, lambda x: (x[0, :, 0], weight)),
        (gpuattn.cross_entropy, lambda x: (x[0, :, 0], label)),
        (operator.add, lambda x: (Tensor(x[0, :, 0]), Tensor(x[0, :, 1]))),
        (gpuattn.flash_attention, lambda x: (x, x * 1, x * 2)),
        (gpuattn.flash_attention, lambda x: (x[:, :, :1], x[:, :, 1:], x[:, :, 1:] * 1)),
    ]  # fmt: skip
    for op, given in calls:
        with without_plans():
            wanted = to_cpu(raw(op(*given(rows[0]))))
        for i in (first, first, first, 1 - first, 1 - first, 1 - first, 1 - first, first):
            found = to_cpu(raw(op(*given(rows[i]))))  # kernels may add in another order
            np.testing.assert_allclose(found, wanted, 1e-3, 1e-3, err_msg=f"{op}, {i}")


def test_calls_of_one_op_with_other_arguments_than_the_last(xp):
    x, other = xp.ones((4, 16), np.float32), xp.ones((4, 16), np.float16)
    calls = [
        ((x,), {}), ((Tensor(x),), {}), ((Tensor(x, requires_grad=True),), {}), ((other,), {}),
        ((x, 0.5), {}), ((), {"x": x}), ((x,), {"scale": 0.5}), ((), {}),
        ((x,), {"scale": 0.5, "causal": False}), ((x,), {"causal": False, "scale": 0.5}),
        ((x,), {"causal": True, "scale": 0.5}), ((None,), {}), ((x.tolist(),), {}),
        ((np.ones((4, 16), np.float32),), {}), ((Tensor(np.ones((4, 16), np.float32)),), {}),
        ((x, x, x, x, x, x, x, x), {}), ((x,), {"never": 1}),
    ]  # fmt: skip
    with without_plans():
        wanted = [outcome(gpuattn.softmax, *call, contextlib.nullcontext) for call in calls]
    order = [*range(len(calls))] * 5
    for again in (order, sorted(order), np.random.default_rng(0).permutation(order)):
        for i in again:
            context = without_plans if again[0] == again[1] and i % 2 else contextlib.nullcontext
            assert outcome(gpuattn.softmax, *calls[i], context) == wanted[i], i


def test_values_are_checked_in_every_call():
    x, offsets = np.ones((6, 1, 8), np.float32), np.array([0, 2, 6], np.int32)
    for _ in range(4):
        gpuattn.flash_attention(x, x.copy(), x.copy(), cu_seqlens_q=offsets)
    offsets[1] = 9
    with pytest.raises(ValueError, match="never fall"):
        gpuattn.flash_attention(x, x.copy(), x.copy(), cu_seqlens_q=offsets)
    with pytest.raises(IndexError):
        for label in (1, 1, 1, 9):
            gpuattn.cross_entropy(x.reshape(6, 8), np.full(6, label))


def test_each_call_draws_its_own_seed(xp):
    x = xp.ones((4, 64), np.float32)
    drawn = [to_cpu(gpuattn.dropout(x, 0.5)).tobytes() for _ in range(6)]
    assert len(set(drawn)) == 6
    gpuattn.manual_seed(1)
    again = [to_cpu(gpuattn.dropout(x, 0.5)).tobytes() for _ in range(6)]
    gpuattn.manual_seed(1)
    with without_plans():
        assert again == [to_cpu(gpuattn.dropout(x, 0.5)).tobytes() for _ in range(6)]


def test_a_new_array_is_like_those_of_cupy(gpu):
    """The program makes it by a private function of CuPy's."""
    for dtype in (np.float16, np.float32, gpuattn.arrays.BFLOAT16):
        for shape in ((256, 512), (3, 1, 8), (8,)):
            x = gpu.asarray(np.ones(shape, np.float32).astype(dtype))
            made = [gpuattn.relu(x) for _ in range(5)][-1]
            wanted = gpu.empty(shape, dtype)
            for name in ("shape", "strides", "dtype", "size", "nbytes", "base", "device"):
                assert getattr(made, name) == getattr(wanted, name), name
            assert type(made) is type(wanted) and str(made.flags) == str(wanted.flags)
            assert made.data.mem.size == wanted.data.mem.size and made.data is not wanted.data
            assert made.reshape(-1)[1:].base is made
            assert (to_cpu(made).astype(np.float32) == 1).all()


def test_an_edit_of_what_was_saved_is_noticed(xp):
    weight = Tensor(xp.ones((5, 8), np.float32), requires_grad=True)
    for _ in range(4):
        x = Tensor(xp.ones((3, 8), np.float32), requires_grad=True)
        y = gpuattn.linear(x, weight)
        x[0] = 0
        with pytest.raises(GradientError, match="edited in place"):
            y.backward(y.data)


def test_gradients_of_leaves_are_arrays_of_their_own(xp):
    """They are kept, added to and edited, also where a plan hands over what it allocated."""
    x, weight = (Tensor(xp.ones(shape, np.float32), requires_grad=True) for shape in ((4, 8), 8))
    for turn in range(1, 6):
        y = gpuattn.rms_norm(x, weight)
        y.backward(xp.ones_like(y.data))
        if turn == 1:
            first = [to_cpu(leaf.grad) for leaf in (x, weight)]
            continue
        for leaf, one in zip((x, weight), first, strict=True):
            np.testing.assert_allclose(to_cpu(leaf.grad), turn * one, rtol=1e-6)
    for leaf in (x, weight):
        leaf.grad = None
    y = gpuattn.rms_norm(x, weight)
    y.backward(xp.ones_like(y.data), retain_graph=True)
    x.grad[...] = 0
    kept, weight.grad = weight.grad, None
    y.backward(xp.ones_like(y.data))
    np.testing.assert_array_equal(to_cpu(weight.grad), to_cpu(kept))
    np.testing.assert_array_equal(to_cpu(x.grad), first[0])


def test_a_backward_pass_leaves_no_cycles(xp):
    """What only a collection of garbage frees keeps device memory until then."""
    weight = Tensor(xp.ones((8, 8), np.float32), requires_grad=True)

    def run():
        y = gpuattn.layer_norm(gpuattn.linear(weight, weight), xp.ones(8, np.float32))
        y.backward(xp.ones_like(y.data))

    for _ in range(4):
        run()
    gc.collect()
    gc.disable()
    try:
        run()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_arrays_of_both_kinds_take_plans_of_their_own(xp):
    """A Tensor of a GPU array, after one of a NumPy array, in a call of the same types."""
    for module in (np, xp, np):
        leaf = Tensor(module.full((3, 8), 2, np.float32), requires_grad=True)
        found = [gpuattn.softmax(leaf) for _ in range(4)]
        assert all(isinstance(y.data, module.ndarray) for y in found)
        assert len({numbers(y) for y in found}) == 1


def test_the_table_is_bounded():
    x = np.ones((2, 8), np.float32)
    for number in range(3 * plans.MOST):
        gpuattn.relu(x)
        gpuattn.softmax(x, scale=float(number))
    assert len(plans.table.young) <= plans.MOST and len(plans.table.old) <= plans.MOST
    used = [plan.op for plan in plans.table.young.values() if type(plan) is plans.Plan]
    assert "relu" in used, "what was used last is known"


def test_threads_share_plans(xp):
    rows = [xp.full((3, 64), n, np.float32) + xp.arange(64, dtype=np.float32) for n in range(4)]
    weight = xp.ones(64, np.float32)
    wanted = [to_cpu(gpuattn.layer_norm(x * 1, weight)) for x in rows]
    wrong = []

    def work(number):
        for _ in range(60):
            leaf = Tensor(rows[number], requires_grad=True)
            out = gpuattn.layer_norm(leaf, weight)
            out.backward(rows[number])
            if not np.array_equal(to_cpu(out.data), wanted[number]):
                wrong.append(number)

    in_threads(work, range(4))
    assert not wrong


def results(ops):
    """Return the bits of the results and gradients of ``ops``, functions of no arguments."""
    found = []
    for op in ops:
        out = op()
        out.backward(out.data * 0.5)
        found.append(numbers(out))
    return found


def test_planned_calls_on_another_stream_and_in_a_graph(gpu):
    """They launch on the current stream, and what a graph replays are launches like any others."""
    x, weight, bias = (gpu.asarray(np.random.default_rng(0).normal(size=shape), np.float16)
                       for shape in ((64, 256), (256, 256), 256))  # fmt: skip
    leaf = Tensor(x, requires_grad=True)
    ops = [
        lambda: gpuattn.layer_norm(leaf, bias, bias), lambda: gpuattn.softmax(leaf),
        lambda: gpuattn.gelu(gpuattn.linear(leaf, weight, bias)),
        lambda: gpuattn.flash_attention(*(leaf.reshape(2, 32, 4, 64) * n for n in (1, 2, 3))),
    ]  # fmt: skip
    with without_plans():
        wanted = results(ops)
    for _ in range(5):
        assert results(ops) == wanted
    stream = gpu.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(3):
            assert results(ops) == wanted
        graph = Graph([lambda op=op: op().data for op in ops])
        for _ in range(20):
            graph()
        stream.synchronize()
        assert [numbers(out) for out in graph.results] == wanted
