"""Fine-tune a model of a Hugging Face folder, with part of it frozen, and export it again.

Claim: after as many updates on a small text, a model that begins with a folder predicts that text
better than one that begins from scratch, and what is frozen stays the folder's, bit for bit.

The folder is made here: a small GPT-2 learns German clauses, dates, times and prices. The text that
is then new to it has German numbers. A folder of your own: gpuattn train --from FOLDER --lm TEXT.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import load_file

from gpuattn.data.generated import generate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: 3 updates, too few to learn")
options = parser.parse_args()
print(__doc__, flush=True)

UPDATES, FIRST = (3, 3) if options.smoke else (60, 400)
FROM_SCRATCH = ["--tokenizer", "chars", "--bias", "--dropout", "0", "--dim", "64", "--heads", "4",
                "--layers", "3", "--block", "48"]  # fmt: skip
FROZEN = "embedding,layers.0"  # the table of tokens, that of positions, and the first layer


def gpuattn(*arguments):
    """Run a gpuattn command."""
    command = [sys.executable, "-m", "gpuattn", *map(str, arguments)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def train(out, text, updates, *how):
    """Train, and return the loss on what is held out of the text, in nats a character."""
    gpuattn("train", "--lm", text, *how, "--for", f"{updates}u", "--batch", "960", "--lr", "3e-3",
            "--warmup", "10%", "--out", out)  # fmt: skip
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["event"] == "valid"][-1]


here = Path(tempfile.mkdtemp())
pairs = generate("toy", "train", 4000, seed=3)
for name, is_number in (("known", False), ("numbers", True)):
    lines = [pair.target for pair in pairs if (pair.kind == "numbers") == is_number]
    (here / name).write_text("".join(f"{line}\n" for line in lines[:2000]), encoding="utf-8")
train(here / "base", here / "known", FIRST, *FROM_SCRATCH)
gpuattn("export", here / "base", here / "folder")

numbers = here / "numbers"
tuned = train(here / "tuned", numbers, UPDATES, "--from", here / "folder", "--freeze", FROZEN)
scratch = train(here / "scratch", numbers, UPDATES, *FROM_SCRATCH)
gpuattn("export", here / "tuned", here / "export")
old, new = (load_file(here / name / "model.safetensors") for name in ("folder", "export"))
same = [name for name, values in old.items() if values.tobytes() == new[name].tobytes()]
share = sum(old[name].size for name in same) / sum(values.size for values in old.values())
print(f"{len(same)} of {len(old)} tensors, {share:.0%} of the parameters, were frozen: the export "
      "has them as the folder does, bit for bit")  # fmt: skip
print(f"loss after {UPDATES} updates: {tuned:.3f} nats a character from the folder, {scratch:.3f} "
      "from scratch")  # fmt: skip
