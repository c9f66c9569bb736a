"""What the steppers of the models share: rows of beams, caches, and the way without caches."""

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.errors import problem


class CachedStepper:
    """A ``decode.Stepper`` over rows = sentences * beam texts that grow by a token at a step.

    With ``kv_cache`` a step computes the new tokens only; without, all of the text again.
    A model supplies ``_new_caches(rows)``, ``_stores()``, the KeyValueCaches whose rows move with
    the beams, and ``_logits(tokens (rows, T), first position, caches or None)``.
    """

    def __init__(self, model, sentences, vocab, max_length, beam, kv_cache):
        self.model, self.sentences, self.vocab = model, sentences, vocab
        self.max_length, self.kv_cache = max_length, kv_cache
        self.start(beam)

    def start(self, beam):
        """Begin anew with ``beam`` rows for each sentence."""
        rows = self.sentences * beam
        self.text = None
        self.before = self.length = 0
        with self.model.evaluating():
            self.caches = self._new_caches(rows) if self.kv_cache else None

    def step(self, tokens, position):
        """Return logits (rows, vocabulary) after ``tokens`` (rows,) at ``position`` 0, 1, ..."""
        if position != self.length - self.before:
            expected = self.length - self.before
            raise ValueError(problem("step", "position", position, f"the next one, {expected}"))
        return raw(self._advance(tokens[:, None]))[:, : self.vocab]

    def reorder(self, parents):
        """Let row i go on from what was row ``parents[i]``; parents are int32 (rows,)."""
        if self.caches is None:
            self.text = self.text[parents]
        else:
            for store in self._stores():
                store.reorder(parents)

    def _begin(self, tokens):
        """Compute what comes before position 0."""
        if tokens.shape[1]:
            self._advance(tokens)
        self.before = self.length

    def _advance(self, tokens):
        first, self.length = self.length, self.length + tokens.shape[1]
        if self.caches is None:
            xp = get_xp(tokens)
            parts = [tokens] if self.text is None else [self.text, tokens]
            tokens, first = xp.concatenate(parts, axis=1), 0
            self.text = tokens
        with self.model.evaluating():
            return self._logits(tokens, first, self.caches)
