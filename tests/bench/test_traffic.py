"""The byte model of each implementation of attention, beside what the arrays of a call are."""

import numpy as np
import pytest

import gpuattn
from gpuattn import Tensor, flash_attention, traffic
from gpuattn.ops.attention import unfused


def draw(T=48, S=64, H=4, kv_heads=2, D=16, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (2, T, H, D), (2, S, kv_heads, D), (2, S, kv_heads, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_the_tables_of_the_unfused_form_are_those_that_its_steps_read_and_write(
    monkeypatch, dropout_p
):
    """Each product and softmax of a run is watched for arrays as large as a table."""
    q, k, v = draw()
    size, seen = 2 * 4 * 48 * 64, {"read": 0, "written": 0}

    def watched(name):
        function = getattr(unfused, name)

        def call(*arguments):
            result = function(*arguments)
            for x in arguments:
                seen["read"] += x.nbytes if getattr(x, "size", 0) == size else 0
            seen["written"] += result.nbytes if result.size == size else 0
            return result

        monkeypatch.setattr(unfused, name, call)

    for name in ("_product", "_softmax", "_softmax_gradient"):
        watched(name)
    given = {"dropout_p": dropout_p, "seed": 1, "impl": "unfused"}
    leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    out = flash_attention(*leaves, **given)
    forward = dict(seen)
    out.backward(np.ones(out.shape, np.float32))
    backward = {name: seen[name] - forward[name] for name in seen}
    table = 4 * size * (dropout_p > 0)  # what dropout reads and writes is in no such step
    for direction, counted in (("forward", forward), ("backward", backward)):
        model = traffic(flash_attention, q, k, v, direction=direction, **given)
        names = "scores", "weights", "dweights", "dscores"
        assert sum(model.reads.get(name, 0) for name in names) == counted["read"] + table
        assert sum(model.writes.get(name, 0) for name in names) == counted["written"] + table
        assert model.reads.get("dropout mask", 0) == (size if dropout_p else 0)


def test_the_fused_form_moves_each_array_once(monkeypatch):
    from gpuattn.impls import OPS, Impls
    from gpuattn.ops.attention.flash_attention import IMPLS, simt

    forms = [impl for impl in IMPLS if impl.name == "raw-simt"]
    monkeypatch.setattr(simt, "kernel_refusal", lambda *_: None)
    monkeypatch.setattr(simt, "tiles_refusal", lambda *_: None)
    monkeypatch.setitem(OPS, "flash_attention", IMPLS)  # put back, as Impls enters itself
    monkeypatch.setattr("gpuattn.ops.attention.flash_attention.IMPLS",
                        Impls("flash_attention", *forms))  # fmt: skip
    q, k, v = draw(dtype=np.float16)
    model = traffic(flash_attention, q, k, v)
    assert model.impl == "raw-simt"
    assert model.bytes == q.nbytes + k.nbytes + v.nbytes + q.nbytes + 4 * q.size // 16


def test_other_ops_are_counted_as_they_run():
    x, weight = np.ones((8, 16), np.float32), np.ones((32, 16), np.float32)
    model = traffic(gpuattn.linear, x, weight)
    assert (model.reads, model.writes) == ({"arguments": 4 * 640}, {"results": 4 * 256})
    model = traffic(gpuattn.linear, x, weight, direction="backward")
    assert model.writes == {"results": 4 * 640} and model.reads == {"arguments": 4 * (640 + 256)}


def test_a_table_is_printed():
    q, k, v = draw()
    text = str(traffic(flash_attention, q, k, v, impl="unfused"))
    assert text.startswith("flash_attention, unfused, forward: ") and "scores " in text


def test_what_does_not_fit_is_refused():
    q, k, v = draw()
    with pytest.raises(ValueError, match="direction is 'up'; accepted: forward or backward"):
        traffic(flash_attention, q, k, v, direction="up")
    with pytest.raises(TypeError, match="does not choose"):
        traffic(np.sin, q)
