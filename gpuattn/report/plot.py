"""Pictures of a run: curves of loss and scores, and attention maps. Needs matplotlib."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.errors import CheckpointError, ConfigError, UnsupportedError
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run
from gpuattn.runs.metrics import loss_names, round_times
from gpuattn.tasks.corpus import held_out
from gpuattn.tasks.registry import task_of
from gpuattn.tasks.users.translator import Translator
from gpuattn.typing import StrPath

INK, BLUE, ORANGE = "#333333", "#1f77b4", "#d95f02"
STYLE = {
    "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.edgecolor": INK,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 200,
}  # fmt: skip
LOOKS = (  # of two curves in one picture, distinguishable where they overlap
    {"color": BLUE, "marker": "o", "markersize": 4, "linewidth": 2},
    {"color": ORANGE, "marker": "s", "markersize": 3.5, "linestyle": "--"},
)
MARKED_POINTS = 20  # a curve of losses with fewer points has a mark at each
SPACE = "\u2581"  # begins the first piece of a word


class Attention(NamedTuple):
    """Words of both sides, and (heads, target words, source words) for each decoder layer."""

    source: list
    target: list
    layers: list


def plot_run(path: StrPath, out: StrPath, sentence: str | None = None) -> list[Path]:
    """Write ``curves.png``, ``attention.png`` and ``overview.png`` into ``out``; return the paths.

    ``sentence``: the source whose translation is drawn, by default a rather long held-out one.
    A language model has ``curves.png`` only, and no ``sentence``.
    Raises UnsupportedError without matplotlib, CheckpointError for a run without metrics yet.
    """
    pyplot = import_pyplot()
    folder = RunFolder(path)
    config = folder.config()
    train, valid = folder.metrics.read("train"), folder.metrics.read("valid")
    if not train and not valid:
        raise CheckpointError(f"{path} has nothing to draw: it was not trained for a few updates")
    attention = None
    if task_of(config).new_user is Translator:
        attention = attention_of(load_run(path, device="numpy"), sentence or _sentence(config))
    elif sentence:
        raise ConfigError(f"{path} does not translate: there is no map of a sentence to draw")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)

    def write(name, figure):
        figure.savefig(out / name)
        pyplot.close(figure)
        return out / name

    with pyplot.rc_context(STYLE):
        curves, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
        _draw_loss(left, train, valid, config)
        _draw_scores(right, train, valid, config)
        if attention is None:
            return [write("curves.png", curves)]
        heads = _draw_heads(pyplot, attention)
        overview, axes = pyplot.subplot_mosaic(
            [["loss", "map"], ["scores", "map"]], figsize=(9, 4.8), width_ratios=[1, 1.35]
        )
        _draw_loss(axes["loss"], train, valid, config)
        _draw_scores(axes["scores"], train, valid, config)
        _draw_map(axes["map"], attention.layers[-1].mean(0), attention)
        axes["map"].set_title("Where the decoder looks for each word it writes")
        return [
            write("curves.png", curves),
            write("attention.png", heads),
            write("overview.png", overview),
        ]


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed: pip install 'gpuattn[plots]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# ---- curves -------------------------------------------------------------------------------------


def _draw_loss(axis, train, valid, config):
    for rows, look, label in zip((train, valid), LOOKS, loss_names(config), strict=True):
        rows = [row for row in rows if row["update"]]
        mark = {} if len(rows) < MARKED_POINTS else {"marker": None}
        axis.plot(*_columns(rows, "loss"), label=label, **look | mark)
    losses = [row["loss"] for row in train + valid]
    if max(losses) > 10 * min(losses):
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.tick_params(which="minor", length=0)
    axis.legend()
    axis.set_title(f"Loss (nats per {task_of(config).predicted})")
    _draw_updates(axis, train + valid)


def _draw_scores(axis, train, valid, config):
    title, figures = task_of(config).scores(config)
    rows = [row for row in valid if figures.keys() <= row.keys()]
    for (name, label), look in zip(figures.items(), LOOKS, strict=False):
        axis.plot(*_columns(rows, name), label=label, **look)
    axis.set_ylim(0, 103 if config.exact_match else None)
    if rows:
        axis.legend()
    axis.set_title(title)
    _draw_updates(axis, train + valid)


def _columns(rows, name):
    return [row["update"] for row in rows], [row[name] for row in rows]


def _draw_updates(axis, rows):
    """Label the lower axis with updates and the upper one with the time."""
    most = max(1, *(row["update"] for row in rows))
    axis.set_xlim(0, 1.02 * most)
    axis.set_xlabel("updates")
    times = round_times(rows)
    above = axis.secondary_xaxis("top")
    above.set_xticks([update for update, _ in times], [text for _, text in times])
    above.tick_params(labelsize=8, length=2)
    above.spines[:].set_visible(False)


# ---- attention ----------------------------------------------------------------------------------


def _sentence(config):
    """Return a rather long held-out source; of the toy a clause, whose verb moves to the end."""
    pairs = held_out(config)[:200]
    pairs = [pair for pair in pairs if pair.kind == "clauses"] or pairs
    pairs = sorted(pairs, key=lambda pair: len(pair.source))
    return pairs[len(pairs) * 4 // 5].source


def attention_of(translator: Any, sentence: str, translation: str | None = None) -> Attention:
    """Return the Attention between a sentence and its translation, by default the model's own."""
    tokenizer = translator.tokenizer
    source = translator.check(sentence)
    if translation is None:
        (translation,) = translator.translate([sentence])
    room = translator.model.config.max_length - 1  # a repetitive text may take more
    target = tokenizer.target.encode(translation)[:room]
    cross = translator.model.attention_maps(source, target)["cross"]
    source_words, source_starts = _words(tokenizer, source)
    target_words, target_starts = _words(tokenizer, target)
    sizes = np.diff([*target_starts, len(target) + 1])
    layers = [
        np.add.reduceat(np.add.reduceat(heads, source_starts, 2), target_starts, 1)
        / sizes[None, :, None]
        for heads in cross
    ]
    return Attention(source_words, target_words, layers)


def _words(tokenizer, ids):
    """Return the words of pieces, with an end mark, and the index where each begins."""
    words, starts = [], []
    for i, piece in enumerate(tokenizer.piece(id) for id in ids):
        if piece.startswith(SPACE) or not words:
            words.append("")
            starts.append(i)
        words[-1] += piece.removeprefix(SPACE)
    return [*words, "(end)"], [*starts, len(ids)]


def _draw_heads(pyplot, attention):
    """Return a figure with a map for each layer (row) and head (column)."""
    layers = attention.layers
    heads = len(layers[0])
    size = (2.6 * heads + 1, 2.8 * len(layers) + 1)
    shared = {"squeeze": False, "sharex": True, "sharey": True}
    figure, axes = pyplot.subplots(len(layers), heads, figsize=size, **shared)
    for layer, row in enumerate(axes):
        for head, axis in enumerate(row):
            _draw_map(axis, layers[layer][head], attention)
            axis.set_title(f"layer {layer + 1}, head {head + 1}")
    return figure


def _draw_map(axis, weights, attention):
    # Row t of the map is the query after t target tokens: it decides the token that comes next.
    axis.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    columns, rows = range(len(attention.source)), range(len(attention.target))
    axis.set_xticks(columns, attention.source, rotation=50, ha="right", rotation_mode="anchor")
    axis.set_yticks(rows, attention.target)
    longer = max(len(attention.source), len(attention.target))
    axis.tick_params(length=0, labelsize=min(9, 200 / longer))
    axis.grid(False)
    axis.spines[:].set_visible(False)
