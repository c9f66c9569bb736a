"""The largest batch, in texts of 1,024 tokens, of an update of GPT-2 124M, beside PyTorch.

gpuattn runs its TrainingStep: bfloat16 with float32 masters, AdamW, CUDA graphs, with and without
``--checkpoint block``. PyTorch runs autocast to bfloat16, flash attention and AdamW(fused=True),
eager and by torch.compile (once, for batches of any size), with expandable segments in its
allocator. Nothing but the update is in memory.

Each has the GPU to itself, in its own process. The search begins with a guess: for gpuattn the
batch whose plan (``gpuattn.train.memory``) fills the free memory, for PyTorch a line through the
bytes of two batches. From there batches grow or shrink by steps of 2 % of the guess, until one
makes all its updates and one a step larger runs out of memory. Batches repeat the same texts, so
all losses must be equal, within a tolerance.

Required: 1.3 times as many as PyTorch.
"""

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from gpuattn.bench.results import origin
from gpuattn.bench.train.cases import MODELS, small
from gpuattn.bench.train.measure import LOSS_TOLERANCE, Ours, Updates, texts
from gpuattn.models import GPT2
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import precision
from gpuattn.runtime.device import array_module, card_memory, choose_device, is_out_of_memory
from gpuattn.train import memory

RATIO = 1.3  # required
STEP = 0.02  # between batches, as a share of the guess
UPDATES = 3  # per batch: gpuattn launches, captures, replays; the last update is timed
TEXTS = 48  # different texts; above 42, so torch.compile uses 64-bit indices from the first
MORE = 64  # texts of the second batch that PyTorch's guess is computed from
ROOM = 20  # texts that fit in the smoke test
LEVELS = ("none", "block")  # "full" equals "block": logits of this size come in slices anyway
PEERS = ("torch-eager", "torch-compile")
SIZES = ("bytes", "planned_bytes")  # printed where known

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--only", nargs="+", choices=LEVELS + PEERS, metavar="NAME",
                    help=f"only these of {', '.join(LEVELS + PEERS)}")  # fmt: skip
parser.add_argument("--json", metavar="FILE", help="write all results to this file")
parser.add_argument("--smoke", action="store_true", help="a small model on NumPy, for the tests")
parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)  # print results of names as JSON
options = parser.parse_args()
CASE = replace(MODELS["gpt2-124m"], shape=(TEXTS, 1024))
if options.smoke:
    CASE = replace(small(CASE), shape=(4, 16))


def wait_for_turn():
    """Wait until this process may use the GPU; before that it prepares on the host."""
    if not sys.stdin.readline():
        sys.exit("the process that started this one has ended")


# ---- updates of either library -------------------------------------------------------------------


class OurUpdates:
    """Updates of gpuattn, as ``gpuattn train`` makes them."""

    def __init__(self, device):
        wait_for_turn()
        self.xp = array_module(device)
        self.ours = Ours(CASE, self.xp)
        self.first, self.updates = self.ours.inputs, None
        self.precision = precision.choose("auto", device)

    def choose(self, level):
        """Continue with a level of ``--checkpoint``."""
        self.ours.model.checkpoint = level
        self.config = TrainConfig(model="gpt2", lm="text", checkpoint=level, ema=0.0)

    def planned(self, count):
        """Return the planned bytes (of parameters and optimizer, of activations)."""
        tokens = count * CASE.shape[1]
        return memory.plan(self.ours.model, self.config, self.precision, tokens)[:2]

    def guess(self, took):
        """Return how many texts the plan fits into the free memory."""
        if self.xp is np:
            return ROOM // 2
        self.free()
        free, count = card_memory()[0], 1
        while self.planned(count + 1)[1] <= free:
            count += 1
        return count

    def begin(self, count):
        """Prepare a batch of ``count`` texts."""
        self.free()
        if self.xp is np and count > ROOM:
            raise MemoryError
        self.ours.read([np.resize(part, (count, CASE.shape[1])) for part in self.first])
        self.updates = Updates(self.ours, tuned=False, notify=sys.exit)
        self.updates.restart()

    def free(self):
        """Free the memory of the batch before."""
        self.updates = None
        gc.collect()
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
            self.xp.get_default_memory_pool().free_all_blocks()

    def update(self):
        """Update once; return the loss."""
        self.updates()
        return self.updates.loss()

    def bytes(self, count):
        """Return the bytes that the batch takes, and those planned."""
        planned = sum(self.planned(count))
        if self.xp is np:
            return {"planned_bytes": planned}
        self.xp.get_default_memory_pool().free_all_blocks()
        held = (
            self.xp.get_default_memory_pool().total_bytes() + self.updates.step.calls.held_bytes()
        )
        return {"bytes": held, "planned_bytes": planned}


class PeerUpdates:
    """Updates of PyTorch, with the methods of ``OurUpdates``."""

    def __init__(self):
        import torch

        from gpuattn.bench.peers.train import Peer

        weights = {path: p.data for path, p in GPT2(CASE.config()).named_parameters()}
        self.torch, self.first = torch, texts(CASE)
        wait_for_turn()
        self.peer = Peer(CASE, SimpleNamespace(weights=weights, inputs=self.first))

    def choose(self, name):
        self.compiles = name == "torch-compile"
        self.model = self.torch.compile(self.peer.model) if self.compiles else self.peer.model

    def guess(self, took):
        """Return how many texts fit, by the line through the bytes of TEXTS, ``took``, and MORE."""
        each = (measure(self, MORE)["bytes"] - took) / (MORE - TEXTS)
        self.free()
        there = self.torch.cuda.mem_get_info()[0] + self.torch.cuda.memory_allocated()
        return int((there - took) / each) + TEXTS

    def begin(self, count):
        self.free()
        self.peer.read([np.resize(part, (count, CASE.shape[1])) for part in self.first])
        for x in self.peer.inputs if self.compiles else ():
            self.torch._dynamo.mark_dynamic(x, 0)
        self.peer.restart()
        self.torch.cuda.reset_peak_memory_stats()

    def free(self):
        self.peer.inputs = None
        self.peer.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self.torch.cuda.empty_cache()

    def update(self):
        self.peer.step(self.model)
        return self.peer.loss()

    def bytes(self, count):
        return {"bytes": self.torch.cuda.max_memory_allocated()}


