"""Vectors of lines, by an encoder such as Bert and its tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, on_gpu, to_cpu
from gpuattn.errors import DataError, problem

BATCH = {"cpu": 1 << 11, "gpu": 1 << 16}  # tokens, with padding, that are computed together


class Embedder:
    """Turns lines into vectors. The arguments are those of a Sampler; ``config`` may be None."""

    task = "embedding"
    by_line = {"embed": ("numbers",)}  # what ranks share, see ``dealt``

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}

    def embed(
        self,
        lines: Sequence[str],
        *,
        pool: str = "mean",
        normalised: bool = True,
        truncate: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return a vector of each line, float32 (lines, d_model).

        ``pool``: "mean" of the states of the line's tokens, or the "first" one. ``normalised``: to
        length 1. ``truncate``: cut a longer line than the model takes, which else is a DataError.
        ``numbers``: of the lines, for errors; by default from 1 on.
        """
        if isinstance(lines, str):
            raise TypeError(problem("embed", "lines", "a str", "a list of str, a line each"))
        most = self.model.config.max_length
        numbers = range(1, len(lines) + 1) if numbers is None else numbers
        ids = self._encoded(lines, numbers)
        long = next((i for i, line in enumerate(ids) if len(line) > most), None)
        if long is not None and not truncate:
            got, accepted = f"{len(ids[long])} tokens long", f"up to {most}"
            advice = "truncate=True (--truncate) cuts it"
            raise DataError(problem("embed", f"line {numbers[long]}", got, accepted, advice))
        ids = [line if len(line) <= most else [*line[: most - 1], line[-1]] for line in ids]
        vectors = np.zeros((len(ids), self.model.config.d_model), np.float32)
        for chosen in self._batches([len(line) for line in ids]):
            tokens, lengths = self._padded([ids[i] for i in chosen])
            found = self.model.embed(tokens, lengths=lengths, pool=pool, normalised=normalised)
            vectors[chosen] = to_cpu(found)
        return vectors

    def _encoded(self, lines, numbers):
        """Return the token ids of each line. DataError names a line that has none."""
        try:
            return self.tokenizer.encode_marked(lines)
        except DataError:
            for number, line in zip(numbers, lines, strict=True):
                try:
                    self.tokenizer.encode_marked([line])
                except DataError as error:
                    raise DataError(f"line {number}: {error}") from None
            raise

    def _batches(self, lengths):
        """Yield the indices of lines with tokens, those of similar lengths together."""
        order = [i for i in np.argsort(lengths, kind="stable") if lengths[i]]
        room = BATCH["gpu" if on_gpu(self.model.parameters()[0].data) else "cpu"]
        begin = 0
        while begin < len(order):
            end = begin + 1
            while end < len(order) and (end + 1 - begin) * lengths[order[end]] <= room:
                end += 1
            yield order[begin:end]
            begin = end

    def _padded(self, ids):
        """Return tokens (B, T), with zeros after each line, and lengths (B,) on the device."""
        xp = get_xp(self.model.parameters()[0].data)
        lengths = np.array([len(line) for line in ids], np.int32)
        tokens = np.zeros((len(ids), lengths.max()), np.int32)
        for row, line in zip(tokens, ids, strict=True):
            row[: len(line)] = line
        return xp.asarray(tokens), xp.asarray(lengths)
