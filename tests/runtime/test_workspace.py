"""Flat buffers: parameters as aligned slices, gradients in place, all-or-nothing loads."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import Tensor, nn, no_grad, to_cpu
from gpuattn.errors import CheckpointError, GradientError
from gpuattn.optim import AdamW
from gpuattn.runtime import workspace
from gpuattn.runtime.workspace import Workspace

SHAPES = {"embedding": (10, 30), "norm.weight": (30,), "scale": (), "head.weight": (7, 30)}


class Model:
    """A fake module with the parts that a workspace uses."""

    def __init__(self, seed=0, frozen=()):
        rng = np.random.default_rng(seed)
        self.tensors = {
            name: Tensor(
                rng.standard_normal(shape).astype(np.float32), requires_grad=name not in frozen
            )
            for name, shape in SHAPES.items()
        }

    def named_parameters(self):
        yield from self.tensors.items()

    def loss(self, x):
        """Compute a loss from all parameters but norm.weight; uses the embedding twice."""
        t = self.tensors
        h = np.tanh(x @ t["embedding"]) * t["scale"]
        return np.sum((h @ t["head.weight"].T) ** 2) + np.sum(t["embedding"] * t["embedding"])


def device_of(xp):
    return "numpy" if xp is np else "cuda"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_parameters_become_aligned_slices_with_their_values(xp, dtype):
    model, want = Model(), Model()
    w = Workspace(model, device_of(xp), dtype)
    assert list(w.slots) == list(SHAPES)
    assert w.size % 8192 == 0
    assert w.params.nbytes % 16384 == 0 and w.grads.dtype == dtype_of(dtype)
    for name, tensor in model.tensors.items():
        slot = w.slots[name]
        assert slot.start * w.params.itemsize % 256 == 0
        assert tensor.data.dtype == dtype_of(dtype) and tensor.shape == SHAPES[name]
        expected = want.tensors[name].data.astype(dtype_of(dtype))
        assert to_cpu(tensor.data).tobytes() == expected.tobytes()
        assert (to_cpu(w.weights()[name]) == want.tensors[name].data).all()
        w.params[slot.start : slot.stop] = 3
        assert (tensor.data == 3).all(), "the parameter is not a view of the buffer"
        w.grads[slot.start : slot.stop] = 4
        assert (tensor.grad_slot == 4).all() and tensor.grad_slot.shape == SHAPES[name]
    assert (w.model is None) == (dtype == "float32")
    assert (w.masters is w.params) == (dtype == "float32")
    ends = sorted((slot.start, slot.stop) for slot in w.slots.values())
    assert all(stop <= start for (_, stop), (start, _) in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_frozen_stays_outside(xp, dtype):
    network, other = (nn.FeedForward(3, 5).freeze("inner", "*.bias") for _ in range(2))
    values = network.state()
    workspaces = [Workspace(model, device_of(xp), dtype) for model in (network, other)]
    assert list(workspaces[0].slots) == ["out.weight"] and workspaces[0].size == 8192
    assert {p.dtype for _, p in network.named_tensors()} == {dtype_of(dtype)}
    assert all(isinstance(p.data, xp.ndarray) for _, p in network.named_tensors())
    for kept in (workspaces[0].weights(), workspaces[0].state_dict()):
        assert all(to_cpu(kept[name]).tobytes() == a.tobytes() for name, a in values.items())
    workspaces[1].load_state_dict(workspaces[0].state_dict())
    for name, tensor in other.named_tensors():
        assert to_cpu(tensor.data).tobytes() == values[name].astype(dtype_of(dtype)).tobytes()
    assert workspaces[1].weights()["inner.weight"].tobytes() == values["inner.weight"].tobytes()


def test_only_matrices_decay():
    w = Workspace(Model())
    for name, slot in w.slots.items():
        blocks = w.decay[slot.start // 128 : -(-slot.stop // 128)]
        assert blocks.size and (blocks == (len(slot.shape) == 2)).all(), name
    assert w.decay.size * 128 == w.size
    assert Workspace(Model(frozen=["embedding"])).decay.sum() == 2


def test_gradients_are_written_to_the_buffer_and_accumulate(xp):
    x = xp.asarray(np.random.default_rng(1).standard_normal((4, 10)).astype(np.float32))
    plain, model = Model(), Model()
    for tensor in plain.tensors.values():
        tensor.data = xp.asarray(tensor.data)
    plain.loss(x).backward()
    w = Workspace(model, device_of(xp))
    w.grads.fill(np.nan)  # values of the last update must not matter
    for times in (1, 2):
        w.begin()
        for _ in range(times):
            w.backward(model.loss(x))
        assert w.finish() == ["norm.weight"]
        views = w.slices(w.grads)
        for name, tensor in plain.tensors.items():
            want = 0 if tensor.grad is None else to_cpu(tensor.grad) * times
            np.testing.assert_allclose(to_cpu(views[name]), want, 1e-5, 1e-5, err_msg=name)


def test_the_loss_scale_multiplies_gradients(xp):
    x = xp.ones((2, 10), np.float32)
    grads = []
    for scale in (None, xp.full((), 8, np.float32)):
        model = Model()
        w = Workspace(model, device_of(xp))
        w.begin()
        w.backward(model.loss(x), scale)
        w.finish()
        grads.append(to_cpu(w.grads))
    np.testing.assert_array_equal(grads[0] * 8, grads[1])


def test_an_unrecorded_loss_is_an_error():
    w = Workspace(Model())
    with no_grad():
        loss = w.tensors["scale"] * 2
    with pytest.raises(GradientError, match="not recorded"):
        w.backward(loss)


def test_a_frozen_parameter_does_not_change():
    model = Model(frozen=["embedding"])
    w = Workspace(model)
    optimizer = AdamW(w, weight_decay=0.5)
    before = model.tensors["embedding"].data.copy()
    for _ in range(3):
        w.begin()
        w.backward(model.loss(np.ones((2, 10), np.float32)))
        w.finish()
        optimizer.update(0.1)
    assert (model.tensors["embedding"].data == before).all()
    assert (model.tensors["head.weight"].data != Model().tensors["head.weight"].data).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_round_trip(xp, dtype, rng):
    w, other = (Workspace(Model(seed), device_of(xp), dtype) for seed in (1, 2))
    for buffer in (w.masters, w.exp_avg, w.exp_avg_sq):
        buffer[...] = xp.asarray(rng.standard_normal(w.size).astype(np.float32))
    w.sync_model()
    state = {name: to_cpu(view).copy() for name, view in w.state_dict().items()}
    assert set(state) == {f"{p}{n}" for p in ("", "exp_avg:", "exp_avg_sq:") for n in SHAPES}
    other.load_state_dict(state)
    for name, tensor in other.tensors.items():
        assert (to_cpu(tensor.data) == to_cpu(w.tensors[name].data)).all()
    assert {n: to_cpu(v).tobytes() for n, v in other.state_dict().items()} == {
        n: v.tobytes() for n, v in state.items()
    }
    fresh = Workspace(Model(3), device_of(xp), dtype)
    fresh.load_weights({name: state[name] for name in SHAPES})
    assert (to_cpu(fresh.params) == to_cpu(other.params))[: fresh.slots["scale"].stop].any()
    assert not fresh.exp_avg.any()


def test_without_masters_the_state_has_only_the_parameters(xp, rng):
    options = {"moments": ("exp_avg",), "masters": False}
    w, other = (Workspace(Model(seed), device_of(xp), "bfloat16", **options) for seed in (1, 2))
    assert w.masters is w.params and w.model is None and not hasattr(w, "exp_avg_sq")
    w.exp_avg[...] = xp.asarray(rng.standard_normal(w.size).astype(np.float32))
    state = {name: to_cpu(view).copy() for name, view in w.state_dict().items()}
    assert set(state) == {f"{p}{n}" for p in ("", "exp_avg:") for n in SHAPES}
    assert state["scale"].dtype == w.params.dtype
    other.load_state_dict(state)
    assert to_cpu(other.params).tobytes() == to_cpu(w.params).tobytes()
    weights = {name: to_cpu(view) for name, view in w.weights().items()}
    assert {a.dtype for a in weights.values()} == {np.dtype("float32")}
    fresh = Workspace(Model(3), device_of(xp), "bfloat16", **options)
    fresh.load_weights(weights)
    assert to_cpu(fresh.params).tobytes() == to_cpu(w.params).tobytes()
    with pytest.raises(ValueError, match="masters is False; accepted: True for float16"):
        Workspace(Model(), device_of(xp), "float16", masters=False)


def test_a_load_that_does_not_fit_changes_nothing():
    w = Workspace(Model(1))
    before = w.masters.tobytes()
    good = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    bad = {
        "scale is missing": {k: v for k, v in good.items() if k != "scale"},
        "other is unknown": good | {"other": np.zeros(1)},
        r"head.weight has shape \(30, 7\), want \(7, 30\)": good
        | {"head.weight": np.zeros((30, 7), np.float32)},
        "scale is float64, want float32": good | {"scale": np.zeros(())},
    }
    for message, tensors in bad.items():
        with pytest.raises(CheckpointError, match=f"of another model: {message}"):
            w.load_weights(tensors)
    with pytest.raises(CheckpointError, match="exp_avg:embedding is missing.*and 3 more"):
        w.load_state_dict(good)
    assert w.masters.tobytes() == before


def test_names_the_parameters_with_nonfinite_gradients():
    w = Workspace(Model(), dtype="bfloat16")
    assert w.unusable_gradients() == []
    w.tensors["scale"].grad_slot[...] = np.nan
    w.tensors["head.weight"].grad_slot[3, 4] = np.inf
    assert w.unusable_gradients() == ["scale", "head.weight"]


def test_gradients_may_be_wider_than_the_model():
    w = Workspace(Model(), dtype="bfloat16", grad_dtype="float32")
    assert w.grads.dtype == np.float32 and w.params.dtype == dtype_of("bfloat16")
    assert Workspace(Model(), dtype=np.float32, grad_dtype=np.float16).grads.dtype == np.float16


def test_wider_gradients_take_the_memory_of_those_before(monkeypatch):
    """They come when memory is used up, for batches in parts."""
    model = Model()
    w = Workspace(model, dtype="bfloat16")
    w.backward(model.loss(np.ones((2, 10), w.params.dtype)))
    before, seen = weakref.ref(w.grads), []

    def zeros(size, dtype):
        seen.append(before())
        return np.zeros(size, dtype)

    monkeypatch.setattr(workspace, "get_xp", lambda like: SimpleNamespace(zeros=zeros))
    w.keep_gradients_in("float32")
    assert seen == [None] and w.grads.dtype == np.float32
    assert all(tensor.grad is None for tensor in w.tensors.values())
    assert model.tensors["scale"].grad_slot.base is w.grads


def test_refuses_by_name():
    with pytest.raises(ValueError, match="Workspace: device is 'tpu'; accepted: 'numpy' or 'cuda'"):
        Workspace(Model(), "tpu")
    with pytest.raises(ValueError, match="Workspace: dtype is 'float64'; accepted: float32, float"):
        Workspace(Model(), dtype="float64")
    model = Model()
    model.tensors["scale"].data = np.zeros(())
    with pytest.raises(TypeError, match="Workspace: scale is numpy float64; accepted: a float32"):
        Workspace(model)
