"""The cache on disk: atomic writes, and no error where the disk cannot be written."""

import json
from pathlib import Path

import pytest

from gpuattn.cuda import disk_cache


def test_bytes_round_trip_and_damage_is_detected(tmp_path):
    path = tmp_path / "new" / "file"
    assert disk_cache.read_bytes(path) is None
    disk_cache.write_bytes(path, b"code" * 100)
    assert disk_cache.read_bytes(path) == b"code" * 100
    assert path.parent.stat().st_mode & 0o077 == 0
    stored = path.read_bytes()
    for damaged in (stored[:-1], stored[1:], bytes([stored[0] ^ 1]) + stored[1:], b""):
        path.write_bytes(damaged)
        assert disk_cache.read_bytes(path) is None
    assert [p.name for p in path.parent.iterdir()] == ["file"], "a temporary file is left"


def test_json_round_trip_and_damage_gives_an_empty_table(tmp_path):
    path = tmp_path / "table.json"
    assert disk_cache.read_json(path) == {}
    disk_cache.write_json(path, {"a": [1, "x"]})
    assert disk_cache.read_json(path) == json.loads(path.read_text()) == {"a": [1, "x"]}
    path.write_text(path.read_text()[:-1])
    assert disk_cache.read_json(path) == {}


@pytest.mark.parametrize("fails", ["mkdir", "replace"])
def test_a_failing_disk_is_not_an_error(tmp_path, monkeypatch, fails):
    def refuse(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(
        *((Path, "mkdir") if fails == "mkdir" else (disk_cache.os, "replace")), refuse
    )
    disk_cache.write_bytes(tmp_path / "file", b"x")
    disk_cache.write_json(tmp_path / "table.json", {})
    assert not list(tmp_path.iterdir())


def test_the_user_can_set_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "own"))
    assert disk_cache.folder() == tmp_path / "own"
    monkeypatch.delenv("GPUATTN_CACHE_DIR")
    assert disk_cache.folder() == tmp_path / "xdg" / "gpuattn" / "kernels"
