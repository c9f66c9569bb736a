"""Shows the progress of a run on standard error: a live bar on a terminal, else plain lines."""

import contextlib
import functools
import os
import sys
import time
from typing import Any

import click

from gpuattn.train.progress import Listener, Progress
from gpuattn.units import duration, short

PLAIN_SECONDS = 10  # between lines of progress where there is no terminal
BAR_SECONDS = 0.5  # between changes of a bar of lines
COMMANDS = ("stopped", "next")  # topics whose text users copy: never wrapped
NARROW = 24  # columns; below this, text is not aligned in a column of its own
LEVELS = ("debug", "info", "warning", "error")
URGENT = ("warning", "stopping", "stopped")  # topics of the level "warning"


def new_report(level: str = "info") -> Listener:
    """Return the Listener that suits standard error and a level of LEVELS.

    "debug": a line for every report of progress. "info": a bar, or a line every PLAIN_SECONDS.
    "warning": warnings, and what a signal does. "error": nothing, as ``cli.main`` prints errors.
    """
    if level == "error":
        return Listener()
    if level == "warning":
        return UrgentReport()
    if level == "debug":
        return PlainReport(every=0)
    return LiveReport() if lively() else PlainReport()


def lively() -> bool:
    """Return whether standard error is a terminal that can rewrite its last line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def facts(progress: Progress) -> list[str]:
    """Return the figures of a ``train.progress.Progress`` in words, most important first."""
    found = [
        f"loss {progress.loss:.3f}",
        f"{'at most ' if progress.at_most else ''}{duration(progress.eta)} left",
        f"{short(progress.rate)} {progress.counted}/s",
        f"{progress.memory / 2**30:.2f} GiB",
        f"{progress.milliseconds:.3g} ms",
    ]
    if progress.mfu is not None:
        found.append(f"MFU {100 * progress.mfu:.3g} %")
    if progress.watts is not None:
        found.append(f"{progress.watts:.0f} W")
    if progress.joules is not None:
        found.append(f"{progress.joules / 1e3:.3g} kJ")
    if progress.waiting is not None:
        found.append(f"ranks wait {progress.waiting:.0%}, rank {progress.slowest} least")
    return [*found, f"lr {progress.learning_rate:.1e}"]


def _if_read(show):
    """Return a method that does nothing once standard error is closed: the run continues."""

    @functools.wraps(show)
    def shown(*args):
        with contextlib.suppress(OSError):
            show(*args)

    return shown


class PlainReport(Listener):
    """Plain lines, for files and other programs. ``every``: seconds between lines of progress."""

    def __init__(self, every: float = PLAIN_SECONDS) -> None:
        self._every, self._shown = every, time.monotonic()

    @_if_read
    def say(self, topic: str, text: str) -> None:
        click.echo(f"{topic:8} {text}", err=True)

    def progress(self, progress: Progress) -> None:
        if time.monotonic() - self._shown < self._every:
            return
        self._shown = time.monotonic()
        done = f"{100 * progress.share:.0f} %"
        self.say("train", "  ".join([f"update {progress.update:,}", done, *facts(progress)]))


class UrgentReport(PlainReport):
    """Lines for warnings and signals only."""

    def say(self, topic: str, text: str) -> None:
        if topic in URGENT:
            super().say(topic, text)

    def progress(self, progress: Progress) -> None:
        """Show nothing."""


class LiveReport(Listener):
    """A bar that stays at the bottom of the terminal while lines pass above it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = _console()
        self._column = BarColumn()
        columns = (
            TextColumn("update {task.fields[update]}"), self._column,
            TextColumn("{task.percentage:3.0f} %"), TextColumn("{task.fields[facts]}"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task: Any = None

    @_if_read
    def say(self, topic: str, text: str) -> None:
        from rich.table import Table
        from rich.text import Text

        style = "yellow" if topic == "warning" else "bold" if topic == "valid" else "dim"
        head, body = Text(f"{topic:8}", style), Text(text)
        if topic in COMMANDS or self._console.width < NARROW:
            self._console.print(head, body, soft_wrap=True)
            return
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(head, body)
        self._console.print(line)

    @_if_read
    def progress(self, progress: Progress) -> None:
        update, width = f"{progress.update:,}", self._console.width  # may change at any time
        self._column.bar_width = min(20, width // 10)
        room = width - self._column.bar_width - len(f"update {update}  100 % ")
        shown = {"update": update, "facts": _fitting(facts(progress), room)}
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0, **shown)
        self._bar.update(self._task, completed=progress.share, **shown)

    @_if_read
    def close(self) -> None:
        if self._task is not None:
            self._bar.stop()


def _fitting(parts, room):
    """Return the first parts that fit in ``room`` columns, joined; "" if none fits."""
    while parts and len("  ".join(parts)) > room:
        parts = parts[:-1]
    return "  ".join(parts)


class LineProgress:
    """How far a command is in a file: lines a second and the time left, on standard error.

    A bar on a terminal, else a line every PLAIN_SECONDS. ``size``: bytes of the file. Nothing is
    shown for a file that takes less than BAR_SECONDS.
    """

    def __init__(self, topic: str, size: int) -> None:
        self._topic, self._size, self._lines = topic, size, 0
        self._before = self._done = self._each = 0.0  # bytes
        self._begun = self._shown = time.monotonic()
        self._lively = lively()
        self._bar: Any = None

    def begin(self, lines: int, size: int) -> None:
        """Begin with some lines, ``size`` bytes together."""
        self._done, self._before = self._before, self._before + size
        self._each = size / lines

    def add(self, lines: int) -> None:
        """Count lines that are done."""
        self._lines += lines
        self._done += lines * self._each
        now = time.monotonic()
        if now - self._shown >= (BAR_SECONDS if self._lively else PLAIN_SECONDS):
            self._shown = now
            self._show(min(1.0, self._done / max(1, self._size)), now - self._begun)

    @_if_read
    def _show(self, share, seconds):
        rate, left = self._lines / seconds, seconds / share - seconds
        facts = f"{self._lines:,} sentences  {short(rate)} sentences/s  {duration(left)} left"
        if not self._lively:
            click.echo(f"{self._topic:8} {100 * share:.0f} %  {facts}", err=True)
            return
        from rich.progress import BarColumn, Progress, TextColumn

        if self._bar is None:
            columns = (BarColumn(20), TextColumn("{task.percentage:3.0f} %"),
                       TextColumn("{task.description}"))  # fmt: skip
            console = _console()
            self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._bar.start()
            self._bar.add_task("", total=1.0)
        self._bar.update(self._bar.task_ids[0], completed=share, description=facts)

    @_if_read
    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _console():
    from rich.console import Console

    return Console(stderr=True, highlight=False)
