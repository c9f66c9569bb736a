"""The GPT that 10_own_model.py writes, beside `gpuattn train --model gpt2` and PyTorch: tokens/s.

It trains by one call an update and by the plain loop. Beside them: the step of `gpuattn train`, and
the plain loop of PyTorch, eager, with autocast, flash attention, AdamW(fused=True) and batches in
pinned memory. Two sizes: the example's, and GPT-2 124M. All sides are in one process and have the
same first weights, batches and AdamW: bfloat16, float32 masters, gradients clipped; losses must be
near. A turn is some updates, with the copies of their batches, until the last loss is on the host.
Products that one call has tuned are tuned in the plain loop too. Without a GPU models are small.

Required: one call 0.95 of `gpuattn train`, the plain loop 1 of PyTorch's.
"""

import argparse
import contextlib
import gc
import importlib
import json
import re
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from gpuattn.bench.peers import timing as peers
from gpuattn.bench.results import origin
from gpuattn.bench.train.cases import MODELS, small
from gpuattn.bench.train.measure import LOSS_TOLERANCE, Ours, texts
from gpuattn.data.batching import LanguageModelBatch, token_order
from gpuattn.errors import UnsupportedError
from gpuattn.optim import AdamW
from gpuattn.runtime import TrainingStep
from gpuattn.runtime.device import array_module, choose_device

sys.path.insert(0, str(Path(__file__).parents[1]))
example = importlib.import_module("10_own_model")

GPT2 = replace(MODELS["gpt2-124m"], shape=(8, 1024))
EXAMPLE = replace(GPT2, model="example", shape=(12, 64), vocab=21, width=128, heads=4, layers=(4,),
                  hidden=512)  # fmt: skip
PLAIN, ONE, TRAIN, TORCH = "plain loop", "one call", "gpuattn train", "PyTorch"
FIRST = {PLAIN: 0, ONE: 1e-3, TRAIN: 5e-3, TORCH: LOSS_TOLERANCE}  # of the first loss, relative
REQUIRED = {(ONE, TRAIN): 0.95, (PLAIN, TORCH): 1.0}
WARM_UP, BATCHES, ROUNDS = 10, 8, 7  # updates; different batches; turns of each side
LEAST, SECONDS = 3, 20  # no more turns than these once they have taken so many seconds


class Side(NamedTuple):
    """``update(batch)`` makes an update, inside ``place()``; ``loss(result)`` waits for it."""

    update: Callable
    batches: list
    loss: Callable = float
    place: Callable = contextlib.nullcontext

    def losses(self, updates):
        """Return the losses of some updates."""
        with self.place():
            return [self.loss(self.update(batch)) for batch in islice(cycle(self.batches), updates)]

    def seconds(self, updates):
        """Return the seconds of some updates."""
        gc.collect()
        time.sleep(0.1)  # long work lowers the clock
        with self.place():
            begin = time.perf_counter()
            for batch in islice(cycle(self.batches), updates):
                result = self.update(batch)
            self.loss(result)
            return time.perf_counter() - begin


def batch_of(case, seed):
    """Return tokens, labels, and the order of the tokens."""
    tokens, labels = texts(case, seed)
    return tokens, labels, token_order(tokens.ravel())


def own_path(path, layers):
    """Return the path in the example's model of a parameter of GPT2: norms have other places."""
    path = re.sub(r"layers\.(\d+)\.norms\.0", r"norms.\1", path)
    path = re.sub(r"layers\.(\d+)\.norms\.1", r"blocks.\1.norm", path)
    path = re.sub(r"^norm\.", f"norms.{layers}.", path)
    return path.replace("layers.", "blocks.")


def own(kind, case, device, weights, batches):
    """Return the side of the example's model by its ``one_call`` or ``plain_loop``."""
    model = example.GPT(case.vocab, case.width, case.heads, *case.layers, case.shape[1])
    model.load_state({own_path(path, len(model.blocks)): x for path, x in weights.items()})
    optimizer = AdamW(
        model.to(device=device), lr=case.learning_rate, betas=case.betas, eps=case.eps,
        weight_decay=case.weight_decay, max_norm=case.clip, precision="auto",
    )  # fmt: skip
    step = kind(model, optimizer)
    return Side(lambda batch: step(*batch), [(*pair, order.order) for *pair, order in batches])


def trainers(ours, batches):
    """Return the side of `gpuattn train`, which works on the stream of its step."""
    case = ours.case
    step = TrainingStep(ours.model, ours.optimizer, ours.loss, tokens=case.tokens)
    return Side(
        lambda batch: step(batch, learning_rate=case.learning_rate),
        [LanguageModelBatch(*batch) for batch in batches], lambda _: step.mean_loss(), step.ordered,
    )  # fmt: skip


