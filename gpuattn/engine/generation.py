"""Sampling from a language model. A step is launches only, so a CUDA graph can hold it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, on_gpu, to_cpu
from gpuattn.autodiff.tape import raw
from gpuattn.decode.options import SampleOptions
from gpuattn.decode.sample import sample
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine.beam import pinned
from gpuattn.engine.cache import DeviceCache
from gpuattn.errors import problem
from gpuattn.ops.sampling.sample_tokens import sample_tokens
from gpuattn.ops.sampling.text_update import Texts, text_update
from gpuattn.rng import Key

DRAWS = "temperature", "top_k", "top_p", "min_p"


def refusal(options: SampleOptions) -> str | None:
    """Return why the device cannot run a generation, so that ``decode.sample`` does, or None."""
    if len(options.eos) > 1:
        return f"there are {len(options.eos)} end marks, the generation on the device takes one"
    if options.by_text:
        return "no_repeat_ngram and repetition_penalty are not in the generation on the device"
    return None


def check(
    model: Any, prompts: Sequence[Any], limits: Sequence[int], options: SampleOptions
) -> None:
    """Raise ValueError for texts that do not fit into the model, and for tokens it lacks."""
    block, vocab = model.config.block, model.config.vocab
    for prompt, limit in zip(prompts, limits, strict=True):
        if len(prompt) == 0 or limit < 0 or len(prompt) - 1 + limit > block:
            got = f"{len(prompt)} tokens, with a limit of {limit}"
            accepted = f"1 or more, together up to block + 1, {block + 1}"
            raise ValueError(problem("generate", "a prompt", got, accepted))
    wrong = [token for token in (*options.banned, *options.eos) if not 0 <= token < vocab]
    if wrong:
        got = f"holding {wrong[0]}"
        raise ValueError(problem("generate", "banned or eos", got, f"0 <= token < {vocab}"))


class Generation:
    """The state of up to ``sentences`` texts at a time, reused for batch after batch.

    ``room``: the most keys of a text. ``before``: the most tokens of a prompt without its last.
    ``draws``: temperature to min-p, see ``sample_tokens``. ``eos``: the end mark or -1.
    ``masked``: whether some tokens are banned.
    """

    def __init__(
        self, model: Any, sentences: int, room: int, before: int, *, draws: dict, eos: int,
        masked: bool,
    ) -> None:  # fmt: skip
        self.model, self.before, self.draws, self.eos = model, before, draws, eos
        like = model.parameters()[0].data
        xp = get_xp(like)
        self.texts = Texts(like, sentences, room)
        own = [layer.attention for layer in model.layers]
        self.caches = [DeviceCache(like, self.texts, x.kv_heads, x.head_dim) for x in own]
        # of each sentence: last token, its position, limit, number, key, the tokens before
        self._inputs = xp.zeros((8 + before) * sentences, np.int32)
        self._staging = pinned(self._inputs)
        self.banned: Any = xp.zeros(model.config.vocab, bool) if masked else None

    def load(
        self, prompts: Sequence[Any], limits: Sequence[int], numbers: Sequence[int], key: Key,
        banned: Sequence[int],
    ) -> None:  # fmt: skip
        """Copy a batch to the device; there may be fewer prompts than sentences."""
        host, count = self._staging, len(prompts)
        host[...] = 0
        last, positions, most, own, keys, before = self._parts(host)
        last[:count] = [prompt[-1] for prompt in prompts]
        positions[:count] = [len(prompt) - 1 for prompt in prompts]
        most[:count], own[:count] = limits, numbers
        keys[:] = key.seed & 0xFFFFFFFF, key.seed >> 32, key.stream, int(key.step)
        for row, prompt in zip(before, prompts, strict=False):
            row[: len(prompt) - 1] = prompt[:-1]
        _copy(host, self._inputs)
        if self.banned is not None:
            mask = np.zeros(len(self.banned), bool)
            mask[list(banned)] = True
            _copy(mask, self.banned)

    def _parts(self, inputs):
        """Return views of (S,) last tokens, positions, limits, numbers, (S, 4) keys, the others."""
        S = self.texts.sentences
        last, positions, most, own = inputs[: 4 * S].reshape(4, S)
        keys = inputs[4 * S : 8 * S].reshape(S, 4).view(np.uint32)
        return last, positions, most, own, keys, inputs[8 * S :].reshape(S, self.before)

    def begin(self) -> None:
        """Start the loaded texts: compute the keys of their prompts. Launches only."""
        last, positions, most, _, keys, before = self._parts(self._inputs)
        self.texts.start(last, positions, most, keys)
        if self.before:  # keys past the end of a prompt are overwritten before they are read
            with self.model.evaluating():
                self.model.states(before, caches=self.caches)

    def step(self) -> None:
        """Draw the next token of every text. Launches only."""
        model, texts = self.model, self.texts
        tokens, positions = texts.tokens.reshape(-1, 1), texts.positions.reshape(-1, 1)
        with model.evaluating():
            states = model.states(tokens, positions, caches=self.caches)
            logits = raw(model.head(states[:, -1]))
        drawn = sample_tokens(
            logits, keys=texts.keys, numbers=self._parts(self._inputs)[3], banned=self.banned,
            vocab_size=model.config.vocab, **self.draws,
        )  # fmt: skip
        text_update(*drawn, texts, eos=self.eos)

    def allow_end(self) -> None:
        """Let the end mark come from the next step on."""
        self.banned[self.eos : self.eos + 1].fill(False)


def _copy(host, target):
    if on_gpu(target):
        target.set(host)
    else:
        target[...] = host


def on_host(
    model: Any, prompts: Sequence[Any], limits: Sequence[int], numbers: Sequence[int], key: Key,
    settings: dict,
) -> list[Hypothesis]:  # fmt: skip
    """Return what ``Engine.generate`` does, by ``decode.sample``."""
    found: list[Any] = [None] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        most = np.array([limits[i] for i in chosen], np.int32)
        tokens = np.array([prompts[i] for i in chosen], np.int32)
        stepper = model.stepper(get_xp(model.parameters()[0].data).asarray(tokens), int(most.max()))
        texts = sample(
            stepper, bos=stepper.first_tokens, max_length=most, seed=key,
            numbers=[numbers[i] for i in chosen], **settings,
        )  # fmt: skip
        for i, text in zip(chosen, texts, strict=True):
            found[i] = text
    return found


class Told:
    """Calls ``tell(i, tokens)`` with the new tokens of the texts ``chosen``, as they are known."""

    def __init__(self, tell: Callable[[int, list[int]], None], chosen: Sequence[int]) -> None:
        self._tell, self._chosen, self._known = tell, chosen, [0] * len(chosen)

    def add(self, lengths: Sequence[int], texts: Sequence[Any]) -> None:
        """Tell of the first ``lengths`` tokens of each of ``texts`` what was not told before."""
        for row, i in enumerate(self._chosen):
            new = np.asarray(texts[row])[self._known[row] : lengths[row]].tolist()
            self._known[row] += len(new)
            if new:
                self._tell(i, new)

    def all(self, found: Sequence[Hypothesis]) -> None:
        """Tell of all tokens of the texts that were not told before."""
        self.add([len(text.tokens) for text in found], [text.tokens for text in found])


def hypotheses(texts: Texts, count: int) -> list[Hypothesis]:
    """Read the first ``count`` texts back."""
    arrays = texts.history, texts.lengths, texts.scores, texts.ended
    found = zip(*(to_cpu(x)[:count] for x in arrays), strict=True)
    return [
        Hypothesis(
            tokens=tokens[:length].tolist(),
            score=float(score),
            normalised=float(score / max(1, length + ended)),
            ended=bool(ended),
        )
        for tokens, length, score, ended in found
    ]
