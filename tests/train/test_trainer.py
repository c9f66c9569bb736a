"""Runs on a tiny synthetic corpus: learning, files, counts, and when they stop."""

import dataclasses
import gc
import json
import math
import weakref

import numpy as np
import pytest

from gpuattn.errors import CheckpointError, ConfigError, DataError, DeviceMissingError
from gpuattn.runs.averaging import average_runs
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.evaluation import evaluate, pairs_for
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.runs.loading import load_run
from gpuattn.runtime import checkpoint
from gpuattn.tasks.corpus import Corpus
from gpuattn.tasks.translation import TranslationTask
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.trainer import Trainer

WORDS = [
    "red",
    "green",
    "blue",
    "old",
    "new",
    "big",
    "small",
    "cat",
    "dog",
    "bird",
    "tree",
    "house",
]


class Heard(Listener):
    """Records all messages and progress."""

    def __init__(self):
        self.said, self.steps = [], []

    def say(self, topic, text):
        self.said.append((topic, text))

    def progress(self, progress):
        self.steps.append(progress)


def write_corpus(folder, count=60, seed=0):
    """Write ``src`` and ``tgt``: a few words, and the same words in upper case."""
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(count)]
    (folder / "src").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tgt").write_text("".join(f"{line.upper()}\n" for line in lines))
    return str(folder / "src"), str(folder / "tgt")


@pytest.fixture
def config(tmp_path):
    source, target = write_corpus(tmp_path)
    return TrainConfig(
        source=source, target=target, vocab_size=400, max_len=40, dim=16, heads=2, layers=(1, 1),
        ffn=16, dropout=0.1, batch=200, lr=1e-2, warmup=4, length="12u", eval_every="6u",
        score_pairs=4, beam=2,
    )  # fmt: skip


def test_a_run_learns_and_its_folder_translates(config, tmp_path):
    config = dataclasses.replace(config, length="150u", eval_every="75u", dim=32, dropout=0.0)
    heard = Heard()
    outcome = train(config, tmp_path / "run", device="numpy", listener=heard)
    assert outcome.finished and outcome.update == 150
    losses = [row["loss"] for row in RunFolder(tmp_path / "run").metrics.read("valid")]
    assert losses[-1] < min(0.5, losses[0])  # starts at log(400), about 6
    translator = load_run(tmp_path / "run", device="numpy")
    lines = ["red cat", "", "old house"]
    found = translator.translate(lines)
    assert len(found) == 3 and found[1] == "" and found[0].isupper()
    assert translator.translate(["old house"]) == found[2:]
    slow = translator.translate(lines, kv_cache=False)
    assert slow == found
    best = translator.nbest(lines, 2)
    assert [len(each) for each in best] == [2, 1, 2]
    assert best[0][0].score >= best[0][1].score
    topics = [topic for topic, _ in heard.said]
    for topic in ("device", "gpuattn", "data", "model", "update", "folder", "valid"):
        assert topic in topics
    assert heard.steps and heard.steps[-1].rate > 0


MODELS = [
    {"positions": "rotary", "kv_heads": 1, "activation": "swiglu", "pad_vocab": False},
    {"positions": "learned", "norm": "post", "activation": "gelu_exact"},
]


@pytest.mark.parametrize("options", MODELS, ids=lambda options: options["positions"])
def test_models_with_all_options_are_loaded_and_translate(config, tmp_path, options):
    config = dataclasses.replace(config, **options)
    train(config, tmp_path / "run", device="numpy")
    translator = load_run(tmp_path / "run", device="numpy")
    model = translator.model
    for name, value in options.items():
        assert getattr(model.config, name) == value
    rows = len(model.source.weight.data)
    assert rows % 64 == 0 if model.config.pad_vocab else rows == model.config.vocab
    lines = ["red cat", "old house and a dog"]
    assert translator.translate(lines) == translator.translate(lines, kv_cache=False)
    maps = model.attention_maps([5, 6, 7], [8, 9])
    assert [m.shape for m in maps["cross"]] == [(2, 3, 4)]
    with pytest.raises(ConfigError, match="other options"):
        train(dataclasses.replace(config, kv_heads=2), tmp_path / "run", device="numpy")


