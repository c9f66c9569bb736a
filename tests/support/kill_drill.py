"""Kill a training run at random moments and check that it ends like a run without kills.

    python tests/support/kill_drill.py --device cuda --kills 30

Weights, optimizer state, moving average and the metrics of all evaluations must be bitwise equal.
On a GPU the sentences are long enough that attention's gradient would be summed in a random order
without ``deterministic``. The tests do the same on NumPy, with fewer kills.
"""

import argparse
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
from stopping import Training, assert_same_bits, assert_same_metrics, saves

from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import checkpoint

EARLY, SAVING = 0.2, 0.5  # shares of kills soon after the start, and during a save
MOST = 3  # saves between two kills
SAVE_SECONDS = 0.16  # of the eight files of a slow save
SLOW_SAVES = f"""
import os, sys, time
from pathlib import Path
from gpuattn.train.trainer import Trainer
replace, update = os.replace, Trainer._update
note = Path(sys.argv[sys.argv.index("--out") + 1] + ".beside")
def noted(trainer):
    update(trainer)
    if trainer.saves.writing:
        note.write_text(f"{{trainer.at.evaluated[0]}} {{trainer.at.update}}")
os.replace = lambda *names: (time.sleep({SAVE_SECONDS / 8}), replace(*names))
Trainer._update = noted
"""  # a kill can come before a temporary file is renamed, and updates beside a save are noted
SIZES = {
    "numpy": {"dim": 16, "heads": 2, "layers": (1, 1), "ffn": 16, "batch": 120, "max_len": 40},
    "cuda": {"dim": 64, "heads": 2, "layers": (1, 1), "ffn": 64, "batch": 4096, "max_len": 700},
}


def new_config(folder, device, kills):
    """Write a corpus of letters; return the options of a run that is longer than all kills."""
    rng = np.random.default_rng(1)
    least, most, count = (400, 650, 200) if device == "cuda" else (1, 9, 80)
    lines = [
        " ".join(rng.choice(list("abcdefgh"), rng.integers(least, most))) for _ in range(count)
    ]
    (folder / "src").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tgt").write_text("".join(f"{line[::-1]}\n" for line in lines))
    return TrainConfig(
        source=str(folder / "src"), target=str(folder / "tgt"), vocab_size=400, dropout=0.3,
        lr=1e-2, warmup=4, length=f"{2 * (MOST + 1) * kills + 20}u", eval_every="2u",
        score_pairs=0, ema=0.9, accumulate=2, average=2, deterministic=True, threads=2,
        **SIZES[device],
    )  # fmt: skip


def drill(folder, device, kills, seed=0):
    """Run once without and once with ``kills`` kills, and compare.

    Returns the update saved before each kill, how many kills came while a file was written, and
    how many after an update beside a save that never ended. Raises AssertionError unless the runs
    have the same bits.
    """
    rng, config = np.random.default_rng(seed), new_config(folder, device, kills)
    whole, out = Training(config, folder / "whole", device), folder / "killed"
    waiting = deque(Training(config, out, device, SLOW_SAVES) for _ in range(2))
    whole.begin()
    code, errors = whole.end()
    assert code == 0, errors
    updates, during_file, beside, note = [], 0, 0, Path(f"{out}.beside")
    for _ in range(kills):
        note.write_text("")
        training = waiting.popleft()
        waiting.append(Training(config, out, device, SLOW_SAVES))
        training.begin()
        kind = rng.random()
        if kind < EARLY:
            time.sleep(rng.uniform(0, 0.5))
        else:
            training.wait_for_state(saves(out) + rng.integers(1, MOST + 1))
            if kind < EARLY + SAVING:
                training.wait_for_save()
                time.sleep(rng.uniform(0, SAVE_SECONDS))
            else:
                time.sleep(rng.uniform(0, 0.03))
        during_file += training.kill()
        updates.append(checkpoint.load(out, "state")[1]["update"] if saves(out) else 0)
        saving, done = map(int, note.read_text().split() or (0, 0))
        beside += updates[-1] < saving < done
    last, spare = waiting
    spare.kill()
    last.begin()
    code, errors = last.end()
    assert code == 0, errors
    assert 0 < updates[-1] < config.length.amount
    assert_same_bits(folder / "whole", out)
    assert_same_metrics(folder / "whole", out)
    assert not list(out.rglob(".*.tmp"))
    return updates, during_file, beside


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=sorted(SIZES), default="numpy")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        updates, *counts = drill(Path(folder), given.device, given.kills, given.seed)
    print(f"{given.kills} kills: {counts[0]} while a file was written, {counts[1]} after an update")
    print(f"beside a save that never ended; before each one was saved update {updates}")
    print(f"same bits as the run without kills; took {time.monotonic() - begin:.0f} s")
