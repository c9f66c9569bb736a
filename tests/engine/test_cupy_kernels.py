"""Generating on a GPU needs next to no kernels of CuPy's own, which compile one after the other."""

import numpy as np
import pytest
from cupy_kernels import recorded
from fake_runs import Array, training_on

from gpuattn.arrays import BFLOAT16
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import Engine, beam, generation, lookup, paged_generation
from gpuattn.models import TranslationConfig, TranslationModel
from gpuattn.models.gpt2 import GPT2, GPT2Config

SIZES = {"vocab": 40, "d_model": 64, "heads": 2}
FEW, MANY = [[5, 6, 7], [8]], [[5, 6, 7], [8]] * 60
BEAM = {"bos": BOS, "eos": EOS, "banned": (0, 1), "beam": 3}
RULES = {"min_length": 2, "no_repeat_ngram": 2}
LONG = [*range(3, 38)] * 2  # more than a page
WORK = {
    "few": ("translation", lambda e: e.translate(FEW, limits=[9] * 2, **BEAM)),
    "many": ("translation", lambda e: e.translate(MANY, limits=[9] * 120, nbest=2, **BEAM)),
    "prefixes": ("translation", lambda e: e.translate(
        MANY, limits=[9] * 120, prefix=[[4]] * 120, **BEAM, **RULES,
    )),
    "submitted": ("translation", lambda e: e.submit(
        [5, 6], limit=9, **BEAM | {"beam": 1},
    ).result()),
    "texts": ("language", lambda e: e.generate(FEW, limits=[9] * 2, banned=(0,), seed=1)),
    "many texts": ("language", lambda e: e.generate(
        MANY, limits=[9] * 120, top_k=9, top_p=0.9, eos=2, tell=lambda *_: None, **RULES,
    )),
    "submitted beams": ("translation", lambda e: e.submit([5, 6], limit=9, **BEAM).result()),
    "pages": ("language", lambda e: e.generate(
        [LONG, [*LONG, 3], [*LONG, *LONG[:60]], [*LONG, *LONG[:60]]], limits=[20] * 4, seed=1,
    )),
    "speculation": ("language", lambda e: e.generate(
        [LONG, [5, 6]], limits=[9] * 2, temperature=0, banned=(0,), speculate=lookup.Speculation(),
    )),
    "submitted text": ("language", lambda e: e.submit([5, 6], limit=9).result()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of numbers that were never computed
@pytest.mark.parametrize("card, dtype", [("9.0", BFLOAT16), ("8.0", "float32")])
def test_the_operations_are_those_that_are_listed(card, dtype, monkeypatch):
    def hypotheses(search, read, slots, limits=()):
        return [[Hypothesis([1], 0.0, 0.0, False)] for _ in slots]  # the fake GPU wrote none

    monkeypatch.setattr(beam, "stable_texts", lambda done, *_: (0 * done, done[:, None]))
    for search in (generation.Generation, beam.TranslationSearch):
        monkeypatch.setattr(search, "hypotheses", hypotheses)
    chosen = lookup.LookupSearch.found  # tokens that the fake GPU did not write either
    monkeypatch.setattr(
        lookup.LookupSearch, "found", lambda self: [*map(np.zeros_like, chosen(self))]
    )
    rounds, compute = [], paged_generation.PagedGeneration._compute
    monkeypatch.setattr(
        paged_generation.PagedGeneration, "_compute",
        lambda self, *x: rounds.append(x) or compute(self, *x),
    )  # fmt: skip
    with training_on(card), recorded() as recorder:
        for name, (kind, work) in WORK.items():
            if kind == "translation":
                config = TranslationConfig(**SIZES, layers=(1, 1), ffn=64)
                model = TranslationModel(config, seed=0).eval()
            else:
                model = GPT2(GPT2Config(**SIZES, layers=1, block=256), seed=0).eval()
            for parameter in model.parameters():
                parameter.data = np.asarray(parameter.data).astype(dtype).view(Array)
            with Engine(model) as engine:
                work(engine)
            assert recorder.unexpected() == [], name
    assert dtype == BFLOAT16 or any(reach.offsets for *_, reach in rounds)
    assert recorder.used or dtype == BFLOAT16


def test_the_recorder_sees_what_cupy_would_compile():
    with training_on("9.0"), recorded() as recorder:
        import cupy

        x, host = cupy.zeros((4, 6), np.float32), np.ones((4, 6), np.float32)
        rows = cupy.asarray(np.array([1, 2], np.int32))
        for free in (
            lambda: x.fill(0), lambda: x.set(host), lambda: x.get(), lambda: x.copy(),
            lambda: x[1:3].copy(), lambda: x.reshape(24)[2:], lambda: cupy.empty_like(x),
            lambda: x.astype(np.float32, copy=False), lambda: cupy.asarray(host),
            lambda: x.__setitem__(slice(1, 3), x[2:4]), lambda: x.__setitem__(..., 0),
            lambda: cupy.ascontiguousarray(x[1:]), lambda: x[:0] + 1,
        ):  # fmt: skip
            free()
        assert not recorder.used
        for name, needed in {
            "fill": lambda: x.fill(1), "add": lambda: x + 1, "add.reduce": lambda: x.sum(),
            "getitem": lambda: x[rows], "setitem of indices": lambda: x.__setitem__(rows, 0),
            "astype float16": lambda: x.astype(np.float16), "arange": lambda: cupy.arange(3),
            "where": lambda: cupy.where(x > 0, x, 1), "greater": lambda: x > 0,
            "concatenate": lambda: cupy.concatenate([x, x]), "copy of a view": lambda: x.T.copy(),
            "get of a view": lambda: x[:, 1].get(), "reshape of a view": lambda: x.T.reshape(24),
            "setitem": lambda: x.__setitem__((slice(None), 1), x[:, 2]),
            "maximum": lambda: cupy.maximum(x, 0), "argsort": lambda: x.argsort(),
            "multiply": lambda: x.__imul__(2), "exp": lambda: cupy.exp(x),
        }.items():  # fmt: skip
            recorder.used.clear()
            needed()
            assert name in {used.name for used in recorder.used}, name
    assert recorder.unexpected()
