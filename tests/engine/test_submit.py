"""Requests that are submitted: handles, streams, cancelling, and what goes wrong."""

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

import gpuattn
from gpuattn.arrays import get_xp
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.sample import sample
from gpuattn.engine import Engine, searches
from gpuattn.engine.beam import TranslationSearch
from gpuattn.engine.generation import Generation
from gpuattn.engine.request import Handle
from gpuattn.engine.scheduler import BURST
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.translation import TranslationConfig, TranslationModel

BOS, EOS, VOCAB, MOST = 1, 2, 40, 48
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
SETTINGS = {"bos": BOS, "eos": EOS, "beam": 2, "banned": (0, BOS, 3)}
WAIT = 60  # seconds, where a fault would wait for ever


def on(xp, model):
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(6)
    return model.eval()


def translation_model(xp):
    size = {"d_model": 32, "heads": 2, "layers": (1, 2), "ffn": 64, "max_length": MOST}
    return on(xp, TranslationModel(TranslationConfig(vocab=VOCAB, **size), seed=3))


@pytest.fixture
def translator(xp):
    return translation_model(xp)


@pytest.fixture
def writer(xp):
    size = {"d_model": 32, "heads": 2, "layers": 2, "block": MOST}
    return on(xp, GPT2(GPT2Config(vocab=VOCAB, **size), seed=3))


@pytest.fixture
def gate(monkeypatch):
    """Steps of searches wait until the event is set; ``entered`` says that one waits."""
    gate = threading.Event()
    gate.entered = threading.Event()
    for search in (TranslationSearch, Generation):

        def begin(self, begin=search.begin):
            gate.entered.set()
            assert gate.wait(WAIT)
            begin(self)

        monkeypatch.setattr(search, "begin", begin)
    yield gate
    gate.set()


def translated(model, source, limit, settings):
    stepper = model.stepper(model.pack([source]), limit)
    return beam_search(stepper, max_length=[limit], **settings)[0]


def written(model, prompt, limit, decoder, **settings):
    stepper = model.stepper(get_xp(model.parameters()[0].data).asarray([prompt], np.int32), limit)
    return decoder(stepper, bos=stepper.first_tokens, max_length=[limit], **settings)[0]


def test_many_requests_of_several_kinds(translator):
    """Other settings and lengths share nothing but the thread; results are those of decode."""
    rng, asked = np.random.default_rng(0), []
    with gpuattn.Engine(translator, max_rows=8) as engine:
        for i in range(24):
            source = rng.integers(4, VOCAB, rng.integers(0, 16)).tolist()
            limit = int(rng.integers(1, 20))
            settings = SETTINGS | {"beam": int(rng.integers(1, 4)), "length_penalty": i % 2}
            handle = engine.submit(source, limit=limit, priority=i % 3, **settings)
            asked.append((handle, source, limit, settings))
        for handle, source, limit, settings in asked:
            want = translated(translator, source, limit, settings)
            found = handle.result(WAIT)
            assert [h.tokens for h in found] == [h.tokens for h in want]
            assert list(handle) == handle.tokens == want[0].tokens
            assert handle.state == "done" and handle.done()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit([5], limit=3, **SETTINGS)


def test_tokens_come_before_the_end(writer, monkeypatch):
    parts: list[list[int]] = []
    tell = Handle.tell
    monkeypatch.setattr(Handle, "tell", lambda self, new: parts.append(new) or tell(self, new))
    engine = Engine(writer)
    handle = engine.submit([5, 6, 7], limit=40, seed=3)
    want = written(writer, [5, 6, 7], 40, sample, seed=3, eos=None).tokens
    assert list(handle) == want == sum(parts, []) and len(parts) >= 40 // BURST
    again = engine.submit([5, 6, 7], limit=40, temperature=0, eos=EOS)
    assert again.result(WAIT)[0].tokens == written(writer, [5, 6, 7], 40, greedy, eos=EOS).tokens


