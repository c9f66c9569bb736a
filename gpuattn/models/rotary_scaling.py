"""Rotary frequencies of models whose context was lengthened after their training.

A pair of a head turns by its frequency, in radians, from one token to the next. Positions that were
never seen in training are brought into the range of seen ones by lower frequencies: of all pairs
("linear": Chen et al., "Extending Context Window of Large Language Models via Positional
Interpolation", 2023), or of slow pairs alone ("llama3": Grattafiori et al., "The Llama 3 Herd of
Models", 2024; "yarn": Peng et al., "YaRN: Efficient Context Window Extension of Large Language
Models", 2023).
"""

import math
from dataclasses import dataclass

import numpy as np

from gpuattn.errors import ConfigError, problem
from gpuattn.ops.rotary import frequencies_of

KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryScaling:
    """How the frequencies of rotary positions differ from those of their base.

    ``kind``: "linear", "llama3" or "yarn". ``factor``: by which frequencies are divided, from 1 on.
    ``original``: the context of the training, in tokens. ``slow``, ``fast``: turns in so many
    tokens; pairs with ``slow`` or fewer are divided, pairs with ``fast`` or more are not, those
    between in part. ``whole``: whether "yarn" rounds the numbers of the first and the last pair
    between. ``scale``: of rotated queries and keys, for "yarn". "linear" has ``factor`` alone.
    Raises ConfigError for what does not fit together.
    """

    kind: str
    factor: float
    original: int = 8192
    slow: float = 1.0
    fast: float = 4.0
    whole: bool = True
    scale: float = 1.0

    def __post_init__(self):
        for field, fits, accepted in (
            ("kind", self.kind in KINDS, " or ".join(map(repr, KINDS))),
            ("factor", 1 <= self.factor < math.inf, "a number from 1 on"),
            ("original", self.original >= 1, "a whole number from 1 on"),
            ("slow", 0 < self.slow < math.inf, "a positive number"),
            ("fast", self.slow < self.fast < math.inf, f"a number above slow, {self.slow}"),
            ("scale", 0 < self.scale < math.inf, "a positive number"),
            ("scale", self.scale == 1 or self.kind == "yarn", f"1 for {self.kind!r}"),
        ):
            if not fits:
                got = repr(getattr(self, field))
                raise ConfigError(problem("RotaryScaling", field, got, accepted))

    def frequencies(self, base: float, head_dim: int) -> tuple[float, ...]:
        """Return the ``frequencies`` of ``gpuattn.rotary`` for heads of size ``head_dim``.

        Raises ConfigError for "yarn" with a base up to 1.
        """
        plain = frequencies_of(base, head_dim)
        kept = self._kept(plain, base, head_dim)
        return tuple((plain * (kept + (1 - kept) / self.factor)).tolist())

    def _kept(self, plain, base, head_dim):
        """Return the share of each plain frequency that is not divided."""
        if self.kind == "linear":
            return 0.0
        if self.kind == "llama3":
            turns = self.original * plain / (2 * np.pi)
            return np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        if base <= 1:
            raise ConfigError(problem("RotaryScaling", "base", base, "a number above 1 for 'yarn'"))
        first, last = (
            head_dim * math.log(self.original / (2 * np.pi * turns)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        )
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        return 1 - np.clip((np.arange(head_dim // 2) - first) / (last - first or 1e-3), 0, 1)
