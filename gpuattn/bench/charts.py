"""Charts of results: attention over length, shares of a copy, calls, generation, roofline,
profile."""

from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.bench import roofline
from gpuattn.bench.calls.cases import COLD, HOST, WARM, WHOLE, Called
from gpuattn.bench.cases import LENGTHS, TABLE, Attention
from gpuattn.bench.fused.cases import TABLES
from gpuattn.bench.results import OUT_OF_MEMORY, case_of, is_call, is_comparison
from gpuattn.report.plot import INK, STYLE

OURS = "#c8102e"
LOOKS = {  # name in the rows -> (name in the picture, color)
    "flash-attn-4": ("FlashAttention-4", "#1f77b4"),
    "torch-cudnn": ("cuDNN in PyTorch", "#5b8c3e"),
    "torch-fa2": ("FlashAttention-2 in PyTorch", "#8c8c8c"),
    "torch": ("PyTorch", "#8c8c8c"),
    "cupy": ("CuPy", "#5b8c3e"),
    "torch-fused": ("PyTorch, fused, does not clip", "#5b8c3e"),
    "torch-compile": ("torch.compile", "#e08214"),
    "quack": ("quack", "#1f77b4"),
    "liger": ("Liger", "#7b5ea7"),
    "torch-graph": ("PyTorch, compiled, CUDA graph", "#e08214"),
    "ctranslate2": ("CTranslate2", "#1f77b4"),
    "hf": ("Hugging Face", "#8c8c8c"),
    "hf-compile": ("Hugging Face, compiled", "#5b8c3e"),
    "hf-static": ("Hugging Face, compiled", "#5b8c3e"),
}
GRAY = "#bbbbbb"
PALETTE = (
    "#c8102e", "#e08214", "#1f77b4", "#5b8c3e", "#7b5ea7", "#17a2a2", "#8c564b", "#e377c2",
    "#8c8c8c", "#bcbd22", "#003f5c", "#000000", "#9ecae1",
)  # fmt: skip
MARKS = {"forward": "^", "backward": "v", "forward+backward": "D", "step": "o"}


