"""Chapters: finding them, reading their heads, running them.

A chapter is a percent script whose docstring is a title, "22. Beam search without sorting", and
paragraphs that begin with a word of ``FIELDS``.
"""

import ast
import contextlib
import contextvars
import functools
import hashlib
import io
import os
import re
import runpy
import sys
import time
import tokenize
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuattn.errors import ConfigError, SlowPathWarning
from gpuattn.lecture.harness.claims import load
from gpuattn.lecture.harness.say import FAILS, Say
from gpuattn.units import nearest

FOLDER = Path(__file__).parents[1]
FIELDS = ("Claim", "Regime", "Needs", "Question", "Answer", "Vary")
HARNESS = "gpuattn.lecture.harness"
MEASURES = "attention", "composed", "counted", "forms", "machine", "steps", "training"
STOPPED = "it was stopped"
# chapters compare digits in float32 and float64: that the kernels for 16 bits refuse is no news
ASKED_FOR = r"(?s)\w+ uses .* is float(32|64)\b"
_current: contextvars.ContextVar[Say | None] = contextvars.ContextVar("gpuattn_say", default=None)


@dataclass(frozen=True)
class Chapter:
    """A chapter: its file, and what its docstring says."""

    number: int
    path: Path
    title: str
    fields: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of its file without the number, as in "hars"."""
        return self.path.stem.partition("_")[2]

    @property
    def source(self) -> str:
        """The text of its file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def hash(self) -> str:
        """A hash of its code and of what it measures with, without comments."""
        total = hashlib.sha256()
        for path in sources(self.path):
            total.update(code_of(path.read_text("utf-8")).encode())
        return total.hexdigest()[:16]

    @property
    def claims(self) -> list[str]:
        """The ids of its claims."""
        return [claim.id for claim in load()[1].values() if claim.chapter == self.number]


def code_of(text: str) -> str:
    """Return Python source without comments, empty lines and spaces at the ends of lines.

    What a parser makes of it would depend on the version of Python.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def chapters() -> dict[int, Chapter]:
    """Return all chapters by number."""
    found = {}
    for path in sorted(FOLDER.glob("c[0-9][0-9]_*.py")):
        number, title, fields = read_doc(ast.get_docstring(ast.parse(path.read_text("utf-8"))))
        found[number] = Chapter(number, path, title, fields)
    return found


def sources(path: Path) -> list[Path]:
    """Return the file of a chapter, and those of the modules of MEASURES that it is run with."""
    found, left = [], [path]
    while left:
        found.append(path := left.pop())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith(HARNESS):
                names = [module.rpartition(".")[2], *(alias.name for alias in node.names)]
                used = [FOLDER / "harness" / f"{name}.py" for name in names if name in MEASURES]
                left += [file for file in used if file not in (*found, *left)]
    return sorted(found, key=lambda path: path.name)


def read_doc(doc: str | None) -> tuple[int, str, dict[str, str]]:
    """Return the number, the title and the fields of a chapter's docstring."""
    first, _, rest = (doc or "").partition("\n")
    number, _, title = first.partition(". ")
    parts = re.split(rf"^({'|'.join(FIELDS)}): ", rest, flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    fields = {name: " ".join(part.split()) for name, part in pairs}
    if "Claim" in fields:
        fields["Claim"] = fields["Claim"][:1].upper() + fields["Claim"][1:]
    return int(number), title, fields


def choose(names: Sequence[str]) -> list[Chapter]:
    """Return the chapters of ``names``, numbers or words of names and titles; all for none.

    Raises ConfigError for a name that no chapter has, with the nearest ones.
    """
    if not names:
        return list(chapters().values())
    chosen: dict[int, Chapter] = {}
    for name in names:
        found = [chapter for chapter in chapters().values() if _is_called(chapter, name)]
        if not found:
            raise ConfigError(_unknown(name))
        chosen |= {chapter.number: chapter for chapter in found}
    return [chosen[number] for number in sorted(chosen)]


def _is_called(chapter, name):
    if name.isdecimal():
        return int(name) == chapter.number
    word = name.lower()
    return word in (chapter.path.stem, chapter.name) or word in _words(chapter)


def _words(chapter):
    return re.findall(r"\w+", f"{chapter.name} {chapter.title}".lower().replace("_", " "))


def _unknown(name):
    words = [word for chapter in chapters().values() for word in _words(chapter) if len(word) > 3]
    near = "" if name.isdecimal() else nearest(name.lower(), words)
    there = ", ".join(f"{c.number} {c.name}" for c in chapters().values())
    return f"there is no chapter {name!r}; accepted: {there}{near}"


# ---- running ------------------------------------------------------------------------------------


def run(chapter: Chapter, say: Say, keep: Callable[[dict[str, Any]], None] | None = None) -> dict:
    """Run a chapter; return its entry of a record: statements, figures, seconds, error.

    An error in the chapter ends it, and is part of the entry. What was said before Ctrl-C is given
    to ``keep``, as an entry with the error STOPPED.
    """
    begin, error = time.perf_counter(), None

    def entry(error):
        return {
            "number": chapter.number, "title": chapter.title, "hash": chapter.hash,
            "seconds": round(time.perf_counter() - begin, 3), "error": error,
            "statements": say.statements, "figures": say.figures,
        }  # fmt: skip

    token = _current.set(say)
    try:
        with _one_blas_thread(say.device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ASKED_FOR, SlowPathWarning)
            runpy.run_path(str(chapter.path))
    except BrokenPipeError:  # the reader of the lines has gone
        raise
    except KeyboardInterrupt:
        if keep and say.statements:
            keep(entry(STOPPED))
        raise
    except Exception as fault:  # noqa: BLE001 the other chapters go on
        error = f"{type(fault).__name__}: {fault}"
    finally:
        _current.reset(token)
        say.clear()
    if error is None:
        say.check_sizes()
    return entry(error)


def _one_blas_thread(device):
    """On NumPy: products here are small, and threads that wait for each other slow them down."""
    if device != "numpy":
        return contextlib.nullcontext()
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, "blas")


