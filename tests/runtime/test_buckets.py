"""Buckets of gradients: what they cover, and when they are told of."""

import numpy as np
import pytest

from gpuattn import Tensor, nn, optim
from gpuattn.runtime import buckets
from gpuattn.runtime.workspace import Workspace

KIB = 1024


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", KIB)


def laid_out(sizes, unit):
    """Return ({name: slot}, size) of parameters that begin at multiples of 128."""
    slots, at = {}, 0
    for i, size in enumerate(sizes):
        slots[str(i)] = at, at + size, (size,)
        at += -(-size // 128) * 128
    return slots, -(-at // unit) * unit


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 64])
def test_buckets_cover_a_buffer_from_its_end(parts):
    rng = np.random.default_rng(parts)
    for _ in range(200):
        sizes = np.exp(rng.uniform(0, np.log(8 * KIB), rng.integers(1, 30))).astype(int).tolist()
        unit = 128 * parts
        slots, size = laid_out(sizes, np.lcm(unit, 8192).item())
        found = buckets.buckets(slots, size, unit)
        assert found[0].stop == size and found[-1].start == 0
        assert all(a.start == b.stop for a, b in zip(found, found[1:], strict=False))
        assert all(b.start < b.stop and (b.stop - b.start) % unit == 0 for b in found)
        for bucket in found[:-1]:  # but a small one before a large parameter
            assert bucket.stop - bucket.start > KIB // 4 - unit
        assert len(found) <= size // (KIB // 4 - 128) + 1


def test_a_large_first_parameter_is_apart():
    slots, size = laid_out([4000, 128, *[256] * 6], 128)
    found = buckets.buckets(slots, size, 128)
    assert [(b.start, b.stop) for b in found] == [(4736, size), (4096, 4736), (0, 4096)]
    slots, size = laid_out([4000, 128, *[256] * 4], 128)  # what is left would be small
    assert len(buckets.buckets(slots, size, 128)) == 2


def test_full_buckets_are_told_in_order_whatever_the_order_of_gradients():
    rng = np.random.default_rng(0)
    members = [{0, 1, 2}, {2, 3}, set(), {4}, {5, 6, 0}]
    for _ in range(200):
        told, seen = [], set()

        def full(i):
            assert members[i] <= seen or ended  # noqa: B023 called at once
            told.append(i)  # noqa: B023

        arrivals, ended = buckets.Arrivals(members, full), False
        for key in rng.permutation(8)[: rng.integers(4, 9)].tolist():
            seen.add(key)
            arrivals.final(key)
        wanted = 0
        while wanted < 5 and members[wanted] <= seen and seen:
            wanted += 1
        assert told == list(range(wanted))
        ended = True
        arrivals.end()
        assert told == [0, 1, 2, 3, 4]


class Model(nn.Module):
    """Four layers, of which ``used`` are; the first weight is used at both ends, and tied."""

    def __init__(self, used):
        rng = np.random.default_rng(0)
        self.used = used
        table = rng.standard_normal((40, 16)).astype(np.float32)
        self.table = Tensor(table, requires_grad=True)
        self.layers = [nn.Linear(16, 16, rng=rng) for _ in range(4)]
        self.never = Tensor(np.zeros(300, np.float32), requires_grad=True)

    def loss(self, x):
        h = x @ self.table
        for i in self.used:
            h = h + self.layers[i](h)
        return (h @ self.table.T).sum()


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0, 2), (), (3, 2, 1, 0, 1)])
def test_what_is_told_of_is_final(monkeypatch, used):
    monkeypatch.setattr(buckets, "BUCKET", 200)
    w = Workspace(model := Model(used), parts=2)
    assert len(w.buckets) >= 4
    x, told, early = np.eye(40, dtype=np.float32), [], []

    def full(i, events):
        assert events == []
        told.append(i)
        early.append(w.grads[w.buckets[i]].copy())

    for passes in (1, 3):
        w.grads.fill(np.nan), told.clear(), early.clear()
        w.begin()
        for last in range(passes):
            w.backward(model.loss(x), full=full if last == passes - 1 else None)
        assert told == list(range(len(w.buckets)))
        assert w.finish() == []
        for name, slot in w.slices(w.grads).items():
            assert np.isfinite(slot).all(), name
        for bucket, copy in zip(w.buckets, early, strict=True):
            assert w.grads[bucket].tobytes() == copy.tobytes()
        views = w.slices(w.grads)
        assert not views["never"].any() and views["table"].all()
        for i in range(4):
            assert views[f"layers.{i}.weight"].any() == (i in used)
    w.begin()
    w.backward(model.loss(x))
    w.finish()
    np.testing.assert_allclose(3 * w.grads, np.concatenate(early[::-1]), rtol=1e-6)


