"""Checkpoint files: complete or absent, verified before use; the previous one is kept."""

import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from checks import sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.errors import CheckpointError
from gpuattn.runtime import checkpoint
from gpuattn.runtime.checkpoint import adopt, generations, load, save, unlisted
from gpuattn.tensor_file import pieces, read


def tensors(value=1.0):
    return {
        "encoder.0.weight": np.full((3, 5), value, np.float32),
        "half": np.full(7, value, np.float16),
        "brain": np.arange(4).astype(BFLOAT16),
        "optimizer": np.arange(12, dtype=np.uint32),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.full((), value, np.float64),
    }


def manifest_for(path):
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    said = {"format": "gpuattn/1", "file": path.name, "bytes": len(data), "sha256": digest}
    path.with_suffix(".json").write_text(json.dumps(said))


def edit_manifest(folder, **changes):
    manifest = generations(folder, "last")[0]
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


def test_round_trip_keeps_every_bit(tmp_path, xp):
    mine = {key: xp.asarray(a) for key, a in tensors(1 / 3).items()}
    path = save(tmp_path / "run", "last", mine, {"update": 7, "cursor": [0, 3], "best": np.inf})
    assert path.name == "last-00000001.safetensors"
    found, metadata = load(tmp_path / "run", "last", expected=mine)
    assert metadata == {"update": 7, "cursor": [0, 3], "best": np.inf}
    for key, want in tensors(1 / 3).items():
        assert (found[key].dtype, found[key].shape) == (want.dtype, want.shape)
        assert found[key].tobytes() == want.tobytes()
        assert found[key].flags.writeable


def test_shapes_are_read_from_the_header(tmp_path):
    assert checkpoint.shapes(tmp_path, "best") is None
    path = save(tmp_path, "best", {"a": np.ones((2, 3), np.float32), "b": np.ones((), np.int32)})
    assert checkpoint.shapes(tmp_path, "best") == {"a": (2, 3), "b": ()}
    data = path.read_bytes()
    path.write_bytes(data[:-8])  # only the header is read
    assert checkpoint.shapes(tmp_path, "best") == {"a": (2, 3), "b": ()}
    for damaged in (data[:20], b"", b"\x02" + bytes(7) + b"[]", bytes(8) + data[8:]):
        path.write_bytes(damaged)
        assert checkpoint.shapes(tmp_path, "best") is None


