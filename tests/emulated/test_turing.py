"""Attention of compute capability 7.5 on any CPU, emulated instruction by instruction."""

import emulator
import pytest
from attention_formula import judge
from attention_problems import Problem
from checks import sampled

pytestmark = pytest.mark.usefixtures("host_compiler")
PROBLEMS = {}


@pytest.mark.parametrize("number", sampled(PROBLEMS, 3))
def test_float16_on_tensor_cores(number):
    problem = Problem(number, dtype="float16")
    wrong = judge(problem, emulator.Machine(seed=number, card="7.5").form("raw-ampere"))
    assert not wrong, f"{problem}: {wrong}"
