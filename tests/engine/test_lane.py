"""Searches whose slots are refilled give what gpuattn.decode gives, in any company and order."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn import rng as random
from gpuattn.arrays import get_xp
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import BeamOptions
from gpuattn.decode.sample import sample
from gpuattn.engine.beam import TranslationSearch
from gpuattn.engine.generation import Generation
from gpuattn.engine.lane import Lane, Request
from gpuattn.engine.scheduler import Scheduler
from gpuattn.engine.searches import Searches
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.translation import TranslationConfig, TranslationModel

BOS, EOS, VOCAB, ROOM = 1, 2, 40, 32
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")


def on(xp, model):
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(6)
    return model.eval()


@pytest.fixture
def translator(xp):
    size = {"d_model": 32, "heads": 2, "layers": (1, 2), "ffn": 64, "max_length": ROOM}
    return on(xp, TranslationModel(TranslationConfig(vocab=VOCAB, **size), seed=3))


@pytest.fixture
def writer(xp):
    size = {"d_model": 32, "heads": 2, "layers": 2, "block": ROOM}
    return on(xp, GPT2(GPT2Config(vocab=VOCAB, **size), seed=3))


class Calls:
    """Runs steps as they are; notes their names and shapes."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, shape, step):
        self.calls.append((name, *shape[1:]))
        step()


def run(lane, each=None):
    """Return {owner: Hypotheses}; ``each(turn)`` is called before each turn."""
    found, turn = {}, 0
    while lane.busy:
        if each:
            each(turn)
        for request, texts in lane.turn():
            assert request.owner not in found
            found[request.owner] = texts
        turn += 1
        assert turn < 2000
    return found


def add(lane, requests, **given):
    return [lane.scheduler.add(r, steps=r.limit, **given) for r in requests]


def sources_of(rng, count):
    sizes = rng.integers(0, 20, count)
    sources = [rng.integers(4, VOCAB, n).tolist() for n in sizes]
    return [
        Request(s, int(limit), owner=i)
        for i, (s, limit) in enumerate(zip(sources, rng.integers(1, 25, count), strict=True))
    ]


def translated(model, request, options):
    stepper = model.stepper(model.pack([request.tokens]), request.limit)
    own = {"max_length": [request.limit], "prefix": [request.prefix]}
    return beam_search(stepper, bos=BOS, **own, **options)[0]


def search_of(model, slots, beam, nbest, prefix_room=0, **options):
    options = BeamOptions(beam=beam, eos=EOS, nbest=nbest, length_penalty=0.6, **options)
    return TranslationSearch(
        model, slots, beam, ROOM, ROOM, options=options, bos=BOS, prefix_room=prefix_room
    )


def check(found, want):
    assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in want]
    scores = ([h.score for h in texts] for texts in (found, want))
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_translations_with_refill_equal_decode(translator, seed):
    """More sentences than slots, which come while others run."""
    rng = np.random.default_rng(seed)
    beam, slots = int(rng.integers(1, 5)), [1, 5, 16, 3][seed]
    nbest = int(rng.integers(1, beam + 1))
    given = {
        "banned": (0, BOS, 3), "min_length": int(rng.integers(0, 4)),
        "no_repeat_ngram": [0, 2, 0, 3][seed],
        "stopping": ["fairseq", "hf", "ct2", "hf-early"][seed],
    }  # fmt: skip
    search = search_of(translator, slots, beam, nbest, prefix_room=[0, 2, 2, 0][seed], **given)
    requests, behind = sources_of(rng, 12), int(rng.integers(2))
    if seed in (1, 2):  # of 0 to 2 tokens
        lengths = [min(r.limit, int(rng.integers(3))) for r in requests]
        forced = [rng.integers(4, VOCAB, n).tolist() for n in lengths]
        requests = [replace(r, prefix=p) for r, p in zip(requests, forced, strict=True)]
    lane = Lane(search, Scheduler(slots), Calls(), behind=behind, at_once=bool(rng.integers(2)))
    late = requests[6:]
    add(lane, requests[:6])
    found = run(lane, lambda turn: add(lane, [late.pop()] if late and turn % 2 else []))
    add(lane, late)
    found |= run(lane)
    assert sorted(found) == list(range(12))
    options = given | {"eos": EOS, "beam": beam, "nbest": nbest, "length_penalty": 0.6}
    for request in requests:
        check(found[request.owner], translated(translator, request, options))


