"""Runs of language models: learning, held-out text, refusals, and bit-for-bit resumes."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from stopping import After, assert_same_bits

from gpuattn.errors import ConfigError, DataError
from gpuattn.runs.averaging import average_runs
from gpuattn.runs.config import OPTIONS, TrainConfig, differences, read_toml, resolve, to_toml
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.runs.loading import load_run
from gpuattn.runtime.device import batch_to
from gpuattn.tasks.corpus import TextCorpus
from gpuattn.tasks.language import LanguageTask
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.trainer import Trainer

LINE = "the cat sat on the mat.\n"


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(["red ", "old\n", "cat ", "dog; "], 150))
    (tmp_path / "text").write_text(text)
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=16, heads=2, layers=1,
        block=8, dropout=0.2, batch=64, lr=1e-2, warmup=2, length="9u", eval_every="3u", ema=0.9,
        label_smoothing=0.0,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr("gpuattn.tasks.language.SAMPLE_TOKENS", 12)


def test_the_end_of_a_text_is_held_out(config, tmp_path):
    (tmp_path / "text").write_text("abc\n" * 25 + "xyz")
    corpus = TextCorpus(config)
    assert corpus.tokenizer.characters == "\nabcxyz"  # of the whole file
    batches = list(corpus.valid_batches())
    labels = [corpus.tokenizer.decode(row) for batch in batches for row in batch.labels]
    assert "".join(labels) == "abc\nabc\nxyz"[1:]
    for batch in corpus.loader(3).epoch(3):
        assert batch.tokens.shape == (8, 8) and batch.tokens.max() < 4 + 4
    assert "92 characters, 92 tokens" in corpus.facts[0] and "11 tokens" in corpus.facts[1]
    (tmp_path / "valid").write_text("ab\nxa")
    other = TextCorpus(dataclasses.replace(config, valid_lm=str(tmp_path / "valid")))
    assert sum(batch.target_tokens for batch in other.valid_batches()) == 4
    assert other.fingerprint != corpus.fingerprint


def test_a_text_of_one_batch_gives_a_warning(config):
    assert not TextCorpus(dataclasses.replace(config, batch=64)).warnings
    (warning,) = TextCorpus(dataclasses.replace(config, batch=1000)).warnings
    assert "all of the text is one batch" in warning and "Try --batch" in warning


def test_subwords_spell_the_text(config, tmp_path):
    text = "  Two words,\n\nand a l\u00f6ng line\r\n" + "word " * 900 + "\n"
    (tmp_path / "text").write_text(text, newline="")
    corpus = TextCorpus(dataclasses.replace(config, tokenizer="subwords", vocab_size=330))
    tokenizer = corpus.tokenizer
    assert tokenizer.decode_text(tokenizer.encode_text(text)) == text
    assert "\u2581word" in tokenizer.pieces  # from a line that SentencePiece skips by default


@pytest.mark.parametrize("text, valid, message", [
    (None, None, "cannot read"), ("", None, "is empty"), ("abcd" * 2, None, "smaller --block"),
    ("abcd" * 9, "a", "1 token for validation"), ("abcd" * 9, "abcX", "character 'X' at 3"),
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


@pytest.mark.parametrize("change, message", [
    ({"layers": "4:2"}, "layers is 4:2; accepted: one number"), ({"lm": None}, "--lm FILE"),
    ({"block": 65}, "block is 65; accepted: up to a batch, 64"), ({"task": "toy"}, "it alone"),
    ({"source": "a", "target": "b"}, "it alone"), ({"model": "translation"}, "lm is a text for"),
    ({"beam": 2}, "beam is for --model translation, not gpt2"), ({"ffn": 99}, "ffn is for"),
    ({"positions": "sinusoidal"}, "learned or rotary for gpt2"), ({"kv_heads": 3}, "kv-heads is 3"),
    ({"model": "gpt3"}, "Did you mean 'gpt2'"), ({"tokenizer": "char"}, "Did you mean 'chars'"),
])  # fmt: skip
def test_invalid_options_are_refused(config, change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **change)


def test_models_with_other_options_are_loaded_and_sample(config, tmp_path):
    options = {"positions": "rotary", "kv_heads": 1, "activation": "swiglu", "pad_vocab": False}
    train(dataclasses.replace(config, **options), tmp_path / "run", device="numpy")
    sampler = load_run(tmp_path / "run", device="numpy")
    for name, value in options.items():
        assert getattr(sampler.model.config, name) == value
    (text,) = sampler.sample(tokens=20, seed=1)  # beyond the block
    assert len(text) == 20


def test_options_of_language_models_are_refused_for_translators():
    with pytest.raises(ConfigError, match="block is for --model bert or gpt2 or llama, not"):
        TrainConfig(task="toy", block=32)


def test_a_text_selects_gpt2_with_its_defaults(tmp_path):
    given = {"lm": "book.txt"}
    config, origins = resolve(("command line", given))
    assert (config.model, config.task, config.block, config.layers) == ("gpt2", None, 256, (6, 6))
    small, origins = resolve(("command line", given), device="numpy")
    assert (small.dim, small.batch, origins["dim"]) == (128, 768, "default on numpy")
    preset, _ = resolve(("command line", given | {"preset": "small", "layers": "3"}))
    assert (preset.dim, preset.layers, preset.ffn) == (256, (3, 3), OPTIONS["ffn"].default)
    tiny, _ = resolve(("command line", given | {"preset": "tiny"}))
    assert (tiny.dim, tiny.schedule, tiny.lr, tiny.ema) == (128, "cosine", 1e-3, 0.0)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(preset))
    assert "beam" not in path.read_text() and 'layers = "3"' in path.read_text()
    assert resolve(("file", read_toml(path)))[0] == preset
    assert differences(preset, dataclasses.replace(preset, block=64)) == ["--block was 256, now 64"]
    with pytest.raises(ConfigError, match="learns from one text: --lm FILE"):
        resolve(("command line", {"model": "gpt2"}))


def test_a_run_learns_a_text_by_heart(config, tmp_path):
    (tmp_path / "text").write_text(LINE * 20)
    config = dataclasses.replace(
        config, dim=32, block=24, batch=192, dropout=0.0, length="120u", eval_every="60u"
    )
    heard = []
    report = Listener()
    report.say = lambda topic, text: heard.append((topic, text))
    outcome = train(config, tmp_path / "run", device="numpy", listener=report)
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    assert rows[0]["loss"] > rows[1]["loss"] < 0.15  # nothing predicts what follows the first t
    assert rows[1]["perplexity"] == pytest.approx(np.exp(rows[1]["loss"]))
    assert outcome.best["score"] == -outcome.best["loss"]
    assert (tmp_path / "run/valid/update_00000120.txt").read_text().strip()
    assert ("update", "8 blocks of 24 tokens, for 120 updates") in heard
    sampler = load_run(tmp_path / "run", device="numpy")
    for tokens in (1, 20, 95):  # the last is far beyond the block
        (text,) = sampler.sample("the cat", tokens=tokens, top_k=1)
        assert text == (LINE * 9)[: 7 + tokens]
    assert sampler.sample(tokens=12, top_k=1, count=2) == [LINE[:12]] * 2
    assert sampler.sample("the mat.\nthe cat sat on the mat.\nthe c", tokens=2, top_k=1) == [
        "the mat.\nthe cat sat on the mat.\nthe cat"
    ]


def test_samples_on_a_gpu_equal_those_on_the_host(gpu, config, tmp_path):
    """The engine draws them, in several contexts, and streams the first; see test_generation.py."""
    train(dataclasses.replace(config, length="2u"), tmp_path / "run", device="numpy")
    here = load_run(tmp_path / "run", device="cuda", dtype="float32")
    host = load_run(tmp_path / "run", device="numpy")
    for settings in ({}, {"top_k": 3, "first": 5}, {"temperature": 0}, {"top_p": 0.8, "count": 3}):
        parts, settings = [], {"tokens": 30, "seed": 3, "prompt": "red ", **settings}
        found = here.generate(stream=parts.append, **settings)
        texts = [text.text for text in found]
        assert "".join(parts) == texts[0]
        assert here.sample(kv_cache=False, **settings) == texts == host.sample(**settings)
        want = [text.score for text in host.generate(**settings)]
        assert [text.score for text in found] == pytest.approx(want, rel=1e-4)


def test_samples_depend_on_seed_and_settings(config, tmp_path):
    train(dataclasses.replace(config, length="2u"), tmp_path / "run", device="numpy")
    sampler = load_run(tmp_path / "run", device="numpy")
    settings = {"tokens": 30, "seed": 3, "temperature": 2.0}
    one, other = sampler.sample("red ", count=2, **settings)
    assert one != other and {len(one), len(other)} == {34} and one.startswith("red ")
    assert sampler.sample("red ", **settings) == [one]
    assert sampler.sample("red ", first=1, **settings) == [other]
    assert sampler.sample("red ", **(settings | {"seed": 4})) != [one]
    assert sampler.sample("red ", tokens=0) == ["red "]
    with pytest.raises(DataError, match="character 'X' at 1 was not in"):
        sampler.sample("rX", tokens=3)
    with pytest.raises(ConfigError, match="from 1"):
        sampler.sample(tokens=3, count=0)


def test_held_out_loss_covers_all_blocks(config):
    task = LanguageTask(config)
    trainer = Trainer(task, "numpy", Listener())
    batches = list(task.corpus.valid_batches())
    assert len({batch.tokens.shape for batch in batches}) == 2  # the last one is shorter
    with task.model.evaluating():
        losses = [task.loss(batch).item() * batch.labels.size for batch in batches]
    tokens = sum(batch.labels.size for batch in batches)
    assert trainer.valid_loss() == pytest.approx(sum(losses) / tokens, rel=1e-6)


def test_a_batch_is_copied_to_a_device_at_once(config):
    batch, copies = LanguageTask(config).corpus.loader(0).crops(3), []
    elsewhere = SimpleNamespace(asarray=lambda flat: copies.append(flat) or flat)
    moved = batch_to(batch, elsewhere)
    assert len(copies) == 1 and moved.target_tokens == batch.target_tokens
    for ours, theirs in [(batch.tokens, moved.tokens), (batch.labels, moved.labels),
                         *zip(batch.order, moved.order, strict=True)]:  # fmt: skip
        assert theirs.base is not None and np.array_equal(ours, theirs)


@pytest.mark.parametrize("change", [
    {}, {"length": "3e", "accumulate": 2, "eval_every": "1e", "average": 2},
    {"tokenizer": "subwords", "vocab_size": 290, "ema": 0.0},
], ids=["updates", "epochs", "subwords"])  # fmt: skip
def test_a_run_stopped_at_any_update_resumes_bit_for_bit(config, tmp_path, change):
    config = dataclasses.replace(config, **change)
    whole, stops = train(config, tmp_path / "whole", device="numpy"), 0
    for calls in (1, 2, 4, 3, 10_000):  # calls of stop: after updates and within evaluations
        stopped = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
        stops += not stopped.finished
    assert stops >= 3 and stopped.finished and stopped.update == whole.update
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    rows = [RunFolder(tmp_path / name).metrics.read("valid") for name in ("whole", "parts")]
    losses = [{row["update"]: row["loss"] for row in each} for each in rows]
    assert losses[0] == losses[1]


def test_summary_of_a_run_and_mean_of_two(config, tmp_path):
    config = dataclasses.replace(config, length="3u")
    for seed in (1, 2):
        train(dataclasses.replace(config, seed=seed), tmp_path / str(seed), device="numpy")
    info = summary(tmp_path / "1")
    assert (info["model"], info["task"], info["units"]) == (
        "gpt2", config.lm, "characters and marks"
    )  # fmt: skip
    assert info["state"] == "finished" and "beam" not in info["options"]
    assert json.loads(json.dumps(info)) == info
    assert average_runs([tmp_path / "1", tmp_path / "2"], tmp_path / "mean") == 2
    assert load_run(tmp_path / "mean", device="numpy").sample("red", tokens=4)
    with pytest.raises(ConfigError, match=r"--model gpt2, to be used by: gpuattn sample .*1$"):
        load_run(tmp_path / "1", task="translation")
    (tmp_path / "text").write_text("cat red old\n" * 60)
    with pytest.raises(DataError, match="not the one that .* began with"):
        train(dataclasses.replace(config, seed=2), tmp_path / "2", device="numpy")


def test_on_a_gpu_it_learns_and_writes(gpu, config, tmp_path):
    config = dataclasses.replace(config, dim=32, length="20u", eval_every="10u")
    outcome = train(config, tmp_path / "run", device="cuda")
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    assert outcome.finished and rows[1]["loss"] < rows[0]["loss"]
    sampler = load_run(tmp_path / "run", device="cuda")
    settings = {"tokens": 20, "seed": 1, "top_p": 0.9}
    assert sampler.sample("red ", **settings) == sampler.sample("red ", **settings)
