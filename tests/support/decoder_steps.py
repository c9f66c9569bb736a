"""Searches in the middle of their texts, with random weights and caches, and their next logits.

The same case gives the same numbers in any dtype and on any device.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from gpuattn.arrays import get_xp
from gpuattn.engine.beam import TranslationSearch
from gpuattn.engine.cache import DeviceCache
from gpuattn.engine.generation import Generation
from gpuattn.engine.steps.decoder_step import DecoderStep, weights_refusal
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.nn.embedding import sinusoidal_positions
from gpuattn.ops.sampling.beam_update import Beams
from gpuattn.ops.sampling.text_update import Texts

SIZE = {"vocab": 50, "d_model": 64, "heads": 2}
GPT, TRANSLATION = {"layers": 2, "inner": 96}, {"layers": (1, 2), "ffn": 96, "dropout": 0.0}
UNUSED = 99.0  # in caches where no key is: any use of it is seen


class Case(NamedTuple):
    """``settings``: of the model, a TranslationModel if they have ``norm``, else a GPT2."""

    sentences: int
    beam: int
    settings: dict
    room: int = 24
    source_room: int = 9

    @property
    def rows(self) -> int:
        return self.sentences * self.beam

    @property
    def translates(self) -> bool:
        return "norm" in self.settings


def model_of(case, seed, rounded, dtype, put=np.asarray):
    """Return the model in ``dtype``, its parameters ``rounded`` first. ``put``: to a device."""
    if case.translates:
        size = {**SIZE, **TRANSLATION, "max_length": 64, **case.settings}
        model: Any = TranslationModel(TranslationConfig(**size))
    else:
        model = GPT2(GPT2Config(**{**SIZE, **GPT, "block": 64, **case.settings}))
    rng = np.random.default_rng(seed)
    for path, parameter in model.named_parameters():
        shape = parameter.data.shape
        x = rng.standard_normal(shape)
        if len(shape) == 2:
            x *= shape[1] ** -0.5
        else:
            x = 0.2 * x + (path.endswith("weight"))  # gains are about 1
        parameter.data = put(x.astype(np.float32).astype(rounded).astype(dtype))
    if case.translates and model.target.positions == "sinusoidal":
        table = sinusoidal_positions(model.target.max_length, model.config.d_model)
        model.target._table = put(table.astype(rounded).astype(dtype))
    return model.eval()


def skip_without(file, model):
    """Skip a test on a GPU for which the kernel in ``file`` is not written."""
    if reason := weights_refusal(model, file):
        pytest.skip(reason)


class Search:
    """What Generation or TranslationSearch holds for a step, with random texts so far.

    ``counts``: keys of each sentence with the new one, if not random.
    """

    def __init__(self, case, seed, rounded, model, counts=None):
        self.case, self.model = case, model
        self.like = like = model.parameters()[0].data
        xp, rng = get_xp(like), np.random.default_rng(seed + 1)
        if case.translates:
            self.beams: Any = Beams(like, case.sentences, case.beam, case.room, float)
            self.state: Any = self.beams
        else:
            self.state = self.texts = Texts(like, case.sentences, case.room)
        layers = model.decoder if case.translates else model.layers
        own = layers[0].attention
        caches = [DeviceCache(like, self.state, own.kv_heads, own.head_dim) for _ in layers]
        self.caches, table = caches, (case.sentences, case.beam)
        self.counts = rng.integers(1, case.room - 3, (case.sentences, 1)).repeat(case.beam, 1)
        self.counts[-1] = 1
        if counts is not None:
            self.counts = np.asarray(counts)[:, None].repeat(case.beam, 1)
        self.slots = rng.integers(0, case.beam, (*table, case.room)).astype(np.int16)

        def random(shape, there=None):
            x = rng.standard_normal(shape).astype(np.float32)
            if there is not None:
                x[~there] = UNUSED
            return xp.asarray(x.astype(rounded).astype(like.dtype))

        there = np.arange(case.room) < self.counts.reshape(-1, 1) - 1
        for cache in caches:
            for x in (cache.k, cache.v):
                x[...] = random(x.shape, there)
        self.memory = self.memory_lengths = None
        if case.translates:
            shape = case.sentences, case.source_room, own.kv_heads, own.head_dim
            self.memory = [(random(shape), random(shape)) for _ in layers]
            lengths = rng.integers(1, case.source_room + 1, case.sentences)
            self.memory_lengths = xp.asarray(lengths.astype(np.int32))
        self.rng = rng
        self.begin()

    def begin(self):
        """Set the tokens, positions and slots for a step."""
        xp, state = get_xp(self.like), self.state
        shape, room = state.tokens.shape, self.case.room
        own = np.arange(self.case.beam, dtype=np.int16)[:, None]
        slots = np.where(np.arange(room) >= self.counts[..., None] - 1, own, self.slots)
        tokens = self.rng.integers(0, self.model.config.vocab, shape)
        state.tokens[...] = xp.asarray(tokens.astype(np.int32))
        state.positions[...] = xp.asarray((self.counts - 1).reshape(shape).astype(np.int32))
        state.key_counts[...] = xp.asarray(self.counts.reshape(shape).astype(np.int32))
        state.slots[...] = xp.asarray(slots)

    def advance(self):
        """Go on to the next tokens."""
        self.counts = self.counts + 1
        self.begin()

    def take(self, other, sentences):
        """Copy the texts of ``other`` in its first ``sentences``."""
        rows = sentences * self.case.beam
        self.counts[:sentences] = other.counts[:sentences]
        for name in ("tokens", "positions", "key_counts", "slots"):
            getattr(self.state, name)[:sentences] = getattr(other.state, name)[:sentences]
        for own, given in zip(self.caches, other.caches, strict=True):
            own.k[:rows], own.v[:rows] = given.k[:rows], given.v[:rows]
        if self.case.translates:
            self.memory_lengths[:sentences] = other.memory_lengths[:sentences]
            for own_pair, given_pair in zip(self.memory, other.memory, strict=True):
                for own, given in zip(own_pair, given_pair, strict=True):
                    own[:sentences] = given[:sentences]

    def by_ops(self):
        """Return the logits of the engine's step op by op, which appends to the caches."""
        step: Any = TranslationSearch if self.case.translates else Generation
        return step._logits(self)

    @property
    def own(self):
        """The arguments of a step behind the model."""
        return self.state, self.caches, self.memory, self.memory_lengths

    def decoder(self):
        return DecoderStep(self.model, *self.own)

    def stored(self):
        """Return copies of all caches, float32 (layers, 2, rows, room, heads, head size)."""
        both = [(cache.k, cache.v) for cache in self.caches]
        return np.array([[host(x) for x in pair] for pair in both])

    def appended(self):
        """Return where the step stores keys: bool (rows, room)."""
        return np.arange(self.case.room) == self.counts.reshape(-1, 1) - 1


