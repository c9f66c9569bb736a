"""The tape: reuse, depth, several outputs, in-place edits, and the memory of gradients."""

import gc
import weakref

import fake_launches
import numpy as np
import pytest
from fake_gpu import GPUS

from gpuattn import Tensor, debug, no_grad, to_cpu, topk_logprobs
from gpuattn.autodiff import backward_pass, tape
from gpuattn.autodiff.hooks import hooked
from gpuattn.errors import GradientError, UnsupportedError
from gpuattn.impls import Fusion, Impl, Impls


def leaf(values, xp=np):
    return Tensor(xp.asarray(values, dtype=np.float64), requires_grad=True)


def test_reused_tensor_adds_its_gradients(xp):
    x = leaf([3.0], xp)
    (x * x + x).sum().backward()
    assert to_cpu(x.grad).tolist() == [7.0]


def test_gradients_add_up_over_calls():
    x = leaf([3.0])
    for _ in range(2):
        (x * 2).sum().backward()
    assert x.grad.tolist() == [4.0]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_gradients_share_no_memory(xp, dtype):
    """Neither with each other nor with the array that backward began with, before and with plans.

    float64 leaves take a copy in another dtype.
    """
    given = xp.asarray([[1.0, 2.0, 3.0]] * 2, "float32" if dtype == "float64" else dtype)
    for grad in (given, given.T.copy().T):
        for _ in range(5):
            x, y = (Tensor(xp.ones((2, 3), dtype), requires_grad=True) for _ in range(2))
            (x + y).backward(grad)
            (x + y).backward(grad)
            for edited in (x.grad, y.grad):
                assert edited.dtype == dtype and to_cpu(edited)[1].tolist() == [2.0, 4.0, 6.0]
                edited[...] = 0
            assert to_cpu(grad)[1].tolist() == [1.0, 2.0, 3.0]


def test_gradients_of_leaves_are_copied_without_launches():
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        given = fake_launches.as_array(np.arange(16, dtype=np.float16).reshape(2, 8))
        for _ in range(5):
            noted.clear()
            leaves = [Tensor(given * 1, requires_grad=True) for _ in range(2)]
            (leaves[0] + leaves[1]).backward(given)
            assert [launch.name for launch in noted] == ["arithmetic"], "of the forward"
            arrays = [given, *(leaf.grad for leaf in leaves)]
            assert len({array.data.ptr for array in arrays}) == 3
            assert all((array == given).all() for array in arrays)


def test_a_chain_of_20000_calls():
    x = leaf([1.0])
    y = x
    for _ in range(20_000):
        y = y + x
    y.sum().backward()
    assert x.grad.tolist() == [20_001.0]
    for _ in range(20_000):
        y = y.detach() if not y.requires_grad else y + x
    del y  # freeing a chain without backward must not overflow the stack
    gc.collect()


def test_several_outputs_and_one_of_them_unused():
    x = leaf([1.0, 2.0, 3.0])
    first, rest = np.split(x * 2, [1])
    (rest**2).sum().backward()
    assert x.grad.tolist() == [0.0, 16.0, 24.0]
    assert first.data.tolist() == [2.0]


def test_second_backward_is_an_error():
    x = leaf([1.0])
    y = (x * x).sum()
    y.backward()
    with pytest.raises(GradientError, match="retain_graph"):
        y.backward()


def test_backward_runs_again_on_a_retained_graph():
    x = leaf([2.0])
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [8.0]


def test_gradient_written_into_its_slot():
    x = leaf([1.0, 2.0])
    flat = np.full(4, 9.0, np.float32)
    x.grad_slot = flat[1:3]
    (x * 3).sum().backward()
    assert flat.tolist() == [9.0, 3.0, 3.0, 9.0], "the first gradient overwrites"
    (x * 3).sum().backward()
    assert flat.tolist() == [9.0, 6.0, 6.0, 9.0], "later ones accumulate"
    assert x.grad.base is flat


def test_ready_is_reported_once_after_the_last_use():
    x, w = leaf([1.0]), leaf([2.0])
    seen = []
    y = (x * w) + x
    backward_pass.backward(y.sum(), np.ones(()), on_ready=seen.append)
    assert {id(b) for b in seen} == {id(x), id(w)}
    assert len(seen) == 2
    assert seen[-1].grad is not None


def test_no_grad_nests_and_survives_errors():
    x = leaf([1.0])
    with no_grad(), no_grad():
        assert not (x * 2).requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        1 / 0  # noqa: B018
    assert (x * 2).requires_grad


# ---- edits in place ------------------------------------------------------------------------------


@pytest.mark.parametrize("edited", ["input", "view", "base"])
def test_edit_through_a_tensor_is_noticed(xp, edited):
    x = leaf([1.0, 2.0, 3.0], xp)
    part = x[1:]
    y = (part * part).sum() if edited != "input" else (x * x).sum()
    if edited == "view":
        with pytest.raises(GradientError, match="item assignment"):
            part[0] = 5.0
        return
    x[1] = 5.0
    assert float(x.data[1]) == 5.0
    with pytest.raises(GradientError, match="edited in place"):
        y.backward()


def test_an_edit_affects_views_only():
    x = leaf([1.0, 2.0])
    y = np.exp(x)  # saves its result, which has its own memory
    x[0] = 5.0
    y.sum().backward()
    np.testing.assert_allclose(x.grad, np.exp([1.0, 2.0]))


def test_gradients_for_some_tensors_keep_the_record_of_others():
    x, w = leaf([3.0]), leaf([2.0])
    h = w * w
    (found,) = backward_pass.gradients([(x * h).sum()], [np.ones(())], [x])
    assert found.tolist() == [4.0]
    h.sum().backward()
    assert w.grad.tolist() == [4.0]


