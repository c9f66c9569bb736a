"""Steps that all ranks run together: as a graph on all of them, or on none."""

import fake_graphs
import numpy as np
import pytest

from gpuattn.runtime import graphs


@pytest.fixture
def replays(monkeypatch):
    """A function that returns Replays whose other ranks say ``theirs()``, and what is noted."""
    monkeypatch.setattr(graphs, "capture_refusal", lambda: None)
    with fake_graphs.graphs_on("9.0") as cupy:

        def made(theirs=lambda: True):
            said, asked = [], []

            def agree(ok):
                asked.append(ok)
                return ok and theirs()

            stream = cupy.cuda.Stream(non_blocking=True)
            stream.__enter__()
            return graphs.Replays(said.append, lambda step: step(), agree), cupy, said, asked

        yield made


def step_of(cupy):
    x, count = cupy.zeros(4, np.float32), [0]

    def step():
        count[0] += 1
        x[...] = x + 1

    return x, count, step


def test_a_step_that_all_ranks_have_captured_is_launched(replays):
    calls, cupy, said, asked = replays()
    x, count, step = step_of(cupy)
    for _ in range(5):
        calls("update", None, step, together=True)
    assert x.tolist() == [5] * 4 and count == [2] and asked == [True, True] and not said


def test_a_step_that_another_rank_could_not_capture_runs_op_by_op(replays):
    calls, cupy, _, asked = replays(theirs=lambda: len(asked) % 2)  # it tries, and fails
    x, count, step = step_of(cupy)
    for _ in range(4):
        calls("update", None, step, together=True)
    assert x.tolist() == [4] * 4 and asked == [True] * 6 and calls.graphs["update", None] is None


def test_a_step_that_another_rank_does_not_try_to_capture_is_not_captured(replays):
    """Its calls could wait, during the capture, for those of the other rank."""
    calls, cupy, _, asked = replays(theirs=lambda: False)
    x, count, step = step_of(cupy)
    for _ in range(4):
        calls("update", None, step, together=True)
    assert x.tolist() == [4] * 4 and count == [4] and asked == [True] * 3


def test_a_rank_that_captures_nothing_says_so_and_still_takes_part(replays):
    calls, cupy, said, asked = replays()

    def broken():
        raise ValueError("made for a test")

    with pytest.raises(ValueError):
        calls("gradients", 1, broken)
    with pytest.raises(ValueError):
        calls("gradients", 1, broken)  # refused now, and called op by op
    assert len(said) == 1 and not asked
    x, count, step = step_of(cupy)
    for _ in range(3):
        calls("update", None, step, together=True)
    assert x.tolist() == [3] * 4 and asked == [False, False]


def test_a_graph_goes_on_where_another_step_is_refused_later(replays):
    calls, cupy, said, asked = replays()
    x, count, step = step_of(cupy)
    for _ in range(2):
        calls("update", None, step, together=True)

    def broken():
        raise ValueError("made for a test")

    for _ in range(2):
        with pytest.raises(ValueError):
            calls("gradients", 1, broken)
    calls("update", None, step, together=True)
    assert x.tolist() == [3] * 4 and count == [2] and asked == [True, True] and len(said) == 1
