"""Ladders of training steps: what is measured on a GPU, with stand-ins for it and for the steps."""

import contextlib
from types import SimpleNamespace

import pytest

from gpuattn.bench.train.cases import MODELS
from gpuattn.lecture.harness import steps
from gpuattn.lecture.harness.say import Say
from gpuattn.lecture.harness.steps import Found, Rung, climb

GPT = MODELS["gpt2-124m"]
RUNGS = {"unfused": Rung(GPT, {"flash_attention": "unfused"}), "flash": Rung(GPT)}


class Pool:
    """A memory pool in which a step op by op reserves 5 bytes beside 2 of the model."""

    held = 2
    malloc = None

    def total_bytes(self):
        return Pool.held

    def free_all_blocks(self):
        Pool.held = 2


@pytest.fixture
def told(monkeypatch):
    """What a say tells while ``climb`` runs on stand-ins; ``refused``: names of impls."""
    told = SimpleNamespace(lines=[], refused=set(), made=[], impl="")

    class Updates:
        def __init__(self, ours, graphs=True, tuned=True, notify=None):
            told.made.append(graphs)
            self.graphs, self.notify, self.calls = graphs, notify, 0

        def __call__(self):
            self.calls += 1
            if not self.graphs:
                Pool.held = 7
            elif self.calls == 2 and told.impl in told.refused:
                self.notify("no CUDA graphs: cuBLAS")

        def restart(self):
            pass

        def loss(self):
            return 3.0

    @contextlib.contextmanager
    def use_impl(flash_attention="fused"):
        told.impl = flash_attention
        yield

    monkeypatch.setattr(steps, "use_impl", use_impl)
    monkeypatch.setattr(steps, "Updates", Updates)
    monkeypatch.setattr(steps, "Ours", lambda case, xp: object())
    monkeypatch.setattr(
        steps.timing, "sample", lambda updates, count: [1.0 if updates.graphs else 9.0]
    )
    return told


def on_a_gpu(told):
    say = Say(tell=told.lines.append)
    say.device = "cuda"
    say.xp = SimpleNamespace(cuda=SimpleNamespace(
        MemoryPool=Pool, Device=lambda: SimpleNamespace(synchronize=lambda: None),
        Stream=lambda non_blocking: contextlib.nullcontext(),
        using_allocator=lambda malloc: contextlib.nullcontext(),
    ))  # fmt: skip
    return say


def test_memory_is_of_steps_op_by_op_and_time_of_graphs(told):
    found = climb(on_a_gpu(told), RUNGS)
    assert found == dict.fromkeys(RUNGS, Found([1.0], 7, 3.0))
    assert told.made == [False, True] * 2 and not told.lines


def test_if_one_is_refused_a_graph_none_has_one(told):
    told.refused = {"fused"}
    found = climb(on_a_gpu(told), RUNGS)
    assert found == dict.fromkeys(RUNGS, Found([9.0], 7, 3.0))
    assert told.lines == ["  (all steps op by op, because of 'flash': no CUDA graphs: cuBLAS)"]


def test_a_rung_may_ask_for_launches(told):
    rungs = {"flash": Rung(GPT), "op by op": Rung(GPT, graphs=False)}
    found = climb(on_a_gpu(told), rungs)
    assert [found[name].us for name in rungs] == [[1.0], [9.0]]
