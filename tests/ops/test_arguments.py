"""Invalid values for every argument of every public op: the error names op and argument."""

import inspect

import numpy as np
import pytest

import gpuattn
from gpuattn.errors import UnsupportedError

SIZE = 128


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def integers(*shape):
    return np.zeros(shape, np.int32)


def update(**more):
    """Return the arguments of an optimizer op."""
    state = gpuattn.OptimizerState(numbers(SIZE))
    return {"params": numbers(SIZE), "grads": numbers(SIZE), "state": state, **more}


def cache():
    return {"k_cache": numbers(1, 8, 1, 4), "v_cache": numbers(1, 8, 1, 4), "lengths": integers(1)}


HEADS = 1, 2, 1, 4
CALLS = {
    "softmax": lambda: {"x": numbers(2, 3)},
    "layer_norm": lambda: {"x": numbers(2, 3)},
    "rms_norm": lambda: {"x": numbers(2, 3)},
    "dropout": lambda: {"x": numbers(2, 3), "p": 0.5},
    "dropout_add_norm": lambda: {
        "x": numbers(2, 3), "residual": numbers(2, 3), "weight": numbers(3),
    },
    "linear": lambda: {"x": numbers(2, 3), "weight": numbers(4, 3)},
    "linear_dropout_add_norm": lambda: {
        "x": numbers(2, 3), "projection": numbers(4, 3), "residual": numbers(2, 4),
        "weight": numbers(4),
    },
    "gelu": lambda: {"x": numbers(2, 4)},
    "relu": lambda: {"x": numbers(2, 4)},
    "silu": lambda: {"x": numbers(2, 4)},
    "swiglu": lambda: {"x": numbers(2, 4)},
    "embedding": lambda: {"tokens": integers(2), "weight": numbers(4, 3)},
    "cross_entropy": lambda: {"logits": numbers(2, 3), "labels": integers(2)},
    "linear_cross_entropy": lambda: {
        "x": numbers(2, 3), "weight": numbers(4, 3), "labels": integers(2),
    },
    "rotary": lambda: {"q": numbers(*HEADS), "k": numbers(*HEADS)},
    "flash_attention": lambda: {name: numbers(*HEADS) for name in "qkv"},
    "scaled_dot_product_attention": lambda: {
        name: numbers(*HEADS) for name in ("query", "key", "value")
    },
    "decode_attention": lambda: {"q": numbers(1, 1, 1, 4), **cache()},
    "append_kv": lambda: {"k": numbers(1, 1, 1, 4), "v": numbers(1, 1, 1, 4), **cache()},
    "topk_logprobs": lambda: {"logits": numbers(2, 5), "k": 2},
    "beam_step": lambda: {"logits": numbers(2, 5), "scores": numbers(1, 2)},
    "sample_tokens": lambda: {"logits": numbers(2, 5)},
    "adamw": lambda: update(exp_avg=numbers(SIZE), exp_avg_sq=abs(numbers(SIZE))),
    "lion": lambda: update(exp_avg=numbers(SIZE)),
    "lamb": lambda: update(
        exp_avg=numbers(SIZE), exp_avg_sq=abs(numbers(SIZE)),
        tensors=gpuattn.TensorTable(numbers(SIZE), [0], SIZE, [True]),
    ),
    "sgd": lambda: update(velocity=None),
    "gradient_statistics": lambda: {
        "grads": numbers(SIZE), "state": gpuattn.OptimizerState(numbers(SIZE)),
    },
}  # fmt: skip
NONE_IS_FINE = {
    ("dropout_add_norm", "weight"), ("linear_dropout_add_norm", "weight"), ("sgd", "velocity"),
}  # fmt: skip


class WantsGradient:
    """A tensor of another library that requires a gradient and therefore refuses export."""

    requires_grad = True

    def __dlpack__(self, **kwargs):
        raise BufferError("Can't export tensors that require gradient")

    def __dlpack_device__(self):
        return 1, 0


