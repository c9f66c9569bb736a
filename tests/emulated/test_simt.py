"""Attention on CUDA cores, emulated on any CPU: forms for much shared memory, and for little."""

import emulator
import numpy as np
import pytest
from attention_formula import backward_of, guarded_memory, judge
from attention_problems import Problem
from checks import sampled

from gpuattn.ops.attention import simt

pytestmark = pytest.mark.usefixtures("host_compiler")
ROOMY = {  # compute capability 9.0; several tiles each
    72: "head size 64, packed, groups of queries, dropout: 64 bits of a mask",
    30: "head size 128, two warps on the same rows, groups of queries, a mask, dropout",
    291: "head sizes 128 and 56, causal, groups of queries, lengths of keys",
    63: "head size 117, whose rows are not aligned, a bias with its gradient",
    123: "head size 64, causal",
    269: "head size 128, more queries than keys",
    83: "head size 64, a window, a bias with its gradient, ALiBi",
    5: "head size 176, a window, a gradient of lse",
    160: "head size 16, groups of queries, a softcap",
}
SIXTEEN_BITS = {2: "head sizes 64 and 72, causal", 355: "head sizes 128 and 56, a bias, a window"}
WHOLE = "whole_rows", "whole"  # the kernels of a gradient in one launch
OTHERS = {72: "head size 64, dropout", 11: "head size 128, a sink", 5: "head size 176"}


def check(number, dtype, card):
    problem = Problem(number, dtype=dtype)
    wrong = judge(problem, emulator.Machine(seed=number, card=card).form("raw-simt"))
    assert not wrong, f"{problem}: {wrong}"


@pytest.mark.parametrize("number", sampled(ROOMY, 3))
def test_float32(number):
    check(number, "float32", "9.0")


@pytest.mark.parametrize("number", sampled(SIXTEEN_BITS, 1))
def test_bfloat16(number):
    check(number, "bfloat16", "9.0")


@pytest.mark.parametrize("number", sampled(OTHERS, 1))
def test_weights_through_shuffles(number):
    check(number, "float32", "8.0")


def gradients(problem, seed, multiprocessors):
    impl = emulator.Machine(seed, multiprocessors).form("raw-simt")
    with guarded_memory():
        _, saved = impl.forward(*problem.inputs, needs=problem.needs, **problem.params)
        into = (None,) * len(problem.needs)
        backward = backward_of(impl, problem.inputs, problem.needs, problem.params)
        return backward(saved, problem.dout, None, needs=problem.needs, into=into,
                        **problem.params)[:3]  # fmt: skip


def test_tiles_of_keys_add_to_dq_in_turn():
    """Four tiles of keys, as many blocks as start at once, in three orders of events."""
    problem = Problem(72, dtype="float32")
    first, *others = (gradients(problem, seed, m) for seed, m in ((1, 12), (2, 12), (3, 2)))
    for found in others:
        for x, y in zip(found, first, strict=True):
            assert np.array_equal(x.view(np.uint32), y.view(np.uint32))


def test_the_launch_of_dk_and_dv_makes_dq(monkeypatch):
    """dq is right where no kernel for dq alone can run."""
    whole = {part: file for part, file in simt.FILES.items() if part in ("forward", *WHOLE)}
    monkeypatch.setattr(simt, "FILES", whole)
    check(123, "float32", "9.0")
