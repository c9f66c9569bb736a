"""Choosing, explaining and overriding implementations."""

import threading

import numpy as np
import pytest

import gpuattn
from gpuattn import softmax, use_impl
from gpuattn.errors import SlowPathWarning, UnsupportedError
from gpuattn.impls import OPS, Impl, Impls, choose, explain

X = np.ones((2, 4), np.float32)


def made(name):
    return lambda x, needs: (name, None)


PICKY = Impls(
    "picky",
    Impl("raw-hopper", made("raw-hopper"), refuse=lambda x: "the GPU is too old"),
    Impl("raw-simt", made("raw-simt"), refuse=lambda x: "x is odd" if x.size % 2 else None),
    Impl("reference", made("reference")),
)


def test_the_first_that_accepts_runs():
    assert choose(PICKY, [X]).name == "raw-simt"
    assert choose(PICKY, [X[:1, :3]]).name == "reference"


def test_raw_means_the_first_raw_that_accepts():
    assert choose(PICKY, [X], "raw").name == "raw-simt"


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


def test_every_op_ends_with_a_reference():
    public = {name for name in OPS if name in gpuattn.__all__}
    assert len(public) >= 12
    for name in public:
        assert OPS[name][-1].name == "reference"
        assert OPS[name][-1].refuse is None, f"{name}: the reference accepts everything"


def test_passing_over_a_kernel_on_a_gpu_is_said(gpu):
    with pytest.warns(SlowPathWarning, match="softmax uses reference because"):
        softmax(gpu.ones((2, 4), "float64"))
