"""Texts that share pages are what decode gives, with the bits of texts that share none."""

import numpy as np
import pytest
from checks import sampled
from delays import HOLD

from gpuattn import rng as random
from gpuattn.arrays import get_xp, to_cpu
from gpuattn.decode.sample import sample
from gpuattn.engine import Engine, generation, paged_generation, pages
from gpuattn.engine.generation import Generation
from gpuattn.engine.lane import Lane, Request
from gpuattn.engine.paged_cache import Beside
from gpuattn.engine.paged_generation import PagedGeneration, generation_of, paging_refusal
from gpuattn.engine.pages import PAGE
from gpuattn.engine.scheduler import Scheduler
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig
from gpuattn.ops.attention import step_attention

EOS, VOCAB, BLOCK = 2, 40, 300
SIZE = {"vocab": VOCAB, "d_model": 32, "heads": 2, "layers": 2, "block": BLOCK}
DRAWS = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
MODELS = {
    "gpt2": lambda: GPT2(GPT2Config(**SIZE), seed=3),
    "llama": lambda: Llama(
        LlamaConfig(**SIZE, ffn=48, kv_heads=1, head_dim=32, qk_norm=True), seed=3
    ),
}


@pytest.fixture(params=MODELS)
def model(xp, request):
    model = MODELS[request.param]()
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(6)
    return model.eval()


