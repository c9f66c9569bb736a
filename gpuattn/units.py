"""Values as users write them: ``30e``, ``8000u``, ``90s``, ``8k``, ``4:2``; and their limits.

Each parser takes what the command line, a TOML file or a program gives, and returns the value or
raises ConfigError with what came and what is accepted.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from gpuattn.errors import ConfigError, type_of

SECONDS = {"s": 1, "m": 60, "h": 3600}
UNIT_NAMES = {"e": "epochs", "u": "updates", "s": "s"}
AUTO = "auto"


class Length(NamedTuple):
    """How long something lasts: ``amount`` of ``unit`` "e" (epochs), "u" (updates), "s" (seconds).

    ``str`` writes it as ``parse_length`` reads it.
    """

    amount: int | float
    unit: str

    def __str__(self):
        return f"{self.amount:g}{self.unit}" if self.unit == "s" else f"{self.amount}{self.unit}"

    def describe(self) -> str:
        """Return such as "30 epochs" or "60 s"."""
        return f"{self.amount:g} {UNIT_NAMES[self.unit]}"

    def most(self) -> str:
        """Return such as "30 epochs at most" or "6.0 min at most"."""
        return f"{duration(self.amount) if self.unit == 's' else self.describe()} at most"


def parse_length(value: Any) -> Length:
    """Return the Length of ``30e``, ``8000u``, ``8ku``, ``90s``, ``5m`` or ``2h``.

    >>> parse_length("5m")
    Length(amount=300.0, unit='s')
    """
    if isinstance(value, Length):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k?)([eusmh])", str(value).strip())
    digits, thousands, unit = match.groups() if match else ("0", "", "u")
    amount = float(digits) * (1000 if thousands else 1)
    whole = unit in SECONDS or amount == int(amount)
    if not whole or amount <= 0 or (thousands and unit != "u"):
        raise ConfigError(f"{value!r} is no length; accepted: such as 30e, 8000u, 90s or 5m")
    if unit in SECONDS:
        return Length(amount * SECONDS[unit], "s")
    return Length(int(amount), unit)


def parse_count(value: Any) -> int:
    """Return the whole number of ``8192``, ``8k`` (8,000) or ``1.5M``.

    >>> parse_count("8k")
    8000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", str(value).strip())
    count = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]] if match else 0
    if isinstance(value, bool) or count < 1 or count != int(count):
        raise ConfigError(f"{value!r} is no count; accepted: such as 4096, 8k or 1.5M")
    return int(count)


def or_auto(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a parser of "auto" and of what ``parse`` takes."""

    def parse_or_auto(value):
        if value == AUTO:
            return AUTO
        try:
            return parse(value)
        except ConfigError as error:
            raise ConfigError(f"{error}, or auto") from None

    return parse_or_auto


def parse_layers(value: Any) -> tuple[int, int]:
    """Return (encoder layers, decoder layers) of ``4`` or ``4:2``."""
    parts = value if isinstance(value, list | tuple) else str(value).split(":")
    numbers = [int(part) for part in parts if re.fullmatch(r"[1-9]\d{0,2}", str(part))]
    if len(numbers) != len(parts) or len(numbers) not in (1, 2):
        raise ConfigError(f"{value!r} are no layers; accepted: such as 4, or 4:2 (encoder:decoder)")
    return (numbers[0], numbers[-1])


def parse_warmup(value: Any) -> int | float:
    """Return a number of updates (int), or a share of the run (float): ``400`` or ``5%``."""
    text = str(value).strip()
    if isinstance(value, float) and 0 <= value < 1:
        return value
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if not share or float(share[1]) >= 100:
        raise ConfigError(f"{value!r} is no warm-up; accepted: updates such as 400, or such as 5%")
    return float(share[1]) / 100


def parse_share(value: Any) -> float:
    """Return the share of ``15%`` or ``0.15``: above 0, below 1."""
    text = str(value).strip()
    found = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < share < 1:
        raise ConfigError(f"{value!r} is no share; accepted: above 0, below 100%, such as 15%")
    return share


def duration(seconds: float) -> str:
    """Return such as "45 s", "3.4 min" or "4.7 h"."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def prefixed(number: float) -> tuple[float, str]:
    """Return (a number in units of "k", "M", "G" or "T", that prefix), "" for small ones."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return number / limit, prefix
    return number, ""


def round_step(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= step * 0.999)


def with_unit(number: float, unit: str) -> str:
    """Return a number with the prefix of its size.

    >>> with_unit(9.67e9, "FLOP/s")
    '9.67 GFLOP/s'
    """
    value, prefix = prefixed(number)
    return f"{value:.3g} {prefix}{unit}"


def short(number: float) -> str:
    """Return such as "1.2M", "24.6k" or "812"."""
    value, prefix = prefixed(number)
    return f"{value:.3g}{prefix}" if prefix else f"{value:.0f}"


CO2_PER_KWH = 480.0  # grams: the world's mean of electricity in 2023 (Ember, 2024)


def co2_grams(joules: float) -> float:
    """Return the grams of CO2 of electric energy, by ``CO2_PER_KWH``."""
    return joules / 3.6e6 * CO2_PER_KWH


def whole(least: float, most: float = math.inf) -> Callable[[Any], int]:
    """Return a parser of whole numbers from ``least`` to ``most``."""

    def parse(value):
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value).strip()):
            raise ConfigError(f"{value!r} is no whole number")
        if int(value) < least:
            raise ConfigError(f"{value} is too small; accepted: {least} or more")
        if int(value) > most:
            raise ConfigError(f"{value} is too large; accepted: {least} to {most}")
        return int(value)

    return parse


def number(
    least: float, below: float = math.inf, above: bool = False, most: float = math.inf
) -> Callable[[Any], float]:
    """Return a parser of numbers: ``least`` (or, where ``above``, more) to ``most``, and all below
    ``below``."""
    accepted = f"above {least:g}" if above else f"{least:g} or more"
    accepted += f", below {below:g}" if below < math.inf else ""
    accepted += f", up to {most:g}" if most < math.inf else ""

    def parse(value):
        try:
            if isinstance(value, bool):
                raise ValueError
            parsed = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{value!r} is no number; accepted: a number {accepted}") from None
        if not (parsed > least if above else parsed >= least) or not (
            parsed < below and parsed <= most
        ):
            raise ConfigError(f"{value!r} is out of range; accepted: a number {accepted}")
        return parsed

    return parse


class OneOf:
    """A parser of one of ``names``, a collection that may grow."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def __call__(self, value: Any) -> str:
        names = tuple(self.names)
        if value not in names:
            raise ConfigError(f"{value!r} is not one of {', '.join(names)}{nearest(value, names)}")
        return value


def choice(*names: str) -> OneOf:
    """Return a parser of one of ``names``."""
    return OneOf(names)


def flag(value: Any) -> bool:
    """Return the bool of ``True`` or ``False``, or of these words."""
    words = {"true": True, "false": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{value!r} is neither true nor false")
    return words[str(value).lower()]


def text(value: Any) -> str:
    """Return a string unchanged."""
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is {type_of(value)}; accepted: text")
    return value


def nearest(value: Any, names: Iterable[str]) -> str:
    """Return the advice ". Did you mean 'x'?" where a name is near, else nothing."""
    near = difflib.get_close_matches(str(value), names, 1, cutoff=0.5)
    return f". Did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    """Return a value as users write it."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    return ":".join(map(str, dict.fromkeys(value))) if type(value) is tuple else str(value)
