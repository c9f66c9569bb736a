"""What a run compiles ahead is what it launches: on a fake GPU. Bits stay: on a GPU."""

import dataclasses

import numpy as np
import pytest
from checks import sampled
from cupy_kernels import recorded
from fake_runs import training_on

from gpuattn.arrays import to_cpu
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import prepare
from gpuattn.data.preparing.sources import find_sources
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import beam, generation
from gpuattn.runs.config import TrainConfig
from gpuattn.tasks.registry import task_of
from gpuattn.tasks.users import engines
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.state import tensors_of
from gpuattn.train.trainer import Trainer

SIZES = {"dim": 64, "heads": 2, "layers": 1, "length": "2u", "eval_every": "1u"}


@pytest.fixture
def translation(reversed_text):
    return TrainConfig(
        **reversed_text, **SIZES, ffn=64, vocab_size=300, max_len=40, dropout=0.1, batch=256,
        ema=0.9,
    )  # fmt: skip


@pytest.fixture
def language(tmp_path, rng):
    (tmp_path / "text").write_text("".join(rng.choice(list("abcdefgh \n"), 9000)))
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", block=64, dropout=0.1,
        batch=1024, accumulate=2, **SIZES,
    )  # fmt: skip


@pytest.fixture
def documents(language, tmp_path, rng):
    lines = (" ".join(rng.choice(list("abcdefgh"), 9)) for _ in range(400))
    (tmp_path / "text.jsonl").write_text("".join(f'"{line}"\n' for line in lines))
    plan = Plan(sources=tuple(find_sources([tmp_path / "text.jsonl"])), tokenizer="chars",
                documents=True)  # fmt: skip
    store = prepare(plan, tmp_path / "store")
    return dataclasses.replace(language, lm=str(store.folder), tokenizer="subwords", documents=True)


@pytest.fixture
def images(tmp_path, rng):
    pictures, labels = rng.integers(0, 256, (72, 16, 16, 3), np.uint8), np.arange(72) % 5
    np.savez(tmp_path / "images.npz", images=pictures, labels=labels)
    return TrainConfig(
        model="vit", images=str(tmp_path / "images.npz"), image_size=14, patch=7, channels=3,
        batch=16, stochastic_depth=0.1, mixup=0.2, flip=True, shift=1, **SIZES,
    )  # fmt: skip


OWN = {"translation": "sampling/beam_update.cu", "language": "sampling/text_update.cu",
       "documents": "sampling/text_update.cu", "images": "image_patches.cu"}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of numbers that were never computed
@pytest.mark.parametrize("kind, card", sampled([
    ("translation", "9.0"), ("language", "7.5"), ("images", "9.0"), ("translation", "8.0"),
    ("language", "9.0"), ("images", "8.0"), ("documents", "9.0"), ("language", "8.0"),
], 3))  # fmt: skip
def test_a_run_compiles_ahead_what_it_launches_and_nothing_else(
    kind, card, request, tmp_path, monkeypatch
):
    def hypotheses(search, read, slots, limits=()):
        return [[Hypothesis([1] * 120, 0.0, 0.0, False)] for _ in slots]  # the fake GPU wrote none

    for search in (generation.Generation, beam.TranslationSearch):
        monkeypatch.setattr(search, "hypotheses", hypotheses)
    # a user of a model rehearses too, right before it decodes
    monkeypatch.setattr(engines, "rehearse", lambda work: None)
    config = request.getfixturevalue(kind)
    with training_on(card) as run, recorded() as recorder:
        train(config, tmp_path / "run", device="cuda")
    assert run.launched() == run.rehearsed
    kinds = {dict(constants).get("scalar") for _, constants in run.launched()}
    assert {"f16", "bf16"} & kinds == ({"f16"} if card == "7.5" else {"bf16"})  # by default
    # CuPy adds ViT's class token, drops its branches, and sorts the positions of documents
    if kind in ("translation", "language"):
        assert recorder.unexpected() == []
    files = {file for file, _ in run.rehearsed}
    assert {"update/adamw.cu", OWN[kind]} <= files


def test_a_rehearsal_launches_and_multiplies_nothing(translation):
    with training_on("9.0") as run:
        trainer = Trainer(task_of(translation)(translation), "cuda", Listener())
        trainer.rehearse()
        assert len(run.rehearsed) > 5 and not run.launches and not run.products.computed


@pytest.mark.parametrize("kind", ["translation", "language", "images"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_rehearsal_changes_no_bit(gpu, kind, precision, request):
    config = dataclasses.replace(request.getfixturevalue(kind), precision=precision, length="4u")
    states = []
    for rehearsed in (False, True):
        trainer = Trainer(task_of(config)(config), "cuda", Listener())
        if rehearsed:
            trainer.rehearse()
        row = {"loss": 0.0, "score": 0.0}
        assert trainer.run(lambda: False, lambda row=row: row, lambda row: None)
        states.append({name: to_cpu(array) for name, array in tensors_of(trainer.step).items()})
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)
