"""Attention on CUDA cores, emulated on any CPU: forms for much shared memory, and for little."""

import emulator
import pytest
from attention_formula import judge
from attention_problems import Problem
from checks import sampled

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
