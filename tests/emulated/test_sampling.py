"""Kernels that update searches, emulated on any CPU with threads in random order, against NumPy."""

import contextlib
from unittest import mock

import emulator
import numpy as np
import pytest
from checks import DTYPES, sampled
from fake_cublaslt import gpu
from ops.attention import test_store_rows as store_cases
from ops.sampling.test_text_rules import RULES, Problem

from gpuattn.ops.attention import store_rows as store_module
from gpuattn.ops.attention.store_rows import store_rows
from gpuattn.ops.sampling import beam_update as beams_module
from gpuattn.ops.sampling import text_rules as rules_module
from gpuattn.ops.sampling import text_update as texts_module
from gpuattn.ops.sampling.beam_update import STOPPING, Beams, beam_update, best_texts
from gpuattn.ops.sampling.text_rules import text_rules
from gpuattn.ops.sampling.text_update import Texts, text_update

pytestmark = pytest.mark.usefixtures("host_compiler")
LIKE = np.zeros(1, np.float32)


@contextlib.contextmanager
def emulated(seed, *modules):
    """Replace GPU kernels by emulated ones; three thread blocks run at a time.

    ``modules``: those that ask where an array is, for which all are on a GPU.
    """
    machine = emulator.Machine(seed, multiprocessors=3)
    stand_ins = {"kernel": machine.kernel, "kernel_refusal": lambda *_: None}
    with contextlib.ExitStack() as stack:
        for module in (beams_module, rules_module, texts_module):
            stack.enter_context(mock.patch.multiple(module, **stand_ins))
        for module in modules:
            stack.enter_context(mock.patch.object(module, "on_gpu", lambda _: True))
        yield


def start(both, seed, *given):
    """Start two states, one of them emulated, and compare all they hold."""
    with emulated(seed, beams_module, texts_module):
        both[0].start(*given)
    both[1].start(*given)
    for name in both[0].NAMES:
        one, other = (getattr(state, name) for state in both)
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("on_logits", [False, True], ids=["amounts", "in place"])
@pytest.mark.parametrize("rules, dtype", sampled([
    *(("all", dtype) for dtype in DTYPES), ("reward", "float32"), ("n-gram of 1", "bfloat16"),
    *((rules, dtype) for rules in RULES for dtype in DTYPES),
], 5))  # fmt: skip
def test_text_rules(rules, dtype, on_logits):
    one, other = (Problem(np, dtype, 1, on_logits=on_logits, **RULES[rules]) for _ in range(2))
    want = text_rules(*other.arrays, other.rules, vocab_size=7, impl="reference")
    with emulated(1):
        found = text_rules(*one.arrays, one.rules, vocab_size=7, impl="raw-simt")
    for x, y in zip(one.arrays[:2], other.arrays[:2], strict=True):
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        x, y = (np.nan_to_num(a.astype(np.float32)) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance)
    assert (found is None) == (want is None)
    if found:
        np.testing.assert_array_equal(found[0], want[0])
        used = want[0] >= 0
        np.testing.assert_allclose(found[1][used], want[1][used], rtol=1e-4, atol=1e-5)


def candidates(rng, beams, count, marks):
    """Return scores, parents and tokens as ``beam_step`` would, with NaN, -inf and equal scores."""
    sentences, beam = beams.scores.shape
    scores = np.round(-4 * rng.random((sentences, count)), 1).astype(np.float32)
    scores = np.sort(scores + beams.scores.max(1, keepdims=True))[:, ::-1].copy()
    scores[1, rng.integers(0, count) :] = -np.inf
    if rng.integers(2):
        scores[2, :2] = np.nan
    tokens = rng.integers(0, 6, scores.shape).astype(np.int32)
    drawn = rng.choice(marks, scores.shape) if len(marks) else tokens
    tokens = np.where(rng.random(scores.shape) < 0.4, drawn, tokens).astype(np.int32)
    return scores, rng.integers(0, beam, scores.shape).astype(np.int32), tokens


@pytest.mark.parametrize("stopping, beam, marks", sampled([
    *((stopping, 3, [1, 5]) for stopping in STOPPING), ("fairseq", 1, [5]), ("present", 5, []),
    *((stopping, beam, marks) for stopping in STOPPING for beam, marks in (
        (1, [5]), (3, [5]), (5, []), (4, [5, 2, 1])
    )),
], 7))  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_beam_update(stopping, beam, marks):
    eos = np.array(marks, np.int32)
    for seed, power in ((1, 2.0), (2, 2.0), (3, -1.0), (4, -1.0)):
        rng = np.random.default_rng(seed)
        limits = np.array([5, 4, 6, 0, 1, 6, 6], np.int32)
        count = max(2, 1 + len(marks)) * beam
        settings = {
            "nbest": int(rng.integers(1, beam + 1)), "end_counts": bool(seed % 2),
            "enough": int(rng.integers(1, 2 * beam + 1)), "stopping": stopping, "eos": eos,
        }  # fmt: skip
        divisor = {n: max(1, n) ** power for n in range(8)}.get
        both = [Beams(LIKE, len(limits), beam, 6, divisor) for _ in "ab"]
        start(both, seed, 0, limits)
        for _ in range(6):
            found = candidates(rng, both[0], count, marks)
            with emulated(seed):
                beam_update(*found, both[0], **settings, impl="raw-simt")
            beam_update(*found, both[1], **settings, impl="reference")
            for name in Beams.NAMES:
                one, other = (getattr(beams, name) for beams in both)
                np.testing.assert_array_equal(one, other, err_msg=name)
        assert both[0].live[0] == 0
        nbest = settings["nbest"]
        with emulated(seed, beams_module):
            texts, lengths, *figures = best_texts(both[0], nbest)
        wanted, *others = best_texts(both[1], nbest)
        for one, other in zip((lengths, *figures), others, strict=True):
            np.testing.assert_array_equal(one, other)
        used = np.arange(texts.shape[2]) < lengths[:, :, None]
        np.testing.assert_array_equal(texts[used], wanted[used])


