"""Large files: a run makes a store of them once, and finds it again."""

import os
import shutil

import numpy as np
import pytest
from stopping import After, assert_same_bits

from gpuattn.bench import doctor
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.errors import ConfigError, DataError
from gpuattn.lock import locked
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run
from gpuattn.tasks import prepared, store_cache, texts
from gpuattn.tasks.corpus import Corpus, TextCorpus, held_out
from gpuattn.train.progress import Listener
from gpuattn.train.session import train


@pytest.fixture(autouse=True)
def small_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(prepared, "LARGE", 1000)
    monkeypatch.setattr(prepared, "usable_cores", lambda: 1)
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path, rng):
    (tmp_path / "text").write_text("".join(rng.choice(["red ", "old\n", "cat ", "dog; "], 500)))
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=16, heads=2, layers=1,
        block=8, dropout=0.0, batch=64, lr=1e-2, warmup=2, length="4u", eval_every="2u",
    )  # fmt: skip


@pytest.fixture
def files(tmp_path, rng):
    for name in ("en", "de"):
        rows = (" ".join(rng.choice(["red", "old", "cat", "dog"], 7)) for _ in range(100))
        (tmp_path / name).write_text("".join(f"{row}\n" for row in rows) + "\n")
    return TrainConfig(
        source=str(tmp_path / "en"), target=str(tmp_path / "de"), vocab_size=300, batch=400,
        max_len=30,
    )  # fmt: skip


class Heard(Listener):
    def __init__(self):
        self.said = []

    def say(self, topic, text):
        self.said.append((topic, text))


def everything_of(config):
    with open(config.lm) as file:
        return file.read()


def stores():
    return sorted(store_cache.folder().glob("*"))


def test_a_run_makes_a_store_once_and_goes_on_with_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr("gpuattn.tasks.language.SAMPLE_TOKENS", 12)
    first, second = Heard(), Heard()
    train(text, tmp_path / "parts", device="numpy", listener=first, stop=After(2))
    (made,) = stores()
    assert ("data", f"{text.lm}: tokens are made once, and kept in {made}") in first.said
    train(text, tmp_path / "parts", device="numpy", listener=second)
    assert stores() == [made] and not any("made once" in text for _, text in second.said)
    train(text, tmp_path / "whole", device="numpy")
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    # digests are those of the file, as where it is not large
    noted = RunFolder(tmp_path / "whole").digests()
    monkeypatch.setattr(prepared, "LARGE", 1 << 20)
    plain = TextCorpus(text)
    assert noted == plain.digests
    monkeypatch.setattr(prepared, "LARGE", 1000)
    found = TextCorpus(text)
    size = len(everything_of(text))
    assert found.facts[0] == f"{text.lm}: {size:,} characters in all, {size - size // 10:,} tokens"
    everything = [np.concatenate([c._ids_of[0], c._ids_of[1]]) for c in (plain, found)]
    assert np.array_equal(*everything) and plain.tokenizer.to_bytes() == found.tokenizer.to_bytes()
    user = load_run(tmp_path / "whole", device="numpy")
    assert user.tokenizer.to_bytes() == found.tokenizer.to_bytes()


def test_other_texts_and_tokenizers_get_stores_of_their_own(text):
    TextCorpus(text)
    ours = TextCorpus(text, CharTokenizer("\n ;acdeglortx"))
    assert len(ours.tokenizer) == 17 and len(stores()) == 2
    with open(text.lm, "a") as file:
        file.write("cat ")
    before = ours.fingerprint
    assert TextCorpus(text).fingerprint != before and len(stores()) == 3


def test_pairs_of_large_files(files):
    said = []
    corpus = Corpus(files, None, said.append)
    assert len(stores()) == 1 and "tokens are made once" in said[0]
    assert "en: 98 pairs" in corpus.facts[0] and "left out: 1 (empty side)" in corpus.facts[0]
    pairs = texts.file_pairs(files)
    whole = {pair[:2] for split in pairs for pair in split}
    assert len(corpus.valid) == 2 and {pair[:2] for pair in corpus.valid} <= whole
    assert list(held_out(files)) == list(corpus.valid)
    assert set(corpus.digests) == {"source", "target"}


@pytest.mark.skipif(os.name == "nt", reason="folders are made read-only by permissions")
def test_a_cache_that_cannot_be_written_to(text, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DataError, match="kept in the cache. cannot write to .* Not a directory"):
        TextCorpus(text)


def test_the_stores_used_longest_ago_are_deleted(text, monkeypatch):
    def made(more):
        with open(text.lm, "a") as file:
            file.write(more)
        before, said = set(stores()), []
        TextCorpus(text, None, said.append)
        (new,) = set(stores()) - before
        return new, said

    first, second = (made("cat ")[0] for _ in range(2))
    for store, age in ((first, 9), (second, 5)):
        for path in (store, *store.iterdir()):
            os.utime(path, (age, age))
    store_cache.mark_used(first)  # now the second was used longest ago
    assert [store.path for store in store_cache.cached()] == [second, first]
    sizes = {store.path: store.size for store in store_cache.cached()}
    (store_cache.folder() / f"{store_cache.DELETED}x").mkdir()  # a killed process left it
    monkeypatch.setattr(store_cache, "MOST", int(2.5 * sizes[first]))
    third, said = made("cat ")
    assert stores() == sorted([first, third]) and "deleted 1 used longest ago" in said[-1]
    monkeypatch.setattr(store_cache, "MOST", 10)
    with locked(first):  # as if it were being written
        fourth, said = made("cat ")
        assert {first, fourth} == set(stores()) and "deleted 1 used longest ago" in said[-1]
    assert "2 of tokens, 0 of images, 0.00 of " in doctor._stores().detail


def test_two_runs_at_once_of_a_new_text(text, tmp_path):
    TextCorpus(text)
    (out,) = stores()
    shutil.rmtree(out)
    message = "text: another run makes tokens .* process .* Wait until it ends, then run this again"
    with locked(out), pytest.raises(ConfigError, match=message):
        TextCorpus(text)
    assert stores() == []
    TextCorpus(text)
    assert stores() == [out]
