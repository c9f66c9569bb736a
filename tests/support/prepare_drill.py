"""Kill ``gpuattn prepare`` at random moments and check that it ends like one without kills.

    python tests/support/prepare_drill.py --kills 20

The stores must be bitwise equal, no worker may outlive its parent for long, and until the end the
folder must never pass for a store. The tests do the same in one process.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gpuattn.data.store import PROGRESS, TokenStore, is_store
from gpuattn.data.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PROGRAM = """
import gpuattn.data.preparing.prepare as prepare
import gpuattn.data.preparing.sources as sources
prepare.PART, sources.BLOCK = 150_000, 30_000
from gpuattn.cli.main import main
main()
"""  # with parts so small that a kill seldom comes before the first
LINES = 120_000
ORPHANED = 5  # seconds that a worker may need to see that its parent is gone


def begin(folder, out):
    """Start preparing ``folder/text.jsonl``; return the process, the leader of a group."""
    options = ["--documents", "--valid", "0.1", "--tokenizer", folder / "tokenizer"]
    arguments = [folder / "text.jsonl", *options, "--workers", "2", "--out", out]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "prepare", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def alone(group):
    """Wait until no process of a group is left."""
    end = time.monotonic() + ORPHANED
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"workers of the group {group} outlive their parent")


def parts(out):
    """Return how many parts are whole."""
    log = out / PROGRESS
    return log.read_bytes().count(b"\n") if log.exists() else 0


def drill(folder, kills, seed=0):
    """Prepare once without and once with kills; return the whole parts at each kill.

    A kill comes a random time after the start, or after a new part. Raises AssertionError unless
    the stores are equal.
    """
    rng, words = np.random.default_rng(seed), [f"word{i}" for i in range(500)]
    lines = (" ".join(rng.choice(words, 12)) for _ in range(LINES))
    (folder / "text.jsonl").write_text("".join(f'"{line}"\n' for line in lines))
    Tokenizer.train(words, 400).save(folder / "tokenizer")
    whole = begin(folder, folder / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    out, found = folder / "killed", []
    while len(found) < kills:
        process, before = begin(folder, out), parts(out)
        if rng.random() < 0.7:
            while parts(out) == before and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
        else:
            time.sleep(rng.uniform(0, 1))
        assert process.poll() is None, process.stderr.read()
        found.append(parts(out))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        alone(process.pid)
        assert parts(out) >= before and not is_store(out)
    last = begin(folder, out)
    assert last.wait() == 0, last.stderr.read()
    one, other = TokenStore(folder / "whole"), TokenStore(out)
    other.check()
    assert one.head == other.head and one.valid.head == other.valid.head
    assert {p.name for p in out.iterdir()} == {p.name for p in (folder / "whole").iterdir()}
    return found, len(one.head["parts"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, total = drill(Path(folder), given.kills, given.seed)
    print(f"{given.kills} kills, with {found} of {total} parts whole: the same store")
