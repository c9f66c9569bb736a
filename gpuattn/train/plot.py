"""Pictures of a run: how loss and scores went, and where the decoder looks. Needs matplotlib."""

from pathlib import Path

from gpuattn.errors import CheckpointError, UnsupportedError
from gpuattn.train.corpus import held_out
from gpuattn.train.run import RunFolder, load_run

INK, BLUE, ORANGE = "#333333", "#1f77b4", "#d95f02"


def plot_run(path, out, sentence=None):
    """Write ``curves.png``, ``attention.png`` and ``overview.png`` into ``out``; return the paths.

    ``sentence``: the source whose translation is drawn, by default a rather long held-out one.
    Raises UnsupportedError without matplotlib, CheckpointError for a run without metrics yet.
    """
    pyplot = _pyplot()
    folder = RunFolder(path)
    config = folder.config()
    train, valid = folder.metrics.read("train"), folder.metrics.read("valid")
    if not train and not valid:
        raise CheckpointError(f"{path} has no metrics yet: train for some updates")
    translator = load_run(path, device="numpy")
    if sentence is None:
        pairs = sorted(held_out(config)[:50], key=lambda pair: len(pair.source))
        sentence = pairs[len(pairs) * 4 // 5].source
    maps = _attention(translator, sentence)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    _draw_loss(axes[0], train, valid)
    _draw_scores(axes[1], valid, config)
    curves = _write(pyplot, figure, out / "curves.png")
    figure = _draw_heads(pyplot, maps)
    attention = _write(pyplot, figure, out / "attention.png")
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.4), width_ratios=[1, 1, 1.3])
    _draw_loss(axes[0], train, valid)
    _draw_scores(axes[1], valid, config)
    source, target, cross = maps
    _draw_map(axes[2], cross[-1].mean(0), source, target)
    axes[2].set_title("Where the decoder looks", loc="left", color=INK)
    return [curves, attention, _write(pyplot, figure, out / "overview.png")]


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed: pip install 'gpuattn[plots]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _attention(translator, sentence):
    """Return (source pieces, target pieces, [(heads, T, S) for each decoder layer])."""
    tokenizer = translator.tokenizer
    source = translator.check(sentence)
    target = tokenizer.encode(translator.translate([sentence])[0])
    cross = translator.model.attention_maps(source, target)["cross"]
    names = [piece.replace("\u2581", " ").strip() or "_" for piece in tokenizer.pieces]
    return [names[i] for i in source] + ["end"], [names[i] for i in target] + ["end"], cross


def _draw_loss(axis, train, valid):
    for rows, color, label in ((train, BLUE, "training"), (valid, ORANGE, "validation")):
        rows = [row for row in rows if row["update"]]
        updates, losses = [row["update"] for row in rows], [row["loss"] for row in rows]
        marker = "o" if rows is not train and len(rows) < 20 else None
        axis.plot(updates, losses, color=color, label=label, marker=marker, markersize=4)
    axis.set_yscale("log")
    axis.legend(frameon=False)
    _label(axis, "Loss per target token (nats)")


def _draw_scores(axis, valid, config):
    figures = {"bleu": ("BLEU", BLUE), "chrf": ("chrF", ORANGE)}
    if config.exact_match:
        figures = {"exact_match": ("exact match, %", BLUE), "bleu": ("BLEU", ORANGE)}
    rows = [row for row in valid if "bleu" in row]
    for name, (label, color) in figures.items():
        updates, values = [row["update"] for row in rows], [row[name] for row in rows]
        axis.plot(updates, values, color=color, label=label, marker="o", markersize=4)
    axis.set_ylim(0, 100)
    if rows:
        axis.legend(frameon=False, loc="lower right")
    _label(axis, "Validation, greedy")


def _label(axis, title):
    axis.set_title(title, loc="left", color=INK)
    axis.set_xlabel("update")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_heads(pyplot, maps):
    """Return a figure with a map for each layer (row) and head (column)."""
    source, target, cross = maps
    heads = len(cross[0])
    size = (2.6 * heads + 1, 2.8 * len(cross) + 1)
    figure, axes = pyplot.subplots(len(cross), heads, figsize=size, squeeze=False)
    for layer, row in enumerate(axes):
        for head, axis in enumerate(row):
            _draw_map(axis, cross[layer][head], source, target)
            axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8, color=INK)
    return figure


def _draw_map(axis, weights, source, target):
    axis.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    # Row t of the map is the query after t target tokens: it decides the token that comes next.
    axis.set_xticks(range(len(source)), source, rotation=90, fontsize=7)
    axis.set_yticks(range(len(target)), target, fontsize=7)


def _write(pyplot, figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
