"""The cache of one layer as pages, which texts that begin alike share: see ``engine.pages``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import import_cupy
from gpuattn.autodiff.tape import raw
from gpuattn.engine.pages import PAGE, SlotPages, pages_of
from gpuattn.ops.attention.flash_attention import flash_attention
from gpuattn.ops.attention.step_attention import step_attention
from gpuattn.ops.attention.store_rows import store_rows
from gpuattn.ops.sampling.text_update import Texts


class HostReads:
    """Which pages a step reads on NumPy: those that prompts fill once for all texts they share.

    ``groups``: (rows, pages) of texts with the same full pages of a prompt; pages are a slice where
    they lie side by side. ``full`` (S,): how many keys those of a row have. ``own`` (S, pages of
    the room): the pages behind them. ``used`` (S,) bool: whether a slot has a text.
    """

    def __init__(self, pages: SlotPages) -> None:
        slots, width = pages.table.shape
        self.table = pages.table.copy()
        self.full, self.used = np.zeros(slots, np.int64), np.zeros(slots, bool)
        by_pages: dict[bytes, list[int]] = {}
        for slot, count in pages.full.items():
            self.full[slot], self.used[slot] = count * PAGE, True
            if count:
                by_pages.setdefault(self.table[slot, :count].tobytes(), []).append(slot)
        self.groups = [
            (np.array(rows), _slice(np.frombuffer(own, np.int32))) for own, rows in by_pages.items()
        ]
        columns = (self.full // PAGE)[:, None] + np.arange(width)
        each = np.arange(slots)[:, None]
        self.own = np.where(columns < width, self.table[each, columns.clip(0, width - 1)], 0)


class PagedCache:
    """The cache of one layer for ``nn.MultiHeadAttention``, one token of each of the ``texts``.

    ``table`` (S, pages of the room): as of a SlotPages, where kernels read it. ``count``: pages.
    """

    def __init__(self, like: Any, texts: Texts, table: Any, count: int, attention: Any) -> None:
        shape = (count, PAGE, attention.kv_heads, attention.head_dim)
        self.k, self.v = arrays.zeros(like, shape), arrays.zeros(like, shape)
        self.texts, self.table = texts, table
        self.reads: HostReads | None = None  # on NumPy

    def decodes(self, q: Any) -> bool:
        """Return True: ``attend`` takes the queries of a step."""
        return True

    def attend(self, q: Any, k: Any, v: Any, **known: Any) -> Any:
        """Store k and v (S, 1, Hk, D) behind the others; return the attention of ``q``.

        ``known``: of ``step_attention``, as of ``DeviceCache``.
        """
        counts = self.texts.key_counts
        if self.reads is None:
            return step_attention(
                q, k, v, self.k, self.v, counts, page_table=self.table, **known
            )  # fmt: skip
        rows, last = np.arange(len(counts)), counts - 1
        for store, new in ((self.k, k), (self.v, v)):
            store[self.table[rows, last // PAGE], last % PAGE] = raw(new)[:, 0]
        return attend_on_host(raw(q), self.k, self.v, counts, self.reads)

    def copy(self, firsts: Any, targets: Any) -> None:
        """Copy pages, which begin in rows ``firsts``; the same pair may come twice."""
        pairs = [(store, store.reshape(-1, *store.shape[2:])) for store in (self.k, self.v)]
        store_rows(pairs, firsts, targets, PAGE)


def attend_on_host(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, counts: np.ndarray, reads: HostReads
) -> np.ndarray:
    """Return the attention of queries (S, 1, H, D) to the first ``counts`` (S,) keys of each text.

    ``k``, ``v``: pages (pages, PAGE, Hk, D). Keys of full prompt pages, and then a text's own: two
    segments, whose sums are joined. A text has the same bits whether it shares pages or not.
    """
    slots, kv_heads, head_dim = len(q), *k.shape[2:]
    rows = (q * q.dtype.type(head_dim**-0.5)).reshape(slots, kv_heads, -1, head_dim)
    own = np.where(reads.used, counts - reads.full, 1)  # keys
    most = int(own.max(initial=1))
    pages = reads.own[:, : pages_of(most)]
    own_k, own_v = (x[pages].reshape(slots, -1, kv_heads, head_dim)[:, :most] for x in (k, v))
    hidden = (np.arange(most) >= own[:, None])[:, None, None]
    with np.errstate(all="ignore"):
        p = np.matmul(rows, own_k.transpose(0, 2, 3, 1))
        np.copyto(p, -np.inf, where=hidden)
        top, shared = p.max(-1, keepdims=True), []
        for members, where in reads.groups:
            keys = k[where].reshape(-1, kv_heads, head_dim)
            logits = np.matmul(rows[members], keys.transpose(1, 2, 0))
            top[members] = np.maximum(top[members], logits.max(-1, keepdims=True))
            shared.append(logits)
        p = np.exp(p - top)
        own_v = np.where(hidden[:, 0, 0, :, None, None], v.dtype.type(0), own_v)
        out, total = np.matmul(p, own_v.transpose(0, 2, 1, 3)), p.sum(-1, keepdims=True)
        for (members, where), logits in zip(reads.groups, shared, strict=True):
            p = np.exp(logits - top[members])
            values = v[where].reshape(-1, kv_heads, head_dim).transpose(1, 0, 2)
            out[members] += np.matmul(p, values)
            total[members] += p.sum(-1, keepdims=True)
        out /= total
    return out.reshape(q.shape)


class Reach(NamedTuple):
    """Where the keys of n prompts of T tokens go, and which keys the queries of these see.

    Prompts begin with a page. ``firsts``, ``pages``: int32 (n * pages of T,), the tokens among all
    n * T that are the first ones of pages, and these pages. ``seen``: int32 (n * reach,), the first
    rows of pages that are read, ``reach`` for each prompt, and ``places``: 0, 1, ...; None where
    each token sees those of its own call alone. ``keys``: how many keys there are of one prompt.
    ``offsets``: of flash_attention, for many. All on the device of the cache.
    """

    firsts: Any
    pages: Any
    seen: Any = None
    places: Any = None
    keys: int = 0
    offsets: dict[str, Any] | None = None

    @classmethod
    def of_one(cls, own: np.ndarray, start: int, tokens: int) -> "Reach":
        """Return that of up to PAGE tokens of a prompt with the pages ``own``, on NumPy."""
        first, total = start // PAGE, start + tokens
        seen = own[: pages_of(total)] * PAGE
        places = np.arange(len(seen))
        return cls(np.zeros(1, np.int32), own[first : first + 1], seen, places, keys=total)


class Beside:
    """A second stream for copies, which wait for memory, beside products on the current one.

    In a CUDA graph it is a branch, which ``join`` ends.
    """

    def __init__(self) -> None:
        self._cuda = import_cupy().cuda
        self._stream = self._cuda.Stream(non_blocking=True)
        self._read: tuple[Any, ...] = ()

    def run(self, call: Callable[[], Any], *read: Any) -> None:
        """Queue what ``call`` launches, which reads the arrays ``read``.

        They are held until the next call of ``run`` or ``join``, in which the current stream waits
        for it.
        """
        self.join()
        self._wait(self._stream, self._cuda.get_current_stream())
        with self._stream:
            call()
        self._read = read

    def join(self) -> None:
        """Let the current stream wait for what was queued."""
        if self._read:
            self._wait(self._cuda.get_current_stream(), self._stream)
            self._read = ()

    def _wait(self, stream, other):
        stream.wait_event(other.record(self._cuda.Event(disable_timing=True)))


class PromptReads:
    """A PagedCache while the keys of prompts are computed, as ``reach`` says.

    ``beside``: where keys are stored, if not on the current stream.
    """

    def __init__(self, cache: PagedCache, reach: Reach, beside: Beside | None = None) -> None:
        self.cache, self.reach, self.beside = cache, reach, beside

    def decodes(self, q: Any) -> bool:
        """Return True: ``attend`` takes the queries of a call."""
        return True

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Store k and v (n, T, Hk, D); return the causal attention of ``q`` (n, T, H, D)."""
        self.store(k, v)
        reach, stores = self.reach, (self.cache.k, self.cache.v)
        if reach.seen is None:
            return flash_attention(q, k, v, causal=True)
        shape = len(reach.seen), *self.cache.k.shape[1:]
        read = [arrays.empty(store, shape) for store in stores]
        rows = [store.reshape(-1, *store.shape[2:]) for store in stores]
        store_rows(list(zip(read, rows, strict=True)), reach.seen, reach.places, PAGE)
        k, v = (x.reshape(-1, *x.shape[2:]) for x in read)
        if reach.offsets is None:
            return flash_attention(q, k[None, : reach.keys], v[None, : reach.keys], causal=True)
        packed_q = raw(q).reshape(-1, *q.shape[2:])
        return flash_attention(packed_q, k, v, causal=True, **reach.offsets).reshape(q.shape)

    def store(self, k: Any, v: Any) -> None:
        """Store k and v (n, T, Hk, D)."""
        packed = [raw(x).reshape(-1, *x.shape[2:]) for x in (k, v)]
        pairs = list(zip((self.cache.k, self.cache.v), packed, strict=True))
        own = pairs, self.reach.firsts, self.reach.pages, min(PAGE, k.shape[1])
        if self.beside is None:
            store_rows(*own)
        else:
            self.beside.run(partial(store_rows, *own), *packed)


def _slice(pages: np.ndarray) -> Sequence[int] | slice | np.ndarray:
    """Return the pages as a slice where they lie side by side: its reads copy nothing."""
    first = int(pages[0])
    beside = (pages == np.arange(first, first + len(pages))).all()
    return slice(first, first + len(pages)) if beside else pages
