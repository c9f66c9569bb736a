"""Choosing, explaining and overriding implementations."""

import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest

import gpuattn
from gpuattn import impls, softmax, use_impl
from gpuattn.autodiff import plans, tape
from gpuattn.errors import (
    HardwareRefusal,
    KernelCompileError,
    SlowerRefusal,
    SlowPathWarning,
    UnsupportedError,
)
from gpuattn.impls import OPS, Call, Impl, Impls, choose, choose_backward, explain

X = np.ones((2, 4), np.float32)


def made(name):
    return lambda x, needs: (name, None)


PICKY = Impls(
    "picky",
    Impl("raw-hopper", made("raw-hopper"), refuse=lambda x, **_: "the GPU is too old"),
    Impl("raw-simt", made("raw-simt"), refuse=lambda x, **_: "x is odd" if x.size % 2 else None),
    Impl("reference", made("reference")),
)


def test_the_first_that_accepts_runs():
    assert choose(PICKY, [X]).name == "raw-simt"
    assert choose(PICKY, [X[:1, :3]]).name == "reference"


def test_raw_means_the_first_that_accepts_and_is_neither_numba_nor_the_reference():
    assert choose(PICKY, [X], "raw").name == "raw-simt"
    library = Impls("op", *(Impl(name, made(name)) for name in ("numba", "cublaslt", "reference")))
    assert choose(library, [X], "raw").name == "cublaslt"
    with pytest.raises(UnsupportedError, match="'raw' is not one of: numba"):
        choose(Impls("op", library[0]), [X], "raw")


def test_every_refusal_is_in_the_error():
    with pytest.raises(UnsupportedError, match="raw-hopper: the GPU is too old") as info:
        choose(PICKY, [X[:1, :3]], "raw")
    assert "raw-simt: x is odd" in str(info.value)


def test_unknown_name_lists_the_known():
    with pytest.raises(UnsupportedError, match="raw-hopper, raw-simt, reference, raw"):
        choose(PICKY, [X], "fast")


def test_explain_is_data_and_computes_nothing():
    answer = explain(softmax, X)
    assert answer.chosen == "reference"
    assert dict(answer.reasons)["raw-simt"]
    assert answer.as_dict()["op"] == "softmax"
    assert "softmax: reference" in str(answer)
    assert "\n  raw-simt   x is a NumPy array; move it" in str(answer)
    assert str(answer).endswith("\n  reference  runs")


TAKES = {
    "tile": (128, 64), "threads": 256, "registers": 168, "shared_bytes": 100_352, "blocks": 1024,
    "waves": 7.7576, "limit": "registers, 1 at a time on a multiprocessor",
}  # fmt: skip


def described(describe):
    """Return an op whose last implementation but one tells what it takes."""
    raw = Impl("raw-simt", made("raw-simt"), describe=describe)
    return Impls("op", PICKY[0], raw, Impl("reference", made("reference")))


def test_explain_tells_what_the_chosen_takes():
    op = described(lambda x, times: TAKES | {"blocks": times * x.size})
    answer = explain(tape.op(lambda: Call(op, (X,), times=3)))
    assert answer.details["blocks"] == 24 == answer.as_dict()["details"]["blocks"]
    assert str(answer).splitlines() == [
        "op: raw-simt",
        "  raw-hopper  the GPU is too old",
        "  raw-simt    runs",
        "              tile 128 x 64, 256 threads, 168 registers each, 98.0 KiB of shared memory",
        "              24 blocks, 7.76 waves, limit: registers, 1 at a time on a multiprocessor",
        "  reference   would run, but comes later",
    ]
    assert explain(softmax, X).details is None


def test_what_cannot_be_described_is_not_chosen(monkeypatch):
    monkeypatch.setattr(impls, "_broken", {})

    def broken(x):
        raise KernelCompileError("x.cu does not compile")

    answer = explain(tape.op(lambda: Call(described(broken), (X,))))
    assert answer.chosen == "reference"
    assert dict(answer.reasons)["raw-simt"] == "x.cu does not compile"


def test_explain_refuses_what_has_no_choice():
    with pytest.raises(TypeError, match="does not choose"):
        explain(np.tanh, X)


def test_explain_passes_bad_arguments_on():
    with pytest.raises(TypeError):
        explain(softmax, X.astype(int))


def test_use_impl_is_for_a_block_and_a_thread():
    seen = []
    with use_impl(softmax="numba"):
        with pytest.raises(UnsupportedError, match="numba"):
            softmax(X)
        worker = threading.Thread(target=lambda: seen.append(softmax(X)))
        worker.start()
        worker.join()
    assert len(seen) == 1, "another thread keeps its own choice"
    assert softmax(X).shape == X.shape