def test_tokens_that_all_beams_share_come_before_the_end(translator, monkeypatch):
    told: dict[Handle, list[list[int]]] = {}
    tell = Handle.tell

    def noted(self, new):
        told.setdefault(self, []).append(new)
        tell(self, new)

    monkeypatch.setattr(Handle, "tell", noted)
    settings = SETTINGS | {"beam": 3, "banned": (0, BOS, 3, EOS)}
    with Engine(translator) as engine:
        handles = [engine.submit([5, 6, i], limit=40, **settings) for i in range(4, 10)]
        for i, handle in enumerate(handles, 4):
            want = translated(translator, [5, 6, i], 40, settings)
            assert list(handle) == want[0].tokens == handle.result(WAIT)[0].tokens
            assert sum(told[handle], []) == want[0].tokens
    assert max(map(len, told.values())) > 2


def test_a_request_does_not_depend_on_its_company(writer):
    with Engine(writer, max_rows=3) as engine:
        handles = [
            engine.submit([5, i % 7 + 3], limit=9 + i % 5, seed=7, number=i) for i in range(12)
        ]
        for i, handle in enumerate(handles):
            given = {"seed": 7, "numbers": [i], "eos": None}
            want = written(writer, [5, i % 7 + 3], 9 + i % 5, sample, **given)
            assert handle.result(WAIT)[0].tokens == want.tokens


def test_submitted_requests_and_calls_share_an_engine(translator):
    """A call in another thread takes turns with the thread of the engine."""
    sources = [[5, 6, 7], [8, 9], [10] * 9]
    with Engine(translator, max_rows=4) as engine:
        handles = [engine.submit(source, limit=20, **SETTINGS) for source in sources * 4]
        found = engine.translate(sources, limits=[20] * 3, **SETTINGS)
        for handle, best in zip(handles, found * 4, strict=True):
            assert [h.tokens for h in handle.result(WAIT)] == [h.tokens for h in best]


def test_what_the_device_lacks_is_searched_by_the_host(translator):
    said: list[str] = []
    with Engine(translator, notify=said.append) as engine:
        settings = SETTINGS | {"coverage": 0.1, "prefix": [6, 7]}
        (found,) = engine.submit([5, 6], limit=9, **settings).result(WAIT)
        assert found.tokens[:2] == [6, 7]
        good = engine.submit([5, 6], limit=9, **SETTINGS)
        assert good.result(WAIT) and len(said) == engine.on_gpu
    assert all(sentence.startswith("the search runs on the host: ") for sentence in said)


# ---- faults -------------------------------------------------------------------------------------


def test_cancelled_before_a_burst(translator, gate):
    """While it waits: it never runs, and those around it do."""
    engine = Engine(translator, max_rows=2)
    first = engine.submit([5, 6], limit=9, **SETTINGS)
    assert gate.entered.wait(WAIT)
    second, third = (engine.submit([5, 6], limit=9, **SETTINGS) for _ in range(2))
    assert second.cancel() and not second.cancel() and second.state == "cancelled"
    gate.set()
    with pytest.raises(CancelledError):
        second.result(WAIT)
    assert list(second) == []
    assert first.result(WAIT) == third.result(WAIT)
    assert not first.cancel() and first.state == "done"  # after the last burst
    engine.close()


def test_cancelled_in_a_burst(writer):
    with Engine(writer) as engine:
        handle = engine.submit([5], limit=MOST, seed=1)
        tokens = iter(handle)
        seen = [next(tokens)]
        assert handle.cancel() and not handle.cancel()
        seen += tokens
        assert len(seen) < MOST and seen == handle.tokens
        with pytest.raises(CancelledError):
            handle.result(WAIT)
        other = engine.submit([5], limit=9, seed=1)  # takes a slot that is free again
        assert len(other.result(WAIT)[0].tokens) == 9


