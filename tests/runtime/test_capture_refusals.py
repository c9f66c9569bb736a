"""Functions that a CUDA graph would not repeat run op by op, and a sentence says why."""

import functools
import re
import warnings

import fake_graphs
import numpy as np
import pytest
from captured import check, full, refusals, scaled_class

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.errors import SlowPathWarning
from gpuattn.runtime.graphs import Graphs


def test_a_write_to_an_argument_is_refused(cp):
    def f(x):
        x += 1
        return x * 2

    captured, x = gpuattn.capture(f), full(cp, 0)
    results, said = refusals(captured, x)
    check(x, 4)
    check(results[-1], 8)
    (sentence,) = said
    assert "f runs op by op" in sentence and "donate=" in sentence and "donate=" in captured.reason


@pytest.mark.parametrize("wrong, reason", [
    (lambda x: x * float(x.sum()), "CaptureUnsupported|capturing|not permitted"),
    (lambda x: to_cpu(x), "returns a ndarray"),
    (lambda x: functools.partial(print), "returns a partial"),
    (lambda x: x + np_asarray(x, [1.0, 2.0, 3.0]), "copies values from the host"),
], ids=["host read", "NumPy result", "no array", "host copy"])  # fmt: skip
def test_what_a_graph_cannot_repeat_is_refused(cp, wrong, reason):
    captured = gpuattn.capture(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured(full(cp, 2))
        captured(full(cp, 2))
    assert captured.graphs == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn", lambda *_, **__: pytest.fail("warned twice"))
        captured(full(cp, 2))
    assert re.search(reason, captured.reason), captured.reason


def np_asarray(like, values):
    return gpuattn.get_xp(like).asarray(values, dtype="float32")


def test_an_error_is_that_of_a_plain_call(cp):
    late = []

    def f(x, fails=False):
        if fails and late:
            raise ValueError("no such luck")
        return x + 1

    captured = gpuattn.capture(f)
    captured(full(cp, 1), True)
    late.append(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no such luck"):
            captured(full(cp, 1), True)
        check(captured(full(cp, 1)), 2)


def test_a_function_that_changes_its_state_is_refused(cp):
    scaled = scaled_class()(None)
    captured = gpuattn.capture(scaled.counting)
    results, said = refusals(captured, full(cp, 1), calls=5)
    for i, out in enumerate(results):
        check(out, i + 1)
    assert len(said) == 1 and "changes 'count'" in said[0]


def test_what_changes_before_every_call_is_refused(cp):
    held = scaled_class()(0)
    captured = gpuattn.capture(lambda x: x * held.by)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(15):
            held.by = 1000 + i
            check(captured(full(cp, 1)), 1000 + i)
    (said,) = [str(w.message) for w in caught if w.category is SlowPathWarning]
    assert "'by' has changed since the last call, as it had before" in said


def test_recorded_results_and_gradients_of_arguments_are_refused(cp):
    x = gpuattn.Tensor(full(cp, 3), requires_grad=True)
    captured = gpuattn.capture(lambda t: t * 2)
    results, said = refusals(captured, x)
    assert len(said) == 1 and "recorded Tensor" in said[0]
    np.sum(results[-1]).backward()
    check(x.grad, 2)

    def backward(t):
        np.sum(t * 3).backward()

    results, said = refusals(gpuattn.capture(backward), x)
    check(x.grad, 2 + 4 * 3)
    assert len(said) == 1 and "'grad' of a Tensor" in said[0]


def test_a_seed_drawn_on_the_host_is_refused(cp):
    f = gpuattn.capture(lambda x: x * 0 + gpuattn.rng.fresh_seed() % 1000)
    results, said = refusals(f, full(cp, 0))
    assert len(said) == 1 and "the same in every replay" in said[0]
    assert len({float(out[0, 0]) for out in results}) > 1


def test_mixed_arguments_and_unhashable_ones_run_plainly(cp):
    f = gpuattn.capture(lambda x, y: x)
    _, said = refusals(f, full(cp, 1), np.ones(2))
    assert len(said) == 1 and "NumPy array" in said[0]
    _, said = refusals(f, full(cp, 1), {1, 2})
    assert len(said) == 1 and "not hashable" in said[0]


def test_arrays_of_two_gpus_are_refused():
    with fake_graphs.graphs_on("9.0") as cp:
        x, y = full(cp, 1), full(cp, 2)
        y.number = 1
        _, said = refusals(gpuattn.capture(lambda x, y: x * 2), x, y)
        assert len(said) == 1 and "several GPUs" in said[0]


def test_an_interrupted_capture_is_ended(cp):
    def interrupted():
        raise KeyboardInterrupt

    with cp.cuda.Stream(non_blocking=True) as stream:
        graphs = Graphs()
        with pytest.raises(KeyboardInterrupt):
            graphs.capture(stream, interrupted)
        assert not stream.is_capturing()
        graph, result = graphs.capture(stream, lambda: 5)
        assert result == 5 and graph is not None


def test_wrong_arguments():
    with pytest.raises(TypeError, match="capture: function is an int"):
        gpuattn.capture(3)
    for wrong in ("weight", 2, 1.5, -1):
        with pytest.raises(TypeError, match="donate is .* positions or names of x, y"):
            gpuattn.capture(lambda x, y: x, donate=wrong)
    gpuattn.capture(lambda *args, **kwargs: args, donate=(5, "w"))