# ---- the search ----------------------------------------------------------------------------------


def largest(updates, name):
    """Return the results of the most texts that fit, with the "guess" and all counts "tried"."""
    begin = time.perf_counter()
    updates.choose(name)
    few = measure(updates, CASE.shape[0])
    guess = count = updates.guess(few.get("bytes"))
    step, tried, best = max(1, round(STEP * guess)), {}, None
    fits, short, stride = 0, None, step
    while short is None or short - fits > step:
        figures = attempt(updates, count)
        tried[count] = figures is not None
        if figures:
            check(f"{count} texts", figures["losses"], few["losses"])
            fits, best = count, figures
        else:
            short = count
        if short is None:
            count, stride = fits + stride, 2 * stride
        elif not fits:
            count, stride = max(1, short - stride), 2 * stride
        else:
            count = fits + (short - fits) // step // 2 * step
    seconds = time.perf_counter() - begin
    return {"guess": guess, "step": step, "tried": tried, "search_seconds": seconds, **best}


def attempt(updates, count):
    """Return the results of a batch, or None if it runs out of memory."""
    try:
        return measure(updates, count)
    except Exception as error:
        if count > 1 and (is_out_of_memory(error) or "out of memory" in str(error)):
            return None
        raise


def measure(updates, count):
    """Return the results of UPDATES updates on a batch."""
    updates.begin(count)
    losses = []
    for _ in range(UPDATES):
        begin = time.perf_counter()
        losses.append(updates.update())
        seconds = time.perf_counter() - begin
    rate = count * CASE.shape[1] / seconds
    return {"texts": count, "losses": losses, "seconds": seconds, "tokens_per_s": rate,
            **updates.bytes(count)}  # fmt: skip


def check(name, losses, others):
    """Exit unless losses fall and are near those of another batch."""
    near = all(abs(a - b) <= LOSS_TOLERANCE * b for a, b in zip(losses, others, strict=True))
    if not (near and losses[-1] < losses[0]):
        sys.exit(f"{name}: losses are {losses}, those of other batches {others}")


def search(names):
    """Print ``largest`` for levels of --checkpoint or for peers, a line of JSON each."""
    if names[0] in PEERS:
        return print_results(PeerUpdates(), names)
    device, _ = choose_device("numpy" if options.smoke else "auto")
    gpu = device != "numpy"
    with array_module(device).cuda.Stream(non_blocking=True) if gpu else nullcontext():
        return print_results(OurUpdates(device), names)


def print_results(updates, names):
    for name in names:
        print(json.dumps({"name": name, **largest(updates, name)}), flush=True)


# ---- output --------------------------------------------------------------------------------------


def start(names):
    """Return a process that searches for each name; it waits for a line on its standard input."""
    return subprocess.Popen(
        [sys.executable, *sys.argv, "--one", *names], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip


def rows(process):
    """Let a process search; yield and print what it finds."""
    process.stdin.write("go\n")
    process.stdin.close()
    for line in process.stdout:
        found = json.loads(line)
        name, sizes = found["name"], [found[key] for key in SIZES if key in found]
        label = name if name in PEERS else f"--checkpoint {name}"
        tried = ", ".join(f"{n}{'' if fits else ' not'}" for n, fits in found["tried"].items())
        print(
            f"{label:18} {found['texts']:5,} x {CASE.shape[1]:,} {found['tokens_per_s']:8,.0f} "
            f"tokens/s {' of a plan of '.join(map(memory.gigabytes, sizes))}; tried {tried}: "
            f"{found['search_seconds']:.0f} s",
            flush=True,
        )
        yield found
    if process.wait():
        sys.exit("a search failed")


def main():
    begin = time.perf_counter()
    device, where = choose_device("numpy" if options.smoke else "auto")
    print(where)
    beside = device != "numpy" and find_spec("torch") is not None
    chosen = options.only or (LEVELS + PEERS if beside else LEVELS)
    sides = [[name for name in side if name in chosen] for side in (LEVELS, PEERS)]
    processes = [start(names) for names in sides if names]
    found = {row["name"]: row for process in processes for row in rows(process)}
    first, *others = found.values()
    for row in others:
        check(row["name"], row["losses"], first["losses"])
    ratios = {
        f"{level} / {peer}": found[level]["texts"] / found[peer]["texts"]
        for level in LEVELS for peer in PEERS if {level, peer} <= found.keys()
    }  # fmt: skip
    for name, ratio in ratios.items():
        reached = "reached" if ratio >= RATIO else "NOT reached"
        print(f"{name}: {ratio:.2f}; required {RATIO:g}, {reached}")
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if options.json:
        document = origin(shlex.join(["python", *sys.argv]), array_module(device))
        document |= {"tokens": CASE.shape[1], "asked": RATIO, "ratios": ratios, "largest": found}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if options.one is None:
    main()
else:
    search(options.one)