def draw_attention(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of the table of attention in ``document`` to ``path``.

    There is a row of panels for each direction and a panel for each head size and mask, with our
    ratio to the best peer at its foot. Without rows of the table or of peers, all rows are drawn.
    """
    rows = [row for row in _not_calls(document) if row["op"] == "flash_attention"]
    rows = list(filter(is_comparison, rows)) or rows
    table = [row for row in rows if any(cell.is_of(row) for cell in TABLE)] or rows
    panels: dict[tuple, list] = {}
    for row in table:
        case = Attention.from_dict(row["case"])
        panels.setdefault((row["direction"], case.shape[3], str(case)), []).append((case, row))
    directions = list(dict.fromkeys(direction for direction, *_ in panels))
    columns = list(dict.fromkeys((head_dim, mask) for _, head_dim, mask in panels))
    ceiling = document["ceilings"]["matmul_tflops"]
    with pyplot.rc_context(STYLE):
        size = (2.9 * len(columns) + 0.6, 2.6 * len(directions) + 0.6)
        shared = {"squeeze": False, "sharex": True, "sharey": True}
        figure, axes = pyplot.subplots(len(directions), len(columns), figsize=size, **shared)
        for line, direction in enumerate(directions):
            axes[line, 0].set_ylabel(f"{direction}, TFLOP/s")
            for place, column in enumerate(columns):
                _draw_panel(axes[line, place], panels.get((direction, *column), []), ceiling)
        for place, (head_dim, mask) in enumerate(columns):
            axes[0, place].set_title(f"head size {head_dim}, {mask}")
            axes[-1, place].set_xlabel("tokens in a sequence")
        axes[0, 0].set_ylim(0)
        _save(pyplot, figure, axes, _title(document, table), path)


def _save(pyplot, figure, axes, title, path):
    """Write a figure with a title and, below it, one legend of all axes; close it."""
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
    figure.savefig(path)
    pyplot.close(figure)


def _not_calls(document):
    return [row for row in document["rows"] if not is_call(row)]


def _title(document, rows):
    dtype = ", ".join(dict.fromkeys(row["case"]["dtype"] for row in rows))
    where = document["gpu"] or "NumPy"
    return f"Attention on {where}, {dtype}, {document['date']}: higher is faster"


def _draw_panel(axis, pairs, ceiling):
    pairs = sorted(pairs, key=lambda pair: pair[0].shape[1])
    lengths = [case.shape[1] for case, _ in pairs]
    ours = [row["tflops"] for _, row in pairs]
    axis.plot(lengths, ours, color=OURS, label="gpuattn", marker="o", ms=4, lw=2.2, zorder=3)
    for name in dict.fromkeys(name for _, row in pairs for name in row["peers"]):
        label, color = LOOKS.get(name, (name, GRAY))
        points = [
            (case.shape[1], case.flops(row["direction"]) / row["peers"][name] / 1e6)
            for case, row in pairs
            if row["peers"].get(name, OUT_OF_MEMORY) != OUT_OF_MEMORY
        ]
        axis.plot(*zip(*points, strict=True), color=color, label=label, marker=".", lw=1.2)
    axis.axhline(ceiling, color=INK, ls=":", lw=1, label="matmul, measured")
    foot = axis.get_xaxis_transform()
    for length, (_, row) in zip(lengths, pairs, strict=True):
        if ratio := row["ratio_to_best_peer"]:
            color = OURS if ratio >= 1 else INK
            axis.text(length, 0.03, f"{ratio:.2f}", transform=foot, ha="center", color=color,
                      fontsize=7.5, weight="bold" if ratio >= 1 else "normal")  # fmt: skip
    axis.set_xscale("log", base=2)
    ticks = lengths or LENGTHS
    axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axis.minorticks_off()


# ---- fused ops ----------------------------------------------------------------------------------


def draw_shares(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of the fused ops in ``document`` to ``path``.

    There is a line for each problem and direction, with a dot for us and for each peer: the rate of
    the bytes that must move, as a share of a copy's.
    """
    rows = [row for op in TABLES for row in _not_calls(document) if row["op"] == op]
    panels = {op: [row for row in rows if row["op"] == op] for op in TABLES}
    panels = {op: part for op, part in panels.items() if part}
    copy = document["ceilings"]["copy_tbs"]
    with pyplot.rc_context(STYLE):
        heights = [len(part) + 1.5 for part in panels.values()]
        figure, axes = pyplot.subplots(
            len(panels), figsize=(8.5, 0.19 * sum(heights) + 1), sharex=True, squeeze=False,
            height_ratios=heights,
        )  # fmt: skip
        for axis, (op, part) in zip(axes[:, 0], panels.items(), strict=True):
            axis.set_title(op)
            _draw_shares(axis, part, copy)
        axes[-1, 0].set_xlabel("bytes that must move a second, as a share of a copy's rate")
        axes[-1, 0].set_xlim(0)
        where = document["gpu"] or "NumPy"
        title = f"Fused ops on {where}, {document['date']}: further right is faster"
        _save(pyplot, figure, axes, title, path)


def _draw_shares(axis, rows, copy):
    names = dict.fromkeys(name for row in rows for name in row["peers"])
    places = range(len(rows))
    moved = [case_of(row).bytes(row["direction"]) / copy / 1e6 for row in rows]  # us of a copy
    for name in names:
        label, color = LOOKS.get(name, (name, GRAY))
        shares = [us / row["peers"].get(name, np.nan) for us, row in zip(moved, rows, strict=True)]
        axis.plot(shares, places, "o", color=color, label=label, ms=4)
    ours = [us / row["us"] for us, row in zip(moved, rows, strict=True)]
    axis.plot(ours, places, "D", color=OURS, label="gpuattn", ms=5, zorder=3)
    axis.axvline(1, color=INK, ls=":", lw=1)
    labels = [f"{case_of(row)}, {row['direction']}" + ", Numba" * ("asked" in row) for row in rows]
    axis.set_yticks(places, labels, fontsize=7.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


# ---- calls --------------------------------------------------------------------------------------


def draw_calls(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of the single calls in ``document`` to ``path``.

    There is a panel for each direction, and for first calls, with a line for each op on small
    arrays: the time of the host, on NumPy the whole time.
    """
    rows = list(filter(is_call, document["rows"]))
    timed = HOST if document["gpu"] else WHOLE
    panels = {
        f"{direction}, {timed}": _smallest(rows, direction, timed)
        for direction in ("forward", "forward+backward", "step")
    }
    panels |= {how: _smallest(rows, "forward", how) for how in (WARM, COLD)}
    panels = {title: part for title, part in panels.items() if part}
    with pyplot.rc_context(STYLE):
        heights = [len(part) + 1.5 for part in panels.values()]
        figure, axes = pyplot.subplots(
            len(panels), figsize=(8.5, 0.22 * sum(heights) + 1.4), squeeze=False,
            height_ratios=heights,
        )  # fmt: skip
        for axis, (title, part) in zip(axes[:, 0], panels.items(), strict=True):
            axis.set_title(title)
            _draw_times(axis, part)
        axes[-1, 0].set_xlabel("microseconds")
        where = document["gpu"] or "NumPy"
        title = f"Calls one by one on {where}, {document['date']}: further left is faster"
        _save(pyplot, figure, axes, title, path)


def _smallest(rows, direction, timed):
    """Return the rows of each op and model with its smallest arrays."""
    found: dict[tuple, dict] = {}
    for row in rows:
        case = Called.from_row(row)
        if (row["direction"], case.timed) == (direction, timed):
            place = row["op"], case.model
            old = found.get(place)
            if old is None or np.prod(case.shape) < np.prod(old["case"]["shape"]):
                found[place] = row
    return list(found.values())


def _draw_times(axis, rows):
    places = range(len(rows))
    for name in dict.fromkeys(name for row in rows for name in row["peers"]):
        label, color = LOOKS.get(name, (name, GRAY))
        times = [row["peers"].get(name, np.nan) for row in rows]
        axis.plot(times, places, "o", color=color, label=label, ms=4)
    if any("bare_us" in row for row in rows):
        times = [row.get("bare_us", np.nan) for row in rows]
        axis.plot(times, places, "o", color=INK, label="NumPy alone", ms=4)
    axis.plot([row["us"] for row in rows], places, "D", color=OURS, label="gpuattn", ms=5, zorder=3)
    labels = [f"{row['op']} {Called.from_row(row).problem}" for row in rows]
    axis.set_yticks(places, labels, fontsize=7.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.grid(axis="y", visible=False)


# ---- generation ---------------------------------------------------------------------------------


def draw_decoding(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of the generations in ``document`` to ``path``.

    There is a line for each case, with a dot for us, for each peer, and for the floor: tokens/s.
    """
    rows = [row for row in document["rows"] if row["op"] == "decode"]
    places = range(len(rows))
    tokens = [row["tokens_per_s"] * row["us"] for row in rows]  # times 1e6
    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(8.5, 0.22 * len(rows) + 1.4))
        for name in dict.fromkeys(name for row in rows for name in row["peers"]):
            label, color = LOOKS.get(name, (name, GRAY))
            times = [row["peers"].get(name, np.nan) for row in rows]
            axis.plot(np.divide(tokens, times), places, "o", color=color, label=label, ms=4)
        ours = [row["us"] for row in rows]
        axis.plot(np.divide(tokens, ours), places, "D", color=OURS, label="gpuattn", ms=5, zorder=3)
        floors = [row["floor_us"] for row in rows]
        axis.plot(np.divide(tokens, floors), places, "|", color=INK, label="floor", ms=9)
        axis.set_yticks(places, [str(case_of(row)) for row in rows], fontsize=7.5)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
        axis.set(xscale="log", xlabel="tokens a second")
        figure.legend(loc="outside lower center", ncols=4)
        where = document["gpu"] or "NumPy"
        title = f"Generation on {where}, {document['date']}: further right is faster"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(path)
        pyplot.close(figure)


# ---- roofline -----------------------------------------------------------------------------------


def draw_roofline(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of FLOP/s over FLOPs a byte, a point for each row, under the ceilings."""
    ceilings, rows = document["ceilings"], document["rows"]
    places = [roofline.place(row, ceilings)[0] for row in rows]
    peak, copy = ceilings["matmul_tflops"], ceilings["copy_tbs"]
    ridge = peak / copy
    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(8.5, 5))
        left, right = min(places) / 2, max(2 * ridge, 2 * max(places))
        axis.plot([left, ridge], [left * copy, peak], color=INK, lw=1.2)
        axis.plot([ridge, right], [peak, peak], color=INK, lw=1.2)
        axis.text(ridge / 9, peak / 9, f"copy, {copy:.2f} TB/s ", ha="right", fontsize=8)
        axis.text(right, peak * 1.15, f"matmul, {peak:.0f} TFLOP/s", ha="right", fontsize=8)
        colors = dict(zip(dict.fromkeys(row["op"] for row in rows), PALETTE, strict=False))
        for op, color in colors.items():
            axis.plot([], [], "s", color=color, label=op)
        for direction, mark in MARKS.items():
            axis.plot([], [], mark, color=INK, fillstyle="none", label=direction)
        for x, row in zip(places, rows, strict=True):
            axis.plot(x, row["tflops"], MARKS[row["direction"]], color=colors[row["op"]], ms=6)
        figure.legend(loc="outside right upper", fontsize=8)
        axis.set(xscale="log", yscale="log", xlabel="FLOPs a byte that must move", ylabel="TFLOP/s")
        where = document["gpu"] or "NumPy"
        title = f"Roofline of {where}, ceilings measured, {document['date']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(path)
        pyplot.close(figure)


def draw_profile(pyplot: Any, document: dict, path: str | Path) -> None:
    """Write a chart of a ``bench.profile`` document to ``path``.

    On the left the times of the ops; on the right a roofline, with points as large as the share of
    the time.
    """
    rows, ceilings = document["rows"], document["ceilings"]
    names = list(dict.fromkeys(row["op"] for row in rows))
    colors = {op: PALETTE[i % len(PALETTE)] for i, op in enumerate(names)}
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, max(4, 0.25 * len(rows) + 1)))
        places, times = range(len(rows)), [row["us"] for row in rows]
        looks = [colors[row["op"]] if row["calls"] else GRAY for row in rows]
        left.barh(places, times, color=looks)
        left.set_yticks(places, [f"{row['op']} {row['direction']}" for row in rows], fontsize=7.5)
        left.set_ylim(len(rows) - 0.5, -0.5)
        left.grid(axis="y", visible=False)
        left.set_xlabel("microseconds of a step")
        _draw_roofs(right, [row for row in rows if row["bytes"]], ceilings, colors)
        title = f"One training step on {document['where']}, {document['model']}, {document['date']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(path)
        pyplot.close(figure)


def _draw_roofs(axis, rows, ceilings, colors):
    """Draw FLOP/s over FLOPs a byte of matrix products, and bytes a second of all other ops."""
    least = min([r["flops"] / r["bytes"] for r in rows if r["flops"]], default=1) / 4
    for row in rows:
        x = max(row["flops"] / row["bytes"], least)
        rate = max(row["flops"], least * row["bytes"]) / row["us"] / 1e6
        look = {"color": colors[row["op"]], "fillstyle": "full" if row["flops"] else "none"}
        axis.plot(
            x, rate, MARKS.get(row["direction"], "s"), ms=4 + 24 * row["share"] ** 0.5, **look
        )
    if ceilings:
        peak, copy = ceilings["matmul_tflops"], ceilings["copy_tbs"]
        right = 4 * max([peak / copy, *(r["flops"] / r["bytes"] for r in rows)])
        axis.plot([least, peak / copy, right], [least * copy, peak, peak], color=INK, lw=1.2)
    axis.set(xscale="log", yscale="log", xlabel="FLOPs a byte (hollow: none, by bytes alone)",
             ylabel="TFLOP/s")  # fmt: skip
    for name in ("forward", "backward"):
        axis.plot([], [], MARKS[name], color=INK, fillstyle="none", label=name)
    axis.plot([], [], "s", color=INK, fillstyle="none", label="update")
    axis.legend(fontsize=8)
