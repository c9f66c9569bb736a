"""gpuattn prepare, and gpuattn info of what it made."""

import json

import pytest

from gpuattn.data.store import TokenStore
from gpuattn.data.tokenizer import Tokenizer

LINES = ["red cat", "green old tree", "a dog", ""] * 6


@pytest.fixture
def files(tmp_path):
    """A folder with ``a.en``, ``a.de`` and the tokenizer ``subwords``."""
    Tokenizer.train(LINES, 300).save(tmp_path / "subwords")
    (tmp_path / "a.en").write_text("".join(f"{line}\n" for line in LINES))
    (tmp_path / "a.de").write_text("".join(f"{line}\n" for line in LINES).upper())
    return tmp_path


def test_pairs_and_info(files, call):
    pairs = ["--pairs", files / "a.en", files / "a.de", "--no-duplicates", "--workers", "1"]
    given = ["prepare", *pairs, "--tokenizer", files / "subwords", "--out", files / "store"]
    result = call(*given)
    assert result.exit_code == 0
    assert f"{files / 'store'}: 3 pairs, " in result.stderr and "21 left out; " in result.stderr
    assert "is already prepared" in call(*given).stderr

    shown = " ".join(call("info", files / "store").stdout.split())
    for text in ("pairs, 3 rows", "24 pairs of 2 files", "6 empty side, 15 duplicate",
                 "red cat | RED CAT", "loss of guessing by frequency", "#"):  # fmt: skip
        assert text in shown
    found = json.loads(call("info", files / "store", "--json").stdout)
    assert found["skipped"] == {"empty side": 6, "duplicate": 15}
    assert ["a dog", "A DOG"] in found["examples"]
    assert "source.bin" in found["parts"][0]["sha256"]


def test_text_from_standard_input(files, call):
    given = ["prepare", "-", "--tokenizer", files, "--out", files / "store", "--workers", "1"]
    assert call(*given, input="red cat\n").exit_code == 2  # a folder without a run
    given[3] = "chars"
    assert "cannot come from standard input" in call(*given, input="red cat\n").stderr
    given[3] = files / "subwords"
    result = call(*given, input="red cat\n")
    assert result.exit_code == 0
    store = TokenStore(files / "store")
    assert store.tokenizer().decode_text(store.tokens("text").tolist()) == "red cat\n"
    # Another text under the same name is not taken for it.
    assert "of other sources" in call(*given, input="green\n").stderr


@pytest.mark.parametrize("given, message", [
    ([], "give SOURCEs, or --pairs"),
    (["a.en", "--longest", "5"], "are for --pairs"),
    (["a.en", "--mix", "a=x"], "'x' is no number; accepted: a number 0 or more"),
    (["a.en", "--mix", "a"], "--mix a; accepted: such as news=0.7,talks=0.3"),
    (["a.en", "--valid", "1.5"], "1.5"),
    (["a.en", "a.en"], "a.en is given twice"),
    (["a.en", "--tokenizer", "a.de"], "accepted: a tokenizer, or the folder of a run or a store"),
    (["--pairs", ".", "a.de"], "a.de is given twice"),
])  # fmt: skip
def test_wrong_usage(files, call, monkeypatch, given, message):
    monkeypatch.chdir(files)
    result = call("prepare", *given, "--out", "store")
    assert result.exit_code == 2 and message in result.stderr
    assert not (files / "store").exists()
