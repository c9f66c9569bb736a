"""Commands by several ranks print what one process prints, and rank 0 alone tells what is wrong."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

import gpuattn
from gpuattn.cli.main import main
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.models import Bert, BertConfig

from .conftest import by_ranks

TINY = ["--dim", "16", "--heads", "2", "--layers", "1", "--for", "2u", "--eval-every", "2u",
        "--device", "numpy"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of every task but translation, and its data. Tests must not change it."""
    folder, rng = tmp_path_factory.mktemp("ranks"), np.random.default_rng(0)
    lines = [" ".join(rng.choice(["the", "a", "cat", "car"], 5)) for _ in range(200)]
    (folder / "text").write_text("".join(f"{line}\n" for line in lines))
    kinds = ("animal" if "cat" in line else "thing" for line in lines)
    pairs = zip(lines, kinds, strict=True)
    (folder / "labels.tsv").write_text("".join(f"{line}\t{kind}\n" for line, kind in pairs))
    np.savez(folder / "images.npz", images=rng.integers(0, 256, (60, 8, 8), np.uint8),
             labels=np.arange(60) % 2)  # fmt: skip
    chars, text = ["--tokenizer", "chars", "--batch", "96"], folder / "text"
    given = {
        "language": ["--model", "gpt2", "--lm", text, *chars, "--block", "32"],
        "masked": ["--model", "bert", "--lm", text, *chars, "--block", "32"],
        "labels": ["--classify", folder / "labels.tsv", *chars, "--block", "32"],
        "images": ["--model", "vit", folder / "images.npz", "--batch", "2"],
    }
    for name, options in given.items():
        command = ["train", *options, *TINY, "--out", folder / name]
        result = CliRunner().invoke(main, list(map(str, command)))
        assert result.exit_code == 0, result.output
    return folder


def figures(text):
    row = json.loads(text)
    return {name: value for name, value in row.items() if not name.endswith("_per_second")}


@pytest.mark.parametrize("name, more", [
    ("language", []), ("masked", []), ("labels", ["labels.tsv"]), ("images", ["images.npz"]),
])  # fmt: skip
def test_ranks_evaluate_to_the_same_figures(call, runs, name, more):
    arguments = ["evaluate", runs / name, *(runs / file for file in more), "--json"]
    alone, shared = call(*arguments), by_ranks(2, *arguments, text="")
    assert shared.returncode == 0, shared.stderr
    assert figures(shared.stdout) == figures(alone.stdout)  # the last bit included


def assert_same_scores(found, wanted):
    """Compare texts. In other batches the last of the four decimals may be rounded otherwise."""
    number = r"-?\d+\.\d{4}\b"
    assert re.split(number, found) == re.split(number, wanted)
    both = (list(map(float, re.findall(number, text))) for text in (found, wanted))
    np.testing.assert_allclose(*both, rtol=0, atol=1.01e-4)


def test_ranks_score_classify_and_embed_in_the_order_of_lines(call, runs, trained, tmp_path):
    (tmp_path / "lines").write_bytes(b"the cat\n\xff\n" + b"a car\n" * 3 + b"a" * 99 + b"\nthe car")
    (tmp_path / "other").write_text("cat\n" * 7)
    text = f"{runs / 'images.npz'}\n\nnothing.npz\n{runs / 'images.npz'}\n"
    commands = [
        (["score", runs / "language", tmp_path / "lines"], "", 1),
        (["score", trained, tmp_path / "other", tmp_path / "other", "--tokens"], "", 0),
        (["classify", runs / "labels", "--input", tmp_path / "lines"], "", 1),
        (["classify", runs / "images"], text, 1),
    ]
    for arguments, given, code in commands:
        alone, shared = call(*arguments, input=given), by_ranks(2, *arguments, text=given)
        assert shared.returncode == alone.exit_code == code, shared.stderr
        if arguments[0] == "score":
            assert_same_scores(shared.stdout, alone.stdout)
        else:
            assert shared.stdout == alone.stdout
        assert shared.stdout and shared.stderr == alone.stderr


def test_ranks_embed_and_name_a_wrong_line(call, tmp_path):
    folder = tmp_path / "encoder"
    config = BertConfig(7, 12, 3, 1, 16, max_length=16, masked=True, dropout=0.0)
    gpuattn.save_pretrained(Bert(config, seed=1), folder, CharTokenizer("abc"))
    arguments = ["embed", folder, "--output", tmp_path / "found.npy"]
    lines = "abc\ncab\n\nb\naabbcc\n"
    assert call(*arguments, input=lines).exit_code == 0
    alone = np.load(tmp_path / "found.npy")
    shared = by_ranks(3, *arguments, text=lines)
    assert shared.returncode == 0, shared.stderr
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), alone, rtol=1e-5, atol=1e-6)
    shared = by_ranks(2, *arguments, text=f"{lines}a\nabcd\n")
    assert shared.returncode == 1 and shared.stderr.count("gpuattn: error") == 1
    assert "line 7: CharTokenizer.encode: character 'd'" in shared.stderr


def test_what_no_rank_can_use_is_told_once(runs):
    for arguments, code, sentence in [
        (["evaluate", runs / "language", runs / "none"], 1, "none"),
        (["evaluate", runs / "labels", "--beam", "2"], 2, "--beam is for translators"),
        (["score", runs / "language", runs / "none"], 1, "none"),
        (["score", runs / "images"], 2, "has a classifier, which scores no text"),
        (["classify", runs / "language"], 2, "has no classifier"),
    ]:
        result = by_ranks(2, *arguments, text="")
        assert result.returncode == code and not result.stdout, result.stderr
        assert result.stderr.count("gpuattn: error") == 1 and sentence in result.stderr
        assert "rank 0" not in result.stderr