@pytest.mark.parametrize(
    "optimizer, lr", [("adam", 1e-2), ("lamb", 3e-2), ("lion", 4e-3), ("sgd", 0.3)]
)
def test_every_optimizer_learns(config, tmp_path, optimizer, lr):
    chosen = dataclasses.replace(
        config, optimizer=optimizer, lr=lr, length="60u", eval_every="15u", dropout=0.0, ema=0.0,
        score_pairs=0,
    )  # fmt: skip
    train(chosen, tmp_path / "run", device="numpy")
    losses = [row["loss"] for row in RunFolder(tmp_path / "run").metrics.read("valid")]
    assert losses[-1] < 0.75 * losses[0]
    names = checkpoint.load(tmp_path / "run", "state")[0]
    assert any(name.startswith("exp_avg:") for name in names)
    assert any(name.startswith("exp_avg_sq:") for name in names) == (optimizer in ("adam", "lamb"))


def test_files_of_a_run(config, tmp_path):
    train(config, tmp_path / "run", device="numpy")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "tokenizer.model", "metrics.jsonl", "valid"} <= names
    for name in ("best", "last", "state"):
        assert checkpoint.generations(tmp_path / "run", name)
    assert not [n for n in names if n.endswith((".pkl", ".pt", ".npy", ".tmp"))]
    assert len((tmp_path / "run/valid/update_00000012.txt").read_text().splitlines()) == 1
    events = [row["event"] for row in RunFolder(tmp_path / "run").metrics.read()]
    assert events[0] == "start" and events[-1] == "end" and events.count("valid") == 2
    info = summary(tmp_path / "run")
    assert info["state"] == "finished" and info["updates"] == 12
    assert json.loads(json.dumps(info)) == info
    for name in ("best", "last", "state"):
        for path in (tmp_path / "run").glob(f"{name}-*"):
            path.unlink()
    assert summary(tmp_path / "run") == info, "a new model has as many parameters"
    assert not (tmp_path / "run/checkpoints").exists()


