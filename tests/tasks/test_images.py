"""Runs of classifiers of images: learning, held-out images, refusals, and bit-for-bit resumes."""

import dataclasses
import json
import os
import time

import numpy as np
import pytest
from PIL import Image
from stopping import After, assert_same_bits

from gpuattn import load_run, save_pretrained
from gpuattn.bench import doctor
from gpuattn.errors import ConfigError, DataError
from gpuattn.runs.averaging import average_runs
from gpuattn.runs.config import TrainConfig, read_toml, resolve, to_toml
from gpuattn.runs.evaluation import evaluate_images
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.tasks import store_cache
from gpuattn.tasks.images import ImageCorpus, ImageTask, suitable_patch
from gpuattn.train.progress import Listener
from gpuattn.train.session import train


def pictures(count, seed=0, sides=(6, 7)):
    """Return images whose half that is bright is their class, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    images = rng.integers(0, 90, (count, *sides, 1), np.uint8)
    images[labels == 1, :3] += 150
    images[labels == 2, 3:] += 150
    return images, np.array(["none", "top", "bottom"])[labels]


@pytest.fixture
def config(tmp_path):
    images, labels = pictures(60)
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    images, labels = pictures(20, 1)
    np.savez(tmp_path / "valid.npz", images=images, labels=labels)
    return TrainConfig(
        model="vit", images=str(tmp_path / "train.npz"), valid_images=str(tmp_path / "valid.npz"),
        image_size=6, patch=3, channels=1, dim=16, heads=2, layers=1, batch=16, lr=1e-2, warmup=2,
        length="7u", eval_every="3u", ema=0.9, mixup=0.3, shift=1, dropout=0.1,
        stochastic_depth=0.2,
    )  # fmt: skip


def test_a_run_learns_and_its_classifier_is_the_same_everywhere(config, tmp_path):
    config = dataclasses.replace(
        config, length="90u", eval_every="45u", dropout=0.0, stochastic_depth=0.0, shift=0, ema=0.0,
        mixup=0.0,
    )  # fmt: skip
    heard, report = [], Listener()
    report.say = lambda topic, text: heard.append((topic, text))
    outcome = train(config, tmp_path / "run", device="numpy", listener=report)
    rows = RunFolder(tmp_path / "run").metrics.read("valid")
    assert rows[-1]["accuracy"] == rows[-1]["score"] == 100 and outcome.best["loss"] < 0.5
    said = [text for _, text in heard]
    assert "16 images of 6 x 6, 5 tokens each, for 90 updates" in said
    assert any("3 classes" in text for text in said) and any("images/s" in text for text in said)
    classifier = load_run(tmp_path / "run", device="numpy", task="images")
    found = classifier.classify(config.valid_images)
    assert [label.name for label in found] == pictures(20, 1)[1].tolist()
    assert all(0.4 < label.probability <= 1 for label in found)
    scores = evaluate_images(classifier)
    assert scores["images"] == 20 and scores["accuracy"] == 100
    assert scores["loss"] == pytest.approx(outcome.best["loss"], rel=1e-5)
    assert evaluate_images(classifier, config.images)["images"] == 60
    Image.fromarray(np.repeat([[20], [220]], 9, 1).repeat(5, 0).astype("u1")).save(
        tmp_path / "a.png"
    )
    assert classifier.classify(tmp_path / "a.png")[0].name == "bottom"
    save_pretrained(classifier.model, tmp_path / "there", classifier.tokenizer)
    written = json.loads((tmp_path / "there" / "config.json").read_text())
    assert list(written["id2label"].values()) == sorted(set(pictures(60)[1].tolist()))
    there = load_run(tmp_path / "there", device="numpy")
    assert there.classify(config.valid_images) == found
    assert there.classify(tmp_path / "a.png")[0].name == "bottom"
    assert evaluate_images(there, config.valid_images)["accuracy"] == 100
    (tmp_path / "files" / "bottom").mkdir(parents=True)
    (tmp_path / "a.png").rename(tmp_path / "files" / "bottom" / "a.png")
    for user in (classifier, there):
        scores = evaluate_images(user, tmp_path / "files")
        assert (scores["images"], scores["accuracy"]) == (1, 100)
    assert "accuracy" in str(summary(tmp_path / "run")["best"])
    assert "100.00 % of held-out images" in (tmp_path / "run" / "report.html").read_text()


def test_a_tenth_is_held_out_and_stays_so(config):
    config = dataclasses.replace(config, valid_images=None)
    corpus, labels = ImageCorpus(config), pictures(60)[1]
    held = np.concatenate([batch.images for batch in corpus.valid_batches()])
    seen = {batch.images[i].tobytes() for e in range(9) for batch in corpus.loader(e).epoch(e)
            for i in range(16)}  # fmt: skip
    assert len(held) == 6 and len(seen) == 54 and not seen & {one.tobytes() for one in held}
    again = ImageCorpus(config, corpus.tokenizer)
    np.testing.assert_array_equal(again.valid_names, corpus.valid_names)
    assert set(corpus.tokenizer.names) == set(labels) and corpus.epoch_tokens() == 54
    assert "54 images of 6 x 7" in corpus.facts[0] and "Try --batch 5" in corpus.warnings[0]


@pytest.mark.parametrize("change", [{}, {"length": "3e", "accumulate": 2, "eval_every": "1e"}],
                         ids=["updates", "epochs"])  # fmt: skip
def test_a_run_stopped_at_any_update_resumes_bit_for_bit(config, tmp_path, change):
    config = dataclasses.replace(config, **change)
    whole, stops = train(config, tmp_path / "whole", device="numpy"), 0
    for calls in (1, 2, 4, 10_000):
        stopped = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
        stops += not stopped.finished
    assert stops >= 2 and stopped.finished and stopped.update == whole.update
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_other_images_cannot_continue_a_run(config, tmp_path):
    train(config, tmp_path / "run", device="numpy")
    images, labels = pictures(60, 5)
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    with pytest.raises(DataError, match="not the one that .* began with"):
        train(config, tmp_path / "run", device="numpy")


def test_labels_unseen_in_training(config, tmp_path):
    images, labels = pictures(4)
    labels = labels.astype("U9")
    labels[1] = "left"
    np.savez(tmp_path / "valid.npz", images=images, labels=labels)
    with pytest.raises(DataError, match="has 'left' among its labels, unseen in training; accept"):
        train(config, tmp_path / "run", device="numpy")


@pytest.mark.parametrize("change, error", [
    ({"images": None}, "--model vit learns from images: --images PATH"),
    ({"lm": "book.txt"}, "--images PATH is all"), ({"source": "a", "target": "b"}, "is all"),
    ({"patch": 4}, "patch is 4; accepted: a divisor of image-size, 6"),
    ({"layers": "2:3"}, "layers is 2:3; accepted: one number"),
    ({"norm": "post"}, "norm is for --model translation, not vit"),
    ({"kv_heads": 1}, "kv-heads is for --model translation or gpt2 or llama, not vit"),
    ({"activation": "swiglu"}, "activation is swiglu; accepted: gelu_exact, gelu, relu for vit"),
    ({"block": 9}, "block is for --model bert or gpt2 or llama, not vit"),
    ({"beam": 2}, "beam is for"),
    ({"model": "gpt2", "lm": "a", "batch": 256}, "is for --model vit, not gpt2"),
])  # fmt: skip
def test_invalid_options_are_refused(config, change, error):
    with pytest.raises(ConfigError, match=error):
        dataclasses.replace(config, **change)


def test_images_select_vit_and_an_npz_says_their_size(config, tmp_path):
    found, origins = resolve(("command line", {"images": config.images}), device="numpy")
    assert (found.model, found.image_size, found.channels, found.patch) == ("vit", 6, 1, 2)
    assert (found.dim, origins["patch"]) == (64, "default")
    given = {"images": config.images, "image_size": 4, "patch": 1}
    assert resolve(("command line", given))[0].patch == 1
    photos, _ = resolve(("command line", {"images": "photos"}))
    assert (photos.image_size, photos.patch, photos.channels, photos.dim) == (224, 16, 3, 192)
    small, _ = resolve(("command line", {"images": "photos", "image_size": 64}))
    assert small.patch == 8
    (tmp_path / "config.toml").write_text(to_toml(found))
    assert resolve(("file", read_toml(tmp_path / "config.toml")))[0] == found
    assert [suitable_patch(n) for n in (1, 7, 8, 28, 32, 96, 224)] == [1, 1, 2, 4, 4, 12, 16]
    assert ImageTask.run_name(photos) == "photos"


def test_the_mean_of_two_runs(config, tmp_path):
    for seed in (1, 2):
        train(dataclasses.replace(config, seed=seed), tmp_path / str(seed), device="numpy")
    assert average_runs([tmp_path / "1", tmp_path / "2"], tmp_path / "mean") == 2
    assert load_run(tmp_path / "mean", device="numpy").classify(config.valid_images)
    with pytest.raises(ConfigError, match=r"--model vit, to be used by: gpuattn classify .*1$"):
        load_run(tmp_path / "1", task="language")


def test_on_a_gpu_it_learns_in_graphs_as_on_the_host(gpu, config, tmp_path):
    config = dataclasses.replace(config, dropout=0.0, precision="fp32", ema=0.0, length="20u")
    for device in ("numpy", "cuda"):
        train(config, tmp_path / device, device=device)
    rows = [RunFolder(tmp_path / name).metrics.read("valid")[-1] for name in ("numpy", "cuda")]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.05)
    classifier = load_run(tmp_path / "cuda", device="cuda")
    assert evaluate_images(classifier)["images"] == 20


def test_an_npz_of_other_images_is_refused(config, tmp_path):
    train(dataclasses.replace(config, length="2u"), tmp_path / "run", device="numpy")
    classifier = load_run(tmp_path / "run", device="numpy")
    for shape, got in (((2, 5, 9), "of 5 x 9 pixels with 1"), ((2, 6, 6, 3), "with 3 channels")):
        np.savez(tmp_path / "other.npz", images=np.zeros(shape, np.uint8))
        with pytest.raises(DataError, match=f"{got}.*accepted: at least 6 x 6 with 1 channels"):
            classifier.classify(tmp_path / "other.npz")


def test_the_bound_of_the_cache_holds_for_images_too(config, tmp_path, monkeypatch):
    """The images used longest ago are deleted, with stores of tokens, and decoded again."""
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "cache"))
    for place in ("a", "b"):
        for name in ("cat", "dog"):
            (tmp_path / place / name).mkdir(parents=True)
            for i in range(6):
                Image.new("L", (9, 9), 20 * i).save(tmp_path / place / name / f"{i}.png")

    def made(place):
        said = []
        own = dataclasses.replace(config, images=str(tmp_path / place), valid_images=None)
        return ImageCorpus(own, None, said.append), said

    tokens = store_cache.folder() / "tokens"
    tokens.mkdir(parents=True)
    (tokens / "part").write_bytes(bytes(100))
    for path in (tokens, tokens / "part"):
        os.utime(path, (5, 5))
    kept, said = made("a")
    (first,) = store_cache.image_folder().iterdir()
    assert "decoded once" in said[0] and len(said) == 1
    assert "1 of tokens, 1 of images, 0.00 of " in doctor._stores().detail
    os.utime(first, (9, 9))
    assert made("a")[1] == [] and first.stat().st_mtime > 9  # it is used now
    os.utime(first, (9, 9))
    for name, age in ((".x.tmp", 9), (".y.tmp", time.time())):  # killed, at work
        (store_cache.image_folder() / name).touch()
        os.utime(store_cache.image_folder() / name, (age, age))
    monkeypatch.setattr(store_cache, "MOST", int(1.5 * first.stat().st_size))
    said = made("b")[1]
    assert "deleted 2 used longest ago" in said[-1] and not tokens.exists() and not first.exists()
    left = sorted(path.name[:2] for path in store_cache.image_folder().iterdir())
    assert left == [".y", "im"]
    assert [len(batch.images) for batch in kept.valid_batches()] == [1]  # its memory map is whole
    assert "decoded once" in made("a")[1][0]
