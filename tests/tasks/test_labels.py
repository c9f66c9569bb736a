"""Runs of classifiers of texts: learning, held-out texts, refusals, resumes, folders."""

import dataclasses
import json

import numpy as np
import pytest
from fake_runs import training_on
from safetensors.numpy import load_file
from stopping import After, assert_same_bits

import gpuattn
from gpuattn import load_run
from gpuattn.data.generated import generate
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.errors import CheckpointError, ConfigError, DataError, PretrainedError
from gpuattn.models import Bert, BertConfig
from gpuattn.runs.averaging import average_runs
from gpuattn.runs.config import TrainConfig, read_toml, resolve, to_toml
from gpuattn.runs.evaluation import evaluate_labels
from gpuattn.runs.fine_tuning import fine_tuning
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.tasks.labels import LabelCorpus
from gpuattn.tasks.registry import task_of
from gpuattn.train.progress import Listener
from gpuattn.train.session import train

WORDS = {"animal": ["cat", "dog", "rat"], "thing": ["cup", "car", "pen"], "none": ["so", "or"]}


def lines_of(count, seed=0, kinds=WORDS):
    """Return lines with labels: a word of the class among others."""
    rng = np.random.default_rng(seed)
    found = []
    for kind in rng.choice(list(kinds), count):
        words = ["the", "a", rng.choice(WORDS[kind]), *["very"] * rng.integers(3)]
        found.append(f"{' '.join(rng.permutation(words))}\t{kind}\n")
    return found


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.tsv").write_text("".join(lines_of(90)))
    (tmp_path / "valid.tsv").write_text("".join(lines_of(30, 1)))
    return TrainConfig(
        model="bert", classify=str(tmp_path / "train.tsv"), tokenizer="chars",
        valid_classify=str(tmp_path / "valid.tsv"), dim=16, heads=2, layers=1, block=32, batch=150,
        lr=1e-2, warmup=2, length="7u", eval_every="3u", ema=0.9, dropout=0.1, label_smoothing=0.1,
    )  # fmt: skip


@pytest.fixture
def encoder(tmp_path):
    """A folder with an encoder and a tokenizer, without a classifier."""
    tokenizer = CharTokenizer.train(lines_of(90))
    model = Bert(BertConfig(len(tokenizer), 16, 2, 1, 20, max_length=40, dropout=0.1), 3)
    gpuattn.save_pretrained(model, tmp_path / "encoder", tokenizer)
    return tmp_path / "encoder"


def begun_with(folder, config, **options):
    """Return a TrainConfig that fine-tunes a folder on the data of another."""
    given = {"classify": config.classify, "valid_classify": config.valid_classify, "block": 32,
             "origin": str(folder), "batch": 150, "length": "4u", "lr": 1e-2}  # fmt: skip
    defaults, has = fine_tuning(folder)
    return resolve(("", defaults), ("", given | options), ("", has), device="numpy")[0]


