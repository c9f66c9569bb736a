"""What a decoder may choose at each step: lengths, bans, penalties and forced tokens, checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu, wide
from gpuattn.decode import processors
from gpuattn.decode.options import Options
from gpuattn.decode.stepper import Running, Stepper
from gpuattn.errors import problem
from gpuattn.typing import Array


def check_tokens(options: Options, vocab: int, function: str | None = None) -> None:
    """Raise ValueError for banned and end tokens that do not fit a vocabulary of that size.

    ``function``: what the error names instead of the function of ``options``.
    """
    banned, ends, function = options.banned, options.eos, function or options.function
    if len(ends) >= vocab:
        accepted = f"fewer end marks than tokens, {vocab}"
        raise ValueError(problem(function, "eos", f"{len(ends)} tokens", accepted))
    wrong = [token for token in (*banned, *ends) if not 0 <= token < vocab]
    if wrong:
        got, accepted = f"holding {wrong[0]}", f"0 <= token < {vocab}"
        raise ValueError(problem(function, "banned or eos", got, accepted))


class Limits:
    """``options`` for the sentences of ``stepper``, with what each of them has of its own.

    ``bos``, ``max_length``, ``prefix``: see ``greedy``. ``most``: the greatest lengths, int32 (B,)
    on the host. ``longest``: the greatest of them. ``plain``: whether a step bans the same tokens
    for all rows and changes nothing else. ``running``: the sentences that ``stepper`` holds, which
    ``forced`` and ``logprobs`` are about. Raises ValueError for what does not fit.
    """

    def __init__(
        self, options: Options, stepper: Stepper, bos: Any, max_length: Any, prefix: Any = None
    ) -> None:
        self.options, self.stepper, self.bos = options, stepper, bos
        self.running = Running(stepper)
        self.most = self._lengths(max_length)
        self.longest = int(self.most.max(initial=0)) if np.ndim(max_length) else int(max_length)
        if options.min_length > self.longest and np.ndim(max_length) == 0:
            accepted = f"0 to max_length, {self.longest}"
            raise ValueError(problem(options.function, "min_length", options.min_length, accepted))
        if np.shape(bos) not in ((), (stepper.sentences,)):
            accepted = f"a token, or one for each of the {stepper.sentences} sentences"
            got = f"of shape {np.shape(bos)}"
            raise ValueError(problem(options.function, "bos", got, accepted))
        self.prefix = self._prefixes(prefix)
        several = len(options.eos) > 1
        self.renormalise = getattr(options, "renormalise", False)  # sampling always does
        self.plain = not (options.by_text or self.renormalise or several or self.prefix.size)
        self._masks: Any = None

    def _lengths(self, max_length):
        function, sentences = self.options.function, self.stepper.sentences
        lengths = np.asarray(to_cpu(max_length))
        if lengths.dtype.kind not in "iu" or lengths.shape not in ((), (sentences,)):
            got = f"{lengths.dtype} of shape {lengths.shape}"
            accepted = f"an integer, or one for each of the {sentences} sentences"
            raise ValueError(problem(function, "max_length", got, accepted))
        if lengths.min(initial=0) < 0:
            raise ValueError(problem(function, "max_length", lengths.min(), "0 or more"))
        return np.ascontiguousarray(np.broadcast_to(lengths, sentences).astype(np.int32))

    def _prefixes(self, prefix: Sequence[Sequence[int]] | None) -> np.ndarray:
        """Return the prefixes, int32 (B, n), with -1 past their ends."""
        function, sentences = self.options.function, self.stepper.sentences
        if prefix is None:
            return np.zeros((sentences, 0), np.int32)
        if len(prefix) != sentences:
            accepted = f"one list of tokens for each of the {sentences} sentences"
            raise ValueError(problem(function, "prefix", f"{len(prefix)} lists", accepted))
        found = np.full((sentences, max(map(len, prefix), default=0)), -1, np.int32)
        for b, tokens in enumerate(prefix):
            if len(tokens) > self.most[b]:
                got, accepted = f"{len(tokens)} tokens long", f"up to max_length, {self.most[b]}"
                raise ValueError(problem(function, f"the prefix of sentence {b}", got, accepted))
            wrong = [token for token in tokens if token < 0 or token in self.options.eos]
            if wrong:
                got, accepted = f"holding {wrong[0]}", "tokens that are no end mark"
                raise ValueError(problem(function, f"the prefix of sentence {b}", got, accepted))
            found[b, : len(tokens)] = tokens
        return found

    def first_tokens(self, beam: int) -> Array:
        """Return the tokens that begin the texts, int32 (B * beam,)."""
        xp, shape = self.stepper.xp, (self.stepper.sentences, beam)
        bos = xp.asarray(self.bos, np.int32)
        return xp.broadcast_to(bos[:, None] if bos.ndim else bos, shape).ravel()

    def ends(self, tokens: Array) -> Array:
        """Return which of ``tokens`` are end marks."""
        first, *others = self.options.eos or (-1,)
        found = tokens == first
        for end in others:
            found |= tokens == end
        return found

    def hidden(self, step: int, vocab: int) -> Array | None:
        """Return a bool mask (V,) of the tokens that may not come at ``step``, or None.

        Raises ValueError for tokens that a vocabulary of V lacks, as ``check_tokens`` does.
        """
        if self._masks is None:
            if self.prefix.max(initial=-1) >= vocab:
                got, accepted = f"holding {self.prefix.max()}", f"tokens below {vocab}"
                raise ValueError(problem(self.options.function, "prefix", got, accepted))
            check_tokens(self.options, vocab)
            banned, ends = self.options.banned, self.options.eos
            self._masks = self._mask((*banned, *ends), vocab), self._mask(banned, vocab)
        return self._masks[step >= self.options.min_length]

    def _mask(self, tokens, vocab):
        if not tokens:
            return None
        mask = np.zeros(vocab, bool)
        mask[list(tokens)] = True
        return self.stepper.xp.asarray(mask)

    def forced(self, step: int) -> Array | None:
        """Return the prefixes' tokens at ``step``, int32 (n,) with -1 for none, or None."""
        if step >= self.prefix.shape[1]:
            return None
        return self.stepper.xp.asarray(self.prefix[self.running.sentences, step])

    def penalised(self, x: Array, texts: Array) -> Array:
        """Return ``x`` (B, K, V) with the bans and penalties that ``texts`` (B, K, T) bring.

        Where there are any, 16-bit numbers become float32.
        """
        if self.options.by_text:
            x = x.astype(wide(x.dtype), copy=False)
        if self.options.repetition_penalty != 1:
            x = processors.penalise_repetitions(x, texts, self.options.repetition_penalty)
        if self.options.no_repeat_ngram:
            x = processors.ban_repeated_ngrams(x, texts, self.options.no_repeat_ngram)
        return x

    def logprobs(self, logits: Array, texts: Array, step: int) -> Array:
        """Return the log-probabilities that a choice at ``step`` compares, in ``logits``' shape.

        ``logits``: (B, K, V). Those of banned tokens are -inf.
        """
        hidden, forced = self.hidden(step, logits.shape[-1]), self.forced(step)
        logits = logits.astype(wide(logits.dtype), copy=False)
        x = logits if self.renormalise else processors.log_softmax(logits)
        x = self.penalised(x, texts)
        if hidden is not None:
            x = processors.ban(x, hidden)
        if self.renormalise:
            x = processors.log_softmax(x)
        if forced is not None:
            x = processors.force(x, processors.log_softmax(logits), forced)
        return x
