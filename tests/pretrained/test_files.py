"""Safetensors files and folders that break the format: every fault is told, none is half loaded."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gpuattn
from gpuattn.errors import CheckpointError, PretrainedError
from gpuattn.pretrained.files import find_tensors, is_pretrained, read_config

GOLDEN = Path(__file__).parent / "golden"
A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = np.arange(8, dtype=np.float32).tobytes()


def write(folder, header, data=DATA, length=None, name="model.safetensors"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / name).write_bytes(length.to_bytes(8, "little") + text + data)


def faults_of(folder):
    faults = []
    return find_tensors(folder, faults, set()), faults


def test_tensors_are_mapped_as_they_are(tmp_path):
    none = {"dtype": "F16", "shape": [0, 3], "data_offsets": [32, 32]}
    write(tmp_path, {"__metadata__": {"format": "pt"}, "a": A, "b": B, "none": none})
    found, faults = faults_of(tmp_path)
    assert not faults and found.keys() == {"a", "b", "none"}
    np.testing.assert_array_equal(found["a"].map(), np.arange(6, dtype="f4").reshape(2, 3))
    assert found["b"].map().tobytes() == DATA[24:] and found["b"].dtype == "bfloat16"
    assert found["none"].map().shape == (0, 3)
    with pytest.raises(ValueError, match="read-only"):
        found["a"].map()[...] = 0


def changed(entry, **values):
    return {"a": A, "b": entry | values}


BROKEN = {
    "overlap": (changed(B, data_offsets=[20, 28]), DATA, "a and b overlap at byte 20"),
    "gap": (changed(B, data_offsets=[26, 34]), DATA + b"..", "a and b leave a gap at byte 24"),
    "truncated": ({"a": A, "b": B}, DATA[:-1], "cut off: its tensors have 32 bytes, it holds 31"),
    "past": (changed(B, data_offsets=[1 << 60, (1 << 60) + 8]), DATA, "leave a gap at byte 24"),
    "rest": ({"a": A}, DATA, "8 bytes after its last tensor"),
    "reversed": (changed(B, data_offsets=[32, 24]), DATA, r"-8 bytes; its shape \[4\] of BF16 has"),
    "size": (changed(B, shape=[5]), DATA, r"8 bytes; its shape \[5\] of BF16 has 10"),
    "negative": (changed(B, shape=[-4]), DATA, "no whole numbers"),
    "floats": (changed(B, shape=[4.0]), DATA, "no whole numbers"),
    "flags": (changed(B, shape=[True]), DATA, "no whole numbers"),
    "kind": (changed(B, dtype="F8_E4M3"), DATA, "b in .* is 'F8_E4M3'; accepted: U64"),
    "more": (changed(B, extra=1), DATA, "no entry of dtype, shape and data_offsets"),
    "list": ([1], DATA, "it holds a list, no object"),
    "twice": (b'{"a": {}, "a": {}}', DATA, "'a' is in it twice"),
    "junk": (b"\xff\xfe", DATA, "cannot be read"),
    "deep": (b"[" * 200_000, DATA, "cannot be read"),
}


@pytest.mark.parametrize("header, data, sentence", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_in_a_sentence(tmp_path, header, data, sentence):
    write(tmp_path, header, data)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(PretrainedError, match=sentence) as caught:
        gpuattn.load_pretrained(tmp_path, device="numpy")
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize("length", [200 << 20, 1 << 62, 400])
def test_a_long_header_is_not_read(tmp_path, length):
    write(tmp_path, {"a": A}, b"", length)
    found, (fault,) = faults_of(tmp_path)
    assert not found and f"says that its header has {length:,}; accepted: up to 104,857" in fault


def test_short_and_missing_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\1\0")
    assert "has 2 bytes" in faults_of(tmp_path)[1][0]
    (tmp_path / "model.safetensors").unlink()
    (fault,) = faults_of(tmp_path)[1]
    assert "model.safetensors is missing" in fault
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    (fault,) = faults_of(tmp_path)[1]
    assert fault.startswith("pytorch_model.bin can run any program when opened, and is not opened")


def index(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards_are_one_model(tmp_path):
    folder = GOLDEN / "gpt2-tied"
    tensors = load_file(folder / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for i, shard in enumerate((names[:9], names[9:])):
        save_file({n: tensors[n] for n in shard}, tmp_path / f"{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{i}.safetensors")
    index(tmp_path, weight_map)
    shutil.copy(folder / "config.json", tmp_path)
    one, other = (gpuattn.load_pretrained(f, device="numpy").state() for f in (folder, tmp_path))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_an_index_names_plain_files_of_its_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    write(tmp_path, {"a": A, "b": B}, name="secret.safetensors")
    write(inside, {"a": A, "b": B}, name="1.safetensors")
    write(inside, {"a": A, "c": B}, name="2.safetensors")
    outside = ["../secret.safetensors", str(tmp_path / "secret.safetensors"), "x\\1.safetensors",
               "1.bin", ""]  # fmt: skip
    index(inside, {f"t{i}": name for i, name in enumerate(outside)} | {
        "a": "1.safetensors", "b": "1.safetensors", "d": "2.safetensors", "e": "3.safetensors",
    })  # fmt: skip
    found, faults = faults_of(inside)
    assert found.keys() == {"a", "b", "c"}
    text = "\n".join(faults)
    for name in outside:
        assert f"names the file {name!r}; accepted: the name of a .safetensors file" in text
    assert "a is in 1.safetensors and again in 2.safetensors" in text
    assert "c is in 2.safetensors, where model.safetensors.index.json does not list it" in text
    assert "d is in model.safetensors.index.json, not in 2.safetensors" in text
    assert "3.safetensors cannot be read: No such file or directory" in text
    for junk in ("[]", '{"weight_map": {"a": 1}}', "{"):
        (inside / "model.safetensors.index.json").write_text(junk)
        assert faults_of(inside)[1][-1].endswith("weight_map is no object of names and files")


@pytest.mark.parametrize("text, sentence", [
    ("[1]", "holds a list"), ("{", "cannot be read"), ('{"a": 1, "a": 2}', "'a' is in it twice"),
    ('{"auto_map": {"AutoModel": "x.Y"}}', "Python code of its own, which is never run"),
])  # fmt: skip
def test_broken_configs(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text)
    faults = []
    read_config(tmp_path, faults)
    assert len(faults) == 1 and sentence in faults[0]


def test_a_folder_of_a_run_is_none_of_hugging_face(tmp_path):
    assert not is_pretrained(tmp_path)
    for name in ("model.safetensors", "config.json"):  # one of them may be forgotten
        (tmp_path / name).write_text("{}")
        assert is_pretrained(tmp_path)
        (tmp_path / name).rename(tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "config.json")
    (tmp_path / "config.toml").write_text("")
    assert not is_pretrained(tmp_path)
