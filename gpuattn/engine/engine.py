"""Generate texts with a trained model: many at a time, the search on the device.

On a GPU a step of the search is a CUDA graph. The host queues replays in bursts. While one burst
runs it reads how many sentences were left after the burst before, so the GPU does not wait for the
host. On NumPy the searches of ``gpuattn.decode`` run instead; tests compare the engine with them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp, import_cupy, on_gpu, to_cpu
from gpuattn.data.batching import PackedLoader
from gpuattn.decode.batches import search_all
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import BeamOptions, SampleOptions
from gpuattn.decode.stepper import Hypothesis, hypotheses_of
from gpuattn.engine import generation
from gpuattn.engine.beam import TranslationSearch
from gpuattn.errors import problem
from gpuattn.ops.sampling.beam_step import MAX_BEAM
from gpuattn.ops.sampling.beam_update import best_texts
from gpuattn.runtime.device import batch_to
from gpuattn.runtime.graphs import Replays, warn
from gpuattn.runtime.readback import Reading

BURST = 4  # steps between two looks at how many sentences still run
SCORED_TOKENS = 8192  # of a batch of pairs to score, on each side
MAX_TOKENS = 1 << 18  # cached tokens, beams x their room, of all searches that are kept


def refusal(options: BeamOptions, prefix: Any = None) -> str | None:
    """Return why the device cannot run a search, so that ``decode.beam`` does, or None."""
    only = BeamOptions(eos=options.eos[:1])
    for name in ("stopping", "patience", "end_counts", "renormalise"):
        asked, there = getattr(options, name), getattr(only, name)
        if asked != there:
            return f"{name} is {asked!r}, the search on the device has {there!r}"
    if len(options.eos) > 1:
        return f"there are {len(options.eos)} end marks, the search on the device takes one"
    if options.by_text:
        return "no_repeat_ngram and repetition_penalty are not in the search on the device"
    if prefix is not None:
        return "texts have a prefix, the search on the device takes none"
    if options.beam > MAX_BEAM:
        return f"the beam is {options.beam}, the search on the device takes at most {MAX_BEAM}"
    return None


class Engine:
    """Generates with ``model``, on the device where its parameters are.

    ``max_rows``: the most beams of all sentences of a batch together. ``notify(sentence)``: called
    with the reason where steps cannot be CUDA graphs or the search cannot run on the device; by
    default it warns.
    """

    def __init__(self, model: Any, *, max_rows: int = 2048, notify: Any = warn) -> None:
        self.model, self.max_rows, self._notify = model, max_rows, notify
        self.on_gpu = on_gpu(model.parameters()[0].data)
        self._searches: dict = {}  # what a search is for -> TranslationSearch or Generation
        self._weights: tuple | None = None  # addresses of the parameters that graphs read
        if self.on_gpu:
            self._stream = import_cupy().cuda.Stream(non_blocking=True)
            with self._stream:
                self._replays = Replays(notify)

    def translate(
        self, sources: Sequence[Sequence[int]], *, limits: Sequence[int], **options: Any
    ) -> list[list[Hypothesis]]:
        """Return for each source a list of up to ``nbest`` Hypotheses, the best first.

        Arguments and errors: those of ``translations``.
        """
        found: list = [[] for _ in sources]
        for chosen, hypotheses in self.translations(sources, limits=limits, **options):
            for i, best in zip(chosen, hypotheses, strict=True):
                found[i] = best
        return found

    def translations(
        self, sources: Sequence[Sequence[int]], *, limits: Sequence[int], bos: int,
        prefix: Sequence[Sequence[int]] | None = None, batch_tokens: int | None = None,
        **settings: Any,
    ) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:  # fmt: skip
        """Yield (indices of sources, their lists of up to ``nbest`` Hypotheses), batch by batch.

        ``sources``: token ids without marks. ``limits``: the most tokens of each translation, the
        end mark included. ``batch_tokens``: beams of a batch times their greatest length, at most.
        Other arguments as in ``decode.beam.beam_search``, which also searches where the device
        cannot: ``notify`` is then called with the reason. Batches are of similar lengths, the
        longest first. A translation does not depend on the sources in its batch, but
        for rounding. Raises ValueError for settings out of range and for texts longer than the
        model's ``max_length``.
        """
        options = BeamOptions(**settings)
        most = self.model.config.max_length
        if max(limits, default=0) > most:
            accepted = f"up to the model's max_length, {most}"
            raise ValueError(problem("translate", "a limit", max(limits), accepted))
        reason = refusal(options, prefix)
        if self.on_gpu and reason:
            self._notify(reason)
        if reason or not self.on_gpu:
            yield from self._on_host(sources, limits, bos, prefix, options, batch_tokens)
            return
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        tokens = options.beam * _rounded(max(limits, default=1), most)
        size = max(1, min(self.max_rows // options.beam, (batch_tokens or MAX_TOKENS) // tokens))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            batch = [sources[i] for i in chosen], [limits[i] for i in chosen]
            yield chosen, self._on_device(*batch, bos, options)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, limits: Sequence[int], eos: Any = None,
        temperature: float = 1.0, seed: Any = None, numbers: Sequence[int] | None = None,
        tell: Callable[[int, list[int]], None] | None = None, **settings: Any,
    ) -> list[Hypothesis]:  # fmt: skip
        """Return for each prompt a Hypothesis: the tokens that a language model continues it by.

        ``prompts``: token ids, 1 or more each. ``limits``: the most new tokens of each. ``eos``:
        the token that ends a text, or None. ``temperature`` 0 takes the most probable token each
        time. ``seed``, ``numbers`` (the number of each sample) and ``settings`` as in
        ``decode.sample.sample``, which also draws where the device cannot: ``notify`` is then
        called with the reason. The tokens of a text depend on its prompt, number and seed, not on
        its batch, but for rounding. ``tell(i, tokens)``: called with the next tokens of text i
        whenever some are known. Raises ValueError for settings out of range, and for a prompt and
        limit that are longer than the model's ``block`` + 1.
        """
        if temperature == 0:
            temperature, settings = 1.0, settings | {"top_k": 1}
        options = SampleOptions(eos=eos, temperature=temperature, **settings)
        generation.check(self.model, prompts, limits, options)
        numbers = range(len(prompts)) if numbers is None else numbers
        key, reason = rng.as_key(seed), generation.refusal(options)
        if self.on_gpu and reason:
            self._notify(reason)
        if reason or not self.on_gpu:
            found = generation.on_host(self.model, prompts, limits, numbers, key, asdict(options))
            if tell:
                generation.Told(tell, range(len(found))).all(found)
            return found
        keys = [len(prompt) - 1 + limit for prompt, limit in zip(prompts, limits, strict=True)]
        order = sorted(range(len(prompts)), key=lambda i: -keys[i])
        results: list = [None] * len(prompts)
        while order:
            room = _rounded(max(1, keys[order[0]]), self.model.config.block)
            size = max(1, min(self.max_rows, MAX_TOKENS // room))
            chosen, order = order[:size], order[size:]
            told = generation.Told(tell, chosen) if tell else None
            batch = [[given[i] for i in chosen] for given in (prompts, limits, numbers)]
            texts = self._generated(batch, key, options, room, size, told)
            for i, text in zip(chosen, texts, strict=True):
                results[i] = text
            if told:
                told.all(texts)
        return results

    def score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        batch_tokens: int = SCORED_TOKENS,
    ) -> list[np.ndarray]:
        """Return, for each (source, target), the log-probabilities of the target's tokens.

        ``pairs``: token ids without marks. Each result is float32 (tokens + 1,), the end mark last;
        its sum is the ``score`` of a Hypothesis that has ended. ``batch_tokens``: of a packed
        batch, on each side; raised to the longest text. Raises ValueError for texts longer than the
        model's ``max_length``.
        """
        if not pairs:
            return []
        longest = max(len(side) for pair in pairs for side in pair) + 1
        xp = get_xp(self.model.parameters()[0].data)
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(pairs)
        for batch in PackedLoader(pairs, max(batch_tokens, longest), seed=0).epoch(0):
            scores = to_cpu(self.model.log_probabilities(batch_to(batch, xp)))
            parts = np.split(scores, batch.cu_target[1:-1])
            for i, part in zip(batch.sentences, parts, strict=True):
                found[i] = part
        return found

    def _on_host(self, sources, limits, bos, prefix, options, batch_tokens):
        def search(stepper, chosen):
            most = [limits[i] for i in chosen]
            given = None if prefix is None else [prefix[i] for i in chosen]
            return beam_search(stepper, bos=bos, max_length=most, prefix=given, **asdict(options))

        return search_all(
            self.model, sources, search, limits=limits, beam=options.beam, max_rows=self.max_rows,
            batch_tokens=batch_tokens,
        )  # fmt: skip

    def _on_device(self, sources, limits, bos, options):
        cupy, beam = import_cupy(), options.beam
        ready = cupy.cuda.get_current_stream().record()
        with self._stream:
            self._stream.wait_event(ready)
            most = self.model.config.max_length
            sizes = _rounded(max(limits), most), _rounded(max(map(len, sources)) + 1, most)
            sentences = _rounded(len(sources), self.max_rows // beam, least=1)
            key = sentences, beam, *sizes, bos, options
            search = self._kept(key, lambda: TranslationSearch(
                self.model, *key[:4], divisor=options.divisor, bos=bos,
                eos=options.eos[0] if options.eos else -1, banned=options.banned,
                nbest=options.nbest, min_length=options.min_length,
            ))  # fmt: skip
            search.load(sources, limits)
            self._replays("encode", (key, search.token_room), search.encode)
            self._run(key, search, max(limits))
            texts = map(to_cpu, best_texts(search.beams, search.nbest))
            empty = [Hypothesis([], 0.0, 0.0, False)]
            found = zip(hypotheses_of(*texts, limits), limits, strict=True)
            return [hypotheses if limit else empty for hypotheses, limit in found]

    def _generated(self, batch, key, options, room, size, told):
        """Return the Hypotheses of a ``batch``: up to ``size`` prompts, limits and numbers."""
        prompts, limits, _ = batch
        cupy, most = import_cupy(), self.model.config.block
        eos, banned = options.eos[0] if options.eos else -1, options.banned
        if options.min_length and options.eos:
            banned = tuple({*banned, eos})
        draws = {name: getattr(options, name) for name in generation.DRAWS}
        longest = max(map(len, prompts)) - 1
        before = _rounded(longest, most) if longest else 0
        ready = cupy.cuda.get_current_stream().record()
        with self._stream:
            self._stream.wait_event(ready)
            sentences = _rounded(len(prompts), size, least=1)
            name = sentences, 1, room, before, tuple(draws.values()), eos, bool(banned)
            search = self._kept(name, lambda: generation.Generation(
                self.model, sentences, room, before, draws=draws, eos=eos, masked=bool(banned)
            ))  # fmt: skip
            search.load(*batch, key, banned)
            self._replays("begin", (name,), search.begin)
            texts, behind = search.texts, None
            read = (texts.live, texts.lengths, texts.history) if told else (texts.live,)
            for step in range(max(limits)):
                if step == options.min_length and len(banned) > len(options.banned):
                    search.allow_end()
                self._replays("step", (name,), search.step)
                if (eos >= 0 or told) and (step + 1) % BURST == 0:
                    if behind is not None:
                        (live, *known) = behind.values()
                        if told:
                            told.add(*known)
                        if live[0] == 0:
                            break
                    behind = Reading(*read)
            return generation.hypotheses(texts, len(prompts))

    def _kept(self, key, new):
        """Return the search for ``key``; graphs read parameters where they were at capture."""
        weights = tuple(parameter.data.data.ptr for parameter in self.model.parameters())
        if weights != self._weights:
            self._drop(len(self._searches))
            self._weights = weights
        if key not in self._searches:
            sentences, beam, room, *_ = key
            tokens = sentences * beam * room
            while self._searches and tokens + self._kept_tokens() > MAX_TOKENS:
                self._drop(1)
            self._searches[key] = new()
        return self._searches[key]

    def _kept_tokens(self):
        return sum(sentences * beam * room for sentences, beam, room, *_ in self._searches)

    def _drop(self, count):
        """Delete the oldest searches and their graphs."""
        for key in list(self._searches)[:count]:
            del self._searches[key]
            self._replays.forget(lambda name, shape, key=key: shape[0] == key)

    def _run(self, key, search, steps):
        """Queue bursts of steps until none of the sentences was left after the last but one."""
        behind = None
        for begin in range(0, steps, BURST):
            for _ in range(min(BURST, steps - begin)):
                self._replays("step", (key,), search.step)
            reading = Reading(search.beams.live)
            if behind is not None and behind.values()[0][0] == 0:
                break
            behind = reading


def _rounded(count, most, least=16):
    """Return ``count`` rounded up to a power of two, or beyond 256 to a multiple of 64.

    From ``least`` to ``most``. Batches whose rounded sizes are equal share a search.
    """
    rounded = max(least, 1 << (count - 1).bit_length()) if count <= 256 else -(-count // 64) * 64
    return max(count, min(rounded, most))
