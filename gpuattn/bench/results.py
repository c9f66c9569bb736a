"""Files of results: where they come from, their rows, files of several runs, a verdict.

A file is {"gpu", "driver", "versions", "date", "commit", "digest", "command", "ceilings", "rows"}.
A row of a comparison with peers holds

- ``op``, ``case``, ``direction``, ``impl``: what ran (``cases.py``);
- ``us``, ``samples_us``: the median of the samples, in microseconds; ``peers``,
  ``peer_samples_us``: the same by name; ``peers_missing``: why one was not measured, by name;
- ``asked``: the implementation of the cell, if the cell names one;
- ``outside_graphs``: peers that cannot be captured as CUDA graphs, timed with the host;
- ``plain_us``, ``plain_samples_us``: gpuattn without the features of the case, if it has any;
- ``eager_us``, ``eager_samples_us``: of training steps, gpuattn without graphs; ``no_graph``: the
  reason if graphs do not work; ``losses``: [first, last] of some updates, by name;
- ``peak_bytes``: device memory, by name; of training steps with parameters and moments: all bytes
  of gpuattn's memory pools, and the peak of what PyTorch had allocated;
- of generations: ``tokens_per_s``, new tokens of the best texts; ``first_token_us`` and its
  samples, the same with a limit of one token; ``step_us``: of each token after that;
  ``floor_us``, ``floor_share``: see ``decode/cases.py``; ``joules_per_token``; ``checked``: what
  was compared before; ``logprobs``: mean of a token by name, scored again; ``no_graph``;
  ``other_process``: peers timed in a process of their own. ``peak_bytes`` there: what the engine
  has of the GPU, with its weights;
- of training steps on several GPUs: ``ranks``, how many; ``alone_us`` and its samples, the step of
  one of them; ``efficiency``, ``alone_us`` over ``us``, each GPU having the batch of the case;
  ``wait_share``, the share of ``us`` that a GPU waits for sums of gradients; ``ways``: the same for
  each way to exchange them (``train/ranks.py``), of which ``us`` is the first. Samples are those of
  the slowest rank, ``tokens_per_s`` of all, other rates of one GPU;
- of single calls (``calls/cases.py``), by ``timed`` among the flags of the case: on NumPy also
  ``bare_us`` and its samples, the same as an expression of NumPy's functions; they have no rates;
- ``tflops``, ``gbs``, ``ceiling_share`` (of the nearer ceiling, product or copy);
- ``ratio_to_best_peer``: the best peer's time over ``us``, above 1 is ahead; None without peers.

-1 microseconds: the peer ran out of memory.
"""

import datetime
import json
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.bench import cases, timing
from gpuattn.bench.calls import cases as call_cases
from gpuattn.bench.cases import Cell
from gpuattn.bench.decode import cases as decode_cases
from gpuattn.bench.fused import cases as fused_cases
from gpuattn.bench.receipt import digest
from gpuattn.bench.train import cases as train_cases
from gpuattn.errors import ConfigError
from gpuattn.runtime.device import versions

OUT_OF_MEMORY = -1
SAME = ("gpu", "commit", "digest")  # must be equal where rows are added to a file
REQUIRED = [
    *cases.REQUIRED, *fused_cases.REQUIRED, *train_cases.TABLE, *decode_cases.TABLE,
    *call_cases.TABLE,
]  # fmt: skip


# ---- where results come from --------------------------------------------------------------------


def document(
    rows: list[dict], command: str, xp: ModuleType, ceilings: dict[str, float] | None = None
) -> dict[str, Any]:
    """Return the content of a file of results; ``ceilings`` are measured unless given."""
    return origin(command, xp) | {"ceilings": ceilings or timing.ceilings(xp), "rows": rows}


def origin(command: str, xp: ModuleType) -> dict[str, Any]:
    """Return where results come from: machine, versions, date, commit, command."""
    gpu = driver = None
    if xp is not np:
        runtime = xp.cuda.runtime
        gpu = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        driver = runtime.driverGetVersion()
    return {
        "gpu": gpu, "driver": driver, "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": _commit(),
        "digest": digest(), "command": command,
    }  # fmt: skip


def _commit():
    try:
        run = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


# ---- rows and files -----------------------------------------------------------------------------


Case = cases.Attention | fused_cases.Fused | train_cases.Step | decode_cases.Decoding


def case_of(row: dict) -> Case:
    """Return the case of a row of a comparison, but not of a single call."""
    if row["op"] in fused_cases.AXES:
        return fused_cases.Fused.from_dict(row["op"], row["case"])
    if row["op"] == "train":
        return train_cases.Step.from_dict(row["case"])
    if row["op"] == "decode":
        return decode_cases.Decoding.from_dict(row["case"])
    return cases.Attention.from_dict(row["case"])