def test_two_generations_are_kept(tmp_path):
    for value in range(1, 6):
        save(tmp_path, "last", tensors(value))
        save(tmp_path, "best", tensors(10 + value))
    assert [m.name for m in generations(tmp_path, "last")] == [
        "last-00000005.json", "last-00000004.json",
    ]  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 8
    assert load(tmp_path, "last")[0]["scalar"] == 5
    assert load(tmp_path, "best")[0]["scalar"] == 15


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGE = {
    "flipped bit": (flip, "is damaged: its SHA-256"),
    "truncated": (truncate, "bytes, want"),
    "lengthened": (lengthen, "bytes, want"),
    "gone": (lambda path: path.unlink(), "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "no JSON": (lambda path: path.with_suffix(".json").write_text("{"), "cannot be read"),
    "binary": (lambda path: path.with_suffix(".json").write_bytes(b"\xff\0"), "cannot be read"),
    "a list": (lambda path: path.with_suffix(".json").write_text("[]"), "format is not gpuattn/1"),
    "deep": (lambda path: path.with_suffix(".json").write_text("[" * 100000), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_previous_one_used(tmp_path, kind):
    damage, message = DAMAGE[kind]
    save(tmp_path, "last", tensors(1))
    damage(save(tmp_path, "last", tensors(2)))
    with pytest.warns(UserWarning, match=f"{message}.*last-00000001 is used instead"):
        found, _ = load(tmp_path, "last", expected=tensors())
    assert found["scalar"] == 1
    damage(generations(tmp_path, "last")[-1].with_suffix(".safetensors"))
    with pytest.raises(CheckpointError, match=f"no checkpoint last in .* can be used.*{message}"):
        load(tmp_path, "last")


def test_a_damaged_generation_is_not_kept_in_place_of_a_good_one(tmp_path, monkeypatch):
    save(tmp_path, "last", tensors(1))
    flip(save(tmp_path, "last", tensors(2)))
    monkeypatch.setattr(checkpoint, "_verified", set())  # like in a process that resumes
    flip(save(tmp_path, "last", tensors(3)))
    with pytest.warns(UserWarning, match="last-00000001 is used instead"):
        assert load(tmp_path, "last")[0]["scalar"] == 1


def test_without_its_manifest_the_newest_is_ignored(tmp_path):
    """A kill between the two renames leaves a file without its manifest."""
    for value in (1, 2):
        save(tmp_path, "last", tensors(value))
    generations(tmp_path, "last")[0].unlink()
    assert [path.name for path in unlisted(tmp_path)] == ["last-00000002.safetensors"]
    assert load(tmp_path, "last")[0]["scalar"] == 1
    save(tmp_path, "last", tensors(3))
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == [
        "last-00000001", "last-00000003",
    ]  # fmt: skip


def test_a_first_save_that_was_killed_is_saved_again(tmp_path):
    save(tmp_path, "last", tensors(1)).with_suffix(".json").unlink()
    save(tmp_path, "last", tensors(2))
    assert load(tmp_path, "last")[0]["scalar"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_without_manifests_nothing_is_removed_and_all_can_be_read(tmp_path):
    for value in (1, 2, 3):
        save(tmp_path, "last", tensors(value), {"update": value})
    save(tmp_path, "best", tensors(7))
    for path in tmp_path.glob("*.json"):
        path.unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError) as error:
        save(tmp_path, "last", tensors(4))
    assert "beside last-00000003.safetensors, last-00000002.safetensors, and" in str(error.value)
    assert f"gpuattn recover {tmp_path}" in str(error.value)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.warns(UserWarning, match="last-00000003.safetensors has no manifest.*recover"):
        assert load(tmp_path, "last", tensors())[0]["scalar"] == 3
    assert checkpoint.exists(tmp_path, "best") and not generations(tmp_path, "best")
    assert checkpoint.notes(tmp_path, "last") == {"update": 3}
    assert checkpoint.shapes(tmp_path, "last")["half"] == (7,)
    truncate(tmp_path / "last-00000003.safetensors")
    with (
        pytest.warns(UserWarning, match="last-00000002.safetensors has no manifest"),
        pytest.warns(UserWarning, match="not a whole safetensors.*last-00000002 is used instead"),
    ):
        assert load(tmp_path, "last")[0]["scalar"] == 2


def test_a_lost_manifest_is_written_again(tmp_path):
    path = save(tmp_path, "last", tensors(1))
    manifest = path.with_suffix(".json").read_bytes()
    path.with_suffix(".json").unlink()
    adopt(path)
    assert path.with_suffix(".json").read_bytes() == manifest
    path.with_suffix(".json").unlink()
    truncate(path)
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        adopt(path)
    assert [left.name for left in tmp_path.iterdir()] == [path.name]


def test_generations_removed_while_reading_are_searched_again(tmp_path, monkeypatch):
    save(tmp_path, "last", tensors(1))
    inner, saved = checkpoint._verified_bytes, []

    def after_two_saves(manifest):
        if not saved:
            saved.extend(save(tmp_path, "last", tensors(value)) for value in (2, 3, 4))
        return inner(manifest)

    monkeypatch.setattr(checkpoint, "_verified_bytes", after_two_saves)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, "last")[0]["scalar"] == 4


CONTENT = {
    "pickle": (pickle.dumps({"w": 1}), "not a whole safetensors file"),
    "npy": (b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}", "not a whole safetensors file"),
    "empty": (b"", "not a whole safetensors file"),
    "huge header": (b"\xff" * 64, "not a whole safetensors file"),
    "foreign": (
        b"".join(pieces({})).replace(b"gpuattn/1", b"someone/1"),
        "the format of .* is 'someone/1'; accepted: 'gpuattn/1'",
    ),
}


@pytest.mark.parametrize("kind", CONTENT)
def test_invalid_content_with_a_correct_hash_is_refused(tmp_path, kind):
    data, message = CONTENT[kind]
    path = tmp_path / "last-00000001.safetensors"
    path.write_bytes(data)
    manifest_for(path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, "last")
    with pytest.raises(CheckpointError, match=message):
        read(path)


def change(**changes):
    return {k: v for k, v in (tensors() | changes).items() if v is not None}


@pytest.mark.parametrize(
    "found, message",
    [
        (change(half=None), "half is missing"),
        (change(other=np.zeros(1)), "other is unknown"),
        (change(half=np.zeros(8, np.float16)), r"half has shape \(8,\), want \(7,\)"),
        (change(half=np.zeros(7, np.float32)), "half is float32, want float16"),
    ],
)
def test_another_model_is_refused(tmp_path, found, message):
    save(tmp_path, "last", found)
    with pytest.raises(CheckpointError, match=f"last-00000001 is of another model: {message}"):
        load(tmp_path, "last", expected=tensors())


def test_many_differences_are_summarised(tmp_path):
    save(tmp_path, "last", {f"w{i}": np.zeros(1) for i in range(20)})
    with pytest.raises(CheckpointError, match="w0 is unknown.*; and 15 more"):
        load(tmp_path, "last", expected={})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_numbers_are_neither_written_nor_read(tmp_path, dtype, bad):
    array = np.ones(3, np.float32).astype(dtype)
    save(tmp_path, "last", {"w": array})
    array[1] = bad
    with pytest.raises(CheckpointError, match="save: last: w holds inf or NaN"):
        save(tmp_path, "last", {"w": array})
    assert len(generations(tmp_path, "last")) == 1
    path = tmp_path / "last-00000002.safetensors"
    path.write_bytes(b"".join(pieces({"w": array})))
    manifest_for(path)
    with pytest.warns(UserWarning, match="last-00000002: w holds inf or NaN; last-00000001 is us"):
        assert (load(tmp_path, "last")[0]["w"] == 1).all()


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "best-00000001.json", 3])
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path, file):
    (tmp_path / "secret.safetensors").write_bytes(b"".join(pieces(tensors())))
    save(tmp_path / "run", "last", tensors())
    edit_manifest(tmp_path / "run", file=file)
    with pytest.raises(CheckpointError, match="the file in last-00000001.json is"):
        load(tmp_path / "run", "last")


