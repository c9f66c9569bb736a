"""Batches of many sources, in several threads: nothing is lost, the order does not matter."""

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from gpuattn.decode import batches
from gpuattn.decode.batches import search_all


class Model:
    """A model whose steppers are lists of (source, limit, beam, kv_cache)."""

    def __init__(self, training=True):
        self.training, self.made = training, []

    def parameters(self):
        return [np.zeros(1).view(Parameter)]

    def eval(self):
        self.train(False)

    def train(self, mode):
        self.training = mode

    def pack(self, sources):
        return sources

    def stepper(self, packed, limit, beam, kv_cache):
        assert not self.training
        self.made.append((len(packed), limit, beam, kv_cache))
        return packed


class Parameter(np.ndarray):
    @property
    def data(self):
        return np.zeros(1)


def sums(stepper, chosen):
    return [[sum(source)] for source in stepper]


@pytest.fixture
def sources():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 30, 700)]


@pytest.fixture(params=[1, 3])
def cores(request, monkeypatch):
    monkeypatch.setattr(batches, "usable_cores", lambda: request.param)
    return request.param


@pytest.mark.parametrize("beam", [1, 5, 200])
def test_every_source_is_searched_once_and_batches_keep_to_their_room(sources, cores, beam):
    model, limits = Model(), [2 * len(source) + 16 for source in sources]
    found, rows = {}, []
    for chosen, results in search_all(model, sources, sums, limits=limits, beam=beam):
        assert not found.keys() & set(chosen)
        found |= dict(zip(chosen, results, strict=True))
        rows.append([len(sources[i]) for i in chosen])
    assert found == {i: [sum(source)] for i, source in enumerate(sources)}
    assert sum(rows, []) == sorted(map(len, sources), reverse=True)
    assert len(rows) >= cores and model.training
    for count, limit, _, kv_cache in model.made:
        assert count == 1 or count * limit * beam <= batches.CACHED_TOKENS["cpu"]
        assert limit <= 2 * 29 + 16 and kv_cache


def test_limits_of_any_order_and_the_most_rows_are_kept(sources, cores):
    model, limits = Model(), np.random.default_rng(1).integers(1, 400, len(sources)).tolist()
    for _ in search_all(model, sources, sums, limits=limits, beam=4, max_rows=600):
        pass
    assert sum(count for count, *_ in model.made) == len(sources)
    for count, limit, beam, _ in model.made:
        assert count * beam * limit <= batches.CACHED_TOKENS["cpu"] and count * beam <= 600


def test_few_sources_are_one_batch(monkeypatch):
    monkeypatch.setattr(batches, "usable_cores", lambda: 8)
    ((chosen, _),) = search_all(Model(), [[1]] * 20, sums, limits=[5] * 20, beam=5)
    assert chosen == list(range(20))
    assert list(search_all(Model(), [], sums, limits=[], beam=5)) == []


def test_threads_have_one_blas_thread_each_until_the_end(sources, monkeypatch):
    monkeypatch.setattr(batches, "usable_cores", lambda: 2)
    before, meet = blas_threads(), threading.Barrier(2, timeout=60)

    def search(stepper, chosen):
        meet.wait()  # which one thread alone would not pass
        return [blas_threads()] * len(stepper)

    limits = [50] * len(sources)
    found = list(search_all(Model(), sources[:600], search, limits=limits, beam=4))
    assert len(found) == 4  # an even number: none waits alone
    assert all(threads == {1} for _, results in found for threads in results)
    assert blas_threads() == before


def blas_threads():
    return {
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    }


def test_an_error_arrives_and_a_search_can_be_left(sources, cores):
    model, calls = Model(training=False), []

    def fails(stepper, chosen):
        calls.append(chosen)
        raise ZeroDivisionError

    limits = {"limits": [64] * len(sources), "beam": 16}
    with pytest.raises(ZeroDivisionError):
        list(search_all(model, sources, fails, **limits))
    assert len(calls) <= cores + 1 and not model.training
    model.train(True)
    search = search_all(model, sources, sums, **limits)
    next(search)
    search.close()
    assert model.training and len(model.made) <= 2 * (cores + 2)
