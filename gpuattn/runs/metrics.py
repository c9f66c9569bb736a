"""Scores of translations, and the log of a run as lines of JSON."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.files import write_text, writing
from gpuattn.typing import StrPath
from gpuattn.units import round_step

TIMES = 6  # beside the updates of an axis, about
NUMBERS = {  # event -> what its rows have beside ``update``
    "train": ("seconds", "loss"), "valid": ("seconds", "loss", "score"), "threads": ("threads",),
}  # fmt: skip


def rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return what orders evaluations: the score, and among equal ones the loss."""
    return row["score"], -row["loss"]


def is_right(row: Mapping[str, Any], percent: float) -> bool:
    """Return whether ``percent`` of the translations of every kind of pair are exact."""
    kinds = row.get("exact_by_kind") or {}
    return bool(kinds) and min(kinds.values()) >= percent


def describe(row: Mapping[str, Any]) -> str:
    """Return a row of metrics in words."""
    mean = f" (mean of {row['averaged']} checkpoints)" if "averaged" in row else ""
    figures = [f"update {row['update']:,}{mean}", f"loss {row['loss']:.3f}"]
    if "perplexity" in row:
        figures.append(f"perplexity {row['perplexity']:.2f}")
    if "accuracy" in row:
        figures.append(f"{row['accuracy']:.2f} % right")
    if row.get("exact_by_kind"):
        figures.append(f"{row['exact_match']:.1f} % exact")
    if "bleu" in row:
        figures += [f"BLEU {row['bleu']:.1f}", f"chrF {row['chrf']:.1f}"]
    return ", ".join(figures)


def loss_names(config: Any) -> tuple[str, str]:
    """Return the names of both losses of a run, which differ with label smoothing."""
    smoothing = config.label_smoothing
    if not smoothing:
        return "training", "validation"
    return f"training, smoothing {smoothing:g}", "validation, unsmoothed"


def round_times(rows: Iterable[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Return [(update, such as "20 s")] for a few round times, by rows of metrics.

    Between rows an update takes as long as the next. Times for which an axis of updates has no
    room, where updates were slow, are left out.
    """
    known = {0: 0.0} | {row["update"]: row["seconds"] for row in rows}
    updates, seconds = zip(*sorted(known.items()), strict=True)
    end, longest = updates[-1], seconds[-1]
    if not longest:
        return []
    units = ((3600, "h"), (60, "min"), (1, "s"))
    size, unit = next(unit for unit in units if longest >= 3 * unit[0] or unit[0] == 1)
    step = round_step(longest / size / TIMES)
    found, last = [], -end
    for n in range(1, math.floor(longest / size / step) + 1):
        update = float(np.interp(n * step * size, seconds, updates))
        if update - last >= 0.1 * end:
            found.append((update, f"{n * step:.4g} {unit}"))
            last = update
    return found


class MetricsLog:
    """``metrics.jsonl`` of a run: a JSON object a line, each with ``event`` and ``update``.

    Events: "start", "train", "valid", "stop", "end"; "threads", a choice of their number;
    "averaged" in a mean of weights.
    ``listener``: is told of rows by ``begin(rows)``, all that a rewind leaves, and ``add(row)``.
    """

    def __init__(self, path: StrPath) -> None:
        self.path, self.listener = Path(path), None

    def add(self, event: str, **values: Any) -> None:
        """Append a line, which stays even if the process is killed right after.

        Raises CheckpointError when writing fails, as ``rewind`` does.
        """
        row = {"event": event, **values}
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self.listener:
            self.listener.add(row)

    def read(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines as dicts, of one event or of all.

        Lines that are no rows are left out: a half-written last one silently, others with a
        warning.
        """
        if not self.path.exists():
            return []
        rows = [_row(line) for line in self.path.read_bytes().splitlines()]
        damaged = [str(number) for number, row in enumerate(rows[:-1], 1) if row is None]
        if damaged:
            few = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
            warnings.warn(f"{self.path} is damaged: left out line {few}", stacklevel=2)
        return [row for row in rows if row is not None and event in (None, row["event"])]

    def rewind(self, update: int) -> None:
        """Drop the rows after an update, and "end" rows: a resumed run writes them again.

        Choices of threads stay: with them, updates that are repeated have the same bits.
        """
        kept = [
            row
            for row in self.read()
            if row["event"] == "threads"
            or (row["update"] <= update and row["event"] != "end" and "averaged" not in row)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        write_text(self.path, text)
        if self.listener:
            self.listener.begin(kept)


def _row(line):
    """Return the dict of a line of metrics, or None where it is none."""
    try:
        row = json.loads(line)
        numbers = [row[name] for name in ("update", *NUMBERS.get(row["event"], ()))]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return row if all(type(number) in (int, float) for number in numbers) else None
