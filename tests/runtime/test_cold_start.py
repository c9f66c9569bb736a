"""Rehearsals launch nothing and end at the first copy to the host; libraries start beside."""

import contextvars
import threading

import numpy as np
import pytest
from fake_runs import Array, training_on

from gpuattn import arrays, softmax
from gpuattn.arrays import BFLOAT16, NothingComputed, to_cpu
from gpuattn.cuda import kernels
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import Engine
from gpuattn.models import TranslationConfig, TranslationModel
from gpuattn.runtime.cold_start import InBackground, rehearse, start_libraries
from gpuattn.runtime.graphs import Replays
from gpuattn.runtime.readback import Reading


@pytest.fixture
def card():
    with training_on("9.0") as run:
        yield run


def fake(shape, dtype="float32"):
    return np.ones(shape, dtype).view(Array)


def test_a_rehearsed_kernel_compiles_and_is_not_launched(card):
    rehearse(lambda: softmax(fake((4, 128))))
    assert len(card.rehearsed) == 1 and not card.launches
    softmax(fake((4, 128)))
    assert card.launched() == card.rehearsed


def test_a_kernel_kept_from_a_rehearsal_is_launched_later_and_the_other_way_round(
    card, monkeypatch
):
    seen = []
    real = kernels.Kernel(lambda *launch, shared_mem: seen.append(launch), "k", [("int", "n")])
    with monkeypatch.context() as patch:  # ends before `card` does
        patch.setattr(kernels, "_kernel", lambda *key: real)
        with kernels.compiling_only():
            found = kernels.kernel("dropout.cu", "dropout_apply", scalar="float", BLOCK=256)
            for kept in (found, real):
                kept((1,), (32,), 7)
            assert found.parameters == [("int", "n")] and not seen
        found((1,), (32,), 7)
    assert seen == [((1,), (32,), (7,))]
    assert card.rehearsed == {("dropout.cu", (("BLOCK", 256), ("scalar", "float")))}


def test_a_copy_to_the_host_ends_a_rehearsal(card):
    reached = []

    def work():
        reached.append(1)
        to_cpu(fake(3))
        reached.append(2)

    rehearse(work)
    assert reached == [1]
    for copy in (to_cpu, Reading):
        with kernels.compiling_only(), pytest.raises(NothingComputed):
            copy(fake(3))
    with kernels.compiling_only():
        assert to_cpu(np.arange(3)).sum() == 3
    assert to_cpu(fake(3)).sum() == 3
    assert not arrays.rehearsing.get()


def test_a_rehearsal_ignores_errors_and_ends(card):
    rehearse(lambda: 1 / 0)
    assert not arrays.rehearsing.get()


def test_graphs_call_a_rehearsed_step_once_and_its_first_call_is_still_to_come(card):
    calls, first = [], []
    steps = Replays(pytest.fail, first=lambda step: first.append(step()))
    rehearse(lambda: [steps("step", 1, lambda: calls.append("rehearsed")) for _ in range(5)])
    assert calls == ["rehearsed"] and not first and not steps.graphs
    steps("step", 1, lambda: calls.append("called"))
    assert calls == ["rehearsed", "called"] and len(first) == 1


def test_an_engine_is_rehearsed_in_one_step(card):
    config = TranslationConfig(vocab=40, d_model=32, heads=2, layers=(1, 1), ffn=32)
    model = TranslationModel(config, seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.astype(BFLOAT16).view(Array)
    engine, sources = Engine(model.eval(), notify=pytest.fail), [[5, 6, 7], [8]]
    found = []

    def work():
        found.append(engine.translate(sources, limits=[30, 30], bos=BOS, eos=EOS, beam=2))

    rehearse(work)
    assert not found and not card.launches and not card.products.computed
    rehearsed = set(card.rehearsed)
    with pytest.MonkeyPatch.context() as patch:
        nothing = [[Hypothesis([], 0.0, 0.0, False)]] * 2
        patch.setattr("gpuattn.engine.beam.hypotheses_of", lambda *texts, **_: nothing)
        work()
    assert found and card.launched() == card.rehearsed == rehearsed


def test_work_in_the_background_sees_the_callers_context_and_may_fail(card):
    chosen = contextvars.ContextVar("chosen", default=0)
    seen = []

    def work():
        seen.append((chosen.get(), threading.current_thread()))
        raise ValueError

    chosen.set(5)
    InBackground(work).wait()
    ((value, thread),) = seen
    assert value == 5 and thread is not threading.current_thread()


def test_libraries_start_on_a_gpu(gpu):
    start_libraries()
    assert to_cpu(gpu.ones(3)).sum() == 3
