"""A tiny run for the commands, trained once, and functions that call them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = [
    "--dim", "16", "--heads", "2", "--layers", "1", "--ffn", "16", "--batch", "400", "--lr", "0.01",
    "--vocab-size", "400", "--max-len", "40", "--warmup", "1", "--dropout", "0", "--beam", "2",
    "--score-pairs", "5", "--eval-every", "20u", "--device", "numpy",
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with ``src`` and ``tgt``: words, and the same words in upper case."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["red", "green", "blue", "old", "new", "cat", "dog", "tree", "house"]
    lines = [" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(80)]
    (folder / "src").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tgt").write_text("".join(f"{line.upper()}\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """The folder of a run of 60 updates. Tests must not change it."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    arguments = ["train", corpus / "src", corpus / "tgt", *TINY, "--for", "60u", "--out", out]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return out


def invoke(*arguments, input=None):
    """Run the command line in this process; return its click Result."""
    return CliRunner().invoke(main, [str(a) for a in arguments], input=input)


def process(*arguments, input=None, **environment):
    """Run the command line in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "gpuattn", *map(str, arguments)], input=input, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


@pytest.fixture
def call():
    """``invoke``, which also checks that errors have no traceback. Returns a click Result."""

    def checked(*arguments, input=None):
        result = invoke(*arguments, input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.output
        return result

    return checked


@pytest.fixture
def run_process():
    return process


RANKS = """
import sys
from gpuattn.parallel.spawn import spawn
sys.exit(spawn(int(sys.argv[1]), [sys.executable, "-m", "gpuattn", *sys.argv[2:]]))
"""  # what --gpus does, on NumPy


def by_ranks(count, *arguments, text):
    command = [sys.executable, "-c", RANKS, str(count), *map(str, arguments), "--device", "numpy"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=ROOT)
