"""Built-in pairs: generated parallel text with exact references and nothing to download."""

import datetime
import difflib
import string
from itertools import product
from typing import NamedTuple

import numpy as np

from gpuattn.data import toy
from gpuattn.data.grammar import SPLITS, Kind
from gpuattn.data.lexicon import MONTH_DAYS, MONTHS_EN, WEEKDAYS, ordinal_en
from gpuattn.errors import ConfigError, DataError


class Pair(NamedTuple):
    """A sentence and its translation; ``kind`` names what it tests, for scores by kind."""

    source: str
    target: str
    kind: str


class Generated(NamedTuple):
    """A built-in set of pairs. ``vocab_size`` is the size of its joint SentencePiece model."""

    name: str
    summary: str
    kinds: tuple[Kind, ...]
    vocab_size: int


# ---- dates to ISO 8601: day x month ----

# {d} day, {s} its suffix, {o} its word, {w} weekday, {m} month, {b} its first three letters,
# {n} its number, {y} year.
_FORMATS = (
    "{m} {d}, {y}",
    "{d} {m} {y}",
    "the {d}{s} of {m}, {y}",
    "{m} {d}{s}, {y}",
    "{d}{s} {m} {y}",
    "{b} {d}, {y}",
    "{d} {b} {y}",
    "{d}-{b}-{y}",
    "{n:02d}/{d:02d}/{y}",
    "{d}.{n}.{y}",
    "{y}, {m} {d}",
    "{y}/{n:02d}/{d:02d}",
    "the {o} of {m} {y}",
    "{m} the {o}, {y}",
    "{w}, {m} {d}, {y}",
)
_CALENDAR = tuple((day, month) for month in range(12) for day in range(1, MONTH_DAYS[month] + 1))


def _iso_date(cell, template, year):
    day, month = cell
    name = MONTHS_EN[month]
    suffix = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    date = datetime.date(year, month + 1, day)
    source = template.format(
        d=day,
        o=ordinal_en(day),
        s=suffix,
        m=name,
        b=name[:3],
        n=month + 1,
        y=year,
        w=WEEKDAYS[date.weekday()][0],
    )
    return source, date.isoformat()


# ---- reverse: first symbol x last symbol ----

_SYMBOLS = tuple(string.digits + string.ascii_lowercase)


def _reverse(cell, length, *middle):
    symbols = (_SYMBOLS[cell[0]], *middle[:length], _SYMBOLS[cell[1]])
    return " ".join(symbols), " ".join(reversed(symbols))


GENERATED = {
    made.name: made
    for made in (
        Generated(
            "toy",
            "English to German phrases: numbers, dates, times, prices, clauses",
            toy.KINDS,
            toy.VOCAB_SIZE,
        ),
        Generated(
            "dates",
            "dates as people write them to ISO 8601",
            (Kind("dates", 1.0, _CALENDAR, (_FORMATS, tuple(range(1900, 2100))), _iso_date),),
            384,
        ),
        Generated(
            "reverse",
            "a row of digits and letters, backwards",
            (
                Kind(
                    "reverse",
                    1.0,
                    tuple(product(range(len(_SYMBOLS)), repeat=2)),
                    (tuple(range(2, 11)), *(_SYMBOLS,) * 10),
                    _reverse,
                ),
            ),
            384,
        ),
    )
}


def generate(name: str, split: str, count: int, seed: int) -> list[Pair]:
    """Return ``count`` pairs of a built-in set, drawn independently.

    The same arguments give the same pairs on every machine. No pair of ``valid`` or ``test`` is
    ever in ``train``, whatever the seeds: they own other cells of each kind's table
    (``gpuattn.data.grammar``).

    ``name``: a key of ``GENERATED``. ``split``: ``"train"``, ``"valid"`` or ``"test"``.
    Raises ConfigError for another name or split, DataError for a negative count.
    """
    made = find_generated(name)
    if split not in SPLITS:
        raise ConfigError(f"generate: split is {split!r}; accepted: {', '.join(SPLITS)}")
    if count < 0:
        raise DataError(f"generate: count is {count}; accepted: 0 or more pairs")
    rng = np.random.Generator(np.random.Philox([seed, SPLITS.index(split)]))
    kinds = rng.choice(len(made.kinds), size=count, p=[kind.share for kind in made.kinds])
    amounts = np.bincount(kinds, minlength=len(made.kinds))
    draws = [
        iter(kind.draw(split, amount, rng))
        for kind, amount in zip(made.kinds, amounts, strict=True)
    ]
    found = ((*next(draws[kind]), made.kinds[kind].name) for kind in kinds)
    return [Pair(source, target, kind) for source, target, kind in found]


def find_generated(name: str) -> Generated:
    """Return the built-in set of pairs of this name; ConfigError names the nearest one."""
    if name in GENERATED:
        return GENERATED[name]
    near = difflib.get_close_matches(str(name), GENERATED, n=1, cutoff=0.4)
    advice = f". Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"task is {name!r}; accepted: {', '.join(GENERATED)}{advice}")
