"""The record of a machine: what every chapter said there, as JSON.

``{"format", "gpu", "driver", "versions", "date", "commit", "digest", "command", "where", "smoke",
"long", "chapters"}``: the head as in ``bench/results.py``, ``where`` in words, and the entries of
``chapters.run``.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuattn.bench.results import origin
from gpuattn.errors import ConfigError, DataError
from gpuattn.files import write_text, writing
from gpuattn.lecture.harness.chapters import Chapter, chapters
from gpuattn.lecture.harness.claims import load
from gpuattn.typing import StrPath
from gpuattn.version import version

FORMAT = "gpuattn lecture/1"
HEAD = ("gpu", "digest", "smoke", "long", "versions", "date", "where", "chapters")
STORED = Path("examples/benchmarks/results/lecture-h200.json")  # in a clone of the repository
NOT_RUN = "was not run"
SAME = ("gpu", "digest", "smoke", "long")  # must be equal where a record goes on


def new(where: str, command: str, xp: ModuleType, smoke: bool, long: bool) -> dict[str, Any]:
    """Return a record without chapters."""
    head = {"format": FORMAT, **origin(command, xp), "where": where}
    return head | {"smoke": smoke, "long": long, "chapters": []}


def read(path: StrPath) -> dict[str, Any]:
    """Return a record. Raises DataError for a file that is none, or of another format."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no record of gpuattn lecture: {error}") from None
    made = record.get("format") if isinstance(record, dict) else None
    if made != FORMAT:
        got = "without a format" if made is None else f"of the format {made!r}"
        raise DataError(f"{path} is no record that can be used: it is {got}; accepted: {FORMAT!r}")
    if lacks := [name for name in HEAD if name not in record]:
        raise DataError(f"{path} is a damaged record: it lacks {', '.join(lacks)}")
    return record


def stored() -> Path | None:
    """Return the path of the record of an H200, where the program or the user is in a clone."""
    places = (Path(__file__).parents[3] / STORED, STORED)
    return next((path for path in places if path.is_file()), None)


def write(path: StrPath, record: Mapping[str, Any]) -> None:
    """Write a record. Raises CheckpointError where that is not possible."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return in words why a record cannot go on from another; nothing where it can."""
    return [f"{name} {old[name]}, not {new[name]}" for name in SAME if old[name] != new[name]]


def go_on(path: StrPath, fresh: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Return ``fresh`` with the chapters of the record at ``path``, if there is one to go on with.

    One of another machine, code or size is moved aside, with a warning; if ``strict``, ConfigError.
    Raises DataError for a file that is no record.
    """
    path = Path(path)
    if not path.exists():
        return fresh
    old = read(path)
    found = "; ".join(differences(old, fresh))
    if not found:
        return fresh | {"chapters": old["chapters"]}
    if strict:
        raise ConfigError(
            f"{path} is a record of {found}: --missing cannot go on with it. "
            "Give another file, or leave --missing out to measure anew"
        )
    aside = path.with_suffix(f".old{path.suffix}")
    with writing(aside):
        path.replace(aside)
    warnings.warn(f"{path} was a record of {found}: it is {aside} now", stacklevel=2)
    return fresh


def put(record: dict[str, Any], entry: dict[str, Any]) -> None:
    """Put the entry of a chapter into a record, in place of an older one."""
    rest = [old for old in record["chapters"] if old["number"] != entry["number"]]
    record["chapters"] = sorted([*rest, entry], key=lambda entry: entry["number"])


def is_missing(record: Mapping[str, Any], chapter: Chapter) -> bool:
    """Return whether a record lacks a chapter, has it with an error, or of other code."""
    entry = entry_of(record, chapter.number)
    return entry is None or bool(entry["error"]) or entry["hash"] != chapter.hash


def entry_of(record: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return the entry of a chapter, or None."""
    return next((entry for entry in record["chapters"] if entry["number"] == number), None)


def statements_of(record: Mapping[str, Any] | None, id: str) -> list[dict[str, Any]]:
    """Return the statements of a claim in a record, if there is one."""
    entries = record["chapters"] if record else ()
    return [s for entry in entries for s in entry["statements"] if s["id"] == id]


def reasons(record: Mapping[str, Any]) -> dict[str, str]:
    """Return why a claim has no statement in a record, by id, for all that have none."""
    said = {s["id"] for entry in record["chapters"] for s in entry["statements"]}
    return {id: _reason(record, claim) for id, claim in load()[1].items() if id not in said}


def _reason(record, claim):
    needs = [f"needs {claim.needs}"] * bool(claim.needs)
    chapter = chapters().get(claim.chapter)
    if chapter is None:
        return "; ".join([f"not built yet: chapter {claim.chapter}", *needs])
    entry = entry_of(record, claim.chapter)
    if entry is None:
        asked = chapter.fields.get("Needs")
        if asked and not record["gpu"]:
            return f"needs {asked}"
        return f"chapter {claim.chapter} {NOT_RUN}"
    if entry["error"]:
        return f"chapter {claim.chapter} ended with an error"
    if _may_lack(record, claim):
        return needs[0]
    return f"not built yet: its part of chapter {claim.chapter}"


def _may_lack(record, claim):
    """Return whether the machine of a record may be what a claim without a statement lacks."""
    return claim.needs is not None and not (record["gpu"] and claim.needs == "a GPU")


def stale(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence for what in a record is of another version, or missing."""
    made, here, found = record["versions"].get("gpuattn"), version(), []
    if made != here:
        found.append(f"it is of gpuattn {made}, this is {here}")
    entries = [(entry, chapters().get(entry["number"])) for entry in record["chapters"]]
    old = [str(c.number) for entry, c in entries if c and entry["hash"] != c.hash]
    if old:
        found.append(f"other code made chapter {', '.join(old)}")
    said = {s["id"] for entry in record["chapters"] for s in entry["statements"]}
    if unknown := sorted(said - set(load()[1])):
        found.append(f"with claims that are unknown here: {', '.join(unknown)}")
    missing = [
        claim.id for claim in load()[1].values()
        if claim.chapter in chapters() and claim.id not in said
        if not _may_lack(record, claim)
    ]  # fmt: skip
    if missing:
        found.append(f"without the claims {', '.join(sorted(missing))}")
    return found
