"""Guesses of hidden tokens, and vectors of lines, by an encoder such as Bert that a run trained."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, to_cpu
from gpuattn.autodiff.tape import raw
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.runtime.device import batch_to
from gpuattn.tasks.users.embedder import Embedder


class Unmasker(Embedder):
    """An Embedder whose model also has a head for masked tokens."""

    def guess(self, batch: Any) -> tuple[np.ndarray, float]:
        """Return the most probable token at each of the ``rows`` of a MaskedBatch, (M,), and the
        mean loss of its labels in nats."""
        model, vocab = self.model, self.model.config.vocab
        batch = replace(batch, order=None)  # which gradients need
        batch = batch_to(batch, get_xp(model.parameters()[0].data))
        with model.evaluating():
            logits = raw(model.masked_logits(batch.tokens, batch.rows, **batch.packing))
            loss = cross_entropy(logits, batch.labels, vocab_size=vocab)
        return to_cpu(logits[:, :vocab].argmax(1)), float(loss)

    def lines(self, batch: Any, guesses: np.ndarray) -> Iterator[str]:
        """Yield the texts of a batch with guesses in brackets: "a [red] [car for bus]", where red
        is right."""
        whole = batch.tokens.copy()
        whole[batch.rows] = batch.labels
        found = dict(zip(batch.rows.tolist(), guesses.tolist(), strict=True))
        for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            inside = range(begin + 1, end - 1)
            own = {row - begin - 1: found[row] for row in inside if row in found}
            if own:
                yield self._line(whole[begin + 1 : end - 1].tolist(), own)

    def _line(self, ids: list[int], guesses: Mapping[int, int]) -> str:
        decode, line, before = self.tokenizer.decode, "", ""
        for i, token in enumerate(ids):
            now = decode(ids[: i + 1])
            part = now[len(before) :]
            if i in guesses:
                word = part.lstrip(" ") or part
                space, guess = part[: len(part) - len(word)], guesses[i]
                other = decode([*ids[:i], guess])[len(before) :]
                other = "" if guess == token else f"{other.lstrip(' ') or other} for "
                part = f"{space}[{other}{word}]"
            line, before = line + part, now
        return line
