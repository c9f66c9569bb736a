"""Models of transformers compute the same here, and their tensors come back bit for bit.

``golden/`` is written by ``tests/support/golden_models.py``.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuattn

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_results_are_those_of_transformers(folder):
    expected = dict(np.load(folder / "expected.npz"))
    given = {n: expected.pop(n).astype(np.int32) for n in ("tokens", "types", "lengths")
             if n in expected}  # fmt: skip
    assert given["tokens"].shape[1] == json.loads((folder / "config.json").read_text()).get(
        "n_positions", 11
    )
    real = np.arange(11) < given.get("lengths", np.full(3, 11))[:, None]
    model, tokens = gpuattn.load_pretrained(folder, device="numpy"), given.pop("tokens")
    with model.evaluating():
        if "logits" in expected:
            logits = model.logits(tokens, **given).data[..., : model.config.vocab]
            np.testing.assert_allclose(
                logits[real], expected.pop("logits")[real], rtol=0, atol=1e-5
            )
        if expected:
            states = model.states(tokens, **given)
            found = {"states": states.data[real], "pooled": model.pooled(states).data}
            expected["states"] = expected["states"][real]
            for name, values in expected.items():
                np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_saving_gives_the_tensors_bit_for_bit(folder, tmp_path):
    model = gpuattn.load_pretrained(folder, device="numpy")
    gpuattn.save_pretrained(model, tmp_path / "out")
    old, new = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert old.keys() == new.keys()
    for name, values in old.items():
        assert values.dtype == new[name].dtype and values.shape == new[name].shape, name
        assert values.tobytes() == new[name].tobytes(), name
    configs = [json.loads((p / "config.json").read_text()) for p in (folder, tmp_path / "out")]
    assert configs[0] == configs[1]