def test_a_run_learns_and_its_classifier_is_the_same_everywhere(config, tmp_path):
    config = dataclasses.replace(
        config,
        length="160u",
        eval_every="80u",
        dropout=0.0,
        ema=0.0,
        label_smoothing=0.0,
        tokenizer="subwords",
        vocab_size=330,
    )
    heard, report = [], Listener()
    report.say = lambda topic, text: heard.append(text)
    outcome = train(config, tmp_path / "run", device="numpy", listener=report)
    assert outcome.best["accuracy"] == outcome.best["score"] == 100
    assert any("90 texts, " in text and "of each of 3 classes" in text for text in heard)
    classifier = load_run(tmp_path / "run", device="numpy", task="labels")
    found = classifier.classify(["the cat", "", "a very very pen the " * 2])
    assert [label.name for label in found][::2] == ["animal", "thing"]
    assert all(1 / 3 <= label.probability <= 1 for label in found)
    scores = evaluate_labels(classifier)
    assert scores["texts"] == 30 and scores["accuracy"] == 100 and scores["wrong"] == []
    assert scores["loss"] == pytest.approx(outcome.best["loss"], rel=1e-4)
    gpuattn.save_pretrained(classifier.model, tmp_path / "there", classifier.tokenizer)
    there = load_run(tmp_path / "there", device="numpy")
    assert there.classify(["the cat", "", "a very very pen the " * 2]) == found
    assert evaluate_labels(there, config.classify)["texts"] == 90
    with pytest.raises(
        DataError, match=r"the line is \d+ tokens long; accepted: up to 32. truncate"
    ):
        classifier.classify(["the cat is", "q" * 38])
    assert classifier.classify(["the cat " * 9], truncate=True)[0].name == "animal"
    assert classifier.classify([]) == []
    described = summary(tmp_path / "run")
    assert described["classes"] == ["animal", "none", "thing"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "100.00 % of held-out texts right" in page and "nats per text" in page


def test_what_is_wrong_is_shown(config, tmp_path):
    train(dataclasses.replace(config, length="1u", warmup=0), tmp_path / "run", device="numpy")
    (tmp_path / "test.tsv").write_text("\n\nthe cat\tanimal\nthe cat\tthing\nthe cat\tnone\n")
    row = evaluate_labels(load_run(tmp_path / "run", device="numpy"), tmp_path / "test.tsv")
    (found,) = {one["found"] for one in row["wrong"]}
    assert len(row["wrong"]) == 2 and row["accuracy"] == pytest.approx(100 / 3)
    lines = {3: "animal", 4: "thing", 5: "none"}
    assert {one["line"]: one["label"] for one in row["wrong"]} == {
        line: label for line, label in lines.items() if label != found
    }
    kept = sorted((tmp_path / "run" / "valid").iterdir())[-1].read_text()
    assert " taken for " in kept


def test_a_tenth_is_held_out_and_stays_so(config):
    config = dataclasses.replace(config, valid_classify=None)
    corpus = LabelCorpus(config)
    assert len(corpus.valid.texts) == 9 and len(corpus.train.texts) == 81
    assert not set(corpus.valid.lines) & set(corpus.train.lines)
    seen = sorted(i for batch in corpus.loader(2).epoch(2) for i in batch.sentences.tolist())
    held = sorted(i for batch in corpus.valid_batches() for i in batch.sentences.tolist())
    assert seen == list(range(81)) and held == list(range(9))
    again = LabelCorpus(config, corpus.tokenizer)
    assert again.valid == corpus.valid and again.tokenizer is corpus.tokenizer


def test_long_texts_are_cut_and_counted(config):
    corpus = LabelCorpus(dataclasses.replace(config, block=12, batch=24))
    long = [line for line, text in zip(corpus.train.lines, corpus.train.texts, strict=True)
            if len(text) > 10]  # fmt: skip
    assert f"{len(long)} are cut to 12 tokens (line {long[0]} first)" in corpus.facts[0]
    batches = list(corpus.loader(0).epoch(0))
    assert max(batch.max_seqlen for batch in batches) == 12
    ends = {int(batch.tokens[end - 1]) for batch in batches for end in batch.cu_seqlens[1:]}
    assert ends == {2} and {int(b.tokens[r]) for b in batches for r in b.rows} == {1}


def test_advice_for_few_texts(config, tmp_path):
    corpus = LabelCorpus(dataclasses.replace(config, batch=400))
    fewer = corpus.epoch_tokens() // 10
    assert f"an epoch has less than 10 batches. Try --batch {fewer}" in corpus.warnings[0] + " "
    assert LabelCorpus(dataclasses.replace(config, batch=60)).warnings == []
    (tmp_path / "train.tsv").write_text("".join(lines_of(40, kinds=["none", "thing"])) + "a\tx\n")
    with pytest.raises(DataError, match="the label 'animal' is unseen in training"):
        LabelCorpus(config)
    lines = ["a cat\tanimal\n", "a car\tthing\n"]
    (tmp_path / "train.tsv").write_text("".join(lines))
    warned = LabelCorpus(dataclasses.replace(config, valid_classify=None)).warnings
    assert any("there is no text to learn " in text for text in warned)


@pytest.mark.parametrize("change", [{}, {"length": "2e", "accumulate": 2, "eval_every": "1e"}],
                         ids=["updates", "epochs"])  # fmt: skip
def test_a_run_stopped_at_any_update_resumes_bit_for_bit(config, tmp_path, change):
    config = dataclasses.replace(config, **change)
    whole, stops = train(config, tmp_path / "whole", device="numpy"), 0
    for calls in (1, 2, 4, 10_000):
        stopped = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
        stops += not stopped.finished
    assert stops >= 2 and stopped.finished and stopped.update == whole.update
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_other_texts_cannot_continue_a_run(config, tmp_path):
    train(config, tmp_path / "run", device="numpy", stop=After(2))
    (tmp_path / "train.tsv").write_text("".join(lines_of(90, 5)))
    with pytest.raises(DataError, match="the training text .* is not the one that .* began with"):
        train(config, tmp_path / "run", device="numpy")


@pytest.mark.parametrize("change, error", [
    ({"lm": "book.txt"}, "--lm FILE is all"), ({"source": "a", "target": "b"}, "is all"),
    ({"images": "photos"}, "--classify FILE is all that a classifier of texts learns from"),
    ({"layers": "2:3"}, "layers is 2:3; accepted: one number"), ({"beam": 2}, "beam is for"),
    ({"block": 2}, "block is 2; accepted: 3 or more"),
    ({"model": "gpt2"}, "classify is for --model bert, not gpt2"),
    ({"classify": None}, "--model bert learns from one text: --lm FILE; or from lines with labels"),
])  # fmt: skip
def test_invalid_options_are_refused(config, change, error):
    with pytest.raises(ConfigError, match=error):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize("content, error", [
    ("a\tx\nb\tx\n", "has one class, 'x'; accepted: two or more"),
    ("a cat\tanimal\nthe car\tother\n", r"valid.tsv, line \d+: the label '\w+' is unseen in train"),
])  # fmt: skip
def test_files_that_teach_nothing_are_refused(config, tmp_path, content, error):
    (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(DataError, match=error):
        train(config, tmp_path / "run", device="numpy")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_batch_that_is_too_small_for_a_text(config):
    with pytest.raises(ConfigError, match=r"batch is 9; accepted: \d+ tokens or more"):
        LabelCorpus(dataclasses.replace(config, batch=9))


def test_labels_select_bert(config, tmp_path):
    found, _ = resolve(("command line", {"classify": "a.tsv"}), device="numpy")
    assert (found.model, found.batch, task_of(found).run_name(found)) == ("bert", 1024, "a")
    (tmp_path / "config.toml").write_text(to_toml(found))
    assert resolve(("file", read_toml(tmp_path / "config.toml")))[0] == found


def test_the_mean_of_two_runs_has_the_same_classes(config, tmp_path):
    for seed in (1, 2):
        train(dataclasses.replace(config, seed=seed), tmp_path / str(seed), device="numpy")
    assert average_runs([tmp_path / "1", tmp_path / "2"], tmp_path / "mean") == 2
    assert load_run(tmp_path / "mean", device="numpy").classify(["the cat"])
    text = (tmp_path / "train.tsv").read_text().replace("\tnone", "\tnothing")
    (tmp_path / "other.tsv").write_text(text)
    other = dataclasses.replace(config, classify=str(tmp_path / "other.tsv"), valid_classify=None)
    train(other, tmp_path / "3", device="numpy")
    with pytest.raises(CheckpointError, match="have different classes"):
        average_runs([tmp_path / "1", tmp_path / "3"], tmp_path / "no")


# ---- beginning with an encoder ------------------------------------------------------------------


def test_a_folder_gets_a_new_head_and_continues_bit_for_bit(config, encoder, tmp_path):
    config = begun_with(encoder, config, freeze="embedding")
    train(config, tmp_path / "whole", device="numpy")
    facts = RunFolder(tmp_path / "whole").metrics.read("start")[0]["data"]["facts"]
    assert facts[-1] == f"the model of {encoder} gets a new classifier"
    assert not train(config, tmp_path / "run", device="numpy", stop=After(2)).finished
    train(config, tmp_path / "run", device="numpy")
    assert_same_bits(tmp_path / "whole", tmp_path / "run")
    for name in ("state", "last", "best", "metrics"):  # as if it was killed before its first save
        for path in (tmp_path / "run").glob(f"{name}*"):
            path.unlink()
    train(config, tmp_path / "run", device="numpy")
    assert_same_bits(tmp_path / "whole", tmp_path / "run")
    user = load_run(tmp_path / "run", device="numpy")
    gpuattn.save_pretrained(user.model, tmp_path / "there", user.tokenizer)
    old, new = (load_file(path / "model.safetensors") for path in (encoder, tmp_path / "there"))
    assert new.keys() - old.keys() == {"classifier.weight", "classifier.bias"}
    name = "bert.embeddings.word_embeddings.weight"
    assert old.keys() < new.keys() and (old[name] == new[name]).all()
    written = json.loads((tmp_path / "there" / "config.json").read_text())
    assert written["architectures"] == ["BertForSequenceClassification"]
    assert written["id2label"] == {"0": "animal", "1": "none", "2": "thing"}
    assert load_run(tmp_path / "there", device="numpy").classify(["a"]) == user.classify(["a"])
    vectors = load_run(tmp_path / "there", device="numpy", task="embedding").embed(["a"])
    assert vectors.shape == (1, 16)


def test_the_head_of_a_folder_goes_on(config, encoder, tmp_path):
    train(begun_with(encoder, config), tmp_path / "first", device="numpy")
    user = load_run(tmp_path / "first", device="numpy")
    gpuattn.save_pretrained(user.model, tmp_path / "there", user.tokenizer)
    more = begun_with(tmp_path / "there", config, length="1u", lr=1e-9)
    train(more, tmp_path / "more", device="numpy")
    again = load_run(tmp_path / "more", device="numpy")
    name = "classifier.weight"
    np.testing.assert_allclose(again.model.state()[name], user.model.state()[name], atol=1e-6)
    (tmp_path / "train.tsv").write_text("a\tx\nb\tanimal\n")
    with pytest.raises(DataError, match=r"line 1: the label 'x' is none of the classifier that"):
        train(dataclasses.replace(more, valid_classify=None), tmp_path / "no", device="numpy")


def test_a_run_of_hidden_tokens_gives_its_encoder(config, tmp_path):
    (tmp_path / "text").write_text("".join(line.split("\t")[0] + "\n" for line in lines_of(90)))
    options = {"classify": None, "valid_classify": None, "lm": str(tmp_path / "text"), "mask": 0.15}
    train(dataclasses.replace(config, **options), tmp_path / "mlm", device="numpy")
    new = dataclasses.replace(config, init_from=str(tmp_path / "mlm"), length="1u", warmup=0,
                              lr=1e-9, ema=0)  # fmt: skip
    train(new, tmp_path / "run", device="numpy")
    runs = [RunFolder(tmp_path / name) for name in ("mlm", "run")]
    said = runs[1].metrics.read("start")[0]["init_from"]["weights"]
    assert said.endswith(", with a new head")
    a, b = (load_run(run.path, device="numpy").model.state() for run in runs)
    shared = a.keys() & b.keys()
    assert "layers.0.attention.qkv.weight" in shared and "classifier.weight" not in shared
    for name in shared:
        np.testing.assert_allclose(a[name], b[name], atol=1e-6)
    back = dataclasses.replace(config, **options, init_from=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="is a run of 'Classifier of .*', whose head does not"):
        train(back, tmp_path / "no", device="numpy")


def test_heads_of_another_purpose_are_refused(encoder, tmp_path):
    for change, error in (
        ({"problem_type": "regression", "num_labels": 1}, "two or more classes, of which one is"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label names no classes 0, 1, 2"),
    ):
        folder = tmp_path / str(len(change))
        gpuattn.save_pretrained(
            Bert(BertConfig(40, 16, 2, 1, 20, classes=2)), folder, CharTokenizer.train(["abc"])
        )
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | change))
        with pytest.raises(PretrainedError, match=error):
            load_run(folder, device="numpy")
        assert load_run(folder, device="numpy", task="embedding").embed(["a"]).shape == (1, 16)
    with pytest.raises(ConfigError, match="is a bert, to be used by: gpuattn embed"):
        load_run(encoder, device="numpy", task="labels")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of numbers that were never computed
def test_a_run_on_a_fake_gpu(config, tmp_path):
    """All kernels of a run are compiled before it needs them, and batches have few shapes."""
    config = dataclasses.replace(config, batch=400, ema=0.0)
    with training_on("9.0") as gpu:
        train(config, tmp_path / "run", device="cuda")
    assert gpu.launched() == gpu.rehearsed and "update/adamw.cu" in dict(gpu.rehearsed)


def test_on_a_gpu_it_learns_in_graphs_as_on_the_host(gpu, config, tmp_path):
    config = dataclasses.replace(config, dropout=0.0, precision="fp32", ema=0.0, length="30u")
    for device in ("numpy", "cuda"):
        train(config, tmp_path / device, device=device)
    rows = [RunFolder(tmp_path / name).metrics.read("valid")[-1] for name in ("numpy", "cuda")]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.05)
    assert evaluate_labels(load_run(tmp_path / "cuda", device="cuda"))["texts"] == 30


@pytest.mark.exhaustive
def test_kinds_of_generated_sentences(tmp_path):
    for split, count in (("train", 4000), ("valid", 1000)):
        lines = (f"{pair.source}\t{pair.kind}\n" for pair in generate("toy", split, count, 1))
        (tmp_path / split).write_text("".join(lines), encoding="utf-8")
    given = {"classify": str(tmp_path / "train"), "valid_classify": str(tmp_path / "valid")}
    config = resolve(("", given | {"length": "460u"}), device="numpy")[0]
    assert train(config, tmp_path / "run", device="numpy").best["accuracy"] >= 99
