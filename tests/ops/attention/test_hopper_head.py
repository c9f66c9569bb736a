"""raw-hopper-head: tests beyond those that every implementation must pass."""

import emulator
import numpy as np
import pytest
from attention_problems import whole_head_arguments as arguments
from checks import check_hopper_compiles, find

from gpuattn import rng
from gpuattn.errors import SlowerRefusal
from gpuattn.impls import choose
from gpuattn.ops.attention import hopper_head
from gpuattn.ops.attention.flash_attention import IMPLS

FORM, TILES = find(IMPLS, "raw-hopper-head"), find(IMPLS, "raw-hopper")


@pytest.mark.parametrize("dropout", [False, True])
def test_compiles_without_spills_and_matches_the_host_memory_size(nvrtc, dropout):
    size = hopper_head.forward_shared_bytes(dropout)
    log = check_hopper_compiles(hopper_head.FORWARD_FILE, size, DROPOUT=dropout)
    assert "C75" not in log, log
    for causal in (True,) if dropout else (True, False):
        size = hopper_head.backward_shared_bytes(dropout, causal)
        constants = {"CAUSAL": causal, "DROPOUT": dropout}
        log = check_hopper_compiles(hopper_head.BACKWARD_FILE, size, **constants)
        assert "C75" not in log, log


RUNS, SLOWER = "runs", "slower"
CASES = [  # changes; forward and gradient: RUNS, SLOWER, or the text of the refusal
    ({}, RUNS, RUNS),
    ({"D": 40, "Dv": 8, "window": (256, 0), "dropout_p": 0.5}, RUNS, RUNS),
    ({"T": 97, "align": "top_left"}, RUNS, RUNS),
    ({"T": 96}, SLOWER, SLOWER),
    ({"B": 1}, RUNS, SLOWER),
    ({"window": (255, 0)}, "255 keys to the left", RUNS),
    ({"scale": -1.0}, "scale is -1.0", RUNS),
    ({"T": 200, "S": 256}, "200 and 256, the kernel takes equal ones up to 256", None),
    ({"T": 257}, "257 and 257", None),
    ({"window": (None, None)}, "no causal mask", RUNS),
    ({"window": (None, None), "T": 193}, "no causal mask", RUNS),
    ({"window": (None, None), "T": 192}, "no causal mask", "192 tokens"),
    ({"window": (None, None), "dropout_p": 0.1}, "no causal mask", "dropout_p 0.1"),
    ({"window": (None, None), "B": 1}, "no causal mask", SLOWER),
    ({"window": (None, 1)}, "no causal mask", "the window is (None, 1)"),
    ({"D": 72}, "the head size is 72", None),
    ({"Dv": 72}, "the head size is 72", None),
    ({"Hk": 3}, "q has 6 heads, k has 3", None),
    ({"B": 0}, "empty", None),
    ({"softcap": 5.0}, "softcap given", None),
    ({"sink": 1}, "sink given", None),
    ({"key_lengths": 1}, "key_lengths given", None),
    ({"cu_q": 1}, "cu_seqlens given", None),
]


@pytest.mark.parametrize("changes, forward, backward", CASES)
def test_refusals(changes, forward, backward):
    """``backward``: None where the gradient is refused for the same reason as the forward."""
    inputs, params = arguments(np, **changes)
    inputs[:3] = map(emulator.as_array, inputs[:3])
    with emulator.Machine(seed=1, multiprocessors=12).in_place():
        for refuse, want in (
            (FORM.refuse, forward), (FORM.refuse_backward, backward or forward),
        ):  # fmt: skip
            reason = refuse(*inputs, needs=(True,) * 9, **params)
            assert isinstance(reason, SlowerRefusal) == (want == SLOWER)
            assert (reason is None) == (want == RUNS)
            assert want in (RUNS, SLOWER) or want in reason


def case(gpu, **changes):
    """Return inputs and parameters of a call that this form runs; skips on other GPUs."""
    inputs, params = arguments(gpu, **changes)
    if reason := FORM.refuse(*inputs, needs=(False,) * 9, **params):
        assert not isinstance(reason, SlowerRefusal), reason
        pytest.skip(reason)
    return inputs, params


@pytest.mark.parametrize("T, window, p", [
    (256, (None, 0), 0.2), (256, (100, 0), 0), (200, (None, 0), 0), (128, (40, 0), 0.2),
    (197, (None, None), 0), (256, (None, None), 0),
])  # fmt: skip
def test_gradients_of_several_heads_of_each_block(gpu, T, window, p):
    """The result is close to raw-hopper's, and repeated calls give equal bits."""
    key = rng.Key(3, 1, 2) if p else None
    case(gpu)  # skips on other GPUs
    inputs, params = arguments(gpu, B=64, T=T, S=T, window=window, dropout_p=p, key=key)
    needs = (True,) * 3 + (False,) * 6
    assert FORM.refuse_backward(*inputs, needs=needs, **params) is None
    dout = arguments(gpu, B=64, T=T, S=T)[0][1]  # values that differ from q's

    def run(form):
        forward = choose(IMPLS, inputs, "raw", needs=needs, **params).forward
        (out, lse), saved = forward(*inputs, needs=needs, **params)
        grads = form.backward(saved, dout, None, needs=needs, into=(None,) * 9, **params)
        return [x.astype(np.float32) for x in (out, lse, *grads[:3])]

    first, again = (run(FORM) for _ in range(2))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    for x, want in zip(first, run(TILES), strict=True):
        assert abs(x - want).max() <= 2**-6 * abs(want).max()


# with growing keys, weights exceed 2^60
@pytest.mark.parametrize(
    "T, p, growth", [(256, 0.2, 1), (256, 0, 300), (150, 0.2, 300), (97, 0, 1)]
)
def test_several_heads_of_each_block(gpu, T, p, growth):
    """Close to raw-hopper's result; equal bits when repeated and in a smaller batch."""
    key = rng.Key(3, 1, 2) if p else None
    inputs, params = case(gpu, B=50, T=T, growth=growth, dropout_p=p, key=key)

    def run(some, form=FORM):
        inputs_of_some = [None if x is None else x[:some] for x in inputs]
        return form.forward(*inputs_of_some, needs=(False,) * 9, **params)[0]

    first = run(50)
    for some in (50, 3):
        for x, y in zip(run(some), first, strict=True):
            assert (x.view(f"u{x.itemsize}") == y[:some].view(f"u{y.itemsize}")).all()
    for x, y in zip(first, run(50, TILES), strict=True):
        x, y = x.astype(np.float32), y.astype(np.float32)
        assert abs(x - y).max() <= 2**-7 * abs(y).max()