@pytest.mark.parametrize("seed", range(4))
def test_generation_with_refill_equals_decode(writer, seed):
    rng = np.random.default_rng(seed)
    draws = {"temperature": 1.5, "top_k": [None, 9][seed % 2], "top_p": 0.9, "min_p": 0.01}
    given = {"banned": [(), (0, 1)][seed % 2], "min_length": int(rng.integers(0, 5))}
    rules = {"eos": [EOS], "min_length": given["min_length"], "no_repeat_ngram": 2 * (seed % 2)}
    given["no_repeat_ngram"], rules["repetition_penalty"] = rules["no_repeat_ngram"], 1.0
    slots, told = [3, 20, 1, 5][seed], {}
    search = Generation(writer, slots, ROOM, draws=draws, rules=rules, banned=given["banned"])
    requests = []
    for i in range(14):
        prompt = rng.integers(3, VOCAB, rng.choice([1, 2, 9, 15])).tolist()
        key = random.Key(int(rng.integers(1 << 62)), int(rng.integers(9)), int(rng.integers(99)))
        limit = int(rng.integers(1, ROOM - len(prompt) + 2))
        requests.append(Request(prompt, limit, (), int(rng.integers(1000)), key, i))
    lane = Lane(
        search, Scheduler(slots), Calls(), behind=seed % 2,
        tell=lambda request, new: told.setdefault(request.owner, []).extend(new),
    )  # fmt: skip
    add(lane, requests)
    found = run(lane)
    for request in requests:
        xp = get_xp(writer.parameters()[0].data)
        stepper = writer.stepper(xp.asarray([request.tokens], np.int32), request.limit)
        want = sample(
            stepper, bos=stepper.first_tokens, max_length=[request.limit], seed=request.key,
            numbers=[request.number], eos=EOS, **draws, **given,
        )  # fmt: skip
        check(found[request.owner], want)
        assert told.get(request.owner, []) == want[0].tokens


def test_streamed_greedy_translations(translator):
    """With one beam tokens are told as they come, in parts, and end as the result does."""
    rng, parts = np.random.default_rng(5), {}
    search = search_of(translator, 3, 1, 1, banned=(0, BOS, 3))
    lane = Lane(
        search, Scheduler(3), Calls(),
        tell=lambda request, new: parts.setdefault(request.owner, []).append(new),
    )  # fmt: skip
    requests = [replace(request, limit=20) for request in sources_of(rng, 9)]
    add(lane, requests)
    found = run(lane)
    texts = {i: sum(told, []) for i, told in parts.items()}
    assert texts == {i: best[0].tokens for i, (*best,) in found.items() if best[0].tokens}
    assert max(map(len, parts.values())) > 2


def test_admitted_sources_disturb_no_others(translator):
    """Entries that fill up a bucket write nothing but what the first entry writes."""
    rng = np.random.default_rng(7)
    requests = sources_of(rng, 8)
    search = search_of(translator, 8, 2, 1, banned=())
    search.load([r.tokens for r in requests], [r.limit for r in requests])
    search.begin()
    search.step()
    names = [name for name in search.beams.NAMES if name not in ("live", "divisors")]
    state = {name: getattr(search.beams, name) for name in names}
    state |= {f"memory {i}": x for i, pair in enumerate(search.memory) for x in pair}
    state["lengths"] = search.memory_lengths
    before = {name: x.copy() for name, x in state.items()}
    chosen = [6, 1, 4]  # three in a bucket of four
    search.load([requests[i].tokens for i in chosen], [9, 9, 9], slots=chosen)
    search.begin()
    others = [0, 2, 3, 5, 7]
    for name, x in state.items():
        assert (x[others] == before[name][others]).all(), name
    assert (search.beams.steps[chosen] == 0).all() and not search.beams.done[chosen].any()
    assert int(search.beams.live[0]) == int((~search.beams.done).sum())