def test_closing_cancels_what_is_left(translator, gate):
    engine = Engine(translator)
    handles = [engine.submit([5, 6], limit=9, **SETTINGS) for _ in range(3)]
    assert gate.entered.wait(WAIT)
    with pytest.raises(TimeoutError, match="the request is pending after 0.01 s"):
        handles[0].result(0.01)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._runner._closed:
        time.sleep(0.001)
    gate.set()
    closing.join(WAIT)
    assert [handle.state for handle in handles] == ["cancelled"] * 3
    engine.close()


@pytest.mark.parametrize("limit", [0, 1])
def test_the_shortest_limits(translator, writer, limit):
    for model, settings in ((translator, SETTINGS), (writer, {"seed": 1})):
        (found,) = Engine(model).submit([5, 6], limit=limit, **settings).result(WAIT)
        assert len(found.tokens) == limit or found.ended
    (empty,) = Engine(translator).submit([5], limit=0, **SETTINGS).result(0)
    assert empty == ([], 0.0, 0.0, False)


def test_too_long_requests_are_refused_with_the_limit(translator, writer):
    engine, long = Engine(translator), [5] * MOST
    said = "a source is 48 tokens long; accepted: up to 47, and the end mark: the model's max_l"
    for call in (
        lambda: engine.submit(long, limit=9, **SETTINGS),
        lambda: engine.translate([[5], long], limits=[9, 9], **SETTINGS),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match="a limit is 49; accepted: 0 to the model's max_length"):
        engine.submit([5], limit=49, **SETTINGS)
    with pytest.raises(ValueError, match="together up to block [+] 1, 49"):
        Engine(writer).submit([5] * 40, limit=10)
    with pytest.raises(ValueError, match="beam is 0"):
        engine.submit([5], limit=9, **SETTINGS | {"beam": 0})


def test_without_room_for_another_search_requests_wait(translator, monkeypatch):
    """Each kind needs all of the memory: they run one after the other, in the order they came."""
    monkeypatch.setattr(searches, "MAX_TOKENS", 1)
    most, take = [], searches.Searches.take

    def noted(self, key, new):
        search = take(self, key, new)
        most.append(len(self.used))
        return search

    monkeypatch.setattr(searches.Searches, "take", noted)
    with Engine(translator) as engine:
        handles = [
            (engine.submit([5, 6], limit=12, **settings), settings)
            for settings in (SETTINGS | {"beam": 1 + i % 3} for i in range(9))
        ]
        for handle, settings in handles:
            want = translated(translator, [5, 6], 12, settings)
            assert handle.result(WAIT)[0].tokens == want[0].tokens
    assert max(most) == 1


def test_an_error_ends_its_requests_only(translator, monkeypatch):
    """A search that breaks takes its own requests with it; the engine works on."""
    load = TranslationSearch.load

    def broken(self, sources, *rest, **given):
        if any(source == [13, 13] for source in sources):
            raise MemoryError("no room for thirteen")
        load(self, sources, *rest, **given)

    monkeypatch.setattr(TranslationSearch, "load", broken)
    with Engine(translator) as engine:
        bad = engine.submit([13, 13], limit=9, **SETTINGS)
        other = engine.submit([5, 6], limit=9, **SETTINGS | {"beam": 3})
        for wait in (lambda: bad.result(WAIT), lambda: list(bad)):
            with pytest.raises(MemoryError, match="no room for thirteen"):
                wait()
        assert bad.state == "failed" and other.result(WAIT)
        assert engine.submit([5, 6], limit=9, **SETTINGS).result(WAIT)


def test_a_nan_in_one_text_harms_no_other():
    """Source token 13 has an embedding of NaN: the others are as without it."""
    translator = translation_model(np)
    settings = SETTINGS | {"banned": (0, BOS, 3, 13)}
    (want,) = Engine(translator).submit([5, 6], limit=9, **settings).result(WAIT)
    translator.source.weight.data[13] = np.nan
    with Engine(translator) as engine:
        handles = [engine.submit(s, limit=9, **settings) for s in ([5, 6], [13, 6], [5, 6])]
        results = [handle.result(WAIT) for handle in handles]
    assert [results[i][0].tokens for i in (0, 2)] == [want.tokens] * 2