def pytorch(case, device, weights, batches):
    """Return PyTorch's side. Raises UnsupportedError or ImportError where it cannot run."""
    if on_gpu := device == "cuda":
        peers.torch_here()
    import torch

    from gpuattn.bench.peers.torch_models import first_weights, new_model
    from gpuattn.bench.peers.train import parameter_groups

    place, model = "cuda" if on_gpu else "cpu", new_model(case)
    model.load_state_dict(first_weights(model, weights))
    model.to(place)
    groups = parameter_groups(model, case.weight_decay)
    optimizer = torch.optim.AdamW(groups, case.learning_rate, case.betas, case.eps, fused=True)

    def update(batch):
        tokens, labels = (x.to(place, non_blocking=True) for x in batch)
        with torch.autocast(place, dtype=torch.bfloat16, enabled=on_gpu):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    pairs = [[torch.from_numpy(x).long() for x in pair] for *pair, _ in batches]
    return Side(update, [[x.pin_memory() for x in pair] for pair in pairs] if on_gpu else pairs)


def measure(case, device, updates, rounds):
    """Print and return the results of a case."""
    begin, ours = time.perf_counter(), Ours(case, array_module(device))
    batches = [batch_of(case, seed) for seed in range(BATCHES)]
    given = case, device, ours.weights, batches
    makers = {
        PLAIN: lambda: own(example.plain_loop, *given), ONE: lambda: own(example.one_call, *given),
        TRAIN: lambda: trainers(ours, batches), TORCH: lambda: pytorch(*given),
    }  # fmt: skip
    sides, losses, missing = {}, {}, {}
    for name, make in makers.items():
        try:
            sides[name] = make()
            losses[name] = sides[name].losses(WARM_UP)
            for i, most in ((0, FIRST[name]), (-1, LOSS_TOLERANCE)):
                loss, other = losses[name][i], losses[PLAIN][i]
                assert abs(loss - other) <= most * other, f"a loss of {loss}, that of {other}"
        except (UnsupportedError, ImportError) as error:
            missing[name] = str(error)
        except Exception as error:  # noqa: BLE001 the others are measured all the same
            traceback.print_exc()
            sides.pop(name, None)
            missing[name] = f"failed: {type(error).__name__}: {error}"
    print(f"{case}: ready after {time.perf_counter() - begin:.0f} s", flush=True)

    begin, seconds = time.perf_counter(), {name: [] for name in sides}
    for i in range(rounds):
        if i < LEAST or time.perf_counter() - begin < SECONDS:
            for name in sides if i % 2 == 0 else reversed(sides):
                seconds[name].append(sides[name].seconds(updates))
    tokens = updates * case.tokens
    rates = {name: tokens / statistics.median(turns) for name, turns in seconds.items()}
    for name, rate in rates.items():
        ends = "loss {:.5f} to {:.5f}".format(*losses[name][:: WARM_UP - 1])
        most = tokens / min(seconds[name])
        print(f"  {name:13} {rate:11,.0f} tokens/s, at best {most:11,.0f}; {ends}")
    for name, reason in missing.items():
        print(f"  {name:13} {reason}")
    pairs = {pair: least for pair, least in REQUIRED.items() if rates.keys() >= {*pair}}
    ratios = {f"{name} / {other}": rates[name] / rates[other] for name, other in pairs}
    for (pair, ratio), least in zip(ratios.items(), pairs.values(), strict=True):
        reached = "reached" if ratio >= least else "NOT reached"
        print(f"  {pair}: {ratio:.3f}; required {least:g}, {reached}", flush=True)
    return {"case": case.as_dict(), "updates": updates, "losses": losses, "missing": missing,
            "seconds": seconds, "tokens_per_s": rates, "ratios": ratios}  # fmt: skip


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
parser.add_argument("--smoke", action="store_true", help="small models on NumPy, for the tests")
options = parser.parse_args()
start = time.perf_counter()
device, where = choose_device("numpy" if options.smoke else "auto")
print(where, flush=True)
document = origin(shlex.join(["python", *sys.argv]), array_module(device)) | {"sizes": []}
document["versions"] |= peers.versions()
for case, updates in ((EXAMPLE, 150), (GPT2, 20)):
    used = (case, device, updates, ROUNDS) if device == "cuda" else (small(case), device, 2, LEAST)
    document["sizes"].append(measure(*used))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
print(f"{time.perf_counter() - start:.0f} s in all")
sys.exit("failed: " in str([size["missing"] for size in document["sizes"]]))