def faults(entry: Mapping[str, Any]) -> list[str]:
    """Return a sentence for what failed in the entry of a chapter."""
    found = [f"{s['id']} {s['what']}" for s in entry["statements"] if s["verdict"] == FAILS]
    return found + [entry["error"]] * bool(entry["error"])


def lecture(doc: str | None) -> Say:
    """Return what the chapter with this docstring speaks through.

    In a chapter that is the program, ``python -m gpuattn.lecture.c22_hars``, run it as asked on
    the command line and end the program.
    """
    say = _current.get()
    if say is not None:
        return say
    if sys.modules["__main__"].__doc__ is doc:
        sys.exit(_alone(chapters()[read_doc(doc)[0]], sys.argv[1:]))
    return Say(smoke=True, tell=lambda text: None)  # imported, as by a documentation tool


def _alone(chapter: Chapter, arguments: Sequence[str]) -> int:
    """Run a chapter as a program; return the exit code."""
    import argparse

    from gpuattn.errors import DeviceMissingError
    from gpuattn.runtime.device import DEVICES, choose_device

    parser = argparse.ArgumentParser(
        prog=f"python -m gpuattn.lecture.{chapter.path.stem}",
        description=f"{chapter.number}. {chapter.title}: {chapter.fields['Claim']}",
    )
    parser.add_argument("sizes", nargs="*", metavar="NAME=N", type=_size, help="sizes to vary")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--smoke", action="store_true", help="small sizes, in a second or two")
    parser.add_argument("--long", action="store_true", help="larger sizes, in minutes")
    options = parser.parse_args(arguments)
    try:
        device = choose_device(options.device)[0]
        if reason := refusal(chapter, device):
            raise DeviceMissingError(reason)
        print(f"{chapter.number}. {chapter.title}\n   {chapter.fields['Claim']}")
        sizes = dict(options.sizes)
        entry = run(chapter, Say(device, smoke=options.smoke, long=options.long, sizes=sizes))
    except (ConfigError, DeviceMissingError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 3 if isinstance(error, DeviceMissingError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    for fault in faults(entry):
        print(f"fails: {fault}", file=sys.stderr)
    return 1 if faults(entry) else 0


def refusal(chapter: Chapter, device: str) -> str | None:
    """Return why a chapter cannot run on a device, or None."""
    needs = chapter.fields.get("Needs")
    return f"chapter {chapter.number} needs {needs}" if needs and device == "numpy" else None


def _size(text):
    import argparse

    name, _, digits = text.partition("=")
    if not name or not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: such as N=1024")
    return name, int(digits)
