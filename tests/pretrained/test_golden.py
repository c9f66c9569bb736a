"""Models of transformers compute the same here, and their tensors come back bit for bit.

``golden/`` is written by ``tests/support/golden_models.py``.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuattn
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.pretrained import files

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_results_are_those_of_transformers(folder):
    expected = dict(np.load(folder / "expected.npz"))
    if "images" in expected:
        check_images(gpuattn.load_pretrained(folder, device="numpy"), **expected)
        return
    given = inputs_of(expected)
    assert given["tokens"].shape[1] == json.loads((folder / "config.json").read_text()).get(
        "n_positions", 11
    )
    real = real_tokens(given)
    model, tokens = gpuattn.load_pretrained(folder, device="numpy"), given.pop("tokens")
    with model.evaluating():
        if "logits" in expected:
            logits, want = model.logits(tokens, **given).data, expected.pop("logits")
            if want.ndim == 3:  # of tokens, not of texts
                logits, want = logits[real][:, : model.config.vocab], want[real]
            np.testing.assert_allclose(logits, want, rtol=0, atol=1e-5)
        if expected:
            states = model.states(tokens, **given)
            found = {"states": states.data[real], "pooled": model.pooled(states).data}
            expected["states"] = expected["states"][real]
            for name, values in expected.items():
                np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5)


def inputs_of(expected):
    """Take the integer arrays that a model of texts is given from ``expected``."""
    names = "tokens", "types", "lengths", "target"
    return {n: expected.pop(n).astype(np.int32) for n in names if n in expected}


def real_tokens(given):
    """Return where tokens are no padding, bool (3, 11)."""
    lengths = np.full(3, 11) if "target" in given else given.get("lengths", np.full(3, 11))
    return np.arange(11) < lengths[:, None]


def check_images(model, images, logits=None, states=None):
    with model.evaluating():
        found = model.states(images) if logits is None else model.logits(images)
    np.testing.assert_allclose(found.data, states if logits is None else logits, rtol=0, atol=1e-5)


LABELLED = [path for path in FOLDERS if "logits" in np.load(path / "expected.npz").files]
NEAR = 0.03  # two roundings of a logit of up to 4 in bfloat16: either of two may be the greater


@pytest.mark.parametrize("folder", LABELLED, ids=lambda path: path.name)
def test_the_best_token_in_bfloat16_is_that_of_transformers(xp, folder):
    """On a GPU by the kernels for 16 bits. Where the two best are near each other, either is."""
    expected = dict(np.load(folder / "expected.npz"))
    device = "numpy" if xp is np else "cuda"
    model = gpuattn.load_pretrained(folder, dtype="bfloat16", device=device)
    given, want = inputs_of(expected), expected["logits"]
    inputs = {name: xp.asarray(values) for name, values in given.items()}
    with model.evaluating():
        if "images" in expected:
            found = model.logits(xp.asarray(expected["images"].astype(BFLOAT16)))
        else:
            found = model.logits(inputs.pop("tokens"), **inputs)
    found = to_cpu(found.data).astype(np.float32)[..., : want.shape[-1]]
    if want.ndim == 3:  # of tokens, not of texts or images
        real = real_tokens(given)
        found, want = found[real], want[real]
    second, first = np.moveaxis(np.sort(want, -1)[..., -2:], -1, 0)
    near = first - second < NEAR
    assert (found.argmax(-1) == want.argmax(-1))[~near].all()
    assert near.mean() < 0.5 and np.abs(found - want).max() < 0.2


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


@pytest.mark.parametrize("values", [1, 100])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_tensor_read_in_blocks_is_the_same(folder, values, monkeypatch):
    whole = gpuattn.load_pretrained(folder, device="numpy")
    counts, read = [], files.Stored.map_values

    def map_values(stored, first, count):
        counts.append(count)
        return read(stored, first, count)

    monkeypatch.setattr("gpuattn.pretrained.folder.BLOCK", values)
    monkeypatch.setattr(files.Stored, "map_values", map_values)
    model = gpuattn.load_pretrained(folder, device="numpy")
    parameters = dict(model.named_parameters())
    for path, parameter in whole.named_parameters():
        assert parameter.data.tobytes() == parameters[path].data.tobytes(), path
    assert len(counts) > 2 * len(parameters)