def search_of(model, slots, eos=(EOS,), **sizes):
    rules = {"eos": list(eos), "min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0}
    return PagedGeneration(model, slots, BLOCK, draws=DRAWS, rules=rules, **sizes)


def requests_of(rng, count, longest=60):
    """Requests that begin alike, up to anywhere."""
    common, requests = rng.integers(3, VOCAB, 200), []
    for i in range(count):
        prompt = np.concatenate([
            common[: rng.choice([0, 10, PAGE, 130, 200])],
            rng.integers(3, VOCAB, rng.choice([1, 1, 2, 40])),
        ]).tolist()  # fmt: skip
        if requests and rng.integers(3) == 0:
            prompt = requests[-1].tokens
        key = random.Key(int(rng.integers(1 << 62)), 1, 2)
        requests.append(Request(prompt, int(rng.integers(1, longest)), (), i, key, i))
    return requests


def run(search, requests, behind=1, cancels=0):
    """Return ({owner: Hypothesis}, {owner: tokens told}) of requests, which come in two parts.

    ``cancels``: requests to cancel, one a turn, once none waits.
    """
    told, found = {}, {}
    scheduler = Scheduler(search.texts.sentences)
    lane = Lane(
        search, scheduler, lambda name, shape, run: run(), behind=behind, at_once=bool(behind),
        tell=lambda request, new: told.setdefault(request.owner, []).extend(new),
    )  # fmt: skip
    parts = [requests[: len(requests) // 2], requests[len(requests) // 2 :]]
    while lane.busy or parts:
        for request in parts.pop() if parts else ():
            scheduler.add(request, steps=request.limit)
        for request, (text,) in lane.turn():
            assert request.owner not in found
            found[request.owner] = text
        holders = {ticket.slot for ticket in scheduler.running}
        assert {*search.pages.full} <= holders, "pages of slots without a text"
        if cancels and scheduler.running and not scheduler.waiting:
            cancels -= scheduler.cancel(scheduler.running[0])
    lane.turn()  # what was cancelled last leaves its slot
    assert search.pages.pool.available == search.pages.pool.count - 1
    return found, told


def check(model, found, requests, eos=EOS):
    for request in requests:
        stepper = model.stepper(
            get_xp(model.parameters()[0].data).asarray([request.tokens], np.int32), request.limit
        )
        (want,) = sample(
            stepper, bos=stepper.first_tokens, max_length=[request.limit], seed=request.key,
            numbers=[request.number], eos=eos, **DRAWS,
        )  # fmt: skip
        text = found[request.owner]
        assert (text.tokens, text.ended) == (want.tokens, want.ended)
        np.testing.assert_allclose(text.score, want.score, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", sampled(range(12), 3))
def test_equals_decode(model, seed, monkeypatch):
    """Also where pages are lacking, so that texts are put back and computed again."""
    if seed % 4 == 2:  # the launches of a GPU, here by the arrays of any device
        monkeypatch.setattr(paged_generation, "on_gpu", lambda x: True)
    rng = np.random.default_rng(seed)
    slots, few = [5, 1, 8, 3][seed % 4], [6, 6, 12, 9][seed % 4]
    requests = requests_of(rng, 8, longest=30)
    found, told = run(search_of(model, slots, pages=few), requests, behind=seed % 2)
    check(model, found, requests)
    assert told == {i: text.tokens for i, text in found.items() if text.tokens}


def test_cancelled_texts_free_their_pages(model):
    rng = np.random.default_rng(4)
    requests = requests_of(rng, 9, longest=30)
    found, _ = run(search_of(model, 3, eos=(), pages=9), requests, cancels=1)
    left = [request for request in requests if request.owner in found]
    assert len(left) == 8
    check(model, found, left, eos=None)


def test_a_text_without_a_page_is_put_back(model, monkeypatch):
    """The one that came last, which gets the same tokens when it is computed again."""
    back, put_back = [], Scheduler.put_back
    monkeypatch.setattr(
        Scheduler, "put_back", lambda self, t: (back.append(t.request.owner), put_back(self, t))
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, PAGE - 10).tolist() for _ in range(4)]
    requests = [Request(p, 100, (), i, random.Key(5, 0, 0), i) for i, p in enumerate(prompts)]
    search = search_of(model, 4, eos=(), pages=7)
    scheduler = Scheduler(4)
    lane = Lane(search, scheduler, lambda name, shape, step: step(), behind=0)
    for request in requests:
        scheduler.add(request, steps=request.limit)
    found, most = {}, 0
    while lane.busy:
        found |= {request.owner: text for request, (text,) in lane.turn()}
        most = max(most, len(scheduler.running))
    assert most == 4 and back == [3, 2]
    alone = search_of(model, 4, eos=())
    alone.load(prompts, [100] * 4, range(4), [random.Key(5, 0, 0)] * 4)
    alone.begin()
    for _ in range(100):
        alone.step()
    want = alone.hypotheses([to_cpu(x) for x in alone.results()], range(4))
    assert [found[i].tokens for i in range(4)] == [text.tokens for (text,) in want]


@pytest.mark.parametrize("seed", range(3))
def test_the_bits_of_texts_that_share_nothing(monkeypatch, seed):
    model = MODELS[["gpt2", "llama"][seed % 2]]().eval()
    rng = np.random.default_rng(seed)
    requests = requests_of(rng, 10, longest=30)
    shared, _ = run(search_of(model, 4), requests, behind=0)
    computed, joined = [], pages.PagePool.join
    monkeypatch.setattr(
        pages.PagePool, "join",
        lambda self, tokens, count: joined(self, tokens[:0], count),
    )  # fmt: skip
    to_compute = pages.SlotPages.to_compute
    monkeypatch.setattr(
        pages.SlotPages, "to_compute",
        lambda self: computed.append(to_compute(self)) or computed[-1],
    )  # fmt: skip
    alone, _ = run(search_of(model, 4), requests, behind=0)
    assert alone == shared  # also the scores
    assert all(prompt.start == 0 for prompts, _ in computed for prompt in prompts)


def test_what_is_computed(model, monkeypatch):
    """A beginning once, the rest of equal prompts once, and what is known not at all."""
    counted, fill = [], type(model).fill
    monkeypatch.setattr(
        type(model), "fill",
        lambda self, tokens, *args, **given: (
            counted.append(tokens.size), fill(self, tokens, *args, **given),
        )[1],
    )  # fmt: skip
    rng, xp = np.random.default_rng(2), get_xp(model.parameters()[0].data)
    system = rng.integers(3, VOCAB, 2 * PAGE).tolist()
    prompts = [[*system, *end, 5] for end in ([7, 8, 9], [7, 8, 9], [4], [7, 8, 9])]
    search, key = search_of(model, 8), random.Key(4, 0, 0)

    def load(prompts, slots):
        counted.clear()
        search.load(prompts, [3] * len(prompts), range(len(prompts)), [key] * len(prompts), slots)
        search.begin()
        return sum(counted)

    first, more = load(prompts, None), load([[*system, 6, 6], [*system, 5]], [6, 7])
    if xp is np:  # on a GPU with what fills up shapes
        assert (first, more) == (2 * PAGE + 3 + 1, 1)
    assert search.shape[1] == 0
    search.refresh(changed=False)
    assert load([[*system, 5]], [7]) == 0
    search.refresh(changed=True)
    assert load([[*system, 5]], [7]) == 2 * PAGE


@pytest.mark.parametrize("fixed", [False, True])
def test_beginnings_stay_known_with_fixed_weights(model, monkeypatch, fixed):
    computed, to_compute = [], pages.SlotPages.to_compute

    def counting(self):
        prompts, copies = to_compute(self)
        computed.append(sum(len(prompt.tokens) for prompt in prompts))
        return prompts, copies

    monkeypatch.setattr(pages.SlotPages, "to_compute", counting)
    prompt = np.random.default_rng(7).integers(3, VOCAB, 2 * PAGE + 9).tolist()
    given = {"seed": random.Key(9, 0, 0), "eos": EOS, **DRAWS}
    requests = [Request(prompt, 12, (), i, given["seed"], i) for i in range(5)]
    with Engine(model, fixed_weights=fixed) as engine:
        for again in (False, True):
            computed.clear()
            found = engine.generate([prompt] * 5, limits=[12] * 5, **given)
            assert sum(computed) == (8 if fixed and again else 2 * PAGE + 8)
            check(model, found, requests)


def test_the_choice_of_caches(xp, monkeypatch):
    model = MODELS["gpt2"]()
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data)
    rules = {"eos": [EOS], "min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0}
    found = generation_of(model, 2, 128, 1, draws=DRAWS, rules=rules)
    assert isinstance(found, PagedGeneration) and found.pages.pool.count == 3
    assert found.decoder is None and paging_refusal(model, 2, 128) is None
    short = generation_of(model, 2, PAGE, 9, draws=DRAWS, rules=rules)
    assert type(short) is Generation and "up to 64 keys" in paging_refusal(model, 2, PAGE)
    assert PAGE == step_attention.PAGE  # else kernels refuse
    assert "batch_invariant" in paging_refusal(model, 2, 128, True)
    alone = generation_of(model, 2, 128, 9, draws=DRAWS, rules=rules, batch_invariant=True)
    assert type(alone) is Generation
    monkeypatch.setattr(paged_generation, "is_one_launch", lambda *_: True)
    assert "one launch" in paging_refusal(model, 2, 128)


def test_samples_of_one_prompt(model):
    """Engine.generate and submit share its pages, and give what decode gives."""
    prompt, made = np.random.default_rng(1).integers(3, VOCAB, 2 * PAGE + 9).tolist(), []
    engine = Engine(model, max_rows=3)
    take = engine._searches.take
    engine._searches.take = lambda *args: made.append(take(*args)) or made[-1]
    requests = [Request(prompt, 12, (), i, random.Key(9, 0, 0), i) for i in range(5)]
    given = {"seed": random.Key(9, 0, 0), "eos": EOS, **DRAWS}
    found = engine.generate([prompt] * 5, limits=[12] * 5, **given)
    check(model, found, requests)
    with engine:
        handles = [engine.submit(prompt, limit=12, number=i, **given) for i in range(5)]
        check(model, [handle.result()[0] for handle in handles], requests)
    assert made and all(isinstance(search, PagedGeneration) for search in made)


def test_first_prompts_begin_before_others_are_read(model, monkeypatch):
    """Two are read, loaded and begin, then those that have a slot, then those that wait."""
    monkeypatch.setattr(generation, "OPENING", 200)
    monkeypatch.setattr(generation, "LEAST_OPENINGS", 2)
    rng, events, read, load = np.random.default_rng(6), [], generation.read, PagedGeneration.load
    monkeypatch.setattr(
        generation, "read",
        lambda model, requests: events.append(("read", len(requests))) or read(model, requests),
    )  # fmt: skip
    monkeypatch.setattr(
        PagedGeneration,
        "load",
        lambda self, texts, *rest, **slots: (
            events.append(("load", len(texts))) or load(self, texts, *rest, **slots)
        ),
    )
    prompts = [rng.integers(3, VOCAB, 80 + i).tolist() for i in range(9)]
    engine = Engine(model, max_rows=6)
    engine.on_gpu = True  # NumPy arrays take the way of a GPU, too
    given = {"seed": random.Key(9, 0, 0), **DRAWS}
    found = engine.generate(prompts, limits=[10] * 9, **given)
    assert events[:5] == [("read", 2), ("load", 2), ("read", 4), ("load", 4), ("read", 3)]
    requests = [Request(p, 10, (), i, given["seed"], i) for i, p in enumerate(prompts)]
    check(model, dict(enumerate(found)), requests, eos=None)
    with pytest.raises(IndexError, match=f"a prompt is holding {VOCAB}; accepted"):
        engine.generate([*prompts[1:], [3, VOCAB]], limits=[10] * 9, **given)
    again = engine.generate(prompts, limits=[10] * 9, **given)
    check(model, dict(enumerate(again)), requests, eos=None)


@pytest.mark.parametrize("name", MODELS)
def test_keys_of_prompts_are_stored_beside_products(gpu, monkeypatch, name):
    """Also where a store is late: what reads it, or takes the memory that it reads, waits."""
    model = MODELS[name]()
    for parameter in model.parameters():
        parameter.data = gpu.asarray(parameter.data)
    rng, found, run = np.random.default_rng(4), [], Beside.run
    hold = gpu.RawKernel(HOLD, "hold")

    def late(self, call, *read):
        run(self, lambda: (hold((1,), (1,), (np.int64(300_000),)), call()), *read)

    monkeypatch.setattr(Beside, "run", late)
    prompts = [rng.integers(3, VOCAB, 150 + i).tolist() for i in range(20)]
    for least in (1, 1 << 30):
        monkeypatch.setattr(paged_generation, "LEAST_BESIDE", least)
        with Engine(model.eval()) as engine:
            for _ in range(3):  # calls, and replays of a graph
                texts = engine.generate(prompts, limits=[40] * 20, seed=5, **DRAWS)
                found.append([text.tokens for text in texts])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("lengths, count", [
    ([896] * 64, 8), ([900] + [500] * 64, 8), ([300] * 120, 16), ([1024] * 31, 0), ([1024] * 32, 8),
    ([9000] * 4, 1), ([40000], 1), ([8192] * 4, 1), ([], 0),
])  # fmt: skip
def test_how_many_prompts_begin_first(lengths, count):
    assert generation.opening(lengths) == count


def test_how_many_prompts_a_launch_has_room_for():
    found = [paged_generation._entries(count, 64) for count in (1, 3, 16, 17, 28, 29, 33, 56, 57)]
    assert found == [1, 4, 16, 28, 28, 32, 56, 56, 64]
    assert paged_generation._entries(40, 50) == 44


def test_no_pages_left(model):
    search = search_of(model, 3, pages=6)
    with pytest.raises(RuntimeError, match="no pages are left for the text in slot 1"):
        search.load([[5, 6], [7] * 290], [200, 5], [0, 1], [random.Key(4, 0, 0)] * 2)
