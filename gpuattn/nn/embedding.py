"""Token embeddings, with learned or sinusoidal positions."""

import functools
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, is_array, shared
from gpuattn.errors import problem
from gpuattn.nn.dropout import Dropout, Streams
from gpuattn.nn.module import Module, check_sizes, generator, normal
from gpuattn.ops.embedding import embedding
from gpuattn.typing import Array


@functools.cache
def sinusoidal_positions(length: int, width: int, *, halves: bool = False) -> np.ndarray:
    """Return the (length, width) float32 table with sin in even and cos in odd columns.

    ``halves``: all sin in the first half of the columns and all cos in the second, as Marian has
    them. Column pair i has the wavelength 2 pi * 10000^(2i / width). Vaswani et al., "Attention Is
    All You Need" (2017), section 3.5. Raises ValueError for an odd width. Do not edit the table.
    """
    if width % 2:
        raise ValueError(problem("sinusoidal_positions", "width", width, "an even number"))
    rates = np.exp(np.arange(0, width, 2) * (-np.log(10000.0) / width))
    angles = np.arange(length)[:, None] * rates
    table = np.empty((length, width), np.float32)
    sines, cosines = slice(0, None, 2), slice(1, None, 2)
    if halves:
        sines, cosines = slice(width // 2), slice(width // 2, None)
    table[:, sines], table[:, cosines] = np.sin(angles), np.cos(angles)
    return table


POSITIONS: dict[str, Any] = {
    "sinusoidal": sinusoidal_positions,
    "sinusoidal_halves": functools.partial(sinusoidal_positions, halves=True),
}  # tables that are constants


class Embedding(Module):
    """``dropout(scale * weight[tokens] + position)``: int tokens (...) to (..., width).

    ``rows``: the size of the table; ``used``: how many of them are tokens; the others are padding,
    start as zeros and are never looked up. ``positions``: None, "learned", "sinusoidal" or
    "sinusoidal_halves" (see ``sinusoidal_positions``), up to ``max_length``. ``weight``: the table
    of another Embedding, to share it.
    """

    def __init__(
        self, rows: int, width: int, *, used: int | None = None, positions: str | None = None,
        max_length: int | None = None, scale: float = 1.0, dropout: float = 0.0,
        weight: Any = None, streams: Streams | None = None, rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        check_sizes("Embedding", rows=rows, width=width)
        rng = generator(rng)
        if positions not in (None, "learned", *POSITIONS):
            accepted = "None, 'learned', 'sinusoidal' or 'sinusoidal_halves'"
            raise ValueError(problem("Embedding", "positions", repr(positions), accepted))
        if positions is not None and max_length is None:
            raise ValueError(problem("Embedding", "max_length", None, "a number, with positions"))
        if weight is None:
            weight = normal(rng, (rows, width), width**-0.5)
            weight.data[rows if used is None else used :] = 0
        self.weight, self.used = weight, used
        self.positions, self.max_length, self.scale = positions, max_length, scale
        self.position_weight = None
        if positions == "learned" and max_length is not None:
            self.position_weight = normal(rng, (max_length, width), width**-0.5)
        elif positions is not None:
            self._table = POSITIONS[positions](max_length, width)  # moves to the weight's device
        self.dropout = Dropout(dropout, streams)

    def __call__(
        self, tokens: Array, positions: Array | None = None, *, order: Any = None, shift: Any = None
    ) -> Any:
        """``positions``: int, of the shape of ``tokens``; by default 0, 1, ... along the last axis;
        without a table of positions they mean nothing.

        ``order``: for the gradient, (N,) int32, ``data.batching.token_order(tokens).order``, or
        the loader's TokenOrder. Otherwise tokens are sorted, which a CUDA graph cannot hold.
        ``shift``: (width,), added to each row of the table of positions, which there must be.
        """
        if is_array(order):
            order = (order, None, None)
        p, key = self.dropout.now()
        table = self._positions()
        return embedding(
            tokens, self.weight, positions=positions if self.positions else None,
            position_weight=table if shift is None else shift + table,
            scale=self.scale, p=p, seed=key, order=order, vocab_size=self.used,
        )  # fmt: skip

    def _positions(self):
        """Return the position table: a parameter, or a constant on the weight's device."""
        if self.positions not in POSITIONS:
            return self.position_weight
        weight, xp = self.weight.data, get_xp(self.weight.data)
        if not isinstance(self._table, xp.ndarray) or self._table.dtype != weight.dtype:
            table = POSITIONS[self.positions](self.max_length, weight.shape[1])
            self._table = shared(xp.asarray(table.astype(weight.dtype, copy=False)))
        return self._table
