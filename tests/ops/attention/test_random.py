"""More than a thousand random problems of attention, forward and backward, against the formula."""

import functools

import pytest
from attention_formula import judge, refusal, repro
from attention_problems import Problem
from checks import find

from gpuattn.errors import HardwareRefusal
from gpuattn.ops.attention.flash_attention import IMPLS

BATCH, PROBLEMS, SMALL = 25, 1250, 400
HEAD = "raw-hopper-head"  # takes so few problems that they are listed
HEAD_PROBLEMS = [
    281, 781, 1456, 1753, 1868, 1915, 1952, 2097, 2188, 2311, 2459, 2623, 3308, 3349, 3738, 6610,
    21552,
]  # fmt: skip
RAW = [impl for impl in IMPLS if impl.name.startswith("raw-") and impl.name != HEAD]
REFERENCE = find(IMPLS, "reference")


@functools.lru_cache(maxsize=1)
def batch(first, xp):
    """Return problems that every implementation uses in turn; expected results are cached."""
    return [Problem(number, xp) for number in range(first, first + BATCH)]


def check(problems, impl):
    """Fail with the command that reproduces each failed problem."""
    refusals, wrong = [refusal(problem, impl) for problem in problems], []
    for problem, reason in zip(problems, refusals, strict=True):
        if reason is None:
            try:
                found = judge(problem, impl)
            except Exception as error:
                error.add_note(repro(problem, impl))
                raise
            wrong += [f"{repro(problem, impl)}\n  {'; '.join(found)}"] if found else []
    assert not wrong, f"{len(wrong)} problems:\n" + "\n".join(wrong)
    assert not all(refusals), min(
        refusals, key=lambda reason: not isinstance(reason, HardwareRefusal)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("impl", RAW, ids=lambda impl: impl.name)
@pytest.mark.parametrize("first", range(0, PROBLEMS, BATCH))
def test_raw(gpu, first, impl):
    check(batch(first, gpu), impl)


@pytest.mark.gpu
@pytest.mark.parametrize("number", HEAD_PROBLEMS)
def test_raw_hopper_head(gpu, number):
    check([Problem(number, gpu)], find(IMPLS, HEAD))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 4 * BATCH, BATCH))
def test_the_reference_on_a_gpu(gpu, first):
    check(batch(first, gpu), REFERENCE)


@pytest.mark.parametrize("dtype", [None, "float64"], ids=["drawn", "float64"])
@pytest.mark.parametrize("first", range(0, SMALL, 100))
def test_the_reference(first, dtype):
    """The reference agrees with the formula, to the precision of float64 in float64."""
    numbers = range(first, first + 100)
    check([Problem(number, small=True, dtype=dtype) for number in numbers], REFERENCE)


def test_the_comparison_finds_small_errors():
    """The comparison detects an error of one rounding, one key or one term in simple problems."""

    class Spoiled:
        name, refuse = "spoiled", None

        def __init__(self, fault):
            self.fault = fault

        def forward(self, *inputs, **params):
            params = self.fault(params)
            (out, lse), saved = REFERENCE.forward(*inputs, **params)
            return (out, lse), saved

        def backward(self, saved, dout, dlse, **params):
            return REFERENCE.backward(saved, dout, dlse, **self.fault(params))

    def window(params):
        left, right = params["window"]
        return params | {"window": (left, None if right is None else right + 1)}

    def scale(params):
        return params | {"scale": params["scale"] * (1 + 2**-8)}

    def softcap(params):
        cap = params["softcap"]
        return params | {"softcap": cap and cap * (1 + 2**-8)}

    problems = [Problem(number, small=True) for number in range(100)]
    for fault, least in ((window, 30), (scale, 60), (softcap, 5), (lambda params: params, 0)):
        caught = sum(bool(judge(problem, Spoiled(fault))) for problem in problems)
        assert caught >= least, fault.__name__
        assert caught == 0 or least, "the reference itself is right"
