"""The receipt of the last GPU run is fresh and complete."""

import json

import pytest

from gpuattn.bench import receipt


def test_the_receipt_matches_the_sources():
    stored = json.loads(receipt.RECEIPT.read_text())
    assert stored["digest"] == receipt.digest(), (
        "kernels, ops or the tape changed since the last GPU run: "
        "python -m gpuattn.bench.receipt on a machine with a GPU"
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


@pytest.mark.parametrize("outcome", ["failure", "skipped"])
def test_no_receipt_unless_everything_passed(monkeypatch, tmp_path, outcome):
    monkeypatch.setattr(receipt, "RECEIPT", tmp_path / "receipt.json")
    monkeypatch.setattr(
        receipt, "_run", lambda shard, processes=None: {"a": "passed", "b": outcome}
    )
    assert receipt.main([["x"]]) == 1
    assert not (tmp_path / "receipt.json").exists()


def test_what_failed_beside_others_may_pass_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(receipt, "RECEIPT", tmp_path / "receipt.json")
    monkeypatch.setattr(receipt, "_parallel", lambda: True)
    monkeypatch.setattr(receipt, "_machine", dict)

    def run(shard, processes=None):
        return {"b": "passed"} if processes == 0 else {"a": "passed", "b": "failure"}

    monkeypatch.setattr(receipt, "_run", run)
    assert receipt.main([["x"]]) == 0
    stored = json.loads(receipt.RECEIPT.read_text())
    assert stored["alone"] == ["b"] and stored["tests"] == {"a": "passed", "b": "passed"}