def test_use_impl_names_what_is_wrong():
    with pytest.raises(ValueError, match="no op 'sofmax'"), use_impl(sofmax="numba"):
        pass
    with pytest.raises(ValueError, match="softmax has no 'fast'"), use_impl(softmax="fast"):
        pass


def rule(name, refuse_backward=None, **kwargs):
    return Impl(
        name, made(name), backward=lambda saved, grad, **_: (grad * len(name),),
        refuse_backward=refuse_backward, **kwargs,
    )  # fmt: skip


def directed(forward=None, backward=None, **kwargs):
    """Return an op whose first implementation may refuse either direction."""
    first = rule("raw-fast", backward or (lambda x, **_: None), refuse=forward, **kwargs)
    return Impls("directed", first, rule("raw-simt"), rule("reference"))


def test_each_direction_is_chosen_by_itself():
    op = directed(backward=lambda x, needs: "needs its own gradient" if needs[0] else None)
    forward = choose(op, [X])
    assert forward.name == "raw-fast"
    assert choose_backward(op, forward, [X], needs=(True,)).name == "raw-simt"
    assert choose_backward(op, forward, [X], needs=(False,)).name == "raw-fast"
    other = directed(forward=lambda x, **_: "x is too small")
    assert choose(other, [X]).name == "raw-simt"
    assert choose_backward(other, other[1], [X], needs=(True,)).name == "raw-fast"
    # asked for by name, its own gradient comes before those listed above it
    assert choose_backward(other, other[1], [X], "raw-simt", needs=(True,)).name == "raw-simt"


def test_the_tape_runs_the_backward_that_was_chosen():
    op = directed(backward=lambda x, **_: "not here")
    x = gpuattn.Tensor(np.ones(2), requires_grad=True)
    op = Impls(op.op, *(replace(i, forward=lambda x, needs: (x.copy(), None)) for i in op))
    tape.apply(op, (x,)).sum().backward()
    np.testing.assert_array_equal(x.grad, len("raw-simt") * np.ones(2))


def test_explain_tells_both_directions():
    op = directed(backward=lambda x, needs: "x is odd" if needs[0] else None)
    answer = explain(tape.op(lambda: Call(op, (X,))))
    assert (answer.chosen, answer.gradient) == ("raw-fast", "raw-simt")
    assert dict(answer.gradient_reasons)["raw-fast"] == "x is odd"
    assert "its gradient: raw-simt\n  raw-fast   x is odd\n  raw-simt   runs" in str(answer)
    assert answer.as_dict()["gradients"][0] == {"impl": "raw-fast", "refusal": "x is odd"}
    assert explain(softmax, X).gradient is None


def test_a_slower_one_runs_if_asked_for_by_name():
    op = directed(forward=lambda x, **_: SlowerRefusal("raw-simt is faster for 4 columns"))
    assert choose(op, [X]).name == "raw-simt"
    assert choose(op, [X], "raw-fast").name == "raw-fast"
    assert choose(op, [X], "raw").name == "raw-simt"


