"""Scores of translations, and the log of a run as lines of JSON."""

import contextlib
import json
import math
import os
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

from gpuattn.errors import CheckpointError, ConfigError, DataError, problem
from gpuattn.train.units import round_step

TOKENIZERS = ("13a", "none")
TIMES = 6  # beside the updates of an axis, about
NUMBERS = {  # event -> what its rows have beside ``update``
    "train": ("seconds", "loss"), "valid": ("seconds", "loss", "score"), "threads": ("threads",),
}  # fmt: skip


def score(hypotheses, references, kinds=None, *, lowercase=False, tokenize="13a"):
    """Return how well sentences match their references, all figures from 0 to 100.

    Keys: ``exact_match``; ``exact_by_kind``, {kind: exact match} (empty without ``kinds``);
    ``bleu`` and ``chrf`` as sacrebleu computes them (Post 2018), ``bleu_signature``; ``sentences``.
    ``lowercase``, ``tokenize`` ("13a", "none"): of BLEU; ``lowercase`` of the other two as well.
    Raises DataError for no sentences or lists of different length.
    """
    if tokenize not in TOKENIZERS:
        accepted = ", ".join(TOKENIZERS)
        raise ConfigError(problem("score", "tokenize", repr(tokenize), accepted))
    if not references or len(hypotheses) != len(references):
        got = f"{len(hypotheses)} hypotheses for {len(references)} references"
        raise DataError(problem("score", "what to compare", got, "as many, and at least one"))
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    result = bleu.corpus_score(hypotheses, [references])
    chrf = CHRF(lowercase=lowercase).corpus_score(hypotheses, [references])
    fold = str.lower if lowercase else str
    right = [fold(h) == fold(r) for h, r in zip(hypotheses, references, strict=True)]
    return {
        "exact_match": 100 * sum(right) / len(right),
        "exact_by_kind": _by_kind(right, kinds),
        "bleu": result.score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.score,
        "sentences": len(references),
    }


def _by_kind(right, kinds):
    if kinds is None or set(kinds) <= {"text"}:
        return {}
    seen = Counter(kinds)
    found = Counter(kind for kind, good in zip(kinds, right, strict=True) if good)
    return {kind: 100 * found[kind] / seen[kind] for kind in sorted(seen)}


def rank(row):
    """Return what orders evaluations: the score, and among equal ones the loss."""
    return row["score"], -row["loss"]


def is_right(row, percent):
    """Tell whether so many of the translations of every kind of pair are exact."""
    kinds = row.get("exact_by_kind")
    return bool(kinds) and min(kinds.values()) >= percent


def describe(row):
    """Return a row of metrics in words."""
    mean = f" (mean of {row['averaged']} checkpoints)" if "averaged" in row else ""
    figures = [f"update {row['update']:,}{mean}", f"loss {row['loss']:.3f}"]
    if "perplexity" in row:
        figures.append(f"perplexity {row['perplexity']:.2f}")
    if row.get("exact_by_kind"):
        figures.append(f"{row['exact_match']:.1f} % exact")
    if "bleu" in row:
        figures += [f"BLEU {row['bleu']:.1f}", f"chrF {row['chrf']:.1f}"]
    return ", ".join(figures)


def loss_names(config):
    """Return the names of both losses of a run, which smoothing makes two measures."""
    smoothing = config.label_smoothing
    if not smoothing:
        return "training", "validation"
    return f"training, smoothing {smoothing:g}", "validation, unsmoothed"


def round_times(rows):
    """Return [(update, such as "20 s")] for a few round times, by rows of metrics.

    Between rows an update takes as long as the next. Times for which an axis of updates has no
    room, where updates were slow, are left out.
    """
    known = {0: 0.0} | {row["update"]: row["seconds"] for row in rows}
    updates, seconds = zip(*sorted(known.items()), strict=True)
    end, longest = updates[-1], seconds[-1]
    if not longest:
        return []
    units = ((3600, "h"), (60, "min"), (1, "s"))
    size, unit = next(unit for unit in units if longest >= 3 * unit[0] or unit[0] == 1)
    step = round_step(longest / size / TIMES)
    found, last = [], -end
    for n in range(1, math.floor(longest / size / step) + 1):
        update = float(np.interp(n * step * size, seconds, updates))
        if update - last >= 0.1 * end:
            found.append((update, f"{n * step:.4g} {unit}"))
            last = update
    return found


class MetricsLog:
    """``metrics.jsonl`` of a run: a JSON object a line, each with ``event`` and ``update``.

    Events: "start", "train", "valid", "stop", "end"; "threads", a choice of their number;
    "averaged" in a mean of weights.
    ``listener``: hears of rows, by ``begin(rows)`` of all that a rewind leaves and by ``add(row)``.
    """

    def __init__(self, path):
        self.path, self.listener = Path(path), None

    def add(self, event, **values):
        """Append a line, so that it is there even if the process ends right after.

        Raises CheckpointError when the disk refuses, as ``rewind`` does.
        """
        row = {"event": event, **values}
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self.listener:
            self.listener.add(row)

    def read(self, event=None):
        """Return the lines as dicts, of one event or of all.

        Lines that are no rows are left out: a half-written last one in silence, others with a
        warning.
        """
        if not self.path.exists():
            return []
        rows = [_row(line) for line in self.path.read_bytes().splitlines()]
        damaged = [str(number) for number, row in enumerate(rows[:-1], 1) if row is None]
        if damaged:
            few = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
            warnings.warn(f"{self.path} is damaged: left out line {few}", stacklevel=2)
        return [row for row in rows if row is not None and event in (None, row["event"])]

    def rewind(self, update):
        """Drop what was noted after an update, and of an end: a resumed run notes it again.

        Choices of threads stay: with them, updates that are repeated have the same bits.
        """
        kept = [
            row
            for row in self.read()
            if row["event"] == "threads"
            or (row["update"] <= update and row["event"] != "end" and "averaged" not in row)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        write_text(self.path, text)
        if self.listener:
            self.listener.begin(kept)


def _row(line):
    """Return the dict of a line of metrics, or None where it is none."""
    try:
        row = json.loads(line)
        numbers = [row[name] for name in ("update", *NUMBERS.get(row["event"], ()))]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return row if all(type(number) in (int, float) for number in numbers) else None


def write_text(path, text):
    """Write a small file at once: another process sees the old text or the new, never a part.

    Raises CheckpointError when the disk refuses.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # one that a kill left is written over
    with writing(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def writing(path):
    """Say of a disk that refuses which file it was, and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. Free some space, or choose another "
            "--out; what was saved before is intact"
        ) from error