def test_accumulated_batches_make_one_update_of_their_tokens(config):
    """Two batches at once and the same two summed give the same gradient."""
    whole = dataclasses.replace(config, dropout=0.0, batch=2000)
    parts = dataclasses.replace(config, dropout=0.0, batch=60, accumulate=50)
    norms = []
    for chosen in (whole, parts):
        task = TranslationTask(chosen)
        trainer = Trainer(task, "numpy", Listener())
        if chosen is parts:
            batches = task.corpus.loader(0).batches(0)
            assert batches >= 4
            trainer.config = dataclasses.replace(parts, accumulate=batches)
        trainer._update()
        assert trainer.at.epoch == 1
        norms.append(trainer.optimizer.state.norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("length, updates", [("3e", None), ("7u", 7)])
def test_runs_have_the_requested_length(config, tmp_path, length, updates):
    config = dataclasses.replace(config, length=length, eval_every="1e", accumulate=2)
    outcome = train(config, tmp_path / "run", device="numpy")
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    if updates is None:
        batches = Corpus(config).loader(0).batches(0)
        assert rows[-1]["epoch"] == 3
        assert math.ceil(3 * batches / 2) - 1 <= outcome.update <= math.ceil(3 * (batches + 1) / 2)
    else:
        assert outcome.update == updates


def test_a_budget_of_seconds_ends_with_the_decay_done(config, tmp_path):
    changes = {"length": "2s", "eval_every": "10s", "schedule": "cosine", "warmup": 0.1}
    config = dataclasses.replace(config, **changes)
    heard = Heard()
    train(config, tmp_path / "run", device="numpy", listener=heard)
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    assert len(rows) == 1 and 2 <= rows[0]["seconds"] < 2.5
    assert heard.steps[-1].learning_rate < 0.02 * config.lr


def test_patience_ends_a_run(config, tmp_path):
    config = dataclasses.replace(config, lr=1e-9, eval_every="1u", patience=2, score_pairs=4)
    outcome = train(config, tmp_path / "run", device="numpy")
    assert outcome.finished and outcome.update < 12
    assert "no better" in checkpoint.load(tmp_path / "run", "state")[1]["finished"]
    again = train(config, tmp_path / "run", device="numpy")
    assert again == outcome


@pytest.mark.parametrize("change, now, took, due", [
    ({}, (50, 0, 30.0), 0, False), ({}, (50, 0, 45.0), 0, True), ({}, (50, 1, 2.0), 0, True),
    ({}, (50, 1, 32.0), 3, False), ({}, (50, 1, 33.0), 3, True), ({}, (50, 0, 33.0), 3, False),
    ({}, (0, 0, 0.0), 0, False), ({"average": 2}, (50, 1, 2.0), 3, True),
    ({"patience": 2}, (50, 0, 500.0), 3, False), ({"eval_every": "9u"}, (9, 0, 0.1), 3, True),
])  # fmt: skip
def test_evaluations_take_a_tenth_of_the_time_by_default(config, change, now, took, due):
    config = dataclasses.replace(config, **({"length": "9e", "eval_every": "auto"} | change))
    trainer = Trainer(TranslationTask(config), "numpy", Listener())
    at = trainer.at
    at.update, at.epoch, at.seconds, at.evaluation = *now, took
    assert trainer._due() == due


def test_the_loss_of_guessing_by_frequency_is_reported(config):
    corpus = Corpus(config)
    tokens = [token for _, target in corpus.valid_ids for token in [*target, 2]]
    p = np.bincount(tokens)[list(set(tokens))] / len(tokens)
    assert f"by frequency {-(p * np.log(p)).sum():.2f}" in corpus.facts[1]


def test_a_corpus_of_one_batch_gives_a_warning(config):
    assert not Corpus(config).warnings
    (warning,) = Corpus(dataclasses.replace(config, batch=9000)).warnings
    assert "all of the text is one batch" in warning and "Try --batch" in warning


def test_averages_are_kept_and_used(config, tmp_path):
    config = dataclasses.replace(config, eval_every="3u", average=3, ema=0.9, score_pairs=0)
    train(config, tmp_path / "run", device="numpy")
    run = RunFolder(tmp_path / "run")
    assert run.snapshots() == [f"update_{n:08d}" for n in (6, 9, 12)]
    rows = run.metrics.read("valid")
    assert rows[-1]["averaged"] == 3
    mean = run.average_snapshots(3)
    parts = [checkpoint.load(run.path / "checkpoints", name)[0] for name in run.snapshots()]
    for name, array in mean.items():
        np.testing.assert_allclose(array, np.mean([p[name] for p in parts], axis=0), atol=1e-6)
    assert average_runs([run.path], tmp_path / "mean") == 3
    found = checkpoint.load(tmp_path / "mean", "best")[0]
    assert all((found[name] == mean[name]).all() for name in mean)
    assert load_run(tmp_path / "mean", device="numpy").translate(["red"])
    with pytest.raises(ConfigError, match="mean is a run already"):
        average_runs([run.path], tmp_path / "mean")
    assert summary(tmp_path / "mean")["state"] == "averaged"
    with pytest.raises(ConfigError, match="is a mean of weights"):
        train(config, tmp_path / "mean", device="numpy")


def test_runs_with_other_tokenizers_are_not_averaged(config, tmp_path):
    train(config, tmp_path / "a", device="numpy")
    other = dataclasses.replace(config, vocab_size=300)
    train(other, tmp_path / "b", device="numpy")
    with pytest.raises(CheckpointError, match="different tokenizers"):
        average_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_nonfinite_gradients_end_the_run_and_name_the_parameter(config, tmp_path):
    trainer = Trainer(TranslationTask(config), "numpy", Listener())
    trainer.workspace.weights()["encoder_norm.weight"][0] = np.nan
    with pytest.raises(FloatingPointError, match="in a row"), np.errstate(invalid="ignore"):
        trainer.run(lambda: False, lambda: {"score": 0, "loss": 0}, lambda row: None)


def test_the_buffers_of_a_trainer_are_freed_with_it(config):
    """Reference counts suffice: the garbage collector does not see GPU memory pressure."""
    trainer = Trainer(TranslationTask(config), "numpy", Listener())
    trainer._update()
    trainer.threads = None  # only on NumPy, where it refers to the trainer
    gc.collect()
    gc.disable()
    try:
        workspace = weakref.ref(trainer.workspace)
        del trainer
        assert workspace() is None
    finally:
        gc.enable()


def test_other_options_are_refused_by_name_and_nothing_is_lost(config, tmp_path):
    train(config, tmp_path / "run", device="numpy")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="--dim was 16, now 32; --lr was 0.01, now 0.1"):
        train(dataclasses.replace(config, dim=32, lr=0.1), tmp_path / "run", device="numpy")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    other = dataclasses.replace(config, dim=32)
    assert train(other, tmp_path / "run", device="numpy", overwrite=True).finished
    assert RunFolder(tmp_path / "run").config() == other


