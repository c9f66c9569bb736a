"""A beam search over translations. A step is launches only, so a CUDA graph can hold it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.tape import raw
from gpuattn.engine.cache import DeviceCache
from gpuattn.models.translation import Sources
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.beam_update import Beams, beam_update

TOKEN_STEP = 512  # the tokens of a batch of sources are padded to a multiple of it


def pinned(like: Any) -> Any:
    """Return a host array like ``like`` from which copies to its device are asynchronous."""
    if not on_gpu(like):
        return np.empty(like.shape, like.dtype)
    import cupyx

    return cupyx.empty_pinned(like.shape, like.dtype)


class TranslationSearch:
    """The state of a search over ``sentences`` sources at a time, reused for batch after batch.

    ``room``, ``source_room``: the most tokens of a translation and of a source, marks included.
    ``divisor``: of scores by length, see ``Beams``. ``banned``: tokens that never come.
    """

    def __init__(
        self, model: Any, sentences: int, beam: int, room: int, source_room: int, *,
        divisor: Callable[[int], float], bos: int, eos: int, banned: tuple[int, ...], nbest: int,
        min_length: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.sentences = model, sentences
        self.bos, self.eos, self.nbest = bos, eos, nbest
        config, like = model.config, model.parameters()[0].data
        xp = get_xp(like)
        self.beams = Beams(like, sentences, beam, room, divisor)
        heads, head_dim = config.kv_heads or config.heads, config.d_model // config.heads
        self.caches = [DeviceCache(like, self.beams, heads, head_dim) for _ in model.decoder]
        shape = (sentences, source_room, heads, head_dim)
        self.memory = [
            (arrays.zeros(like, shape), arrays.zeros(like, shape)) for _ in model.decoder
        ]
        self.memory_lengths = xp.ones(sentences, np.int32)
        self.most_tokens = -(-sentences * source_room // TOKEN_STEP) * TOKEN_STEP
        self.fillers = -(-TOKEN_STEP // source_room)  # sequences that hold the padding
        offsets = sentences + self.fillers + 1
        self._inputs = xp.empty(2 * self.most_tokens + offsets + sentences, np.int32)
        self._staging = pinned(self._inputs)
        self.banned = None
        if banned:
            self.banned = xp.zeros(config.vocab, bool)
            self.banned[list(banned)] = True
        self.min_length = min_length

    def load(self, sources: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Copy token ids without marks to the device; there may be fewer sources than sentences.

        ``limits``: the most tokens of each translation, its end mark included.
        """
        room = self.memory[0][0].shape[1]
        lengths = np.zeros(self.sentences + self.fillers, np.int32)
        lengths[: len(sources)] = [len(source) + 1 for source in sources]
        total = int(lengths.sum())
        self.token_room = -(-total // TOKEN_STEP) * TOKEN_STEP
        lengths[self.sentences :] = (self.token_room - total - room * np.arange(self.fillers)).clip(
            0, room
        )
        host = self._staging
        host[...] = 0
        tokens, positions, bounds, most = self._parts(host)
        tokens[:total] = np.concatenate([[*source, self.eos] for source in sources])
        bounds[1:] = np.cumsum(lengths)
        positions[: self.token_room] = np.arange(self.token_room) - np.repeat(bounds[:-1], lengths)
        most[: len(sources)] = limits
        if on_gpu(self._inputs):
            self._inputs.set(host)
        else:
            self._inputs[...] = host

    def _parts(self, inputs):
        """Return views of tokens, positions, offsets of the sources and limits."""
        rest = inputs[2 * self.most_tokens :]
        return (
            inputs[: self.most_tokens], inputs[self.most_tokens : 2 * self.most_tokens],
            rest[: -self.sentences], rest[-self.sentences :],
        )  # fmt: skip

    def encode(self) -> None:
        """Encode the loaded sources and start the search. Launches only, as in ``step``."""
        model, xp = self.model, get_xp(self.memory_lengths)
        tokens, positions, bounds, limits = self._parts(self._inputs)
        room, used = self.memory[0][0].shape[1], slice(0, self.token_room)
        batch = Sources(tokens[used], positions[used], bounds, room)
        with model.evaluating():
            projected = model.memory(raw(model.encode(batch)))
        starts, ends = bounds[: self.sentences], bounds[1 : self.sentences + 1]
        rows = xp.minimum(starts[:, None] + xp.arange(room), self.token_room - 1)
        for own, found in zip(self.memory, projected, strict=True):
            for target, x in zip(own, found, strict=True):
                target[...] = raw(x)[rows]
        self.memory_lengths[...] = ends - starts
        self.beams.start(self.bos, limits)

    def step(self) -> None:
        """Take the next token of every beam."""
        model, beams = self.model, self.beams
        tokens, positions = beams.tokens.reshape(-1, 1), beams.positions.reshape(-1, 1)
        with model.evaluating():
            x = model.decode(
                model.target(tokens, positions), self.memory, positions=positions,
                memory_lengths=self.memory_lengths, caches=self.caches,
            )  # fmt: skip
            logits = raw(model.logits(x[:, -1]))
        found = beam_step(
            logits, beams.scores, banned=self.banned, penalties=self._early_ends(),
            vocab_size=model.config.vocab,
        )  # fmt: skip
        beam_update(*found, beams, eos=self.eos, nbest=self.nbest)

    def _early_ends(self):
        """Return the penalties of ``beam_step`` that ban the end mark before ``min_length``."""
        if not self.min_length:
            return None
        xp, positions = get_xp(self.memory_lengths), self.beams.positions.reshape(-1, 1)
        early = positions < self.min_length
        amounts = xp.where(early, np.float32(np.inf), np.float32(0))
        return xp.full(positions.shape, self.eos, np.int32), amounts
