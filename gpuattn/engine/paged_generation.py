"""Generation in which texts that begin alike share keys and values, and compute them once."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import on_gpu
from gpuattn.engine.generation import Generation
from gpuattn.engine.inputs import Inputs, rounded
from gpuattn.engine.paged_cache import Beside, HostReads, PagedCache, PromptReads, Reach
from gpuattn.engine.pages import PAGE, SlotPages, pages_of
from gpuattn.engine.steps.row_step import is_one_launch

LEAST_BESIDE = 4096  # tokens from which on keys are stored beside products
LEAST_EIGHTHS = 32  # prompts from which on seven eighths of them are a shape of their own


def generation_of(
    model: Any, slots: int, room: int, pages: int, *, batch_invariant: bool = False, **settings: Any
) -> Generation:
    """Return a Generation: with pages, unless ``paging_refusal`` has a reason.

    ``pages``: the most of them, for all slots; raised to what one text may need. ``settings``:
    other arguments of ``Generation``.
    """
    if paging_refusal(model, slots, room, batch_invariant):
        return Generation(model, slots, room, batch_invariant=batch_invariant, **settings)
    return PagedGeneration(model, slots, room, pages=max(pages, pages_of(room)) + 1, **settings)


def paging_refusal(model: Any, slots: int, room: int, batch_invariant: bool = False) -> str | None:
    """Return why each of ``slots`` texts of up to ``room`` keys has a cache of its own, or None."""
    if batch_invariant:
        return "batch_invariant: what is known of a prompt, and so its bits, hangs on other texts"
    if room <= PAGE:
        return f"texts have up to {room} keys; those of one page, {PAGE}, share none"
    if is_one_launch(model, slots, room):
        return "a step is one launch, whose texts have their keys side by side"
    return None


class PagedGeneration(Generation):
    """A Generation whose caches are pages; a prompt is computed past its longest known beginning.

    ``pages``: how many, with page 0, which is nobody's; by default enough for all slots. A text
    takes a page when its steps reach it: before it queues steps, a caller asks ``provide`` for
    their pages. ``begin`` computes full pages of prompts once for all texts that have them, now and
    as long as they are known, and the tokens behind them once for equal prompts.
    """

    def __init__(
        self, model: Any, sentences: int, room: int, *, pages: int | None = None, **settings: Any
    ) -> None:
        self.pages = SlotPages(sentences, room, pages or sentences * pages_of(room) + 1)
        super().__init__(model, sentences, room, **settings)

    def join(self, slot: int, prompt: Sequence[int], limit: int, keys: int) -> bool:
        """Give a slot pages for a text that is loaded next; see ``SlotPages.join``."""
        self.pages.leave(slot)
        joined = self.pages.join(slot, prompt, limit, keys)
        if joined:
            self._joined.add(slot)
        return joined

    def provide(self, steps: int) -> bool:
        """Give all texts pages for the next steps; False, and nothing, if there are not enough."""
        provided = self.pages.advance(steps)
        if provided:
            self._place()
        return provided

    def refresh(self, *, changed: bool) -> None:
        """Begin the work of another call. Beginnings stay known unless weights may be others."""
        super().refresh(changed=changed)
        for slot in list(self.pages.full):
            self.pages.leave(slot)
        if changed:
            self.pages.pool.forget()

    def _new_caches(self, like):
        self._beside: Beside | None = None
        self._joined: set[int] = set()  # slots whose texts are loaded next
        shape = self.pages.table.shape
        size = shape[0] * shape[1]
        self._table = Inputs(like, (size,))
        self._tables = self._table.device[:size].reshape(shape)
        own = [layer.attention for layer in self.model.layers]
        count = self.pages.pool.count
        return [PagedCache(like, self.texts, self._tables, count, x) for x in own]

    def _place(self):
        """Let kernels read the table as it is now."""
        if not self.pages.changed:
            return
        (host,) = self._table.begin((self._tables.size,))
        host[:] = self.pages.table.ravel()
        self._table.send()
        if not on_gpu(self._tables):
            reads = HostReads(self.pages)
            for cache in self.caches:
                cache.reads = reads
        self.pages.changed = False

    # ---- prompts but for their last tokens ----

    def _plan(self, prompts, limits, at):
        """Return ((prompts, tokens, pages that reach them) of each round, pages to copy)."""
        for slot, prompt, limit in zip(at.tolist(), prompts, limits, strict=True):
            if slot in self._joined:
                continue
            if not self.join(slot, prompt, limit, len(prompt) - 1 + limit):
                raise RuntimeError(f"load: no pages are left for the text in slot {slot}")
        self._joined.clear()
        self._place()
        prompts, self._copies = self.pages.to_compute()
        rounds = sorted({prompt.round for prompt in prompts})
        self._rounds = [[prompt for prompt in prompts if prompt.round == i] for i in rounds]
        copies = rounded(len(self._copies), self.texts.sentences, 1) if self._copies else 0
        return tuple(map(self._shape_of, self._rounds)), copies

    def _shape_of(self, prompts):
        """Return the shape of the launches for a round."""
        slots, room = self.texts.sentences, self.texts.room
        tokens = rounded(max([len(prompt.tokens) for prompt in prompts]), room)
        start = max([prompt.start for prompt in prompts])
        reach = rounded(pages_of(start + tokens), 2 * self.pages.table.shape[1], 1) if start else 0
        return _entries(len(prompts), slots), tokens, reach

    def _largest(self):
        slots, width = self.pages.table.shape
        aligned = ((1, PAGE, 1),) * min(slots, width)  # what the parts of each round may leave free
        return ((2 * slots, self.texts.room, 2 * width), *aligned), slots

    def _prompt_sizes(self, shape):
        """Return how many integers there are, for each round, of tokens and their positions, and of
        the arrays of its Reach; of pages to copy, from and to."""
        rounds, copies = shape
        each = []
        for count, tokens, reach in rounds:
            sizes = count * pages_of(tokens), count * reach, 2 * count + 1
            each.append([x for size in (count * tokens, *sizes) for x in (size, size)])
        return *itertools.chain.from_iterable(each), copies, copies

    def _write_prompts(self, prompts, at, host):
        *host, firsts, targets = host
        most = self.texts.room - 1
        for prompts, (count, width, reach), into in zip(
            self._rounds, self.shape[0], _by_round(host), strict=True
        ):
            tokens, positions, starts, pages, seen, places, bounds, key_bounds = into
            before, lengths = np.zeros((2, count), np.int32)
            before[: len(prompts)] = [prompt.start for prompt in prompts]
            lengths[: len(prompts)] = [len(prompt.tokens) for prompt in prompts]
            # page 0 is nobody's: what pads prompts writes it
            own = self.pages.table[[prompt.slot for prompt in prompts]]
            table = np.zeros((count, own.shape[1] + pages_of(width) + reach), np.int32)
            table[: len(own), : own.shape[1]] = own
            tokens[:] = 0
            for row, prompt in zip(tokens.reshape(count, width), prompts, strict=False):
                row[: len(prompt.tokens)] = prompt.tokens
            reached = positions.reshape(count, width)
            np.add(before[:, None], np.arange(width, dtype=np.int32), out=reached)
            if before.max() + width > most:
                np.minimum(reached, most, out=reached)
            new, each = np.arange(pages_of(width)), np.arange(count + 1)
            begins, rows = each * width, each[:-1, None]
            starts[:] = (rows * width + new * PAGE).ravel()
            pages[:] = table[rows, before[:, None] // PAGE + new].ravel()
            if not reach:  # nothing else is read
                continue
            seen[:], places[:] = table[:, :reach].ravel() * PAGE, np.arange(len(places))
            # each prompt is two sequences of flash_attention, the second of which pads it
            bounds[::2], bounds[1::2] = begins, begins[:-1] + lengths
            begins = each * reach * PAGE
            key_bounds[::2], key_bounds[1::2] = begins, begins[:-1] + before + lengths
        for x, pages in zip((firsts, targets), zip(*self._copies, strict=True), strict=False):
            x[:], x[: len(pages)] = 0, pages
        firsts *= PAGE

    def _compute_prompts(self, *before):
        """Compute the rounds, each after what it needs, and then copy pages.

        On NumPy each prompt alone and a page at a time: the bits of a page then depend on the
        tokens up to its end alone, not on what was known or on who came with it.
        """
        *before, firsts, targets = before
        if not on_gpu(self._tables):
            for prompt in itertools.chain.from_iterable(self._rounds):
                for i in range(0, len(prompt.tokens), PAGE):
                    tokens, start = prompt.tokens[None, i : i + PAGE], prompt.start + i
                    own = self.pages.table[prompt.slot]
                    positions = np.arange(start, start + tokens.shape[1], dtype=np.int32)[None]
                    self._compute(tokens, positions, Reach.of_one(own, start, tokens.shape[1]))
        else:
            for (count, width, reach), found in zip(self.shape[0], _by_round(before), strict=True):
                tokens, positions, starts, pages, seen, places, bounds, key_bounds = found
                known = {"max_seqlen_q": width, "max_seqlen_k": reach * PAGE}
                known |= {"cu_seqlens_q": bounds, "cu_seqlens_k": key_bounds}
                reads = Reach(starts, pages, seen, places, offsets=known)
                if not reach:
                    reads = Reach(starts, pages)
                shape = count, width
                self._compute(tokens.reshape(shape), positions.reshape(shape), reads)
        for cache in self.caches if len(firsts) else ():
            cache.copy(firsts, targets)

    def _compute(self, tokens, positions, reach):
        beside = None
        if on_gpu(self._tables) and tokens.size >= LEAST_BESIDE and reach.seen is None:
            beside = self._beside = self._beside or Beside()  # nothing is read back from pages
        caches = [PromptReads(cache, reach, beside) for cache in self.caches]
        with self.model.evaluating():
            self.model.fill(tokens, positions, caches=caches)
        if beside:
            beside.join()


def _entries(count, most):
    """Return ``count`` prompts rounded up to a power of two, or to seven eighths of one.

    Those are left where an eighth has begun before, see ``generation.opening``.
    """
    whole = rounded(count, most, 1)
    less = whole - whole // 8
    return less if whole >= LEAST_EIGHTHS and count <= less else whole


def _by_round(arrays):
    """Return the arrays of each round, eight of them."""
    return [arrays[i : i + 8] for i in range(0, len(arrays), 8)]