def test_a_bucket_is_told_of_before_the_backward_pass_ends(monkeypatch):
    """Else nothing could be overlapped: the table is final last."""
    monkeypatch.setattr(buckets, "BUCKET", 200)
    w = Workspace(model := Model((0, 1, 2, 3)))
    w.grads.fill(np.nan)
    table, missing = w.slices(w.grads)["table"], []
    w.begin()
    w.backward(
        model.loss(np.eye(40, dtype=np.float32)),
        full=lambda i, events: missing.append(bool(np.isnan(w.grads).any())),
    )
    assert missing == sorted(missing, reverse=True) and missing.count(True) >= 2
    assert np.isfinite(table).all()


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pieces_of_all_parts_are_the_whole(monkeypatch, parts, dtype):
    monkeypatch.setattr(buckets, "BUCKET", 200)
    whole = Workspace(Model((0,)), dtype=dtype, parts=parts)
    found, decay = np.full(whole.size, np.nan, np.float32), np.full(whole.size, 9, np.uint8)
    for part in range(parts):
        w = Workspace(Model((0,)), dtype=dtype, parts=parts, part=part)
        assert w.buckets == whole.buckets and w.masters.size == whole.size // parts
        assert w.my_grads.size == w.masters.size
        for bucket, place, mine in zip(w.buckets, w.places, w.my_params, strict=True):
            assert np.shares_memory(mine, w.masters if dtype == "float32" else w.params)
            each = (bucket.stop - bucket.start) // parts
            piece = slice(bucket.start + part * each, bucket.start + (part + 1) * each)
            assert np.isnan(found[piece]).all()
            found[piece] = w.masters[place]
            decay[piece] = w.decay.repeat(128)[place]
            assert mine.tobytes() == whole.params[piece].tobytes()
        assert w.own_part(whole.masters).tobytes() == w.masters.tobytes()
    assert found.tobytes() == whole.masters.tobytes()
    assert decay.tobytes() == whole.decay.repeat(128).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD"])
def test_parts_are_updated_as_the_whole_is(monkeypatch, kind, dtype):
    """16-bit parameters are written where they lie; no copy of a part is held."""
    monkeypatch.setattr(buckets, "BUCKET", 200)

    def updated(**own):
        w = Workspace(Model((0,)), dtype=dtype, parts=2, moments=("exp_avg", "exp_avg_sq"), **own)
        optimizer = getattr(optim, kind)(w, lr=0.1, weight_decay=0.1)
        rng = np.random.default_rng(0)
        for _ in range(3):
            w.grads[...] = rng.standard_normal(w.size)
            w.my_grads[...] = w.grads if w.part is None else w.own_part(w.grads)
            optimizer.update(0.1)
        return w

    whole, first, second = updated(), updated(part=0), updated(part=1)
    assert len(first.buckets) > 1
    for w in (first, second):
        assert w.masters.tobytes() == w.own_part(whole.masters).tobytes()
        for mine, place in zip(w.my_params, w.places, strict=True):
            assert mine.tobytes() == w.own_part(whole.params)[place].tobytes()