@pytest.mark.parametrize("name", ["../last", "a/b", "", "last-1", "."])
def test_names_of_checkpoints_are_plain(tmp_path, name):
    with pytest.raises(ValueError, match="checkpoint: name is"):
        save(tmp_path, name, {})
    with pytest.raises(ValueError, match="checkpoint: name is"):
        load(tmp_path, name)


def test_a_missing_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint last in"):
        load(tmp_path / "nowhere", "last")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, call, after):
    """``after`` 0: no space for the tensors; 1: space for them, but not for the manifest."""
    save(tmp_path, "last", tensors(1))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    countdown = [after]

    def fail_when_due(function):
        def wrapped(*args):
            countdown[0] -= 1
            if countdown[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args)

        return wrapped

    if call == "write":

        class Full:
            def __init__(self, file):
                self.file, self.write = file, fail_when_due(file.write)

            def __getattr__(self, name):
                return getattr(self.file, name)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

        def opened_full(*args):
            return Full(open(*args))  # noqa: SIM115  closed by __exit__

        countdown[0] = after * len(pieces(tensors(2)))
        monkeypatch.setattr(checkpoint, "open", opened_full, raising=False)
    else:
        due = after * 2 if call == "fsync" else after  # the folder is synced between the two
        countdown[0] = due
        monkeypatch.setattr(checkpoint.os, call, fail_when_due(getattr(os, call)))
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, "last", tensors(2))
    monkeypatch.undo()
    text = str(caught.value)
    assert "No space left on device" in text and "last-00000001.json, is intact" in text
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert load(tmp_path, "last")[0]["scalar"] == 1


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="cannot save last .*; there is none yet"):
        save(tmp_path / "run", "last", tensors())


SAVER = """
import sys, itertools
import numpy as np
from gpuattn.runtime.checkpoint import save
for n in itertools.count(int(sys.argv[2])):
    save(sys.argv[1], "last", {f"w{i}": np.full(100_000, n, "f") for i in range(4)}, {"n": n})
    print(n, flush=True)
"""


@pytest.mark.parametrize("kills", sampled([4, 10], 1))
def test_kill_9_during_saves_loses_nothing(tmp_path, kills):
    rng, done = np.random.default_rng(5), -1
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVER, tmp_path, str(done + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        first = int(child.stdout.readline())
        assert first == done + 1
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        rest = child.communicate()[0].split()
        said = max([first, *map(int, rest)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, metadata = load(tmp_path, "last")
        done = metadata["n"]
        assert done in (said, said + 1), "the last reported save, or the one in progress"
        assert all((array == done).all() for array in found.values())
    save(tmp_path, "last", {"w": np.zeros(1)})
    names = {p.name.rsplit(".", 1)[1] for p in tmp_path.iterdir()}
    assert names == {"json", "safetensors"} and len(list(tmp_path.iterdir())) == 4