def test_a_folder_with_other_files_is_refused(config, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="not a run"):
            train(config, tmp_path / "thesis", device="numpy", overwrite=overwrite)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_evaluation_on_files_and_on_held_out_sentences(config, tmp_path):
    train(config, tmp_path / "run", device="numpy")
    translator = load_run(tmp_path / "run", device="numpy")
    row = evaluate(translator, pairs_for(config), beam=1)
    assert set(row) == {"exact_match", "exact_by_kind", "bleu", "bleu_signature", "chrf",
                        "sentences", "tokens_per_second"}  # fmt: skip
    assert row["sentences"] == 1
    assert evaluate(translator, pairs_for(config, config.source, config.target))["sentences"] == 60
    held = {tuple(pair) for pair in pairs_for(config)}
    assert held == {tuple(pair) for pair in Corpus(config).valid}


def test_invalid_corpora_are_refused(config, tmp_path):
    (tmp_path / "one").write_text("a\n")
    for change, message in (
        ({"source": str(tmp_path / "one")}, "1 line"),
        ({"source": str(tmp_path / "one"), "target": str(tmp_path / "one")}, "--valid SRC TGT"),
        ({"source": str(tmp_path / "none")}, "No such file"),
        ({"max_len": 3, "on_long": "error"}, "tokens long"),
    ):
        with pytest.raises(DataError, match=message):
            train(dataclasses.replace(config, **change), tmp_path / "run", device="numpy")
        assert not (tmp_path / "run").exists()


def test_long_sentences_are_counted_with_the_first_line(config, tmp_path):
    lines = (tmp_path / "src").read_text().splitlines()
    for name in ("src", "tgt"):
        (tmp_path / name).write_text("\n".join([*lines[:7], "cat " * 100, *lines[8:]]) + "\n")
    facts = Corpus(dataclasses.replace(config, valid_source=config.source, seed=3,
                                       valid_target=config.target)).facts  # fmt: skip
    assert "1 longer than 40 tokens (line 8 first)" in facts[0]


def test_without_a_gpu_a_run_warns_or_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(DeviceMissingError, match="gpuattn doctor"):
        train(config, tmp_path / "run", device="cuda")
    heard = Heard()
    train(config, tmp_path / "run", device="auto", listener=heard)
    assert heard.said[0][0] == "device" and "without a GPU" in heard.said[0][1]


def test_on_a_gpu_a_run_learns_in_bf16_too(gpu, config, tmp_path):
    config = dataclasses.replace(config, length="60u", eval_every="30u", dim=32, dropout=0.0)
    for precision in ("bf16", "pure-bf16", "fp16", "fp32"):
        chosen = dataclasses.replace(config, precision=precision)
        train(chosen, tmp_path / precision, device="cuda")
        losses = [row["loss"] for row in RunFolder(tmp_path / precision).metrics.read("valid")]
        assert losses[-1] < losses[0]
        assert load_run(tmp_path / precision, device="cuda").translate(["red cat"])
