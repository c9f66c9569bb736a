"""Pages of texts by random operations: nothing lost, nothing twice, bounds kept."""

import itertools

import numpy as np
import pytest

from gpuattn.engine.pages import PAGE, PagePool, SlotPages, mostly_shared, new_pages, pages_of


def check_pool(pool, texts):
    """``texts``: lists of the pages that texts use."""
    users = np.bincount([page for pages in texts for page in pages], minlength=pool.count)
    assert pool._users == users.tolist() and not users[0]
    free, idle = set(pool._free), set(pool._idle)
    used = set(np.flatnonzero(users).tolist())
    assert len(free) == len(pool._free) and not free & idle and not (free | idle) & used
    assert free | idle | used == set(range(1, pool.count))
    assert {page: run for run in pool._runs.values() for page in run.pages} == pool._known
    assert sum(len(run.pages) for run in pool._runs.values()) == len(pool._known)
    assert idle <= set(pool._known) and not free & set(pool._known)
    for (before, first), run in pool._runs.items():
        assert run.pages and run.tokens.startswith(first)
        assert not before or before in pool._known, "a known page follows one that is not"
        for one, page in itertools.pairwise([before, *run.pages]):
            assert page in idle or one not in idle, "a used page follows one that is idle"


@pytest.mark.parametrize("seed", range(20))
def test_texts_in_slots(seed):
    """Texts of a few beginnings join, grow and leave; the pages are those of a model of them."""
    rng = np.random.default_rng(seed)
    slots, room = int(rng.integers(1, 9)), int(rng.choice([70, 256, 400]))
    pages = SlotPages(slots, room, pages_of(room) + 1 + int(rng.integers(0, 20)))
    content = {}  # page -> the tokens up to its end that it holds keys of
    texts, most = {}, {}  # by slot: tokens so far; the most of them
    common = rng.integers(0, 3, room).astype(np.int32)
    for _ in range(200):
        kind, slot = rng.integers(4), int(rng.integers(slots))
        if kind == 0 and slot not in texts:
            prompt = common[: rng.integers(1, room + 1)].copy()
            prompt[rng.integers(len(prompt)) :] += int(rng.integers(3))
            limit = int(rng.integers(1, room - len(prompt) + 2))
            before, keys = pages.table.copy(), int(rng.integers(room))
            if pages.join(slot, prompt, limit, keys):
                texts[slot], most[slot] = list(prompt), len(prompt) - 1 + limit
            else:
                assert texts, "one text alone always fits"
                assert (pages.table == before).all()
        elif kind == 1 and texts:
            compute(pages, content)
            steps = int(rng.integers(1, 40))
            before = pages.table.copy()
            if pages.advance(steps):
                for slot, text in texts.items():
                    for _ in range(min(steps, most[slot] - len(text) + 1)):
                        page = pages.table[slot, (len(text) - 1) // PAGE]
                        content[page] = tuple(text)
                        text.append(int(rng.integers(5)))
            else:
                assert len(texts) > 1 and (pages.table == before).all()
        elif kind == 2 and slot in texts:
            compute(pages, content)
            pages.leave(slot)
            del texts[slot], most[slot]
        elif kind == 3 and rng.integers(10) == 0:
            compute(pages, content)
            pages.pool.forget()
        check_pool(pages.pool, pages._own.values())
        assert sorted(pages._own) == sorted(texts) and all(slot in pages for slot in texts)
        compute(pages, content)
        for slot in range(slots):
            own, keys = pages._own.get(slot, []), len(texts.get(slot, [1])) - 1
            assert pages.table[slot].tolist() == own + [0] * (pages.table.shape[1] - len(own))
            for i in range(0, keys, PAGE):
                end = min(i + PAGE, keys)
                assert content[own[i // PAGE]][i:end] == tuple(texts[slot][i:end])
                assert content[own[i // PAGE]][:i] == tuple(texts[slot][:i])


def compute(pages, content):
    """Do as a device does: compute and copy the keys of prompts."""
    prompts, copies = pages.to_compute()
    for number in range(max((prompt.round for prompt in prompts), default=-1) + 1):
        now = [prompt for prompt in prompts if prompt.round == number]
        found = {}
        for prompt in now:
            own, start = pages._own[prompt.slot], prompt.start
            known = content[own[start // PAGE - 1]] if start else ()
            assert len(known) == start, "what a round needs is computed before it"
            text = known + tuple(prompt.tokens.tolist())
            for i in range(start, len(text), PAGE):
                assert own[i // PAGE] not in found, "two compute a page"
                found[own[i // PAGE]] = text[: i + PAGE]
        content |= found
    for source, target in copies:
        content[target] = content[source]


def tokens_of(*parts):
    return np.repeat(parts, PAGE).astype(np.int32)


def test_equal_beginnings_share_pages_at_once_and_later():
    pages = SlotPages(4, 4 * PAGE, 40)
    system = tokens_of(1, 2)
    for slot, end in enumerate([[5, 6], [5, 6], [7, 8]]):
        assert pages.join(slot, [*system, *end], 9)
    assert (pages.table[:3, :2] == pages.table[0, :2]).all()
    assert len(set(pages.table[:3, 2])) == 3
    prompts, copies = pages.to_compute()
    assert [(p.slot, len(p.tokens), p.start, p.round) for p in prompts] == [
        (0, 2 * PAGE + 1, 0, 0), (2, 1, 2 * PAGE, 1),
    ]  # fmt: skip
    assert copies == [(pages.table[0, 2], pages.table[1, 2])]
    shared = pages.table[0, :2].copy()
    for slot in range(3):
        pages.leave(slot)
    assert pages.pool.available == 39 and not pages.table.any()
    assert pages.join(3, [*system, 9], 1) and (pages.table[3, :2] == shared).all()
    assert pages.to_compute() == ([], [])
    pages.leave(3)
    pages.pool.forget()
    assert pages.join(3, [*system, 9], 1) and len(pages.to_compute()[0]) == 1


def test_idle_pages_go_the_longest_unused_first():
    pool = PagePool(5)
    old, _ = pool.join(tokens_of(1, 2), 2)
    new, _ = pool.join(tokens_of(3), 1)
    pool.release(new)
    pool.release(old)
    assert pool.available == 4
    assert pool.join(tokens_of(3), 1) == (new, 1)  # used again, so the last to go
    pool.release(new)
    pool.join(tokens_of(4, 5), 2)  # one is free; then the end of the oldest text goes
    assert pool.join(tokens_of(1), 1) == (old[:1], 1)
    assert pool.join(tokens_of(1, 2), 2)[1] == 1
    assert pool.join(tokens_of(6), 1) is None


def test_how_many_pages_texts_need():
    system = tokens_of(1, 2)
    prompts = [[*system, 5], [*system, 6, 7], [*system[:PAGE], *tokens_of(9), 5], [3], [*system, 5]]
    assert new_pages(prompts, [1, PAGE, 0, 2, 0]) == [3, 2, 1, 1, 0]
    assert not mostly_shared(prompts[2:]) and mostly_shared(prompts[:2] + prompts[4:])
    assert not mostly_shared([]) and not mostly_shared([[5]] * 9)


@pytest.mark.parametrize("make, said", [
    (lambda: PagePool(1), "count is 1"), (lambda: SlotPages(2, 130, 3), "more than 3, for one"),
])  # fmt: skip
def test_too_few_pages(make, said):
    with pytest.raises(ValueError, match=said):
        make()
