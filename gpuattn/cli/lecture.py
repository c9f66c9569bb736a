"""gpuattn lecture: every claim of five texts beside what this machine measures."""

import contextlib
import shlex
import signal
import threading
from pathlib import Path

import click

from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, PathName, device_option
from gpuattn.errors import DeviceMissingError
from gpuattn.lecture.harness import chapters, page, record, say
from gpuattn.lecture.harness.chapters import Chapter, choose
from gpuattn.lecture.harness.claims import load
from gpuattn.lecture.harness.say import Say
from gpuattn.runtime.device import array_module, choose_device

PAGE = "lecture.html"
EPILOG = """\b
gpuattn lecture                          all chapters on this machine -> lecture.html
gpuattn lecture 22 softmax               these chapters, by number or word
gpuattn lecture --list                   the chapters and their claims
gpuattn lecture --missing                goes on after Ctrl-C
gpuattn lecture --json mine.json --beside h200.json --out page.html
python -m gpuattn.lecture.c22_hars V=250000     one chapter, with a size of your own
"""


@click.command("lecture", cls=GroupedCommand, epilog=EPILOG)
@click.argument("names", nargs=-1, metavar="[CHAPTER...]")
@click.option("--list", "only_list", is_flag=True, cls=GroupedOption, group="Look",
              help="Print the chapters and their claims; run nothing.")  # fmt: skip
@click.option("--source", is_flag=True, cls=GroupedOption, group="Look",
              help="Print the code of the chapters; run nothing.")  # fmt: skip
@click.option("--smoke", is_flag=True, cls=GroupedOption, group="Sizes",
              help="Small sizes: all chapters in seconds.")  # fmt: skip
@click.option("--long", is_flag=True, cls=GroupedOption, group="Sizes",
              help="Larger sizes, where a chapter has some.")  # fmt: skip
@click.option("--out", type=PathName(dir_okay=False), default=PAGE, show_default=True,
              cls=GroupedOption, group="Results", help="Write the page here.")  # fmt: skip
@click.option("--json", "path", type=PathName(dir_okay=False), cls=GroupedOption, group="Results",
              help="Write the record here.  [default: beside the page]")  # fmt: skip
@click.option("--missing", is_flag=True, cls=GroupedOption, group="Results",
              help="Keep the record and run only what it lacks.")  # fmt: skip
@click.option("--beside", type=PathName(exists=True, dir_okay=False), cls=GroupedOption,
              group="Results", help="Show another machine's record in a column.  [default: "
              "without a GPU, the H200's of the repository, in a clone]")  # fmt: skip