JUNK = {
    "a word": "a", "a list": [1.0], "an object": object(), "a tensor": WantsGradient(),
    "a masked array": np.ma.masked_array(numbers(2, 3), numbers(2, 3) > 0),
}  # fmt: skip
with pytest.warns(PendingDeprecationWarning):
    JUNK["a matrix"] = np.matrix([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("junk", JUNK)
def test_invalid_arguments_are_named(name, junk):
    op = getattr(gpuattn, name)
    for argument in inspect.signature(op).parameters:
        with pytest.raises((TypeError, ValueError)) as raised:
            op(**CALLS[name]() | {argument: JUNK[junk]})
        assert str(raised.value).startswith(f"{name}: {argument}"), argument


def test_every_op_is_tested():
    """Every op with an ``impl`` argument has a row; the other rows select no implementation."""
    ops = {name for name in gpuattn.__all__ if callable(getattr(gpuattn, name))}
    takes = {n for n in ops if "impl" in inspect.signature(getattr(gpuattn, n)).parameters}
    assert takes | {"scaled_dot_product_attention"} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_none_for_a_required_argument(name):
    op = getattr(gpuattn, name)
    op(**CALLS[name]())
    for argument, parameter in inspect.signature(op).parameters.items():
        if parameter.default is inspect.Parameter.empty and (name, argument) not in NONE_IS_FINE:
            with pytest.raises(TypeError, match=rf"^{name}: {argument}\S* is None; accepted"):
                op(**CALLS[name]() | {argument: None})


@pytest.mark.parametrize("name", CALLS)
def test_flags_are_true_or_false(name):
    op = getattr(gpuattn, name)
    flags = [n for n, p in inspect.signature(op).parameters.items() if isinstance(p.default, bool)]
    for argument in flags:
        for value in ("no", 1, None):
            message = f"^{name}: {argument} is {value!r}; accepted: True or False"
            with pytest.raises(TypeError, match=message):
                op(**CALLS[name]() | {argument: value})
        if argument != "nesterov":  # which needs momentum too
            op(**CALLS[name]() | {argument: np.True_})


def test_numpy_booleans_are_accepted_as_flags():
    q, k, v = CALLS["flash_attention"]().values()
    q = k = v = numbers(1, 5, 2, 4)
    want = gpuattn.flash_attention(q, k, v, causal=True)
    np.testing.assert_array_equal(gpuattn.flash_attention(q, k, v, causal=np.True_), want)


@pytest.mark.parametrize("dtype, said", [
    ("float32", "accepted: float32 or bool$"), ("float16", "accepted: float16 or float32 or bool$"),
])  # fmt: skip
def test_a_dtype_is_listed_once(dtype, said):
    q = numbers(1, 4, 2, 8).astype(dtype)
    with pytest.raises(TypeError, match=said):
        gpuattn.flash_attention(q, q, q, bias=np.ones((4, 4), np.int32))


def test_a_wrong_offset_dtype_is_a_type_error():
    q = numbers(4, 2, 8)
    with pytest.raises(TypeError, match=r"cu_seqlens_q\.dtype is int64; accepted: int32.*astype"):
        gpuattn.flash_attention(q, q, q, cu_seqlens_q=np.array([0, 4]))
    with pytest.raises(ValueError, match=r"cu_seqlens_q\.shape"):
        gpuattn.flash_attention(q, q, q, cu_seqlens_q=np.zeros((1, 2), np.int32))


def test_a_seed_is_checked_without_dropout_too():
    with pytest.raises(TypeError, match=r"dropout: seed is 1\.5; accepted: an int, .*Key"):
        gpuattn.dropout(numbers(3), 0.0, seed=1.5)


def test_an_unknown_implementation_is_named():
    with pytest.raises(UnsupportedError, match="softmax: impl='fast' is not one of: raw-simt"):
        gpuattn.softmax(numbers(3), impl="fast")
