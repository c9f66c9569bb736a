"""gpuattn train, classify, evaluate and info: runs on an .npz, without Pillow, and on texts."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import gpuattn
from gpuattn.cli.main import main
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.models import Bert, BertConfig

BERT = ["--dim", "16", "--heads", "2", "--layers", "1", "--batch", "60", "--block", "24", "--for",
        "4u", "--eval-every", "4u", "--device", "numpy", "--vocab-size", "290"]  # fmt: skip
TINY = ["--dim", "16", "--heads", "2", "--layers", "1", "--batch", "16", "--for", "4u",
        "--eval-every", "4u", "--device", "numpy"]  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("images") / "bits.npz", np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 256, (40, 8, 8), np.uint8), labels=np.arange(40) % 2)
    return path


def test_commands_of_a_run(call, images, tmp_path):
    run = tmp_path / "run"
    trained = call("train", "--model", "vit", images, *TINY, "--out", run)
    assert trained.exit_code == 0 and f"echo {images} | gpuattn classify {run}" in trained.stderr
    assert "36 images of 8 x 8" in trained.stderr and "% right" in trained.stderr
    result = call("classify", run, input=f"{images}\n\nnothing.npz\n")
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and len(lines) == 42 and lines[40:] == ["", ""]
    assert result.stderr.count("error: line") == 1  # an empty line has no labels
    assert "error: line 3: cannot read nothing.npz: No such file" in result.stderr
    for line in lines[:40]:
        name, probability = line.split("\t")
        assert name in ("0", "1") and 0.5 <= float(probability) <= 1
    shown = call("evaluate", run).stdout
    assert "accuracy" in shown and "images       4 at" in shown
    assert "images       40 at" in call("evaluate", run, images).stdout
    assert "2 classes" in call("info", run).stdout
    assert call("export", run, tmp_path / "there").exit_code == 0
    found = call("classify", tmp_path / "there", input=f"{images}\n")
    assert found.stdout.splitlines() == lines[:40]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "pets.tsv"
    path.write_text("the cat\tanimal\na car\tthing\n" * 20)
    return path


@pytest.fixture(scope="module")
def texts_run(texts):
    """A run of a classifier of texts. Tests must not change it."""
    out = texts.with_name("run")
    result = CliRunner().invoke(main, ["train", "--classify", str(texts), *BERT, "--out", str(out)])
    assert result.exit_code == 0
    assert f"echo 'the cat' | gpuattn classify {out}" in result.stderr
    assert "36 texts, " in result.stderr and "of each of 2 classes" in result.stderr
    return out


def test_commands_of_a_run_of_texts(call, texts, texts_run, tmp_path):
    long = "the cat " * 20
    given = f"the cat\n\n{long}\na car".encode() + b"\n\xff\n"
    result = call("classify", texts_run, input=given)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and len(lines) == 5 and lines[1] == lines[2] == lines[4] == ""
    for line in (lines[0], lines[3]):
        name, probability = line.split("\t")
        assert name in ("animal", "thing") and 0.5 <= float(probability) <= 1
    assert "error: line 5: not UTF-8" in result.stderr
    assert "error: line 3: classify: the line is " in result.stderr
    assert "accepted: up to 24. truncate=True (--truncate) cuts it" in result.stderr
    cut = call("classify", texts_run, "--truncate", input=given).stdout.splitlines()
    assert cut[2].split("\t")[0] in ("animal", "thing") and cut[::3] == lines[::3]
    assert call("classify", texts_run, input="the cat\n").exit_code == 0
    shown = call("info", texts_run).stdout
    assert "'animal', 'thing'" in shown and "subwords" in shown
    assert "% of held-out texts right" in (texts_run / "report.html").read_text()
    assert call("export", texts_run, tmp_path / "there").exit_code == 0
    found = call("classify", tmp_path / "there", input=given)
    assert found.stdout.splitlines() == lines and "for labels" in call(
        "info", tmp_path / "there").stdout  # fmt: skip
    assert len(call("embed", tmp_path / "there", input="a cat\n").stdout.splitlines()) == 1
    result = call("train", "--from", tmp_path / "there", "--classify", texts, "--for", "1u",
                  "--batch", 60, "--device", "numpy", "--out", tmp_path / "more")  # fmt: skip
    assert result.exit_code == 0 and f"with the model of {tmp_path / 'there'}" in result.stderr


def test_evaluation_shows_the_wrong_ones(call, texts, texts_run, tmp_path):
    shown = call("evaluate", texts_run).stdout
    assert "accuracy" in shown and "texts        4 at" in shown
    (tmp_path / "test.tsv").write_text("the cat\tanimal\nthe cat\tthing\n" * 8)
    shown = call("evaluate", texts_run, tmp_path / "test.tsv").stdout
    row = json.loads(call("evaluate", texts_run, tmp_path / "test.tsv", "--json").stdout)
    assert row["accuracy"] == 50 and len(row["wrong"]) == 8
    one = row["wrong"][0]
    assert f"  line {one['line']}: {one['label']} taken for {one['found']}: the cat" in shown
    (tmp_path / "many.tsv").write_text("the cat\tanimal\nthe cat\tthing\n" * 11)
    shown = call("evaluate", texts_run, tmp_path / "many.tsv").stdout
    assert shown.endswith("... and 1 more (--json)\n") and shown.count("line ") == 10
    (tmp_path / "long.tsv").write_text(f"{'the cat ' * 20}\tanimal\nthe cat\tthing\n")
    assert "too long     1, which were cut" in call(
        "evaluate", texts_run, tmp_path / "long.tsv").stdout  # fmt: skip
    (tmp_path / "other.tsv").write_text("the cat\tpet\n")
    result = call("evaluate", texts_run, tmp_path / "other.tsv")
    assert result.exit_code == 1 and "the label 'pet' is unseen in training" in result.stderr


@pytest.mark.parametrize("arguments, error", [
    (["evaluate", "RUN", "--beam", "2"], "--beam is for translators, and this is a classifier of"),
    (["evaluate", "RUN", "a", "b"], "give one file of lines with labels"),
    (["evaluate", "FOLDER"], "give a file: this is no run"),
    (["sample", "RUN"], "to be used by: gpuattn classify"),
    (["embed", "RUN"], "to be used by: gpuattn classify"),
    (["score", "RUN"], "has a classifier, which scores no text"),
    (["classify", "ENCODER"], "has no classifier; it is used by: gpuattn embed"),
    (["train", "--classify", "TEXTS", "--lm", "TEXTS"], "classify is for --model bert, not gpt2"),
    (["train", "--model", "gpt2", "--classify", "TEXTS"], "classify is for --model bert, not gpt2"),
    (["train", "--model", "bert", "--classify", "TEXTS", "--lm", "TEXTS"], "--lm FILE is all"),
    (["train", "--from", "FOLDER", "--classify", "PETS"], "none of the classifier that the run"),
    (["train", "--classify", "RUN/config.toml"], "line 1, has no tab"),
])  # fmt: skip
def test_what_does_not_fit_texts_is_one_error(call, texts, texts_run, tmp_path, arguments, error):
    call("export", texts_run, tmp_path / "there")
    gpuattn.save_pretrained(Bert(BertConfig(300, 16, 2, 1, 20)), tmp_path / "encoder",
                            CharTokenizer.train(["abc"]))  # fmt: skip
    (tmp_path / "pets.tsv").write_text("the cat\tpet\na car\tthing\n")
    places = {"RUN": texts_run, "FOLDER": tmp_path / "there", "ENCODER": tmp_path / "encoder",
              "TEXTS": texts, "PETS": tmp_path / "pets.tsv",
              "RUN/config.toml": texts_run / "config.toml"}  # fmt: skip
    out = ["--out", tmp_path / "out", "--device", "numpy"] if arguments[0] == "train" else []
    result = call(*[places.get(argument, argument) for argument in arguments], *out, input="a\n")
    assert result.exit_code in (1, 2) and error in " ".join(result.stderr.split())


@pytest.mark.parametrize("arguments, error", [
    (["classify", "RUN", "--truncate"], "--truncate is for texts"),
    (["train", "--model", "vit"], "--model vit learns from images: --images PATH"),
    (["train", "--model", "vit", "a", "b"], "--images PATH"),
    (["evaluate", "RUN", "--beam", "2"], "--beam is for translators, and this is a classifier"),
    (["evaluate", "RUN", "a", "b"], "give one folder of classes or .npz"),
    (["sample", "RUN"], "to be used by: gpuattn classify"),
    (["score", "RUN"], "has a classifier, which scores no text"),
])  # fmt: skip
def test_what_does_not_fit_is_one_error(call, images, tmp_path, arguments, error):
    run = tmp_path / "run"
    if "RUN" in arguments:
        assert call("train", "--images", images, *TINY, "--out", run).exit_code == 0
    result = call(*[run if argument == "RUN" else argument for argument in arguments], input="a\n")
    assert result.exit_code in (1, 2) and error in result.stderr
    assert "Traceback" not in result.stderr