@pytest.mark.parametrize("forward, kwargs", [
    (lambda x, **_: SlowerRefusal("slower"), {}),
    (lambda x, **_: HardwareRefusal("another GPU"), {}),
    (lambda x, **_: "x has no 64 columns", {"specialized": True}),
])  # fmt: skip
def test_refusals_that_no_argument_can_avoid_do_not_warn(as_if_on_gpu, forward, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(directed(forward=forward, **kwargs), [X]).name == "raw-simt"


def test_the_gradient_begins_to_compile_before_the_forward():
    order = []
    op = directed(compile_backward=lambda x, needs: order.append(needs))
    op = Impls(op.op, replace(op[0], forward=lambda x, needs: (order.append("run") or x, None)))
    tape.apply(op, (gpuattn.Tensor(X, requires_grad=True),))
    assert order == [(True,), "run"]
    tape.apply(op, (X,))
    assert order[2:] == ["run"]


def test_every_op_ends_with_a_reference():
    public = {name for name in OPS if name in gpuattn.__all__}
    assert len(public) >= 12
    for name in public:
        assert OPS[name][-1].name == "reference"
        assert OPS[name][-1].refuse is None, f"{name}: the reference accepts everything"


def test_use_impl_knows_every_public_op_with_a_choice():
    with use_impl(scaled_dot_product_attention="numba"), pytest.raises(UnsupportedError):
        gpuattn.scaled_dot_product_attention(*[np.ones((1, 1, 2, 4), np.float32)] * 3)


X4 = np.ones((1, 2, 2, 4), np.float32)
TOKENS, FLAT = np.zeros(2, np.int32), np.zeros(128, np.float32)
STATE = gpuattn.OptimizerState(FLAT)
CALLS = {
    "adamw": (FLAT, FLAT, FLAT, FLAT, STATE),
    "lamb": (FLAT, FLAT, FLAT, FLAT, STATE, gpuattn.TensorTable(FLAT, (0,), 128, (True,))),
    "lion": (FLAT, FLAT, FLAT, STATE),
    "sgd": (FLAT, FLAT, None, STATE),
    "append_kv": (X4, X4, X4[:, :1], X4[:, :1], np.zeros(1, np.int32)),
    "beam_step": (X, X[:1, :2]),
    "cross_entropy": (X, TOKENS),
    "decode_attention": (X4, X4, X4, np.ones(1, np.int32)),
    "dropout": (X, 0.5),
    "dropout_add_norm": (X, X, X[0]),
    "embedding": (TOKENS, X),
    "flash_attention": (X4, X4, X4),
    "gelu": (X,),
    "gradient_statistics": (FLAT, STATE),
    "layer_norm": (X,),
    "linear": (X, X),
    "linear_cross_entropy": (X, X, TOKENS),
    "linear_dropout_add_norm": (X, X, X @ X.T, X[:, 0]),
    "relu": (X,),
    "rms_norm": (X,),
    "rotary": (X4, X4),
    "sample_tokens": (X,),
    "scaled_dot_product_attention": (X4, X4, X4),
    "silu": (X,),
    "softmax": (X,),
    "swiglu": (X,),
    "topk_logprobs": (X, 2),
}


def test_calls_are_of_all_public_ops():
    assert set(CALLS) == set(OPS) & set(gpuattn.__all__)


@pytest.mark.parametrize("op", CALLS)
def test_every_public_op_is_explained(op):
    answer = explain(getattr(gpuattn, op), *CALLS[op])
    assert answer.chosen == "reference"
    raw = "cublaslt" if op in ("linear", "linear_dropout_add_norm") else "raw-simt"
    assert "NumPy array" in dict(answer.reasons)[raw]


def test_explain_draws_no_seed():
    gpuattn.manual_seed(1)
    want = gpuattn.dropout(X, 0.5)
    gpuattn.manual_seed(1)
    explain(gpuattn.dropout, X, 0.5)
    np.testing.assert_array_equal(gpuattn.dropout(X, 0.5), want)


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """Slow paths are only spoken of for arrays on a GPU."""
    monkeypatch.setattr(impls, "on_gpu", lambda x: isinstance(x, np.ndarray))
    monkeypatch.setattr(plans, "table", plans.Table())


def test_the_warning_points_at_the_line_of_the_user_and_comes_once(as_if_on_gpu):
    layer = gpuattn.nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            softmax(X)
            gpuattn.scaled_dot_product_attention(X4, X4, X4)
            layer(X)
            gpuattn.grad(lambda x: gpuattn.gelu(x).sum())(X)
    assert [w.filename for w in seen] == [__file__] * 4
    assert all(w.category is SlowPathWarning for w in seen)


def test_a_kernel_that_does_not_compile_is_passed_over_from_then_on(as_if_on_gpu, monkeypatch):
    monkeypatch.setattr(impls, "_broken", {})
    calls = []

    def broken(x, *, needs):
        calls.append(1)
        raise KernelCompileError("x.cu does not compile\nfull text and log: /tmp/x")

    op = Impls("op", Impl("raw-simt", broken), Impl("reference", made("reference")))
    with pytest.warns(
        SlowPathWarning, match="op uses reference because:\n  raw-simt: x.cu does not"
    ):
        assert tape.apply(op, (X,)) == "reference"
    with pytest.warns(SlowPathWarning, match="full text and log"):
        assert tape.apply(op, (X,)) == "reference"
    assert len(calls) == 1
    with pytest.raises(UnsupportedError, match="does not compile"):
        tape.apply(op, (X,), "raw-simt")
    impls._broken.clear()
    with pytest.raises(KernelCompileError):
        tape.apply(op, (X,), "raw")


def test_passing_over_a_kernel_on_a_gpu_is_said(gpu):
    with pytest.warns(SlowPathWarning, match="softmax uses reference because"):
        softmax(gpu.ones((2, 4), "float64"))
