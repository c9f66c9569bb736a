"""Attention of float32 arrays on tensor cores, which round them to TF32: only with tf32=True."""

import itertools

import compiled
import numpy as np
import pytest

from gpuattn import Tensor, explain, flash_attention
from gpuattn.autodiff import backward_pass
from gpuattn.cuda import kernels, sources
from gpuattn.ops.attention import ampere

LEAST_LIMIT = 101_376  # bytes of shared memory per block on sm_86 and sm_89
CASES = {
    "d32": {"D": 32},
    "d64-causal": {"causal": True},
    "d68": {"D": 68, "Dv": 4},
    "d96-window": {"D": 96, "window": (40, 5), "align": "top_left"},
    "d128-gqa": {"D": 128, "Hk": 1, "causal": True},
    "long": {"T": 700, "S": 1000},
    "hidden_keys": {"key_lengths": np.array([130, 0])},
    "bias": {"bias": np.sin(np.arange(200.0 * 170)).reshape(1, 1, 170, 200)},
    "all": {
        "D": 128, "softcap": 2.0, "sink": np.array([0.5, -0.5]), "dropout_p": 0.2, "seed": 3,
        "alibi_slopes": np.array([0.1, 0.2]), "causal": True,
    },
}  # fmt: skip


def draw(rng, D=64, Dv=None, T=170, S=200, Hk=2):
    shapes = (2, T, 2, D), (2, S, Hk, D), (2, S, Hk, Dv or D)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def rounded(x):
    """Return ``x`` with 10 bits of mantissa, ties away from zero."""
    return (x.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32)


def test_tf32_has_no_effect_on_numpy(rng):
    q, k, v = draw(rng)
    assert (flash_attention(q, k, v, tf32=True) == flash_attention(q, k, v)).all()


@pytest.mark.parametrize("extras, dropout", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("scalar", ["float", "bf16"])
@pytest.mark.parametrize("width", ampere.WIDTHS)
def test_tiles_are_those_of_the_kernel(nvrtc, width, scalar, extras, dropout):
    size = 4 if scalar == "float" else 2
    if size == 4 and width > ampere.MAX_TF32_HEAD_DIM:
        return
    file = "attention/flash_attention_forward_ampere.cu"
    text = sources.source_text(file, scalar=scalar, HEAD_DIM=width, EXTRAS=extras, DROPOUT=dropout)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
        rows, keys = ampere.forward_tile(width, size, extras, dropout, int(arch[3:]))
        count = ampere.forward_shared_bytes(width, size, rows, keys)
        claim = f"ROWS == {rows} && KEYS == {keys} && SHARED_BYTES == {count}"
        sizes = text[: text.index("// Copies rows of an array to a tile")]
        compiled.check_front_end(f'{sizes}\nstatic_assert({claim}, "");', arch, file)
        assert size == 2 or count <= LEAST_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_errors_are_those_of_rounding(gpu, rng, case):
    sizes = {name: case[name] for name in ("D", "Dv", "T", "S", "Hk") if name in case}
    params = {name: value for name, value in case.items() if name not in sizes}
    qkv = draw(rng, **sizes)
    exact, exact_lse = flash_attention(
        *(x.astype(np.float64) for x in qkv), return_lse=True, **params
    )
    usual, usual_lse = flash_attention(
        *(rounded(x).astype(np.float64) for x in qkv), return_lse=True, **params
    )
    asked = {"tf32": True}
    for name, value in params.items():
        if isinstance(value, np.ndarray):
            value = gpu.asarray(value, np.float32 if value.dtype.kind == "f" else np.int32)
        asked[name] = value
    arrays = [gpu.asarray(x) for x in qkv]
    told = explain(flash_attention, *arrays, **asked)
    assert told.chosen == "raw-ampere", str(told)
    before = kernels.launches["flash_attention_forward"]
    out, lse = flash_attention(*arrays, return_lse=True, **asked)
    assert kernels.launches["flash_attention_forward"] == before + 1
    again = flash_attention(*arrays, **asked)
    assert out.dtype == np.float32 and out.tobytes() == again.tobytes()
    out, lse, seen = out.get(), lse.get(), np.isfinite(exact_lse)
    assert (lse[~seen] == exact_lse[~seen]).all()
    np.testing.assert_allclose(lse[seen], usual_lse[seen], rtol=0, atol=1e-5)  # sums in float32
    limit = 2 * abs(usual - exact).max() + 2**-11 * abs(exact).max()  # weights are rounded too
    assert abs(out - exact).max() <= limit


@pytest.mark.gpu
def test_gradients_stay_in_float32(gpu, rng):
    found = []
    for asked in (False, True):
        boxes = [Tensor(gpu.asarray(x), requires_grad=True) for x in draw(np.random.default_rng(0))]
        out = flash_attention(*boxes, causal=True, tf32=asked)
        told = explain(flash_attention, *boxes, causal=True, tf32=asked)
        assert not asked or told.chosen == "raw-ampere", str(told)
        found.append(
            [g.get() for g in backward_pass.gradients([out], [gpu.ones_like(out.data)], boxes)]
        )
    for usual, from_tf32 in zip(*found, strict=True):
        assert from_tf32.dtype == np.float32
        assert 0 < abs(usual - from_tf32).max() <= 2**-8 * abs(usual).max()


@pytest.mark.gpu
def test_refusals_name_the_remedy(gpu, rng):
    q, k, v = (gpu.asarray(x) for x in draw(rng))
    refused = ampere.refuse(q, k, v, None, None, None, max_seqlen_q=170, max_seqlen_k=200)
    assert refused == "q is float32: tf32=True lets tensor cores round it to TF32"
    q, k, v = (gpu.asarray(x) for x in draw(rng, D=160))
    asked = {"max_seqlen_q": 170, "max_seqlen_k": 200, "tf32": True}
    assert "160" in ampere.refuse(q, k, v, None, None, None, **asked)