def test_an_op_without_a_gradient_is_refused():
    best, _ = topk_logprobs(leaf([[1.0, 2.0]]), 1)
    with pytest.raises(UnsupportedError, match="topk_logprobs: reference has no gradient"):
        best.sum().backward()


def test_saved_numpy_arrays_are_read_only_until_backward():
    a = np.ones(3)
    x = Tensor(a, requires_grad=True)
    y = (x * x).sum()
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 2.0
    y.backward()
    a[0] = 2.0


def test_arrays_are_writable_after_their_graph_is_dropped():
    a = np.ones(3)
    x = Tensor(a, requires_grad=True)
    y = x * x
    assert not a.flags.writeable
    del y
    gc.collect()
    assert a.flags.writeable


def test_an_array_that_was_read_only_stays_so():
    a = np.ones(3)
    a.flags.writeable = False
    (Tensor(a, requires_grad=True) ** 2).sum().backward()
    assert not a.flags.writeable


def test_raw_edits_are_caught_under_debug(xp):
    a = xp.ones(3)
    x = Tensor(a, requires_grad=True)
    with debug():
        y = (x * x).sum()
    if xp is np:
        a.flags.writeable = True
    a[0] = 2.0
    with pytest.raises(GradientError, match="edited in place"):
        y.backward()


# ---- custom ops --------------------------------------------------------------------------------


def test_a_fused_op_names_itself_when_refusing_a_second_derivative():
    def forward(x, *, needs):
        return x * 2, ()

    def backward(saved, grad, *, needs, into):
        return (grad * 2,)

    double = Impls("double", Impl("array", forward, backward))
    x = leaf([1.0])
    y = tape.apply(double, (x,)).sum()
    with pytest.raises(UnsupportedError, match="double: array is fused"):
        y.backward(create_graph=True)


class Thrice:
    """An op (3 x, 5 x) whose backward takes a second gradient of 3 x; ``given``: what it got."""

    def __init__(self):
        fusion = Fusion(takes_second=True)
        self.given = []
        self.impls = Impls("thrice", Impl("array", self._forward, self._backward, fusion=fusion))

    def __call__(self, x):
        return tape.apply(self.impls, (x,))

    def _forward(self, x, *, needs):
        return (3 * x, 5 * x), ()

    def _backward(self, saved, first, other, second, *, needs, into):
        self.given.append([None if g is None else g.item() for g in (first, other, second)])
        parts = [n * g for n, g in ((3, first), (5, other), (3, second)) if g is not None]
        return (sum(parts[1:], parts[0]),)


@pytest.mark.parametrize("program, given", [
    (lambda y, z: y * 2, [2, None, None]),
    (lambda y, z: y * 2 + y * 7, [7, None, 2]),
    (lambda y, z: y * 2 + y * 7 + y * 10, [12, None, 7]),
    (lambda y, z: y * 2 + z * 3 + z * 4, [2, 7, None]),
    (lambda y, z: z * 3, [None, 3, None]),
])  # fmt: skip
def test_two_gradients_of_one_result(program, given):
    """The op gets the second gradient of its first result, and the sum of any others."""
    x, op = leaf([1.0]), Thrice()
    program(*op(x)).sum().backward()
    assert op.given == [given]
    assert x.grad.item() == sum(n * g for n, g in zip((3, 5, 3), given, strict=True) if g)


def test_two_gradients_of_a_result_whose_gradient_is_wanted():
    x, op = leaf([1.0]), Thrice()
    y, _ = op(x)
    found = backward_pass.gradients([(y * 2 + y * 7).sum()], [np.ones(())], [x, y])
    assert [g.item() for g in found] == [27, 9] and op.given == [[7, None, 2]]
    y, _ = op(x)
    with pytest.raises(UnsupportedError, match="thrice: array is fused"):
        backward_pass.backward((y * 2 + y * 7).sum(), np.ones(()), create_graph=True)


def test_plain_arrays_stay_plain():
    assert type(tape.apply(Impls("t", Impl("array", lambda x, needs: (x, ()))), (np.ones(2),))) is (
        np.ndarray
    )


def test_arrays_that_no_gradient_reads_are_freed_at_once():
    x = leaf(np.ones(3))
    double = x * 2
    memory = weakref.ref(double.data)
    total = (double + 1).sum()
    del double
    assert memory() is None
    total.backward()
    assert x.grad.tolist() == [2.0] * 3


def test_backward_frees_saved_arrays_as_it_goes():
    x, alive, memories = leaf(np.ones(3)), [], []

    def forward(x, *, needs):
        return x + 1, (x,)

    def backward(saved, dy, *, needs, into):
        alive.append([i for i, memory in enumerate(memories) if memory() is not None])
        return (dy,)

    step, y = Impls("step", Impl("array", forward, backward)), x
    for _ in range(3):
        y = tape.apply(step, (y,))
        memories.append(weakref.ref(y.data))
    loss = y.sum()
    del y
    loss.backward()
    assert alive == [[0, 1], [0], []]


def test_a_watcher_wraps_every_op():
    seen = []

    def watch(op, direction, function):
        def noted(*arguments, **given):
            seen.append((op, direction))
            with hooked(None):
                return function(*arguments, **given)

        return noted

    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    with hooked(watch):
        np.sum(np.exp(x)).backward()
    want = np.exp(np.ones(3, np.float32))
    np.testing.assert_array_equal(x.grad, want)
    np.exp(x)  # no longer watched
    ops = [op for op, direction in seen if direction == "forward"]
    assert ops == ["np.exp", "np.sum"]
    assert [op for op, direction in seen if direction == "backward"] == ops[::-1]
