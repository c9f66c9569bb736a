"""The receipt of the last GPU run is fresh and complete."""

import json
import os
from pathlib import Path

import pytest

from gpuattn.bench import receipt
from gpuattn.errors import ConfigError


def test_the_receipt_matches_the_sources():
    stored = json.loads(receipt.RECEIPT.read_text())
    if stored["digest"] == receipt.digest():
        assert not receipt.AWAITED.exists(), "the GPU run that it waits for is done: delete it"
        return
    awaited = json.loads(receipt.AWAITED.read_text()) if receipt.AWAITED.exists() else {}
    assert awaited.get("digest") == receipt.digest(), (
        "kernels, ops or the tape changed since the last GPU run: "
        "python -m gpuattn.bench.receipt on a machine with a GPU"
    )
    pytest.skip(
        f"the GPU tests have not run on this text since {awaited['since']}: {awaited['reason']}"
    )


def test_the_receipt_holds_passed_tests_of_every_op():
    stored = json.loads(receipt.RECEIPT.read_text())
    assert stored["gpu"]
    assert set(stored["tests"].values()) == {"passed"}
    for op in ("flash_attention", "softmax", "layer_norm", "cross_entropy", "beam_step", "adamw"):
        assert any(f"test_{op}" in name for name in stored["tests"]), op
    for impl in ("raw-simt-cupy", "numba-cupy", "reference-cupy"):
        assert any(impl in name for name in stored["tests"]), impl


def test_the_digest_sees_a_changed_byte(monkeypatch, tmp_path):
    folder = tmp_path / "rawkernels"
    folder.mkdir()
    (folder / "x.cu").write_text("a")
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    before = receipt.digest()
    (folder / "x.cu").write_text("b")
    assert receipt.digest() != before


@pytest.fixture
def places(monkeypatch, tmp_path):
    for name in ("RECEIPT", "AWAITED", "OUTCOMES"):
        monkeypatch.setattr(receipt, name, tmp_path / "build" / f"{name.lower()}.json")
    monkeypatch.setattr(receipt, "_machine", dict)
    return tmp_path / "build"


@pytest.mark.parametrize("outcome", ["failure", "skipped"])
def test_no_receipt_unless_everything_passed(monkeypatch, places, outcome):
    """Then the tests that did not pass can run again, but not those of other sources; also the
    tests of a file that could not be imported."""
    asked, right = [], [outcome]

    def run(shard, marker, parallel):
        asked.append(shard)
        if marker == "gpu":
            return {"t.b::two[x::1]": right[0], "t.d::four": "passed"}
        ran = {"t.a::one": "passed", "t.b::two[x::1]": outcome, "::t.d": "error"}
        return ran if "not timing" in marker else {"t.c::three": "passed"}

    monkeypatch.setattr(receipt, "_run", run)
    assert receipt.main(again=True) == 1 and not asked
    assert receipt.main([["x"]]) == 1
    assert receipt.main(again=True) == 1 and asked[-1] == ["t/b.py::two[x::1]", "t/d.py"]
    assert not (places / "receipt.json").exists()
    right[0] = "passed"
    with monkeypatch.context() as patch:
        patch.setattr(receipt, "digest", lambda: "of other sources")
        assert receipt.main(again=True) == 1
    assert receipt.main(again=True) == 0
    stored = json.loads((places / "receipt.json").read_text())
    ran = "t.a::one", "t.b::two[x::1]", "t.c::three", "t.d::four"
    assert stored["tests"] == dict.fromkeys(ran, "passed")
    assert not (places / "outcomes.json").exists()


def test_tests_of_time_run_alone_and_all_run_once(monkeypatch, tmp_path):
    commands = []

    def run(command, **_):
        commands.append(command)
        (path,) = (word for word in command if word.startswith("--junitxml="))
        text = f'<suite><testcase classname="t" name="{len(commands)}"/></suite>'
        Path(path.partition("=")[2]).write_text(text)

    awaited = tmp_path / "awaited.json"
    awaited.write_text("{}")
    monkeypatch.setattr(receipt, "RECEIPT", tmp_path / "receipt.json")
    monkeypatch.setattr(receipt, "AWAITED", awaited)
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    monkeypatch.setattr(receipt, "_has_xdist", lambda: True)
    monkeypatch.setattr(receipt, "_machine", dict)
    monkeypatch.setattr(receipt.subprocess, "run", run)
    assert receipt.main() == 0
    together, alone = commands
    assert "gpu and not timing" in together and "-n" in together
    assert "gpu and timing" in alone and "-n" not in alone
    stored = json.loads((tmp_path / "receipt.json").read_text())
    assert stored["tests"] == {"t::1": "passed", "t::2": "passed"}
    assert not awaited.exists()


@pytest.mark.parametrize("outcome", ["skipped", "failure"])
def test_a_forced_architecture_is_a_section_of_the_receipt(monkeypatch, places, outcome):
    """Tests of forms that the architecture lacks are skipped; one that fails gives no section."""
    monkeypatch.setenv("GPUATTN_ARCH", "")
    places.mkdir()
    before = {"digest": "before", "by_hand": {"gpus": "2"}, "tests": {"t.a::one": "passed"}}
    (places / "receipt.json").write_text(json.dumps(before))
    asked = []

    def run(shard, marker, parallel):
        asked.append((marker, os.environ["GPUATTN_ARCH"]))
        return {"t.a::one": "passed", "t.b::hopper": outcome}

    monkeypatch.setattr(receipt, "_run", run)
    assert receipt.main([["x"]], arch=75) == (outcome == "failure")
    assert asked == [("gpu and not timing", "75")]
    stored = json.loads((places / "receipt.json").read_text())
    assert stored["digest"] == "before" and stored["tests"] == {"t.a::one": "passed"}
    if outcome == "skipped":
        section = stored["forced"]["75"]
        assert section["digest"] == receipt.digest()
        assert section["tests"] == {"t.a::one": "passed", "t.b::hopper": "skipped"}
        monkeypatch.setattr(receipt, "_run", lambda *_, **__: {"t.c::two": "passed"})
        assert receipt.main([["x"]]) == 0  # a new receipt keeps it
        new = json.loads((places / "receipt.json").read_text())
        assert new["forced"]["75"] == section and new["by_hand"] == before["by_hand"]
    else:
        assert "forced" not in stored
    with pytest.raises(ConfigError, match="GPUATTN_ARCH is '76'; accepted: 75, 80"):
        receipt.main([["x"]], arch=76)