def test_a_full_batch_costs_no_launches_beyond_its_steps(translator):
    """One admission, steps up to the limit, no look where no sentence can end before it."""
    calls = Calls()
    search = search_of(translator, 4, 2, 1, banned=(EOS,))
    lane = Lane(search, Scheduler(4), calls)
    search.progress = None  # would be called for a look
    add(lane, [Request([5, 6], 18, owner=i) for i in range(4)])
    assert len(run(lane)) == 4
    assert [name for name, *_ in calls.calls] == ["begin"] + 6 * ["steps"]
    assert calls.calls[1:] == 4 * [("steps", 4)] + 2 * [("steps", 1)]  # graphs of whole bursts


def test_buckets_are_few(translator):
    """Admissions of any size share few shapes, each of which is a graph."""
    calls, rng = Calls(), np.random.default_rng(0)
    search = search_of(translator, 16, 1, 1, banned=())
    lane = Lane(search, Scheduler(16), calls)
    add(lane, [replace(one, limit=1 + one.limit % 6) for one in sources_of(rng, 200)])
    run(lane)
    begins = [shape for name, *shape in calls.calls if name == "begin"]
    assert len(begins) > 20 and len(set(map(tuple, begins))) < 10


@pytest.mark.parametrize("when", ["waiting", "in a burst", "complete"])
def test_cancelled_requests_leave_and_others_are_unharmed(translator, when):
    rng = np.random.default_rng(3)
    options = {"eos": EOS, "beam": 2, "length_penalty": 0.6, "banned": (0, BOS, 3)}
    search = search_of(translator, 3, 2, 1, banned=(0, BOS, 3))
    lane = Lane(search, Scheduler(3), Calls())
    requests = sources_of(rng, 9)
    tickets = add(lane, requests)
    gone = {"waiting": 8, "in a burst": 1, "complete": 0}[when]
    state = {"waiting": "waiting", "in a burst": "running", "complete": "over"}[when]

    def cancel(turn):
        ticket = tickets[gone]
        if ticket.state == state and (state == "waiting" or turn > 1):
            assert lane.scheduler.cancel(ticket) == (state != "over")
            assert not lane.scheduler.cancel(ticket)

    found = run(lane, cancel)
    assert (gone in found) == (when == "complete")
    for request in requests:
        if request.owner in found:
            check(found[request.owner], translated(translator, request, options))
    assert len(found) == (9 if when == "complete" else 8)


def test_a_search_that_was_left_in_the_middle_is_sound(translator):
    """What still runs in its slots is nobody's, and harms nobody."""
    rng = np.random.default_rng(4)
    options = {"eos": EOS, "beam": 2, "length_penalty": 0.6}
    search = search_of(translator, 4, 2, 1, banned=())
    for _ in range(3):
        lane = Lane(search, Scheduler(4), Calls())
        add(lane, sources_of(rng, 9))
        for _ in range(3):
            lane.turn()
    lane, requests = Lane(search, Scheduler(4), Calls()), sources_of(rng, 9)
    add(lane, requests)
    found = run(lane)
    for request in requests:
        check(found[request.owner], translated(translator, request, options))


def test_memory_is_kept_until_no_launch_needs_it(translator):
    """Searches that are dropped, and their owner, wait for the stream first."""
    waits: list[str] = []
    searches = Searches(translator, lambda sentence: None)
    searches._stream = SimpleNamespace(synchronize=lambda: waits.append("wait"))
    searches._weights = tuple
    searches.run = SimpleNamespace(forget=lambda which: waits.append("forget"))
    key = (2, 1, ROOM)
    searches.give(searches.take(key, lambda: search_of(translator, 2, 1, 1)), keep=False)
    assert waits == ["wait", "forget"]
    searches.give(searches.take(key, lambda: search_of(translator, 2, 1, 1)), keep=True)
    assert waits == ["wait", "forget"]
    del searches
    assert waits == ["wait", "forget", "wait"]
