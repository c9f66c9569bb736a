"""Which form of attention runs a call, forward and backward; deciding it needs no GPU."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn import Tensor, flash_attention, use_impl
from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import kernels
from gpuattn.errors import UnsupportedError
from gpuattn.impls import explain
from gpuattn.ops.attention import hopper_backward, hopper_head
from gpuattn.rng import Key

pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")

PROBLEMS = 2000
LENGTHS = (0, 1, 40, 64, 65, 96, 97, 128, 200, 256, 257, 600)


@dataclass(frozen=True)
class Problem:
    """A call. ``bias``: None or its dtype; ``wanting``: whether its gradient is computed."""

    dtype: str = "bfloat16"
    B: int = 2
    T: int = 200
    S: int = 200
    H: int = 6
    Hk: int = 6
    D: int = 64
    Dv: int = 64
    packed: bool = False
    layout: str = "rows"  # "backwards": aligned rows that no tensor map can describe; "shifted"
    causal: bool = True
    window: int | None = None
    scale: float = 0.1
    bias: str | None = None
    wanting: bool = False
    softcap: float | None = None
    slopes: bool = False
    sink: bool = False
    key_lengths: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    tf32: bool = False

    def arrays(self):
        """Return q, k, v and keyword arguments."""
        lead = [(self.T,), (self.S,)] if self.packed else [(self.B, self.T), (self.B, self.S)]
        shapes = (
            (*lead[0], self.H, self.D), (*lead[1], self.Hk, self.D), (*lead[1], self.Hk, self.Dv),
        )  # fmt: skip
        q, k, v = (self._lay_out(shape) for shape in shapes)
        given = {
            "causal": self.causal, "scale": self.scale, "softcap": self.softcap,
            "dropout_p": self.dropout_p, "deterministic": self.deterministic, "tf32": self.tf32,
            "window": (self.window, None), "seed": Key(1, 2, 3) if self.dropout_p else None,
        }  # fmt: skip
        if self.bias:
            bias = as_array(np.empty((1, self.H, self.T, self.S), _dtype(self.bias)))
            given["bias"] = Tensor(bias, requires_grad=self.wanting)
        if self.slopes:
            given["alibi_slopes"] = as_array(np.ones(self.H, np.float32))
        if self.sink:
            given["sink"] = as_array(np.ones(self.H, np.float32))
        if self.key_lengths:
            given["key_lengths"] = as_array(np.ones(1 if self.packed else self.B, np.int32))
        if self.packed:
            given["cu_seqlens_q"] = as_array(np.array([0, self.T], np.int32))
            given["cu_seqlens_k"] = as_array(np.array([0, self.S], np.int32))
        return q, k, v, given

    def _lay_out(self, shape):
        first = self.layout == "shifted"  # 2 or 4 bytes away from any alignment
        x = np.empty(int(np.prod(shape)) + first, _dtype(self.dtype))[int(first) :].reshape(shape)
        return as_array(x[..., ::-1, :, :] if self.layout == "backwards" else x)


def _dtype(name):
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def forms(p, card):
    """Return the expected forms of (forward, gradient).

    These rules are independent of the modules: they are those from before both directions were
    chosen from one table.
    """
    sixteen = p.dtype in ("float16", "bfloat16")
    size, longest = max(p.D, p.Dv), max(p.T, p.S)
    step = 16 // _dtype(p.dtype).itemsize
    aligned = p.D % step == p.Dv % step == 0 and not (p.layout == "shifted" and p.B)
    repeats = p.layout == "backwards" and p.B > 0
    if p.layout != "rows" and (p.T <= 1 or p.S <= 1):
        return None  # this oracle does not model which of the three arrays is copied
    short = sixteen and aligned and size <= 128 and longest <= 64
    hopper = card.has_wgmma and sixteen and aligned and size <= 256 and not repeats
    ampere = aligned and size <= (256 if sixteen else 128) and (sixteen or p.tf32)
    ampere = ampere and p.dtype != "float64"
    if not card.has_bfloat16:  # float16 alone, the gradient up to head size 192
        ampere = ampere and p.dtype == "float16"
        short = short and p.dtype == "float16"
        if ampere and not short and size > 192:
            return "raw-ampere", "raw-simt"
    if not (hopper or ampere):
        name = "raw-simt" if size <= 256 and p.dtype != "float64" else "reference"
        return name, name
    if short:
        return "raw-short", "raw-short"
    if not hopper:
        return "raw-ampere", "raw-ampere" if sixteen else "raw-simt"

    features = p.bias, p.softcap, p.slopes or None, p.sink or None, p.key_lengths or None
    whole = not p.packed and all(x is None for x in features) and p.Hk == p.H
    whole = whole and 97 <= p.T == p.S <= 256 and size <= 64 and p.B * p.T > 0
    full = whole and not p.causal and p.T > 192 and p.window is None and not p.dropout_p
    whole = whole and p.causal
    unbounded = p.window is None or p.window >= p.S
    forward = "raw-hopper-head" if whole and unbounded and p.scale > 0 else "raw-hopper"
    extras = p.bias or p.slopes or p.softcap
    if size > 128 and (extras or p.dropout_p or p.deterministic):
        return forward, "raw-ampere"
    if extras and p.dropout_p:
        return forward, "raw-ampere"
    if p.softcap and p.bias and p.bias != "bool" and p.wanting:
        return forward, "raw-ampere"
    heads = p.B * p.H
    if (whole or full) and heads >= card.multiprocessors:
        return forward, "raw-hopper-head"
    return forward, "raw-hopper"


def draw(rng):
    """Return a problem with few features: with many, most problems would select one form."""
    if rng.random() < 0.2:  # self-attention in which whole heads may be computed
        T = rng.choice([96, 97, 150, 192, 193, 256, 257])
        B, H = rng.choice([(2, 6), (12, 11), (40, 4)])
        given = rng.choice(
            [{}, {}, {"window": 100}, {"window": 256}, {"scale": -1.0}, {"causal": False}]
        )
        return Problem(rng.choice(["float16", "bfloat16"]), B, T, T, H, H, **given)
    T = rng.choice(LENGTHS)
    B, H = rng.choice([(1, 4), (2, 6), (12, 11), (40, 4), (0, 4)])
    D = rng.choice([8, 40, 64, 64, 64, 72, 100, 128, 192, 256, 264, 33])
    dtype = rng.choice(["float16", "bfloat16", "bfloat16", "float32", "float64"])
    p = Problem(
        dtype, B, T, T if rng.random() < 0.7 else rng.choice(LENGTHS), H,
        H if rng.random() < 0.8 else 1, D, D if rng.random() < 0.8 else 16,
        packed=rng.random() < 0.2, causal=rng.random() < 0.7, tf32=rng.random() < 0.5,
        layout=rng.choice(["rows"] * 6 + ["backwards", "shifted"]),
    )  # fmt: skip
    features = {
        "window": rng.choice([100, 1000]), "scale": -1.0, "softcap": 3.0, "slopes": True,
        "sink": True, "key_lengths": True, "dropout_p": 0.1, "deterministic": True,
        "bias": rng.choice([p.dtype, "float32", "bool"]),
    }  # fmt: skip
    used = rng.sample(list(features), rng.choice([0, 0, 1, 1, 2]))
    p = replace(p, **{name: features[name] for name in used}, B=1 if p.packed else B)
    return replace(p, wanting=p.bias not in (None, "bool") and rng.random() < 0.7)


def chosen(p, **more):
    """Return the names of the forms of (forward, gradient) that ``flash_attention`` chooses."""
    q, k, v, given = p.arrays()
    call = flash_attention.prepare(*(Tensor(x, requires_grad=True) for x in (q, k, v)), **given,
                                   **more)  # fmt: skip
    forward = call.choose()
    return forward.name, call.choose_backward(forward, call.needs).name


@pytest.mark.parametrize("card", GPUS)
def test_each_direction_runs_the_expected_form(card):
    found = Counter()
    rng = random.Random(card)
    with launches_on(GPUS[card]):
        for _ in range(PROBLEMS):
            p = draw(rng)
            if want := forms(p, GPUS[card]):
                assert chosen(p) == want, p
                found[want] += 1
    pairs = {("raw-short", "raw-short"), ("raw-ampere", "raw-ampere"), ("raw-simt", "raw-simt")}
    pairs |= {("raw-ampere", "raw-simt"), ("reference", "reference")}
    if card == "9.0":
        head, tiles = "raw-hopper-head", "raw-hopper"
        pairs |= {(head, head), (head, tiles), (tiles, head), (tiles, tiles), (tiles, "raw-ampere")}
    assert set(found) == pairs
    assert min(found.values()) >= 5, found


def test_impl_selects_the_form():
    short = Problem(T=40, S=40)
    with launches_on(GPUS["9.0"]):
        for name in ("raw-short", "raw-hopper", "raw-ampere", "raw-simt"):
            assert chosen(short, impl=name) == (name, name)
        # slower here, but selected with impl=
        assert chosen(short, impl="raw-hopper-head") == ("raw-hopper-head",) * 2
        assert chosen(Problem(), impl="raw-short") == ("raw-short", "raw-short")
        with use_impl(flash_attention="raw-hopper"):
            assert chosen(short) == ("raw-hopper", "raw-hopper")
        assert chosen(short, impl="raw") == ("raw-short", "raw-short")
        # the first usable form, starting with the one in impl=
        capped = replace(short, softcap=3.0, dropout_p=0.1)
        assert chosen(capped, impl="raw-hopper") == ("raw-hopper", "raw-ampere")
        with pytest.raises(UnsupportedError, match="raw-hopper-head: .* 40 and 64, the kernel ta"):
            chosen(replace(short, S=64), impl="raw-hopper-head")
        with pytest.raises(UnsupportedError, match="raw-short: the longest sequence is 257"):
            chosen(replace(short, T=257), impl="raw-short")


def test_explain_gives_the_reason_for_each_form():
    q, k, v, given = Problem(T=300, S=300, scale=0.1).arrays()
    described = {"tile": (1, 1)}
    with launches_on(GPUS["9.0"]), mock.patch("gpuattn.ops.attention.hopper._Plan.describe",
                                               lambda *_: described):  # fmt: skip
        told = explain(flash_attention, q, k, v, **given)
    assert (told.chosen, told.gradient, told.details) == ("raw-hopper", "raw-hopper", described)
    want = {
        "raw-short": "the longest sequence is 300, the kernel takes at most 256",
        "raw-hopper-head": "the longest lengths of queries and keys are 300 and 300, the kernel "
        "takes equal ones up to 256",
        "raw-hopper": None,
    }
    for reasons in (told.reasons, told.gradient_reasons):
        assert {name: dict(reasons)[name] for name in want} == want


HERE = "attention/flash_attention"
LAUNCHED = {  # form: (a file of the forward, of the gradient)
    "raw-short": (f"{HERE}_short.cu",) * 2,
    "raw-hopper-head": (f"{HERE}_forward_hopper_head.cu", f"{HERE}_backward_hopper_head.cu"),
    "raw-hopper": (f"{HERE}_forward_hopper.cu", f"{HERE}_backward_hopper.cu"),
    "raw-ampere": (f"{HERE}_forward_ampere.cu", f"{HERE}_backward_ampere"),
    "raw-simt": (f"{HERE}_forward_simt.cu", f"{HERE}_backward_simt.cu"),
}  # fmt: skip
AHEAD = {  # problem: whether the gradient's kernel is compiled in parallel with the forward's
    "short": (Problem(T=40, S=40), False),
    "whole heads": (Problem(B=40), True),
    "whole heads, dropout": (Problem(B=40, dropout_p=0.1), True),
    "few heads": (Problem(B=1), True),
    "long": (Problem(T=300, S=300, causal=False), True),
    "tiles of a head in turn": (Problem(B=22, T=300, S=300), True),
    "head size 128": (Problem(D=128, Dv=128), True),
    "head size 192": (Problem(D=192, Dv=192), True),
    "softcap": (Problem(softcap=3.0), True),
    "negative scale": (Problem(scale=-1.0, window=3, T=300, S=300), True),
    "dropout": (Problem(T=300, S=300, dropout_p=0.1), True),
    "ALiBi, in a fixed order": (Problem(slopes=True, deterministic=True), True),
    "packed": (Problem(packed=True), True),
    "bias": (Problem(bias="bfloat16", wanting=True), False),
    "by raw-ampere": (Problem(softcap=3.0, dropout_p=0.1), False),
    "float32": (Problem("float32", tf32=True), False),
    "no keys": (Problem(S=0, causal=False), False),
}


@pytest.mark.parametrize(("p", "ahead"), AHEAD.values(), ids=AHEAD)
def test_the_gradient_is_compiled_in_parallel_with_the_forward(p, ahead):
    """The gradient launches the kernels that were compiled ahead; each form launches its own."""
    asked = []

    def compile_ahead(file, **constants):
        asked.append((file, tuple(sorted(constants.items()))))

    for cached in (hopper_head._compile_backward, hopper_backward._compile_main):
        cached.cache_clear()
    with (
        launches_on(GPUS["9.0"]) as noted,
        mock.patch.object(kernels, "compile_ahead", compile_ahead),
    ):
        q, k, v, given = p.arrays()
        names = chosen(p)
        boxes = [Tensor(x, requires_grad=True) for x in (q, k, v)]
        out = flash_attention(*boxes, **given)
        forward = len(noted)
        assert len(asked) == ahead
        out.backward(np.ones_like(out.data))
    for direction, launches in enumerate((noted[:forward], noted[forward:])):
        file = LAUNCHED[names[direction]][direction]
        if p.S:
            assert any(launch.file.startswith(file[:-3]) for launch in launches), (names, launches)
    launched = {(launch.file, tuple(sorted(launch.constants))) for launch in noted[forward:]}
    assert set(asked) <= launched


def test_explain_lists_shared_reasons_once():
    x = np.ones((1, 2, 1, 8), np.float32)
    told = str(explain(flash_attention, x, x, x))
    assert told.endswith("  reference        runs\nits gradient: reference, for the same reasons")
