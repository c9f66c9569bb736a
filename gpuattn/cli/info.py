"""gpuattn info: what a run is and how it went."""

import json
import textwrap

import click

from gpuattn.cli.options import run_argument
from gpuattn.pretrained import is_pretrained
from gpuattn.pretrained.folder import describe_folder
from gpuattn.runs.folder import summary
from gpuattn.train.session import describe
from gpuattn.units import duration

WIDTH = 80


@click.command("info")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: str, as_json: bool) -> None:
    """Show what the run in DIR is, how far it came, its best scores and its options.

    Of a folder of Hugging Face: its model, and what of the folder is not used.
    """
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
    best = found["best"]
    _say("best", describe(best) if best else "not evaluated yet")
    kinds = (best or {}).get("exact_by_kind", {})
    if len(kinds) > 1:
        _say("exact", ", ".join(f"{kind} {value:.1f} %" for kind, value in kinds.items()))
    _say("options", ", ".join(f"{name} {value}" for name, value in found["options"].items()))


def _say_pretrained(found):
    _say("folder", f"{found['folder']}: {found['model']} for {found['task']}")
    shown = f"{found['parameters']:,} parameters in {found['dtype']}"
    _say("model", f"{shown}, {found['vocabulary']:,} tokens")
    for topic in ("copies", "ignored"):
        if found[topic]:
            _say(topic, ", ".join(found[topic]))
    _say("options", ", ".join(f"{name} {value}" for name, value in found["options"].items()))


def _say(topic, text):
    click.echo(textwrap.fill(f"{topic:8} {text}", WIDTH, subsequent_indent=" " * 9,
                             break_on_hyphens=False, break_long_words=False))  # fmt: skip
