"""Train the toy translator, then translate phrases that were not in its training data.

Claim: about a minute on two CPU cores, without a download, is enough to translate English numbers,
times and clauses into German, with the verb at the end and articles that agree with their nouns.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: 5 updates, too few to learn")
parser.add_argument("--out", type=Path, help="the run folder (default: a temporary one)")
options = parser.parse_args()
print(__doc__, flush=True)

LINES = [
    "forty-eight thousand nine hundred and seventy-one",
    "the bus arrives at quarter to nine every day",
    "she says that the old teacher sold my green bicycle yesterday",
]


def gpuattn(*arguments, **more):
    """Run a gpuattn command; return what it prints, if ``stdout`` is a pipe."""
    command = [sys.executable, "-m", "gpuattn", *arguments]
    return subprocess.run(command, check=True, text=True, **more).stdout


out = options.out or Path(tempfile.mkdtemp()) / "toy"
gpuattn("train", "--out", out, *(["--for", "5u"] if options.smoke else []))
answer = gpuattn("translate", out, input="\n".join(LINES), stdout=subprocess.PIPE)
for line, translation in zip(LINES, answer.splitlines(), strict=True):
    print(f"{line}\n    -> {translation}")
score = json.loads(gpuattn("evaluate", out, "--json", stdout=subprocess.PIPE))
print(f"{score['exact_match']:.1f} % of {score['sentences']:,} unseen phrases are exactly right")
