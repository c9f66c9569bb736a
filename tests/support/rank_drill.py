"""Kill a random rank of a run at random moments and check that it ends like a run without kills.

    python tests/support/rank_drill.py --kills 30 --ranks 4
    python tests/support/rank_drill.py --kills 6 --ranks 2 --device cuda

All ranks must be gone within 10 seconds (the tests, which judge no times, do not look at that), one
message names the rank that was killed, and the bits of weights, optimizer state and metrics are
those of a run in one process.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from kill_drill import new_config
from ranks import COMMAND, SECONDS, Ranks
from stopping import assert_same_bits, assert_same_metrics, saves

from gpuattn.runs.config import to_toml
from gpuattn.train.session import train

LONGEST = 10  # seconds from a kill to the end of all processes
LAST = 600  # seconds that the run may take to a save, or to its end, on a busy machine
NOTE = """
import time
from pathlib import Path
from gpuattn.train.trainer import Trainer
inner = Trainer._update
out = sys.argv[sys.argv.index("--out") + 1]
def noted(trainer):
    note = Path(f"{out}.rank{trainer.communicator.rank}")
    if not note.exists():
        note.write_text(str(os.getpid()))
    inner(trainer)
    time.sleep(0.02)
Trainer._update = noted
"""  # ranks write their process numbers when they train, slowly enough to be met


def drill(folder, kills, ranks=4, seed=0, spawned=False, device="numpy"):
    """Run once in one process and once with ``kills`` kills, and compare; see ``Ranks``.

    On GPUs there is one for each rank.

    Returns (seconds from each kill to the end of all ranks, messages that name the killed rank).
    Raises AssertionError unless the runs have the same bits.
    """
    rng = np.random.default_rng(seed)
    config = new_config(folder, device, kills)
    config = type(config)(**vars(config) | {
        "replicas": ranks, "batch": config.batch // 2, "threads": 1, "length": f"{6 * kills + 10}u",
    })  # fmt: skip
    (folder / "options.toml").write_text(to_toml(config))
    out = folder / "killed"
    command = ["train", "--config", folder / "options.toml", "--out", out, "--device", device]
    seconds, named, code = [], 0, None
    for kill in range(kills + 1):
        for path in folder.glob("killed.rank*"):
            path.unlink()
        running = Ranks(ranks, COMMAND.format(lines=NOTE), *command, spawned=spawned)
        if kill < kills:
            before, victim = saves(out), int(rng.integers(ranks))
            note = folder / f"killed.rank{victim}"
            wait_for(
                running, lambda n=note, b=before: saves(out) > b and n.exists() and n.read_text()
            )
            time.sleep(rng.uniform(0, 0.2))
            if running.process.poll() is None:
                os.kill(int(note.read_text()), signal.SIGKILL)
        begin = time.monotonic()
        code, said = running.end(SECONDS if kill < kills else LAST)
        if code == 0:  # also the last one, or one that ended before its kill
            break
        seconds.append(time.monotonic() - begin)
        errors = [line for line in said.splitlines() if line.startswith("gpuattn: error")]
        assert len(errors) == 1, (victim, code, said, running.printed)
        named += f"rank {victim} of {ranks}" in errors[0]
    assert code == 0, said
    train(config, folder / "whole", device=device)
    assert_same_bits(folder / "whole", out)
    assert_same_metrics(folder / "whole", out)
    return seconds, named


def wait_for(running, condition, seconds=LAST):
    """Wait until a condition is true, or the ranks have ended."""
    deadline = time.monotonic() + seconds
    while not condition() and running.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawned", action="store_true", help="as by --gpus, without MPI")
    parser.add_argument("--device", choices=("numpy", "cuda"), default="numpy")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds, named = drill(
            Path(folder), given.kills, given.ranks, given.seed, given.spawned, given.device
        )
    print(f"{len(seconds)} kills, {named} messages named the rank; all gone after at most "
          f"{max(seconds):.2f} s; same bits as in one process")  # fmt: skip
    sys.exit(max(seconds) > LONGEST)