def rated(row: dict, ceilings: dict[str, float]) -> dict:
    """Return ``row`` with the rates and the ratio computed from its times."""
    us = row["us"]
    best = min((t for t in row["peers"].values() if t != OUT_OF_MEMORY), default=None)
    row = row | {"ratio_to_best_peer": best and best / us}
    if is_call(row):
        return row
    case = case_of(row)
    tflops = case.flops(row["direction"]) / us / 1e6
    gbs = case.bytes(row["direction"]) / us / 1e3
    share = max(tflops / ceilings["matmul_tflops"], gbs / 1e3 / ceilings["copy_tbs"])
    if isinstance(case, decode_cases.Decoding):
        floor = case.floor_us(ceilings)
        row = row | {"floor_us": floor, "floor_share": floor / us}
    return row | {"tflops": tflops, "gbs": gbs, "ceiling_share": share}


def write(path: str | Path, document: dict) -> dict:
    """Write ``document`` to ``path``, added to the rows of the same commit and GPU in the file.

    A row replaces an older one of its cell (and implementation, where several are timed without
    peers); ceilings are the highest seen.
    Returns the document written. Raises ConfigError for a file of another commit or GPU.
    """
    path, old = Path(path), read(path, document)
    if old:
        document = _joined(old, document)
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[[-\d.,\s]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text + "\n")
    scratch.replace(path)
    return document


def read(path: str | Path, document: dict) -> dict | None:
    """Return the document in ``path``, None without a file.

    Raises ConfigError if it is of another commit or GPU than ``document``.
    """
    path = Path(path)
    if not path.exists():
        return None
    old = json.loads(path.read_text())
    for name in SAME:
        if old[name] != document[name]:
            raise ConfigError(
                f"{path} holds results of {name} {old[name]}, these are of {document[name]}: "
                "give another file, or remove that one"
            )
    return old


def _joined(old, new):
    ceilings = {name: max(old["ceilings"][name], value) for name, value in new["ceilings"].items()}
    fresh = [_place(row) for row in new["rows"]]
    rows = [row for row in old["rows"] if _place(row) not in fresh] + new["rows"]
    rows = [rated(row, ceilings) if "ceiling_share" in row else row for row in rows]
    commands = dict.fromkeys([*old["command"].split(" && "), new["command"]])
    return new | {"command": " && ".join(commands), "ceilings": ceilings, "rows": rows}


def _place(row):
    impl = row.get("asked") if is_comparison(row) else row["impl"]
    return row["op"], row["case"], row["direction"], impl


def is_call(row: dict) -> bool:
    """Return whether a row is of a single call."""
    return "timed" in row["case"].get("flags", ())


def is_comparison(row: dict) -> bool:
    """Return whether a row has peers, measured or missing for a reason."""
    return bool(row.get("peers") or row.get("peers_missing"))


def holds(rows: Sequence[dict], cell: Cell, with_peers: bool) -> bool:
    """Return whether ``rows`` have the results of a cell, also of its peers if ``with_peers``."""
    alone = not (with_peers and cell.peers)
    return any(cell.is_of(row) and (alone or is_comparison(row)) for row in rows)


def absent(rows: Sequence[dict]) -> list[str]:
    """Return a sentence for each required cell and named peer that comparisons in ``rows`` lack.

    Ops that ``rows`` do not compare with peers are not required, nor their single calls.
    """
    rows = [row for row in rows if "ranks" not in row]
    compared = {(row["op"], is_call(row)) for row in rows if is_comparison(row)}
    called, lacks = call_cases.Called, []
    for cell in REQUIRED:
        if (cell.op, isinstance(cell.case, called)) not in compared:
            continue
        place = f"{cell.op} {cell.case.shape} {cell.case} {cell.direction}"
        found = [row for row in rows if cell.is_of(row) and (is_comparison(row) or not cell.peers)]
        if not found:
            lacks.append(f"{place}: no row")
        for row in found:
            named = {*row["peers"], *(name for name, why in row["peers_missing"].items() if why)}
            lacks += [f"{place}: neither {name} nor why" for name in {*cell.peers} - named]
    return lacks


def verdict(rows: Sequence[dict], table: Sequence[Cell]) -> str:
    """Return a line: the cells of a table with a ratio of 1 or more, and the mean ratio."""
    ratios: dict[str, list[float]] = {}
    for cell in table:
        for row in filter(cell.is_of, rows):
            if row["ratio_to_best_peer"]:
                ratios.setdefault(cell.direction, []).append(row["ratio_to_best_peer"])
    every = [ratio for part in ratios.values() for ratio in part]
    if not every:
        return "no cell of the table was measured beside a peer"
    means = {name: statistics.geometric_mean(part) for name, part in ratios.items()}
    parts = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    ahead = sum(ratio >= 1 for ratio in every)
    whole = len(every) == len([cell for cell in table if cell.peers])
    cells = f"{len(every)} cells" if whole else f"{len(every)} measured cells"
    mean = statistics.geometric_mean(every)
    return f"ahead in {ahead} of {cells}, geometric mean {mean:.2f} ({parts})"
