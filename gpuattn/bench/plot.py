"""A picture of the table of attention: TFLOP/s over length, ours beside the peers'."""

from gpuattn.bench.cases import LENGTHS, TABLE, Attention
from gpuattn.bench.results import OUT_OF_MEMORY, is_comparison
from gpuattn.train.plot import INK, STYLE

OURS = "#c8102e"
LOOKS = {  # name in the rows -> (name in the picture, color)
    "flash-attn-4": ("FlashAttention-4", "#1f77b4"),
    "torch-cudnn": ("cuDNN in PyTorch", "#5b8c3e"),
    "torch-fa2": ("FlashAttention-2 in PyTorch", "#8c8c8c"),
}
GRAY = "#bbbbbb"


def draw(pyplot, document, path):
    """Write the rows of the table that ``document`` holds as a picture to ``path``.

    A line of panels for each direction, a panel for each head size and mask; at the foot of each
    our share of the best peer's rate. Where the table has no rows beside peers, any are drawn.
    """
    rows = [row for row in document["rows"] if row["op"] == "flash_attention"]
    rows = list(filter(is_comparison, rows)) or rows
    table = [row for row in rows if any(cell.is_of(row) for cell in TABLE)] or rows
    panels = {}
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
        handles = {}
        for axis in axes.flat:
            handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        where = {"loc": "outside lower center", "ncols": len(handles)}
        figure.legend(handles.values(), handles, **where)
        figure.suptitle(_title(document, table), x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(path)
        pyplot.close(figure)


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
    axis.axhline(ceiling, color=INK, ls=":", lw=1, label="matrix product, measured")
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