@device_option
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    only_list: bool,
    source: bool,
    smoke: bool,
    long: bool,
    out: str,
    path: str | None,
    missing: bool,
    beside: str | None,
    device: str,
) -> None:
    """Run the chapters of the living lecture, each with some claims about attention, memory,
    caches and beam search; print each claim with a verdict; write a page with figures.

    CHAPTER is a number or a word of a title; without one, all run. Exits with 1 if a claim fails.
    """
    if smoke and long:
        raise click.UsageError("--smoke and --long; accepted: one of them")
    chosen = choose(names)
    if only_list or source:
        for chapter in chosen:
            _list(chapter) if only_list else click.echo(chapter.source)
        return
    path = path or str(Path(out).with_suffix(".json"))
    if Path(path).resolve() == Path(out).resolve():
        raise click.UsageError(f"--out and --json are both {out}; accepted: two files")
    device, where = choose_device(device)
    where += ", one BLAS thread" if device == "numpy" else ""
    if beside is None and device == "numpy" and (stored := record.stored()):
        beside = str(stored)
    other = record.read(beside) if beside else None
    for fault in record.stale(other) if other else []:
        click.echo(f"gpuattn: warning: {beside}: {fault}", err=True)
    line = shlex.join(["gpuattn", "lecture", *ctx.meta["arguments"]])
    found = record.new(where, line, array_module(device), smoke, long)
    found = record.go_on(path, found, strict=missing)
    if missing:
        chosen = [chapter for chapter in chosen if record.is_missing(found, chapter)]
    refused = {c.number: reason for c in chosen if (reason := chapters.refusal(c, device))}
    chosen = [chapter for chapter in chosen if chapter.number not in refused]
    page.write_page(out, found, other)  # unwritable places show before anything is measured
    record.write(path, found)
    click.echo(where)
    if other:
        click.echo(f"beside it: {other['where']}, {other['date']} ({beside})")
    try:
        with _ending_as_ctrl_c():
            _run(chosen, found, path, smoke, long, device)
    except KeyboardInterrupt:
        page.write_page(out, found, other)
        given = [argument for argument in ctx.meta["arguments"] if argument != "--missing"]
        again = shlex.join(["gpuattn", "lecture", "--missing", *given])
        count = sum(not entry["error"] for entry in found["chapters"])
        click.echo(f"\nstopped; {path} keeps {count} chapters. {again} goes on", err=True)
        ctx.exit(130)
    page.write_page(out, found, other)
    _end(found, out, path, other)
    for number, reason in refused.items():
        _show_other(number, reason, other)
    failed = [fault for entry in found["chapters"] for fault in chapters.faults(entry)]
    for fault in failed:
        click.echo(f"gpuattn: error: {fault}", err=True)
    if names and refused and not chosen:
        raise DeviceMissingError("no GPU to use, and no chapter asked for runs without one")
    ctx.exit(1 if failed else 0)


def _run(chosen, found, path, smoke, long, device):
    """Run chapters, one after the other; the record at ``path`` has each as soon as it ended."""

    def keep(entry):
        record.put(found, entry)
        record.write(path, found)

    for chapter in chosen:
        click.echo(f"{chapter.number}. {chapter.title}")
        keep(chapters.run(chapter, Say(device, smoke=smoke, long=long, tell=click.echo), keep))


def _stop(*_):
    raise KeyboardInterrupt


@contextlib.contextmanager
def _ending_as_ctrl_c():
    """Let a request to end (SIGTERM, as of ``timeout``) do what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_other(number, reason, other):
    """Say why a chapter did not run, and what the record beside has of it."""
    click.echo(reason, err=True)
    entry = record.entry_of(other, number) if other else None
    for statement in entry["statements"] if entry else ():
        click.echo(f"  {other['where']}: {statement['id']}  {say.line(statement)}")


def _end(found, out, path, other):
    missing = record.reasons(found)
    groups = sorted(_by_reason(missing).items(), key=lambda pair: _chapter_of(pair[1]))
    left_out = [ids for reason, ids in groups if reason.endswith(record.NOT_RUN)]
    for reason, ids in groups:
        if ids not in left_out:
            click.echo(f"  not shown: {' '.join(ids)}: {reason}")
    if left_out:
        click.echo(f"  not run: chapters {', '.join(str(_chapter_of(ids)) for ids in left_out)}")
    wanted = [id for id, reason in missing.items() if reason == _needs(id)]
    for id in wanted:
        for statement in record.statements_of(other, id):
            click.echo(f"  {other['where']}: {id}  {say.line(statement)}")
    if wanted and not other:
        click.echo("  no record of a GPU is at hand to show them; --beside FILE shows one")
    count = len(load()[1])
    click.echo(f"{count - len(missing)} of {count} claims shown; {out} and {path} written")


def _needs(id):
    return f"needs {load()[1][id].needs}"


def _chapter_of(ids):
    return load()[1][ids[0]].chapter


def _by_reason(missing):
    groups: dict[str, list[str]] = {}
    for id, reason in missing.items():
        groups.setdefault(reason, []).append(id)
    return groups


def _list(chapter: Chapter) -> None:
    click.echo(f"{chapter.number:2} {chapter.name:14} {chapter.title}")
    for id in chapter.claims:
        claim = load()[1][id]
        click.echo(f"     {id} {claim.kind:8} {claim.claim} ({claim.place})")
