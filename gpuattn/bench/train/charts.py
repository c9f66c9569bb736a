"""A chart of training steps: a bar for us and for each peer, model by model."""

from pathlib import Path
from typing import Any

from gpuattn.bench.charts import GRAY, LOOKS, OURS
from gpuattn.bench.results import case_of
from gpuattn.report.plot import STYLE

OP_BY_OP = "#e9a5b0"


def draw_steps(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of the rows of ``bench train`` in ``document`` to ``path``.

    A panel for each model and batch, with the milliseconds of a step of ours as a graph, of ours op
    by op, and of each peer that was measured.
    """
    rows = [row for row in document["rows"] if row["op"] == "train"]
    with pyplot.rc_context(STYLE):
        bars = [_bars(row) for row in rows]
        heights = [len(part) + 1.5 for part in bars]
        figure, axes = pyplot.subplots(
            len(rows), figsize=(8.5, 0.24 * sum(heights) + 1), squeeze=False, height_ratios=heights
        )
        for axis, row, part in zip(axes[:, 0], rows, bars, strict=True):
            names, times, colors = zip(*part, strict=True)
            places = range(len(part))
            axis.barh(places, times, color=colors)
            for place, ms in zip(places, times, strict=True):
                axis.text(ms, place, f" {ms:.3g}", va="center", fontsize=7.5)
            axis.set_yticks(places, names, fontsize=7.5)
            axis.set_ylim(len(part) - 0.5, -0.5)
            axis.set_xlim(0, 1.1 * max(times))
            axis.grid(axis="y", visible=False)
            axis.set_title(str(case_of(row)))
        axes[-1, 0].set_xlabel("milliseconds of a training step")
        where = document["gpu"] or "NumPy"
        title = f"Training steps on {where}, {document['date']}: shorter is faster"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(path)
        pyplot.close(figure)


def _bars(row):
    """Return (name, milliseconds, color) of each bar of a row."""
    found = []
    if row["impl"] == "graph":
        found.append(("gpuattn", row["us"] / 1e3, OURS))
    found.append(("gpuattn, op by op", row["eager_us"] / 1e3, OP_BY_OP))
    for name, us in row["peers"].items():
        label, color = LOOKS.get(name, (name, GRAY))
        found.append((label, us / 1e3, color))
    return found
