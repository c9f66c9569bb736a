"""``report.html``: the options, curves and samples of a run in one file.

Without scripts and links: any browser opens it offline.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuattn.errors import CheckpointError
from gpuattn.files import write_text
from gpuattn.models.config import padded_rows
from gpuattn.report import svg
from gpuattn.report.markup import tag
from gpuattn.report.plot import attention_of
from gpuattn.report.style import document
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.runs.loading import load_run
from gpuattn.runs.metrics import describe, loss_names, round_times
from gpuattn.tasks.registry import task_of
from gpuattn.typing import StrPath
from gpuattn.units import CO2_PER_KWH, co2_grams, duration, short, with_unit

PAGE, PROFILE = "report.html", "profile.json"
SAMPLES = 12  # translations shown
WORDS = 30  # of sentences whose attention is drawn, at most


def write_page(path: StrPath) -> Path:
    """Write ``report.html`` into the run folder ``path``; return its path.

    A stopped run gives a page of what there is. Raises CheckpointError where there is no run.
    """
    folder = RunFolder(path)
    found, profile = summary(path), _read_profile(folder)
    rows = {event: folder.metrics.read(event) for event in ("start", "train", "valid", "end")}
    config = folder.config()
    title = task_of(config).title(config)
    body = [
        tag("h1", title),
        tag("p", _verdict(found, task_of(config).scores(config)[0]), class_="verdict"),
        tag("p", _course(found), class_="dim head"),
        tag("p", _cost(rows), class_="dim head"),
        _section("Curves", _charts(rows, config)),
        _section("Samples", _samples(folder, found)),
        _section("Attention", _attention(folder, found)),
        _section("Where the time of a step goes", _profile(folder, profile)),
        _section("Data", _data(rows["start"])),
        _section("Model", _model(found, config, profile)),
        _section("Environment", _environment(folder, rows["start"])),
    ]
    page = folder.path / PAGE
    write_text(page, document(title, body))
    return page


def _section(title, content):
    return tag("section", tag("h2", title), content) if content else None


def _verdict(found, held):
    """Return a line on the best evaluation. ``held``: what was held out, in words."""
    best = found["best"]
    if found["state"] == "averaged":
        return "A mean of weights."
    if not best:
        return "Not evaluated yet."
    if "perplexity" in best:
        return f"Perplexity {best['perplexity']:.2f} on held-out text."
    if "accuracy" in best:
        return f"{best['accuracy']:.2f} % of {held[:1].lower()}{held[1:]} right."
    if "bleu" not in best:
        return f"Loss {best['loss']:.3f} nats per token of held-out sentences."
    count = f"{best['sentences']:,} held-out sentence{'s' * (best['sentences'] != 1)}"
    scores = f"BLEU {best['bleu']:.1f}"
    if best["exact_by_kind"]:
        return f"{best['exact_match']:.1f} % of {count} translated exactly, {scores}."
    return f"{scores}, chrF {best['chrf']:.1f} on {count}."


def _course(found):
    if found["state"] == "averaged":
        return None
    best = f"; best: {describe(found['best'])}" if found["best"] else ""
    done = f"{found['updates']:,} updates, {duration(found['seconds'])}"
    return f"{found['state'].capitalize()} after {done}{best}."


def _cost(rows):
    """Return a sentence on speed and energy of a run that ended, or None."""
    spent = rows["end"][-1].get("spent") if rows["end"] else None
    if not spent or not spent["seconds"]:
        return None
    tokens, seconds = spent["tokens"], spent["seconds"]
    parts = [f"{short(tokens)} tokens, {short(tokens / seconds)} a second",
             f"{with_unit(spent['flops'] / seconds, 'FLOP/s')} in updates"]  # fmt: skip
    shares = [row["mfu"] for row in rows["train"] if "mfu" in row]
    if shares:
        parts.append(f"MFU {100 * sorted(shares)[len(shares) // 2]:.3g} % (median)")
    if spent["joules"]:
        each = spent["joules"] / tokens * 1e3
        parts.append(f"{spent['joules'] / 1e3:.3g} kJ, {each:.3g} J for 1,000 tokens")
        parts.append(f"{co2_grams(spent['joules']):.3g} g of CO2 at {CO2_PER_KWH:.0f} g a kWh")
    return ", ".join(parts)


# ---- curves -------------------------------------------------------------------------------------


def _charts(rows, config):
    train, valid = rows["train"], [row for row in rows["valid"] if row["update"]]
    task = task_of(config)
    times = round_times(train + valid)

    def points(of, name, scale=1):
        return [(row["update"], row[name] * scale) for row in of if name in row]

    parts = zip(loss_names(config), (train, valid), strict=True)
    losses = {name: points(part, "loss") for name, part in parts}
    every = [y for part in losses.values() for _, y in part if y > 0]
    scores = {"exact match, %": points(valid, "exact_match"), "BLEU": points(valid, "bleu")}
    if any(row.get("exact_by_kind") == {} for row in valid):
        scores.pop("exact match, %")  # free texts hardly ever match the reference word for word
    steep = bool(every) and max(every) > 10 * min(every)
    charts = (
        (f"Loss (nats per {task.predicted})", losses, {"log": steep}),
        ("Held-out sentences, translated greedily", scores, {"span": (0, 100)}),
        (f"{task.scores(config)[0]} right (%)", {"": points(valid, "accuracy")}, {}),
        ("Perplexity of held-out text", {"": points(valid, "perplexity")}, {}),
        ("Learning rate", {"": points(train, "learning_rate")}, {"span": (0,)}),
        (task.rate_title, {"": points(train, "rate")}, {"span": (0,)}),
        ("MFU (% of measured products)", {"": points(train, "mfu", 100)}, {"span": (0,)}),
        ("Power (W)", {"": points(train, "watts")}, {"span": (0,)}),
    )  # fmt: skip
    drawn = [
        svg.titled(title, svg.curves(series, times=times, **given))
        for title, series, given in charts
    ]
    return tag("div", drawn, class_="charts") if any(drawn) else None


# ---- what the model does ------------------------------------------------------------------------


def _lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _written(folder, found):
    """Return the lines that the model wrote at the best evaluation."""
    update = (found["best"] or {}).get("update", -1)
    return _lines(folder.path / "valid" / f"update_{update:08d}.txt")


def _samples(folder, found):
    written = _written(folder, found)
    sources, references = (
        _lines(folder.path / "valid" / f"{n}.txt") for n in ("source", "reference")
    )
    if written and not sources:  # a text that continues, not translations
        return tag("pre", "\n".join(written))
    triples = list(zip(sources, references, written, strict=False))[:SAMPLES]
    head = tag("tr", [tag("th", name) for name in ("exact", "source", "reference", "translation")])
    body = [
        tag("tr", tag("td", "\N{CHECK MARK}" if reference == text else ""), tag("td", source),
            tag("td", reference), tag("td", text))
        for source, reference, text in triples
    ]  # fmt: skip
    return tag("div", tag("table", head, body), class_="wide") if triples else None


def _attention(folder, found):
    pairs = zip(_lines(folder.path / "valid/source.txt"), _written(folder, found), strict=False)
    pairs = [pair for pair in pairs if 0 < len(pair[0].split()) <= WORDS]
    if not pairs:
        return None
    source, target = sorted(pairs, key=lambda pair: len(pair[0]))[len(pairs) * 4 // 5]
    try:
        user = load_run(folder.path, device="numpy")
    except CheckpointError:  # no weights, or damaged ones: the rest can be shown
        return None
    maps = attention_of(user, source, " ".join(target.split()[:WORDS]))  # early models repeat words
    drawn = {f"layer {n}, mean of heads": heads.mean(0) for n, heads in enumerate(maps.layers, 1)}
    drawn |= {
        f"layer {len(maps.layers)}, head {number}": head
        for number, head in enumerate(maps.layers[-1], 1)
    }
    text = "Where the decoder looks in the source (columns) for each word it writes (rows)."
    return [tag("p", text, class_="dim"), svg.heat_maps(drawn, maps.target, maps.source)]


def _read_profile(folder):
    """Return what ``gpuattn profile`` left in the folder, or None."""
    try:
        return json.loads((folder.path / PROFILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def describe_padding(found: Mapping[str, Any]) -> str:
    """Return a sentence on what padding the vocabulary gains, by its entry in a profile."""
    padded, plain = (found[key] / 1e3 for key in ("padded_us", "plain_us"))
    gain = 1 - padded / plain
    saves, would_save = ("saves", "would save") if gain >= 0 else ("costs", "would cost")
    return (
        f"the three products of its table take {padded:.3g} ms with {found['rows']:,} rows and "
        f"{plain:.3g} ms with {found['size']:,}, measured at {found['tokens']:,} tokens: padding "
        f"{saves if found['pads'] else would_save} {abs(gain):.0%}"
    )


def _profile(folder, found):
    if not found:
        command = tag("code", f"gpuattn profile {shlex.quote(str(folder.path))}")
        return tag("p", command, " measures it, for this page too.", class_="dim")
    names = ("op", "", "calls", "launches", "us", "share", "MB", "GFLOP", "of the roof")
    head = tag("tr", [tag("th", name) for name in names[:2]],
               [tag("th", name, class_="right") for name in names[2:]])  # fmt: skip
    body = [
        tag("tr", tag("td", row["op"]), tag("td", row["direction"]),
            [tag("td", text, class_="n") for text in (
                *("-" if row[key] is None else f"{row[key]:,.0f}" for key in ("calls", "launches")),
                f"{row['us']:,.1f}", f"{row['share']:.1%}",
                *(f"{row[key] / size:.3g}" if row[key] else "-"
                  for key, size in (("bytes", 1e6), ("flops", 1e9))),
                "-" if row["roof"] is None else f"{row['roof']:.2f}",
            )])
        for row in found["rows"]
    ]  # fmt: skip
    reach = found["ceilings"]
    text = f"{found['where']}, {found['dtype']}: a step takes {found['step_us'] / 1e3:.3g} ms"
    if reach:
        product, copy = reach["matmul_tflops"] * 1e12, reach["copy_tbs"] * 1e12
        text += f"; measured ceilings {with_unit(product, 'FLOP/s')} and {with_unit(copy, 'B/s')}"
    chart = svg.roofline(found["rows"], reach)
    title = "Ops under the roofline, each as large as its share of the time"
    return [
        tag("p", text, class_="dim"),
        svg.titled(title, tag("div", chart, class_="wide")) if chart else None,
        tag("div", tag("table", head, body), class_="wide"),
    ]


# ---- what it is ---------------------------------------------------------------------------------


def _data(starts):
    data = starts[-1].get("data") if starts else None
    if not data:
        return None
    found = data["figures"]
    facts = [tag("p", fact[:1].upper() + fact[1:], ".") for fact in data["facts"]]
    return [facts, _store(found) if found else None]


def _store(found):
    """Return the figures of a token store: a table of its sides, and how long rows are."""
    rows, files = found["rows"], found["files"]
    counts = ", ".join(f"{n:,} {what}" for what, n in found["counts"].items())
    skipped = ", ".join(f"{n:,} {why}" for why, n in found["skipped"].items())
    what = "pairs" if found["kind"] == "pairs" else "documents"
    text = (
        f"A token store of {rows:,} {what}: {counts} of {files:,} file{'s' * (files != 1)}; "
        f"left out: {skipped or 'nothing'}; {found['held_out']:,} more held out."
    )
    mix = "; ".join(f"{p['name']} {p['weight']:g} of {p['rows']:,} rows" for p in found["mix"])
    names = ("side", "tokens", "a row", "longest row", "loss of guessing by frequency")
    body = [
        tag("tr", tag("td", side), [tag("td", shown, class_="n") for shown in (
            f"{found['tokens'][side]:,}", f"{found['tokens'][side] / max(rows, 1):,.1f}",
            f"{found['longest'][side]:,}", f"{found['unigram'][side]:.2f}")])
        for side in found["tokens"]
    ]  # fmt: skip
    head = tag("tr", tag("th", names[0]), [tag("th", name, class_="right") for name in names[1:]])
    charts = [
        svg.titled(f"Rows by length: {side}", svg.bars(found["lengths"][side], "tokens"))
        for side in found["lengths"]
    ]
    return [
        tag("p", text, f" Mix: {mix}." if mix else ""),
        tag("div", tag("table", head, body), class_="wide"),
        tag("div", charts, class_="charts"),
    ]


def _model(found, config, profile):
    size, units = found["vocabulary"], found["units"]
    rows = padded_rows(size) if config.pad_vocab else size
    share = f"{100 * (rows - size) / rows:.2g} % of them padding" if rows > size else "all in use"
    text = (
        f"{found['parameters']:,} parameters. {size:,} {units}, in tables of {rows:,} rows: {share}"
    )
    measured = profile and profile.get("vocabulary")
    return [
        tag("p", text, "." if rows == size else ", which lets products run in whole tiles."),
        tag("p", f"Of the vocabulary {describe_padding(measured)}.") if measured else None,
    ]


def _environment(folder, starts):
    start = starts[-1] if starts else {}
    facts = {"device": start.get("where"), "begun": start.get("date"),
             "command": start.get("command")}  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in start.get("versions", {}).items())
    facts["versions"] = versions or None
    rows = [tag("tr", tag("th", name), tag("td", value)) for name, value in facts.items() if value]
    text = (folder.path / "config.toml").read_text(encoding="utf-8")
    options = "Options, and where those came from that are no defaults:"
    return [
        tag("table", rows) if rows else None,
        tag("p", options, class_="dim"),
        tag("pre", text, class_="columns"),
    ]
