"""The commands on a folder of Hugging Face with a translator, and a run that becomes one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuattn import load_run

from .conftest import TINY, invoke

FOLDER = Path(__file__).parents[1] / "pretrained" / "golden" / "marian-swish"
NUMPY = ("--device", "numpy")


@pytest.fixture
def files(tmp_path):
    """Recorded sources, and what transformers translates them to."""
    recorded = json.loads((FOLDER / "tokenized.json").read_text())
    texts = recorded["translations"]
    sources = [text for text, _ in recorded["sources"][: len(texts)]]
    for name, lines in (("src", sources), ("ref", texts)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "src", tmp_path / "ref"


def test_a_folder_translates_as_transformers_does(call, files):
    source, reference = files
    result = call("translate", FOLDER, "--input", source, *NUMPY)
    assert result.exit_code == 0 and result.stdout == reference.read_text()
    others = call("translate", FOLDER, "--input", source, "--beam", "1", "--stopping", "ct2",
                  "--length-penalty", "2", "--min-length", "3", *NUMPY)  # fmt: skip
    assert others.stdout != result.stdout and others.exit_code == 0
    long = call("translate", FOLDER, *NUMPY, input="h" * 40)
    assert long.exit_code == 1 and "accepted: up to 21 (and the end mark, of the" in long.stderr


def test_a_folder_is_described_evaluated_and_scored(call, files):
    found = json.loads(call("info", FOLDER, "--json").stdout)
    assert found["model"] == "marian" and found["task"] == "translation"
    assert found["options"]["activation"] == "silu" and found["options"]["output_bias"]
    row = json.loads(call("evaluate", FOLDER, *files, "--json", *NUMPY).stdout)
    assert row["exact_match"] == 100
    missing = call("evaluate", FOLDER, *NUMPY)
    assert missing.exit_code == 2 and "give two files: this is no run" in missing.stderr
    (line := files[0].with_name("line")).write_text("the cat\n")
    row = json.loads(call("score", FOLDER, line, line, "--json", *NUMPY).stdout)
    assert row["tokens"] == 8 and row["score"] < 0  # other pieces than as a source, which are 7
    wrong = call("sample", FOLDER, *NUMPY)
    assert wrong.exit_code == 2 and "is a marian, to be used by: gpuattn translate" in wrong.stderr


def test_a_run_becomes_a_marian_that_translates_alike(call, corpus, tmp_path):
    out, folder = tmp_path / "run", tmp_path / "folder"
    form = ["--norm", "post", "--positions", "sinusoidal_halves", "--activation", "silu"]
    data = corpus / "src", corpus / "tgt"
    result = invoke("train", *data, *TINY, *form, "--for", "20u", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert call("export", out, folder).exit_code == 0
    options = ["--beam", "2", "--stopping", "hf", "--length-penalty", "1", *NUMPY]
    texts = [call("translate", path, *options, input="red cat\nold house\n").stdout
             for path in (out, folder)]  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 2
    names = {"config.json", "model.safetensors", "source.spm", "target.spm", "vocab.json"}
    assert {path.name for path in folder.iterdir()} == names | {"generation_config.json"}
    translators = [load_run(path, device="numpy") for path in (out, folder)]
    settings = [replace(one.search, stopping="hf") for one in translators]
    assert settings[0] == settings[1] and settings[0].beam == 2