@pytest.mark.parametrize("beam, room", [(1, 9), (5, 700), (64, 50)])
def test_texts_of_several_pieces(beam, room):
    """The kernel has 1,024 links of a history in shared memory at a time."""
    rng, nbest = np.random.default_rng(beam), max(1, beam // 2)
    beams = Beams(LIKE, 3, beam, room, float)
    beams.history[..., 0] = rng.integers(0, 99, beams.history.shape[:3])
    beams.history[..., 1] = rng.integers(0, beam, beams.history.shape[:3])
    beams.pool_steps[...] = rng.integers(0, room + 1, (3, beam))
    beams.pool_steps[0, 0], beams.pool_steps[1] = room, 0
    beams.pool_beams[...] = rng.integers(0, beam, (3, beam))
    with emulated(beam, beams_module):
        texts, *figures = best_texts(beams, nbest)
    wanted, *others = best_texts(beams, nbest)
    for one, other in zip(figures, others, strict=True):
        np.testing.assert_array_equal(one, other)
    used = np.arange(room) < others[0][:, :, None]
    np.testing.assert_array_equal(texts[used], wanted[used])


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("marks", [[], [2], [2, 7, 4]])
def test_text_update(marks, settled):
    rng, eos = np.random.default_rng(0), np.array(marks, np.int32)
    limits = rng.integers(0, 7, 150).astype(np.int32)
    first = np.arange(150, dtype=np.int32)
    both = [Texts(LIKE, 150, 9) for _ in "ab"]
    start(both, 3, first, first, limits, np.ones((150, 4), np.uint32))
    for _ in range(7):
        tokens = rng.integers(0, 9, 150).astype(np.int32)
        logprobs = np.where(rng.random(150) < 0.05, -np.inf, -rng.random(150)).astype(np.float32)
        with emulated(3):
            text_update(tokens, logprobs, both[0], eos=eos, settled=settled, impl="raw-simt")
        text_update(tokens, logprobs, both[1], eos=eos, impl="reference")
        for one, other in zip(*(texts.arrays() for texts in both), strict=True):
            np.testing.assert_array_equal(one, other)
    assert both[0].live[0] == 0


def test_starts_between_updates():
    """Some texts of searches that go on begin anew; -1 leaves a text as it is."""
    rng = np.random.default_rng(0)
    beams = [Beams(LIKE, 9, 3, 5, float) for _ in "ab"]
    texts = [Texts(LIKE, 200, 4) for _ in "ab"]
    start(beams, 1, 1, np.zeros(9, np.int32))
    for seed in range(4):
        for state in (beams, texts):
            for name in ("scores", "positions", "history", "steps", "ended", "lengths"):
                if (x := getattr(state[0], name, None)) is not None:
                    x[...] = rng.integers(0, 2, x.shape)
                    getattr(state[1], name)[...] = x
        tokens, limits = rng.integers(1, 9, 9), rng.integers(-1, 4, 9).astype(np.int32)
        start(beams, seed, tokens.astype(np.int32) if seed % 2 else 7, limits)
        given = rng.integers(-1, 5, (3, 200)).astype(np.int32)
        start(texts, seed, *given, rng.integers(0, 9, (200, 4)).astype(np.uint32))


@pytest.mark.parametrize("lengths", [None, store_cases.LENGTHS], ids=["whole", "lengths"])
@pytest.mark.parametrize("blocks", [8, 4, 1])
@pytest.mark.parametrize("name", store_cases.CASES)
def test_store_rows(name, lengths, blocks):
    """``blocks``: of each of three multiprocessors, at least; with few of them blocks have several
    rows, and last ones fewer."""
    tables, sources, starts, places, count = store_cases.problem(name)
    want = store_cases.expected(tables, sources, starts, places, count, lengths)
    pairs = [(gpu(t), gpu(s)) for t, s in zip(tables, sources, strict=True)]
    machine = emulator.Machine(1, multiprocessors=3)
    stand_ins = {"kernel": machine.kernel, "on_gpu": lambda _: True}
    stand_ins |= {"gpu": lambda _: machine.gpu, "BLOCKS": blocks}
    with mock.patch.multiple(store_module, **stand_ins):
        store_rows(pairs, starts, places, count, lengths)
    for found, wanted in zip(tables, want, strict=True):
        assert found.tobytes() == wanted.tobytes()
