"""Train the toy translator and ask it something it has never seen.

Claim: with nothing downloaded, a minute on two CPU cores is enough to translate English dates,
prices and clauses into German, with the verb at the end and the articles in agreement.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a few updates, for the tests")
parser.add_argument("--out", type=Path, help="the run folder; default: a temporary one")
options = parser.parse_args()

LINES = [
    "forty-eight thousand nine hundred and seventy-one",
    "the bus arrives at quarter to nine every day",
    "she says that the old teacher sold my green bicycle yesterday",
]
out = options.out or Path(tempfile.mkdtemp()) / "toy"
length = ["--for", "5u"] if options.smoke else []
subprocess.run([sys.executable, "-m", "gpuattn", "train", "--out", out, *length], check=True)
answer = subprocess.run(
    [sys.executable, "-m", "gpuattn", "translate", out],
    input="\n".join(LINES), capture_output=True, text=True, check=True,
)  # fmt: skip
for line, translation in zip(LINES, answer.stdout.splitlines(), strict=True):
    print(f"{line}\n    -> {translation}")
