"""Decoding on NumPy: 1,000 sentences of the toy by a trained translator, and samples of a GPT-2.

    gpuattn train --device numpy --for 400u --out toy
    gpuattn train --device numpy --lm FILE --tokenizer chars --for 200u --out gpt2
    python examples/benchmarks/cpu_decoding.py toy gpt2 --before ../earlier --json decode-cpu.json

Every time is that of one call in a process of its own, after a short one; figures are medians.
``--before``: a checkout of an earlier commit, measured alternately; its texts must be the same.
Without it the first lines must be those that are found without key-value caches. Run it on an idle
machine.
"""

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuattn.environment import usable_cores  # first: it sets variables that NumPy's BLAS reads

# isort: split
import numpy as np

from gpuattn.bench.results import origin
from gpuattn.runs.loading import load_run

HERE = Path(__file__).parents[2]
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("runs", nargs="*", help="folders of trained runs (none with --smoke)")
parser.add_argument("--before", metavar="DIR", help="a checkout of an earlier commit")
parser.add_argument("--repeat", type=int, default=5, metavar="N", help="samples of each figure")
parser.add_argument("--json", metavar="FILE", help="write all results to this file")
parser.add_argument("--smoke", action="store_true", help="a run of two updates, for the tests")
parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a run and a case: print as JSON
options = parser.parse_args()
SENTENCES, TOKENS = (6, 12) if options.smoke else (1000, 400)
BEAMS, COUNTS = (5, 1), (1, 8)


def one(folder, size):
    """Return seconds, tokens and a digest of the texts of one call."""
    run = load_run(folder, device="numpy")
    if hasattr(run, "translate"):
        from gpuattn.data.generated import generate

        lines = [pair.source for pair in generate(run.config.task, "test", SENTENCES, seed=7)]
        few = lines[:20]
        found = run.translate(few, beam=size)
        if not options.before and found != run.translate(few, beam=size, kv_cache=False):
            raise SystemExit(f"{folder}: key-value caches change what beam {size} finds")
        begin = time.perf_counter()
        texts = run.translate(lines, beam=size)
        spent = time.perf_counter() - begin
        shape, tokens = [SENTENCES], sum(len(run.tokenizer.encode(text)) + 1 for text in texts)
    else:
        run.sample("A", tokens=20, count=size, seed=1)
        begin = time.perf_counter()
        texts = run.sample("A", tokens=TOKENS, count=size, seed=5)
        spent = time.perf_counter() - begin
        shape, tokens = [size, 1, TOKENS], size * TOKENS
    found = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return {"shape": shape, "seconds": spent, "tokens": tokens, "texts": found}


def sample(folder, size, checkout):
    """Return ``one`` of a process that uses the package in ``checkout``."""
    arguments = [sys.executable, __file__, *sys.argv[1:], "--one", folder, str(size)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout)


def row_of(folder, name, size):
    """Return the results of a case: tokens/s, and samples in seconds, now and before."""
    places = {"before": options.before} if options.before else {}
    places["now"] = HERE
    taken = {when: [] for when in places}
    for _ in range(options.repeat):
        for when, checkout in places.items():
            taken[when].append(sample(folder, size, checkout))
    texts = {result["texts"] for results in taken.values() for result in results}
    if len(texts) > 1:
        raise SystemExit(f"{folder}, {name} {size}: the texts differ")
    row = {
        "case": {
            "shape": taken["now"][0]["shape"],
            "flags": {"model": Path(folder).name, name: size},
        }
    }
    row["tokens"] = taken["now"][0]["tokens"]
    for when, results in taken.items():
        seconds = [result["seconds"] for result in results]
        row[f"{when}_s"] = seconds
        row[f"tokens_per_s_{when}"] = row["tokens"] / statistics.median(seconds)
    return row


def main():
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            train = [sys.executable, "-m", "gpuattn", "train", "reverse", "--device", "numpy"]
            small = ["--for", "2u", "--dim", "16", "--layers", "1", "--batch", "65", "--quiet"]
            subprocess.run([*train, *small, "--out", f"{folder}/run"], check=True, cwd=HERE)
            options.runs = [f"{folder}/run"]
        rows = []
        for run in options.runs:
            translates = hasattr(load_run(run, device="numpy"), "translate")
            for size in BEAMS if translates else COUNTS:
                row = row_of(run, "beam" if translates else "count", size)
                rates = [f"{row[k]:,.0f} {k[13:]}" for k in row if k.startswith("tokens_per_s_")]
                print(f"{Path(run).name}, {row['case']}: tokens/s {', '.join(rates)}", flush=True)
                rows.append(row)
    command = shlex.join(["python", Path(__file__).name, *sys.argv[1:]])
    document = origin(command, np) | {"cores": usable_cores(), "decoding": rows}
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if options.one:
    print(json.dumps(one(options.one[0], int(options.one[1]))))
else:
    main()
