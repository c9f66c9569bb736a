"""gpuattn info: what a run is and how it went, and what a token store holds."""

import json
import textwrap

import click

from gpuattn.cli.shared.options import run_argument
from gpuattn.data.labelled import some_of
from gpuattn.data.store import TokenStore, is_store
from gpuattn.pretrained import is_pretrained
from gpuattn.pretrained.folder import describe_folder
from gpuattn.runs.folder import summary
from gpuattn.runs.metrics import describe
from gpuattn.units import duration

WIDTH = 80
BAR = 30  # characters
EXAMPLE_TOKENS = 20


@click.command("info")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: str, as_json: bool) -> None:
    """Show what the run in DIR is, how far it came, its best scores and its options; of a token
    store its counts, lengths, examples, and what was left out.

    Of a folder of Hugging Face: its model, and what of the folder is not used.
    """
    if is_store(folder):
        show_store(TokenStore(folder), as_json)
        return
    pretrained = is_pretrained(folder)
    found = describe_folder(folder) if pretrained else summary(folder)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    if pretrained:
        _say_pretrained(found)
        return
    updates = f" after {found['updates']:,} updates, {duration(found['seconds'])}"
    _say("run", f"{found['folder']}: {found['task']}")
    damaged = f", but damaged: {'; '.join(found['faults'])}" if found["faults"] else ""
    _say("state", found["state"] + (updates if found["updates"] else "") + damaged)
    _say("model", f"{found['parameters']:,} parameters, {found['vocabulary']:,} {found['units']}")
    if found["classes"]:
        _say("classes", some_of(found["classes"]))
    best = found["best"]
    _say("best", describe(best) if best else "not evaluated yet")
    kinds = (best or {}).get("exact_by_kind", {})
    if len(kinds) > 1:
        _say("exact", ", ".join(f"{kind} {value:.1f} %" for kind, value in kinds.items()))
    _say("options", ", ".join(f"{name} {value}" for name, value in found["options"].items()))


def show_store(store: TokenStore, as_json: bool) -> None:
    """Print what a store holds."""
    head, sides = store.head, store.sides
    found = examples(store)
    if as_json:
        click.echo(json.dumps(head | {"examples": found}, indent=2, ensure_ascii=False))
        return
    held = f", {len(store.valid):,} more held out" if store.valid else ""
    counts = ", ".join(f"{n:,} {what}" for what, n in head["counts"].items())
    _say(
        "store",
        f"{store.folder}: {store.kind}, {len(store):,} {'rows' if len(store) > 1 else 'row'}{held}",
    )
    files = len(head["sources"])
    _say("read", f"{counts} of {files:,} {'files' if files > 1 else 'file'}")
    for part in head["mix"]:
        _say(
            "mix", f"{part['name']} {part['weight']:g}: {part['rows'][1] - part['rows'][0]:,} rows"
        )
    for side in sides:
        mean = head["tokens"][side] / max(len(store), 1)
        lengths = f"{mean:.1f} a row, {head['longest'][side]:,} at most"
        guessing = f"loss of guessing by frequency {head['unigram'][side]:.2f}"
        _say(side, f"{head['tokens'][side]:,} tokens, {lengths}; {guessing}")
    _say("ids", f"{head['vocab']:,}, {head['dtype']}, in {len(head['parts']):,} parts")
    skipped = ", ".join(f"{n:,} {reason}" for reason, n in head["skipped"].items())
    _say("left out", skipped or "nothing")
    for line in histogram(head["lengths"]["edges"], head["lengths"][sides[-1]]):
        _say("lengths", line)
    for texts in found:
        _say("example", " | ".join(texts))


def histogram(edges: list[int], counts: list[int]) -> list[str]:
    """Return a line for each range of lengths from the first to the last that occurs."""
    some = [i for i, n in enumerate(counts) if n]
    lines = []
    for i in range(some[0], some[-1] + 1) if some else ():
        bar = "#" * round(BAR * counts[i] / max(counts))
        lines.append(f"to {edges[i]:>9,} {counts[i]:>11,} {bar}".rstrip())
    return lines


def examples(store: TokenStore) -> list[list[str]]:
    """Return the beginnings of the first, the middle and the last row, decoded, by side."""
    tokenizer, found = store.tokenizer(), []
    for i in sorted({0, len(store) // 2, len(store) - 1}):
        rows = [store.row(side, i)[:EXAMPLE_TOKENS].tolist() for side in store.sides]
        found.append([tokenizer.decode_text(row).replace("\n", " ") for row in rows])
    return found


def _say_pretrained(found):
    _say("folder", f"{found['folder']}: {found['model']} for {found['task']}")
    shown = f"{found['parameters']:,} parameters in {found['dtype']}"
    _say("model", f"{shown}, {found['vocabulary']:,} {found['units']}")
    for topic in ("copies", "ignored"):
        if found[topic]:
            _say(topic, ", ".join(found[topic]))
    _say("options", ", ".join(f"{name} {value}" for name, value in found["options"].items()))


def _say(topic, text):
    click.echo(textwrap.fill(f"{topic:8} {text}", WIDTH, subsequent_indent=" " * 9,
                             break_on_hyphens=False, break_long_words=False))  # fmt: skip
