"""Runs on token stores: the batches of the same text, resumes, and stores that do not fit."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from stopping import After, assert_same_bits

from gpuattn.data.preparing.store_writer import StoreWriter
from gpuattn.data.rows import Rows
from gpuattn.data.store import HEAD, TokenStore, head_digest
from gpuattn.data.tokenizer import EOS, CharTokenizer, Tokenizer
from gpuattn.errors import ConfigError, DataError
from gpuattn.models.kinds import new_model
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.evaluation import evaluate_text
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run
from gpuattn.tasks import stored, texts
from gpuattn.tasks.corpus import Corpus, TextCorpus, held_out
from gpuattn.train.session import train

CHARS = CharTokenizer("\n ;acdeglort")
WORDS = Tokenizer.train(["red old cat dog"] * 9, 300)
MODEL = {"dim": 16, "heads": 2, "dropout": 0.2, "lr": 1e-2, "warmup": 2, "ema": 0.9}


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr("gpuattn.tasks.language.SAMPLE_TOKENS", 12)


def write_store(folder, tokenizer, sides, valid=None, documents=False):
    """Write ``sides``, {name: Rows}, as a store, and one in ``valid/``."""
    inside = write_store(folder / "valid", tokenizer, valid, None, documents) if valid else None
    kind = "text" if "text" in sides else "pairs"
    writer = StoreWriter(folder, tokenizer, kind, documents)
    writer.add({side: rows.flat for side, rows in sides.items()},
               {side: rows.ends for side, rows in sides.items()})  # fmt: skip
    writer.end_part(None)
    writer.finish(valid=inside and inside.head["digest"])
    writer.clean()
    return TokenStore(folder)


def text_rows(text):
    ids = np.array(CHARS.encode_text(text))
    return {"text": Rows(ids, np.array([len(ids)]))}


@pytest.fixture
def text(rng):
    return "".join(rng.choice(["red ", "old\n", "cat ", "dog; "], 150))


@pytest.fixture
def language(text, tmp_path):
    cut = texts.held_out_from(text)
    write_store(tmp_path / "store", CHARS, text_rows(text[:cut]), text_rows(text[cut:]))
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "store"), layers=1, block=8, batch=64, length="4u",
        eval_every="2u", label_smoothing=0.0, **MODEL,
    )  # fmt: skip


@pytest.fixture
def of_documents(text, tmp_path, language):
    rows = {"text": Rows.of([CHARS.encode(line) for line in text.split("\n")])}
    write_store(tmp_path / "documents", CHARS, rows, rows, documents=True)
    return dataclasses.replace(language, lm=str(tmp_path / "documents"), documents=True)


@pytest.fixture
def lines(rng):
    words = ["red", "old", "cat", "dog"]
    return [(" ".join(rng.choice(words, n)), " ".join(rng.choice(words, n + 1)))
            for n in rng.integers(1, 9, size=120)]  # fmt: skip


@pytest.fixture
def translation(lines, tmp_path):
    def rows(some):
        return {name: Rows.of([WORDS.encode(pair[i]) for pair in some])
                for i, name in enumerate(("source", "target"))}  # fmt: skip

    write_store(tmp_path / "pairs", WORDS, rows(lines[:100]), rows(lines[100:]))
    return TrainConfig(
        pairs=str(tmp_path / "pairs"), layers=(1, 1), ffn=16, batch=40, max_len=8, length="4u",
        eval_every="2u", **MODEL,
    )  # fmt: skip


def same_batches(one, other):
    for ours, theirs in zip(one, other, strict=True):
        for name, a in vars(ours).items():
            b = vars(theirs)[name]
            if name != "sentences":  # indices of a store count the pairs left out, too
                assert (
                    all(map(np.array_equal, a, b)) if isinstance(a, tuple) else np.array_equal(a, b)
                )


def test_a_text_and_its_store_give_the_same_batches(text, language, tmp_path):
    (tmp_path / "text").write_text(text)
    of_file = dataclasses.replace(language, lm=str(tmp_path / "text"), tokenizer="chars")
    one, other = TextCorpus(language), TextCorpus(of_file, CHARS)
    assert one.tokenizer.to_bytes() == other.tokenizer.to_bytes()
    same_batches(one.loader(1).epoch(1, 2), other.loader(1).epoch(1, 2))
    same_batches(one.valid_batches(), other.valid_batches())
    assert one.epoch_tokens() == other.epoch_tokens() and one.facts[1] == other.facts[1]
    assert f"{len(one._ids_of[0]):,} tokens" in one.facts[0] and one.warnings == other.warnings


def test_pairs_and_their_store_give_the_same_batches(lines, translation, tmp_path):
    files = {}
    for name, some in (("", lines[:100]), ("valid_", lines[100:])):
        for i, side in enumerate(("source", "target")):
            path = tmp_path / f"{name}{side}"
            path.write_text("".join(f"{pair[i]}\n" for pair in some))
            files[f"{name}{side}"] = str(path)
    of_files = dataclasses.replace(translation, pairs=None, **files)
    one, other = Corpus(translation), Corpus(of_files, WORDS)
    assert 0 < one.loader(0).packing.count < 100
    for epoch in range(2):
        same_batches(one.loader(epoch).epoch(epoch), other.loader(epoch).epoch(epoch))
    same_batches(one.valid_batches(), other.valid_batches())
    assert list(one.valid) == list(other.valid) and one.valid[:2] == other.valid[:2]
    assert one.valid[-1] == other.valid[-1]
    assert one.epoch_tokens() == other.epoch_tokens()
    assert "longer than 8 tokens" in one.facts[0] and "longer than 8 tokens" in other.facts[0]
    assert held_out(translation)[:] == list(one.valid)
    mixed = Corpus(dataclasses.replace(translation, **{k: v for k, v in files.items() if "v" in k}))
    same_batches(one.valid_batches(), mixed.valid_batches())
    with pytest.raises(DataError, match="pairs longer than 8 tokens"):
        Corpus(dataclasses.replace(translation, on_long="error"))


@pytest.mark.parametrize("kind", ["language", "translation"])
def test_a_stopped_run_of_a_store_resumes_bit_for_bit(kind, request, tmp_path):
    config = request.getfixturevalue(kind)
    config = dataclasses.replace(config, **({"score_pairs": 4} if kind == "translation" else {}))
    train(config, tmp_path / "whole", device="numpy")
    for calls in (1, 10_000):
        train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    name = "lm" if kind == "language" else "pairs"
    found = RunFolder(tmp_path / "whole").digests()
    assert found == {name: TokenStore(getattr(config, name)).fingerprint}
    if kind == "language":
        user = load_run(tmp_path / "whole", device="numpy")
        best = max(RunFolder(tmp_path / "whole").metrics.read("valid"), key=lambda r: r["score"])
        assert evaluate_text(user)["loss"] == pytest.approx(best["loss"], rel=1e-5)
        assert evaluate_text(user)["tokens"] == len(TextCorpus(config)._ids_of[1]) - 1


def test_runs_of_documents(of_documents, language, tmp_path):
    train(of_documents, tmp_path / "whole", device="numpy")
    for calls in (1, 10_000):
        train(of_documents, tmp_path / "parts", device="numpy", stop=After(calls))
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    user = load_run(tmp_path / "whole", device="numpy")
    best = max(RunFolder(tmp_path / "whole").metrics.read("valid"), key=lambda r: r["score"])
    assert evaluate_text(user)["loss"] == pytest.approx(best["loss"], rel=1e-5)
    batch = TextCorpus(of_documents).loader(0).crops(0)
    assert (batch.tokens[batch.positions > 0] != EOS).all() and (batch.tokens == EOS).any()
    plain = dataclasses.replace(of_documents, documents=False)
    train(plain, tmp_path / "plain", device="numpy")
    losses = [RunFolder(tmp_path / run).metrics.read("valid")[-1]["loss"]
              for run in ("whole", "plain")]  # fmt: skip
    assert losses[0] != losses[1]
    with pytest.raises(ConfigError, match="--documents was true, now false"):
        train(plain, tmp_path / "whole", device="numpy")
    text = dataclasses.replace(language, documents=True)
    (tmp_path / "text").write_text("red cat\n" * 99)
    for config in (text, dataclasses.replace(text, lm=str(tmp_path / "text"))):
        with pytest.raises(DataError, match="has no marks where its documents end"):
            TextCorpus(config)


def test_a_document_is_predicted_from_itself_alone(of_documents):
    corpus = TextCorpus(of_documents)
    model = new_model(of_documents, corpus.tokenizer).eval()
    batch = corpus.loader(0).crops(0)
    begin, end = batch.cu_seqlens[2:4]
    other = batch.tokens.copy()
    other[:begin] = 5
    other[end:] = 6
    states = [model.states(ids, **batch.packing).data[begin:end] for ids in (batch.tokens, other)]
    assert np.array_equal(*states)


def test_what_is_held_out_of_a_store_without_a_share(text, lines, language, translation, tmp_path):
    rows = text_rows(text)
    write_store(tmp_path / "whole", CHARS, rows)
    found = TextCorpus(dataclasses.replace(language, lm=str(tmp_path / "whole")))
    train_ids, held = found._ids_of
    assert len(held) == len(rows["text"].flat) // 10
    assert np.array_equal(np.concatenate([train_ids, held]), rows["text"].flat)
    other = dataclasses.replace(language, lm=str(tmp_path / "whole"), valid_lm=language.lm)
    assert len(TextCorpus(other)._ids_of[0]) == len(rows["text"].flat)
    (tmp_path / "valid.txt").write_text("red cat")
    other = dataclasses.replace(other, valid_lm=str(tmp_path / "valid.txt"))
    assert TextCorpus(other)._ids_of[1] == CHARS.encode("red cat")
    sides = {name: Rows.of([WORDS.encode(p[i]) for p in lines])
             for i, name in enumerate(("source", "target"))}  # fmt: skip
    write_store(tmp_path / "pairs2", WORDS, sides)
    pairs = Corpus(dataclasses.replace(translation, pairs=str(tmp_path / "pairs2"), max_len=20))
    assert pairs.loader(0).packing.count == 118
    assert [pair[:2] for pair in pairs.valid] == lines[118:]


def edited(config, folder, **changes):
    """Change the head of a store in place."""
    path = folder / HEAD
    head = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(head | {"digest": head_digest(head)}))
    return config


def test_stores_that_do_not_fit_are_refused(language, translation, tmp_path):
    def refused(message, corpus, config, tokenizer=None):
        with pytest.raises(DataError, match=message):
            corpus(config, tokenizer)

    other = CharTokenizer("abc")
    for corpus, config in ((TextCorpus, language), (Corpus, translation)):
        refused("another tokenizer than the run's", corpus, config, other)
    write_store(tmp_path / "chars", CHARS, dict.fromkeys(("source", "target"), Rows.of([[5]])))
    refused("chars has characters .*; pairs need subwords", Corpus,
            dataclasses.replace(translation, pairs=str(tmp_path / "chars")))  # fmt: skip
    write_store(tmp_path / "sub", WORDS, {"text": Rows.of([[5, 6], [7]])})
    refused("tokenizer is chars, and .* has subwords", TextCorpus,
            dataclasses.replace(language, lm=str(tmp_path / "sub"), tokenizer="chars"))  # fmt: skip
    refused(r"store is a store of a text; accepted: --lm", Corpus,
            dataclasses.replace(translation, pairs=language.lm))  # fmt: skip
    refused(r"pairs is a store of pairs; accepted: --pairs", TextCorpus,
            dataclasses.replace(language, lm=translation.pairs))  # fmt: skip
    (tmp_path / "file").touch()
    refused("file is a file; accepted by --pairs: the folder", Corpus,
            dataclasses.replace(translation, pairs=str(tmp_path / "file")))  # fmt: skip
    refused("none does not exist", Corpus,
            dataclasses.replace(translation, pairs=str(tmp_path / "none")))  # fmt: skip
    refused("no token store: store.json is missing", TextCorpus,
            dataclasses.replace(language, lm=str(tmp_path)))  # fmt: skip
    with (tmp_path / "pairs" / "target.bin").open("r+b") as file:
        file.truncate(100)
    refused("target.bin has 100 bytes of", Corpus, translation)
    refused("byte order is big", TextCorpus, edited(language, tmp_path / "store", byteorder="big"))
    refused("format is 'x/9'", TextCorpus, edited(language, tmp_path / "store", format="x/9"))


@pytest.mark.parametrize("name", ["store/text.bin", "store/valid/text.bin"])
def test_a_run_ends_at_a_store_whose_tokens_have_changed(language, tmp_path, name):
    data = bytearray((tmp_path / name).read_bytes())
    data[20] ^= 1  # still in the vocabulary
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=r"part 1 of text.bin is not as it was written. Prepare it"):
        train(dataclasses.replace(language, length="60s"), tmp_path / "run", device="numpy")
    assert not any(t.name == "gpuattn-check" for t in threading.enumerate())


def test_a_run_goes_on_with_its_own_store_only(language, text, tmp_path):
    config = dataclasses.replace(language, length="2u", eval_every="2u")
    train(config, tmp_path / "run", device="numpy")
    write_store(tmp_path / "more", CHARS, text_rows(text + "cat"), text_rows(text))
    longer = dataclasses.replace(config, lm=str(tmp_path / "more"), length="3u")
    with pytest.raises(DataError, match="the training text .*more is not the one"):
        train(longer, tmp_path / "run", device="numpy")
    (tmp_path / "store").rename(tmp_path / "moved")
    moved = dataclasses.replace(config, lm=str(tmp_path / "moved"), length="3u")
    assert train(moved, tmp_path / "run", device="numpy").update == 3


def test_pairs_alone(translation):
    with pytest.raises(ConfigError, match="pairs is .* and there are files"):
        dataclasses.replace(translation, source="a", target="b")
    with pytest.raises(ConfigError, match="task is 'toy' and there are files"):
        dataclasses.replace(translation, task="toy")


def test_at_most_some_of_a_large_share_is_evaluated(
    text, lines, language, translation, monkeypatch
):
    monkeypatch.setattr(stored, "VALID_TOKENS", 48)
    monkeypatch.setattr(stored, "SLICES", 4)
    corpus = TextCorpus(language)
    held, whole = corpus._ids_of[1], TokenStore(language.lm).valid.tokens("text")
    assert len(held) == 48 < len(whole)
    assert np.array_equal(held[:12], whole[:12]) and np.array_equal(held[-12:], whole[-12:])
    pairs = Corpus(translation)
    assert 0 < len(pairs.valid) < 20 and {pair[:2] for pair in pairs.valid} <= set(lines[100:])
    assert sum(len(b.sentences) for b in pairs.valid_batches()) == len(pairs.valid)


def test_the_mix_of_a_store_counts(language, translation, tmp_path):
    half = [
        {"name": "a", "weight": 0.9, "rows": [0, 20], "tokens": {"text": [0, 200]}},
        {"name": "b", "weight": 0.1, "rows": [20, 100], "tokens": {"text": [200, 9999]}},
    ]
    TextCorpus(edited(language, tmp_path / "store", mix=half))
    found = [b.sentences for b in Corpus(edited(translation, tmp_path / "pairs", mix=half))
             .loader(0).epoch(0)]  # fmt: skip
    assert np.mean(np.concatenate(found) < 20) > 0.8
    whole = write_store(tmp_path / "none", CHARS, text_rows("red cat\n" * 99))
    with pytest.raises(DataError, match="is a mix and holds out nothing"):
        TextCorpus(dataclasses.replace(edited(language, whole.folder, mix=half[:1]),
                                       lm=str(whole.folder)))  # fmt: skip
