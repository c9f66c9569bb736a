"""Runs of hidden tokens: learning, batches of one shape, vectors, refusals, resumes."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from stopping import After, assert_same_bits, assert_same_metrics

import gpuattn
from gpuattn.data import generated
from gpuattn.data.batching import IGNORED
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import prepare
from gpuattn.data.preparing.sources import Source
from gpuattn.errors import ConfigError, DataError
from gpuattn.models import Bert
from gpuattn.runs.config import TrainConfig, read_toml, resolve, to_toml
from gpuattn.runs.evaluation import evaluate_masked
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.runs.loading import load_run
from gpuattn.tasks import texts
from gpuattn.tasks.masked import MaskedCorpus, MaskedTask
from gpuattn.train import memory
from gpuattn.train.session import train

NAMES = {"red": "car", "old": "dog", "new": "hat"}  # each colour has its thing


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{rng.choice(['a', 'the'])} {word} {NAMES[word]}"
             for word in rng.choice(list(NAMES), 200)]  # fmt: skip
    (tmp_path / "text").write_text("\n\n".join(lines) + "\n")
    return TrainConfig(
        model="bert", lm=str(tmp_path / "text"), tokenizer="chars", dim=16, heads=2, layers=1,
        block=16, dropout=0.1, batch=200, lr=1e-2, warmup=2, length="9u", eval_every="3u", ema=0.0,
        label_smoothing=0.0,
    )  # fmt: skip


def test_a_hidden_token_is_learnt_from_both_sides(config, tmp_path):
    config = dataclasses.replace(config, dim=32, dropout=0.0, length="150u", eval_every="75u")
    outcome = train(config, tmp_path / "run", device="numpy")
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    guess = texts.entropy(texts.text(config).held)  # line ends among them
    assert rows[1]["loss"] < 0.5 * guess and rows[1]["loss"] < rows[0]["loss"]
    assert rows[1]["accuracy"] > 60
    assert outcome.best["score"] == -outcome.best["loss"]
    user = load_run(tmp_path / "run", device="numpy")
    found = evaluate_masked(user)
    assert found["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(rows[1]["accuracy"])
    (tmp_path / "other").write_text("the red car\na new hat\n")
    assert evaluate_masked(user, tmp_path / "other")["tokens"] == round(0.15 * (11 + 9 + 4))
    shown = (tmp_path / "run/valid/update_00000150.txt").read_text().splitlines()
    assert len(shown) > 10 and all("[" in line for line in shown)
    plain = re.sub(r"\[(?:. for )?(.)\]", r"\1", "\n".join(shown)).splitlines()
    lines = [f"{a} {word} {NAMES[word]}" for a in ("a", "the") for word in NAMES]
    assert all(any(line.endswith(end) for line in lines) for end in plain)


def test_a_run_gives_vectors_and_a_folder(config, tmp_path):
    train(dataclasses.replace(config, length="2u"), tmp_path / "run", device="numpy")
    user = load_run(tmp_path / "run", device="numpy", task="embedding")
    lines = ["a red car", "the old dog", ""]
    vectors = user.embed(lines)
    alone = user.embed(lines[1:2])
    np.testing.assert_allclose(vectors[1:2], alone, atol=1e-6)
    ids = np.array([[1, *user.tokenizer.encode("a red car"), 2]], np.int32)
    np.testing.assert_allclose(user.model.embed(ids), vectors[:1], atol=1e-6)
    gpuattn.save_pretrained(user.model, tmp_path / "folder", user.tokenizer)
    names = load_file(tmp_path / "folder" / "model.safetensors").keys()
    assert "cls.predictions.bias" in names and not any("pooler" in name for name in names)
    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert written["architectures"] == ["BertForMaskedLM"]
    other = load_run(tmp_path / "folder", device="numpy")
    assert other.embed(lines).tobytes() == vectors.tobytes()
    model = gpuattn.load_pretrained(tmp_path / "folder", device="numpy")
    assert model.logits(ids).data.tobytes() == user.model.logits(ids).data.tobytes()
    with pytest.raises(ConfigError, match=r"--model bert, to be used by: gpuattn embed .*run$"):
        load_run(tmp_path / "run", task="language")
    info = summary(tmp_path / "run")
    assert info["model"] == "bert" and info["options"]["mask"] == 0.15


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_has_the_bits_of_a_whole_one(config, tmp_path, accumulate):
    config = dataclasses.replace(config, accumulate=accumulate)
    assert train(config, tmp_path / "whole", device="numpy").finished
    for stop in (2, 5):
        assert not train(config, tmp_path / "parts", device="numpy", stop=After(stop)).finished
    assert train(config, tmp_path / "parts", device="numpy").finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


def test_batches_of_one_shape_have_the_same_loss_and_gradients(config):
    task = MaskedTask(dataclasses.replace(config, dropout=0.0))
    for p in task.model.parameters():
        p.data = p.data.astype(np.float64)
    batches = [next(task.corpus.loader(0).epoch(0)), list(task.corpus.valid_batches())[-1]]
    fixed = [task.fixed_shape(batch) for batch in batches]
    assert len({(batch.tokens.shape, batch.rows.shape) for batch in batches}) == 2
    names = ("tokens", "positions", "cu_seqlens", "rows", "labels")
    shapes = [[getattr(batch, name).shape for name in names] for batch in fixed]
    assert shapes[0] == shapes[1] and fixed[0].limits == fixed[1].limits == (16,)
    for batch, same in zip(batches, fixed, strict=True):
        assert same.target_tokens == batch.target_tokens == (same.labels != IGNORED).sum()
        assert (np.diff(same.rows) >= 0).all()
        np.testing.assert_array_equal(same.order.order, np.argsort(same.tokens, kind="stable"))
        found = []
        for one in (batch, same):
            task.model.zero_grad()
            loss = task.loss(one)
            loss.backward()
            found.append((loss.item(), [p.grad for p in task.model.parameters()]))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
        for a, b in zip(found[0][1], found[1][1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_batches_that_are_too_large_are_cut(config):
    task = MaskedTask(dataclasses.replace(config, batch=64))
    before = task.corpus.epoch_tokens()
    parts = memory.next_parts(task.config, 1)
    task.rebatch(memory.in_parts(task.config, parts))
    assert (task.config.batch, task.config.accumulate) == (32, 2)
    batches = list(task.corpus.loader(1).epoch(1))
    assert max(len(batch.tokens) for batch in batches) <= 32
    assert sum(len(batch.tokens) for batch in batches) == before
    assert memory.next_parts(task.config, 1) == 2 and memory.next_parts(task.config, 2) is None


def test_lines_of_a_store_are_those_of_its_text(config, tmp_path):
    store = tmp_path / "store"
    source = Source(config.lm, "text")
    prepare(Plan(sources=(source,), tokenizer="chars"), store, lambda text: None)
    (tmp_path / "valid").write_text("a red car\n")
    valid = {"valid_lm": str(tmp_path / "valid")}
    one, other = (
        MaskedCorpus(dataclasses.replace(config, lm=path, **valid))
        for path in (config.lm, str(store))
    )
    assert other.store is not None and one.epoch_tokens() == other.epoch_tokens()
    for a, b in zip(one.loader(0).epoch(0), other.loader(0).epoch(0), strict=True):
        assert len(a.tokens) == len(b.tokens)


def test_line_ends_of_windows_are_no_tokens(config, tmp_path):
    text = Path(config.lm).read_text()
    (tmp_path / "windows").write_bytes(text.replace("\n", "\r\n").encode())
    one, other = (
        MaskedCorpus(dataclasses.replace(config, lm=path))
        for path in (config.lm, str(tmp_path / "windows"))
    )
    assert np.array_equal(one._train.flat, other._train.flat)


def test_characters_without_line_ends_are_cut_into_parts(config, tmp_path):
    (tmp_path / "text").write_text("abcde" * 40)
    corpus = MaskedCorpus(config)
    for batch in corpus.loader(0).epoch(0):
        tokens = batch.tokens.copy()
        tokens[batch.rows] = batch.labels
        assert batch.lengths.max() <= 16
        for text in np.split(tokens, batch.cu_seqlens[1:-1]):
            assert corpus.tokenizer.decode(text) in "abcde" * 4


def test_a_text_and_a_share_select_bert(tmp_path):
    given = {"lm": "book.txt"}
    config, origins = resolve(("", given | {"mask": "20%"}), device="numpy")
    assert (config.model, config.mask, origins["mask"]) == ("bert", 0.2, "")
    assert (config.dim, origins["dim"]) == (64, "default on numpy")
    assert resolve(("", given))[0].model == "gpt2"
    assert resolve(("", given | {"model": "bert"}))[0].mask == 0.15
    base = resolve(("", given | {"model": "bert", "preset": "base"}))[0]
    assert (base.dim, base.heads, base.layers) == (768, 12, (12, 12))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert resolve(("file", read_toml(tmp_path / "config.toml")))[0] == config


@pytest.mark.parametrize("change, message", [
    ({"mask": 0}, "mask: 0 is no share; accepted: above 0, below 100%"),
    ({"mask": "100%"}, "'100%' is no share"), ({"mask": "15 tokens"}, "is no share"),
    ({"mask": "15"}, "'15' is no share"), ({"mask": "nan"}, "is no share"),
    ({"mask": True}, "is no share"), ({"model": "gpt2"}, "mask is for --model bert, not gpt2"),
    ({"lm": None}, "--lm FILE"), ({"task": "toy"}, "it alone"), ({"images": "x"}, "it alone"),
    ({"block": 201}, "block is 201; accepted: up to a batch, 200"), ({"block": 2}, "3 or more"),
    ({"layers": "2:1"}, "bert is an encoder only"), ({"positions": "rotary"}, "learned for bert"),
    ({"activation": "swiglu"}, "accepted: gelu, gelu_exact, relu for bert"),
    ({"documents": True}, "documents is for --model gpt2"), ({"ffn": 99}, "ffn is for"),
    ({"kv_heads": 1}, "kv-heads is for"),
])  # fmt: skip
def test_invalid_options_are_refused(config, change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, mask=0.15).__class__(**(vars(config) | change))


@pytest.mark.parametrize("text, valid, message", [
    (None, None, "cannot read"), ("", None, "is empty"), ("a\nbc", "\n\n\n", "is empty"),
    ("abc\n", None, "no line with text"), ("abc\n" * 9, "abcX", "character 'X' at 3"),
])  # fmt: skip
def test_invalid_texts_are_refused(config, tmp_path, text, valid, message):
    (tmp_path / "text").unlink()
    if text is not None:
        (tmp_path / "text").write_text(text)
    if valid is not None:
        (tmp_path / "valid").write_text(valid)
        config = dataclasses.replace(config, valid_lm=str(tmp_path / "valid"))
    with pytest.raises(DataError, match=message):
        train(config, tmp_path / "run", device="numpy")
    assert not (tmp_path / "run").exists()


def test_a_text_of_one_batch_gives_a_warning(config):
    (warning,) = MaskedCorpus(dataclasses.replace(config, batch=9000)).warnings
    assert "all of the text is one batch" in warning and "Try --batch" in warning
    assert not MaskedCorpus(config).warnings


@pytest.mark.exhaustive
def test_generated_english_in_600_updates(tmp_path):
    """Two layers of width 64 halve the loss of guessing by frequency, in seconds."""
    pairs = generated.generate("toy", "train", 20_000, 1)
    (tmp_path / "text").write_text("".join(f"{pair.source}\n" for pair in pairs))
    given = {"lm": str(tmp_path / "text"), "mask": "15%", "length": "600u", "eval_every": "600u"}
    config = resolve(("", given), device="numpy")[0]
    outcome = train(config, tmp_path / "run", device="numpy")
    held = texts.text(config).held
    assert outcome.best["loss"] < 0.6 * texts.entropy(held)


def test_on_a_gpu_it_learns_and_gives_vectors(gpu, config, tmp_path):
    config = dataclasses.replace(config, dim=32, length="20u", eval_every="10u")
    outcome = train(config, tmp_path / "run", device="cuda")
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    assert outcome.finished and rows[1]["loss"] < rows[0]["loss"]
    here, host = (load_run(tmp_path / "run", device=device, dtype="float32")
                  for device in ("cuda", "numpy"))  # fmt: skip
    lines = ["a red car", "the old dog"]
    np.testing.assert_allclose(here.embed(lines), host.embed(lines), atol=1e-4)
    assert isinstance(here.model, Bert)
