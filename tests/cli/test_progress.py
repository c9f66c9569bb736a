"""Progress on terminals of any width, and the text that remains at the end."""

import io
import re

import pytest
from rich.console import Console

from gpuattn.cli.shared import progress
from gpuattn.train.progress import Progress
from gpuattn.units import duration

NOW = Progress(update=1234, epoch=3, seconds=90.0, share=0.25, loss=2.5, learning_rate=1e-3,
               rate=24_600.0, milliseconds=12.34, eta=12_000.0, memory=1 << 28)  # fmt: skip


@pytest.mark.parametrize("seconds, text", [
    (0.2, "0 s"), (59.6, "60 s"), (89, "89 s"), (90, "1.5 min"), (5399, "90.0 min"),
    (5400, "1.5 h"), (16854, "4.7 h"),
])  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "room, count",
    [(200, 6), (58, 5), (48, 4), (38, 3), (25, 2), (12, 1), (3, 0), (0, 0), (-1, 0), (-30, 0)],
)
def test_the_most_important_facts_stay(room, count):
    parts = progress.facts(NOW)
    assert parts[:5] == ["loss 2.500", "3.3 h left", "24.6k tokens/s", "0.25 GiB", "12.3 ms"]
    assert progress._fitting(parts, room) == "  ".join(parts[:count])
    assert len(progress._fitting(parts, room)) <= max(room, 0)


def test_gpu_figures_are_shown_where_known():
    assert progress.facts(NOW)[5:] == ["lr 1.0e-03"]
    known = NOW._replace(mfu=0.1234, watts=312.4, joules=21_040.0)
    assert progress.facts(known)[5:] == ["MFU 12.3 %", "312 W", "21 kJ", "lr 1.0e-03"]


@pytest.fixture
def console(monkeypatch):
    """The terminal of a LiveReport, 40 columns wide."""
    console = Console(file=io.StringIO(), width=40, force_terminal=True, no_color=True)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    return console


@pytest.fixture
def live(console):
    """A LiveReport of 40 columns, and a function that returns the lines it wrote."""
    return progress.LiveReport(), console.file.getvalue


def written_lines(console):
    """Return the lines that were written since the last call, without control codes."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    console.file.seek(0)
    console.file.truncate()
    return re.split("[\r\n]+", text)


def test_every_width_shows_a_bar_that_fits(console):
    report = progress.LiveReport()
    report._bar.live.auto_refresh = False  # no thread draws meanwhile
    report.progress(NOW)
    written_lines(console)
    widths = [*range(301), *range(300, -1, -7), 120, 10, 200, 40, 0, 300]
    for width in widths:
        console.width = width
        report.progress(NOW)
        report._bar.refresh()
        assert all(len(line) <= width for line in written_lines(console)), width
    assert "loss 2.500" in report._bar.tasks[0].fields["facts"]
    report.close()


def test_text_on_a_narrow_terminal_is_whole(console):
    report, text = progress.LiveReport(), "update 1,149, loss 0.002, 99.5 % exact"
    for width in (1, 2, 5, 9, 17, 23):
        console.width = width
        report.say("valid", text)
        assert "".join(written_lines(console)).split() == ["valid", *text.split()]


def test_text_wraps_next_to_its_topic_but_commands_do_not_wrap(live):
    report, written = live
    report.say("valid", "update 1,149, loss 0.002, 99.5 % exact, [BLEU] 100.0")
    command = "echo 'a rather long sentence to be translated' | gpuattn translate runs/toy"
    report.say("next", command)
    lines = [line.rstrip() for line in written().replace("\x1b[0m", "").splitlines()]
    assert lines[0].endswith("valid    update 1,149, loss 0.002, 99.5")
    assert lines[1].strip() == "% exact, [BLEU] 100.0"
    assert lines[2].endswith(command)


def test_the_cursor_is_shown_again(live):
    report, written = live
    report.progress(NOW)
    assert "\x1b[?25l" in written() and "loss 2.500" in written()
    report.close()
    assert written().rindex("\x1b[?25h") > written().rindex("\x1b[?25l")


@pytest.mark.parametrize("level, topics", [
    ("debug", ["model", "valid", "warning", "stopped", "train"]),
    ("info", ["model", "valid", "warning", "stopped"]), ("warning", ["warning", "stopped"]),
    ("error", []),
])  # fmt: skip
def test_the_level_selects_the_messages(level, topics, capsys):
    report = progress.new_report(level)
    for topic in ("model", "valid", "warning", "stopped"):
        report.say(topic, "a text")
    report.progress(NOW)
    report.close()
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.err.splitlines()] == topics and said.out == ""


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress.new_report()) is progress.PlainReport
    monkeypatch.setenv("TERM", "screen-256color")
    assert type(progress.new_report()) is progress.LiveReport


def test_a_bar_of_lines(console, monkeypatch):
    monkeypatch.setattr(progress, "lively", lambda: True)
    monkeypatch.setattr(progress, "BAR_SECONDS", 0)
    console.width = 90
    bar = progress.LineProgress("translate", 100)
    bar.begin(4, 50)
    bar.add(2)
    bar.add(1)  # an empty line is not counted
    bar.begin(1, 50)
    bar.add(1)
    bar.close()
    shown = written_lines(console)
    assert "4 sentences" in " ".join(shown) and "100 %" in " ".join(shown)
    assert "sentences/s" in " ".join(shown)
    progress.LineProgress("translate", 100).close()  # nothing was shown


def test_lines_of_progress_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    lines = progress.LineProgress("translate", 1000)
    lines.begin(10, 100)
    lines.add(5)
    lines.add(5)
    shown = capsys.readouterr().err.splitlines()
    assert [line.split()[:4] for line in shown] == [
        ["translate", "5", "%", "5"], ["translate", "10", "%", "10"],
    ]  # fmt: skip
