"""What chapters share: both directions of a form, texts one token after the other, counts."""

import warnings

import numpy as np
import pytest

import gpuattn
from gpuattn.errors import SlowPathWarning, warn_slow_path
from gpuattn.lecture.harness import chapters, counted
from gpuattn.lecture.harness.forms import (
    both_ways,
    cache_bytes,
    difference,
    doublings,
    generate,
    gradients,
    host_peak,
)
from gpuattn.lecture.harness.say import Say

CONFIG = gpuattn.models.GPT2Config(vocab=16, d_model=16, heads=2, layers=1, block=16)


def test_both_ways_gives_the_result_and_gradients(rng):
    a, b = rng.standard_normal((2, 3))
    out, da, db = both_ways(lambda a, b: a * b, a, b)
    np.testing.assert_allclose((out, da, db), (a * b, a * b * b, a * b * a))
    assert both_ways(lambda a: 2 * a, a, grad=np.ones(3))[1].tolist() == [2, 2, 2]


def test_a_difference_is_the_largest_of_arrays_tensors_and_lists():
    a, b = np.zeros(3), gpuattn.Tensor(np.array([0.0, -2.0, 1.0]))
    assert difference(a, b) == 2
    assert difference([a, (a, a)], [a, (a, b)]) == 2
    assert np.isnan(difference(a, a + np.nan))
    with pytest.raises(ValueError, match="zip"):
        difference([a], [a, b])


def test_texts_are_generated_with_and_without_a_cache():
    model, prompts = gpuattn.models.GPT2(CONFIG), np.array([[3], [5]])
    text = generate(model, prompts, prompts[:, 0], 4)
    assert text.shape == (2, 4)
    assert (generate(model, prompts, prompts[:, 0], 4, kv_cache=False) == text).all()
    stepper = model.stepper(prompts, 4)
    first = stepper.step(prompts[:, 0], 0).argmax(-1)
    assert (text[:, 0] == first).all()
    assert (text[:, 1] == stepper.step(first, 1).argmax(-1)).all()


def test_gradients_are_of_one_batch_only():
    model, tokens = gpuattn.models.GPT2(CONFIG), np.arange(8)[None]
    once = gradients(model, tokens, tokens)
    assert once.size == sum(p.size for p in model.parameters())
    assert (gradients(model, tokens, tokens) == once).all()


def test_sizes():
    assert doublings(8, 70) == [8, 16, 32, 64] and doublings(1, 1) == [1]
    assert cache_bytes(4, 2, 10, 8) == 2 * 8 * 10 * 2 * 8 * 4
    assert host_peak(lambda: np.ones(1 << 16)) >= 8 << 16


def test_two_forms_are_compared_by_their_calls():
    say, x = Say(tell=lambda line: None), gpuattn.Tensor(np.ones((4, 8), np.float32))
    forms = {"fused": lambda x: x + 2.0, "op by op": lambda x: x + 1.0 + 1.0}
    moved = counted.compare(say, "B12", forms, x)
    assert [s["verdict"] for s in say.statements] == ["near", "order", "order"]
    assert moved == {"fused": 2.0, "op by op": 4.0}


@pytest.mark.parametrize("text, shown", [
    ("softmax uses reference because:\n  raw-simt: x is float64, the kernel takes float32", False),
    ("flash_attention uses raw-simt because:\n  raw-ampere: q is float32: tf32=True", False),
    ("softmax uses reference because:\n  raw-simt: there is no compiler", True),
    ("a matrix product takes a slower path because a is float32 and b is float16", True),
])  # fmt: skip
def test_a_chapter_is_silent_about_the_dtype_that_it_chose(monkeypatch, text, shown):
    monkeypatch.setattr(chapters.runpy, "run_path", lambda path: warn_slow_path(text))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        entry = chapters.run(chapters.chapters()[17], Say(smoke=True))
    assert entry["error"] is None
    assert sum(w.category is SlowPathWarning for w in seen) == shown
