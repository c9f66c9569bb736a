"""Shows a run: a live bar on a terminal, plain lines elsewhere. All on standard error."""

import sys
import time

import click

from gpuattn.train.report import Report

PLAIN_SECONDS = 10  # between lines of progress where there is no terminal


def new_report():
    """Return the Report that suits standard error."""
    return LiveReport() if sys.stderr.isatty() else PlainReport()


def facts(progress):
    """Return what the bar and the lines say of a ``train.report.Progress``."""
    return (
        f"loss {progress.loss:.3f}  lr {progress.learning_rate:.1e}  "
        f"{_short(progress.rate)}tokens/s  {progress.memory / 2**30:.2f} GiB"
    )


class PlainReport(Report):
    """Lines, for files and for other programs."""

    def __init__(self):
        self._shown = time.monotonic()

    def say(self, topic, text):
        click.echo(f"{topic:8} {text}", err=True)

    def progress(self, progress):
        if time.monotonic() - self._shown < PLAIN_SECONDS:
            return
        self._shown = time.monotonic()
        self.say("train", f"update {progress.update:,}  {facts(progress)}  "
                 f"{100 * progress.share:.0f} %, {progress.eta:.0f} s left")  # fmt: skip


class LiveReport(Report):
    """A bar that stays at the bottom of the terminal while lines pass above it."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("update {task.fields[update]}"), BarColumn(),
            TextColumn("{task.percentage:3.0f} %"), TextColumn("{task.fields[facts]}"),
            TextColumn("{task.fields[eta]}"), console=self._console, transient=True,
        )  # fmt: skip
        self._task = None

    def say(self, topic, text):
        style = "yellow" if topic == "warning" else "bold" if topic == "valid" else "dim"
        self._console.print(f"[{style}]{topic:8}[/] ", end="")
        self._console.print(text, markup=False, soft_wrap=True)

    def progress(self, progress):
        shown = {
            "update": f"{progress.update:,}",
            "facts": facts(progress),
            "eta": f"{progress.eta:.0f} s left",
        }
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0, **shown)
        self._bar.update(self._task, completed=progress.share, **shown)

    def close(self):
        if self._task is not None:
            self._bar.stop()


def _short(number):
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.0f} "
