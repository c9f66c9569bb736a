"""Causal attention by whole heads: what cases for every implementation do not see."""

import numpy as np
import pytest
from attention_problems import whole_head_arguments as arguments
from checks import check_hopper_compiles, find

from gpuattn import rng
from gpuattn.cuda import kernels
from gpuattn.ops.attention import hopper
from gpuattn.ops.attention import hopper_head_forward as whole_heads
from gpuattn.ops.attention.flash_attention import IMPLS


@pytest.mark.parametrize("dropout", [False, True])
def test_compiles_without_spills_for_the_memory_that_the_host_asks_for(nvrtc, dropout):
    size = whole_heads.shared_bytes(dropout)
    log = check_hopper_compiles(whole_heads.FILE, size, DROPOUT=dropout)
    assert "C75" not in log, log


CASES = [  # changes, whether it is computed so
    ({}, True),
    ({"B": 1, "H": 1}, True),
    ({"T": 97, "D": 40, "Dv": 8, "window": (97, 0), "align": "top_left"}, True),
    ({"window": (255, 0)}, False),
    ({"window": (None, None)}, False),
    ({"window": (None, 1)}, False),
    ({"T": 96}, False),
    ({"S": 200}, False),
    ({"T": 257}, False),
    ({"scale": -1.0}, False),
    ({"D": 72}, False),
    ({"Hk": 3}, False),
    ({"softcap": 5.0}, False),
    ({"key_lengths": 1}, False),
    ({"cu_q": 1}, False),
]


@pytest.mark.parametrize("changes, does", CASES)
def test_what_is_taken(changes, does):
    inputs, params = arguments(np, **changes)
    assert whole_heads.takes(*inputs, **params) == does


# where keys grow, weights pass 2^60
@pytest.mark.parametrize(
    "T, p, growth", [(256, 0.2, 1), (256, 0, 300), (150, 0.2, 300), (97, 0, 1)]
)
def test_several_heads_of_each_block(gpu, monkeypatch, T, p, growth):
    """Against the form by tiles; the same bits again, and beside fewer heads."""
    key = rng.Key(3, 1, 2) if p else None
    inputs, params = arguments(gpu, B=50, T=T, growth=growth, dropout_p=p, key=key)
    if reason := find(IMPLS, "raw-hopper").refuse(*inputs, **params):
        pytest.skip(reason)

    def run(some):
        inputs_of_some = [None if x is None else x[:some] for x in inputs]
        before = kernels.launches[whole_heads.NAME]
        (out, lse), _ = hopper.forward(*inputs_of_some, needs=(False,) * 9, **params)
        return kernels.launches[whole_heads.NAME] - before, out, lse

    launches, *first = run(50)
    assert launches == 1
    for some in (50, 3):
        for x, y in zip(run(some)[1:], first, strict=True):
            assert (x.view(f"u{x.itemsize}") == y[:some].view(f"u{y.itemsize}")).all()
    monkeypatch.setattr(whole_heads, "takes", lambda *_, **__: False)
    launches, *want = run(50)
    assert launches == 0
    for x, y in zip(first, want, strict=True):
        x, y = x.astype(np.float32), y.astype(np.float32)
        assert abs(x - y).max() <= 2**-7 * abs(y).max()