def host(x):
    """Return an array of any device, or of a fake one, as float32 of NumPy."""
    return np.array(x.get() if hasattr(x, "get") else x, np.float32)


def take_weights(model, other):
    """Copy the parameters of another model."""
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own.data[...] = new.data


def assert_step_keeps(search, step):
    """Run a step, which stores keys and values at the new position alone; return its result."""
    before, found = search.stored(), host(step())
    same = search.stored() == before
    assert same[:, :, ~search.appended()].all(), "it writes beside the new keys"
    return found


def assert_steps_by_ops(search, found, exact, by_ops, columns=None):
    """Assert that results of steps, and the caches behind them, are as accurate as op by op.

    ``found``: of each step of ``search``. ``exact``, ``by_ops``: Searches before these steps, in
    float32 and in the dtype of ``search``. ``columns``: of the results, the first that count.
    """
    for step, got in enumerate(found):
        if step:
            exact.advance()
            by_ops.advance()
        every = (x.reshape(search.case.rows, -1) for x in (got, by_ops.by_ops(), exact.by_ops()))
        assert_as_accurate(*(x[:, :columns] for x in every))
    assert_as_accurate(search.stored(), by_ops.stored(), exact.stored())


def assert_as_accurate(found, by_ops, want, factor=2, atol=1e-3):
    """Assert that the error of ``found`` is at most ``factor`` times that of ``by_ops``.

    Both in root mean square and at most; ``want``: by float32. Only used columns are given.
    """
    found, by_ops, want = (host(x).astype(np.float64) for x in (found, by_ops, want))
    assert found.shape == by_ops.shape == want.shape and np.isfinite(found).all()
    for measure in (lambda x: np.sqrt((x**2).mean()), lambda x: np.abs(x).max()):
        error, known = measure(found - want), measure(by_ops - want)
        assert error <= factor * known + atol, f"error {error:.3g}, op by op {known:.3g}"
