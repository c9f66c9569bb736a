"""Generate texts with a trained model: many at a time, the search on the device.

On a GPU a step of the search is a CUDA graph. The host queues replays in bursts. While one burst
runs it reads which sentences were done after the burst before, so the GPU does not wait for the
host; their places in the batch are taken by others that wait (``scheduler``, ``lane``). On NumPy
the searches of ``gpuattn.decode`` run instead, batch after batch; tests compare the engine with
them. Requests that are submitted run in slots on NumPy too.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp, on_gpu, to_cpu
from gpuattn.data.batching import PackedLoader
from gpuattn.decode.batches import search_all
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import BeamOptions
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import arguments, generation, lookup
from gpuattn.engine.inputs import rounded
from gpuattn.engine.lane import Lane, Request
from gpuattn.engine.lookup import Speculation
from gpuattn.engine.pages import mostly_shared
from gpuattn.engine.plans import Plans
from gpuattn.engine.request import Handle
from gpuattn.engine.runner import Queued, Runner
from gpuattn.engine.scheduler import Scheduler
from gpuattn.engine.searches import Searches
from gpuattn.errors import ConfigError, problem, type_of
from gpuattn.ops.arguments import check_flags
from gpuattn.runtime.device import batch_to
from gpuattn.runtime.graphs import warn

SCORED_TOKENS = 8192  # of a batch of pairs to score, on each side


class Engine:
    """Generates with ``model``, on the device where its parameters are.

    ``max_rows``: the most beams of all sentences that run together. ``notify(sentence)``: called
    with the reason where steps cannot be CUDA graphs or the search cannot run on the device; by
    default it warns. The parameters may change, in place too, while no request runs.

    ``fixed_weights``: parameters keep their values while the engine is used. They are then packed
    for its steps once, not in each call, and the beginnings of prompts whose keys and values are
    known stay known from call to call, while there is room for them.

    ``batch_invariant``: the tokens and scores of a text are the same bits whatever runs with it,
    and in any order: alone, in a full batch, in a slot that others had. They then depend on the
    model, the device, its libraries, ``max_rows``, ``batch_tokens`` and the text's own settings and
    lengths alone. On a GPU each step has ``max_rows`` rows however few texts there are, so choose
    it for the load, and sources or prompts are computed 2048 tokens at a time, those that are
    missing too. On NumPy products are computed 16 rows at a time. Settings that the search on the
    device lacks are refused. ``score`` is as without.

    >>> import gpuattn
    >>> from gpuattn.models.gpt2 import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocab=40, d_model=32, heads=2, layers=2, block=64)).eval()
    >>> with gpuattn.Engine(model) as engine:
    ...     one = engine.submit([3, 1, 4], limit=6, seed=1)
    ...     other = engine.submit([1, 5], limit=9, temperature=0)
    ...     tokens = [token for token in one]  # as they come
    ...     (text,) = other.result()
    >>> tokens == one.result()[0].tokens, len(text.tokens)
    (True, 9)
    """

    def __init__(
        self, model: Any, *, max_rows: int = 2048, notify: Any = warn,
        batch_invariant: bool = False, fixed_weights: bool = False,
    ) -> None:  # fmt: skip
        check_flags("Engine", batch_invariant=batch_invariant, fixed_weights=fixed_weights)
        if not hasattr(model, "config"):
            accepted = "a translator or a language model of gpuattn.models"
            raise TypeError(problem("Engine", "model", type_of(model), accepted))
        self.model, self.max_rows, self._notify = model, max_rows, notify
        self.batch_invariant = batch_invariant
        self.on_gpu = on_gpu(model.parameters()[0].data)
        self._searches = Searches(model, notify, invariant=batch_invariant, fixed=fixed_weights)
        self._plans = Plans(model, max_rows, self._searches, invariant=batch_invariant)
        self._runner = Runner(self._searches, on_gpu=self.on_gpu)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all submitted requests and wait until they have ended; take no more."""
        self._runner.close()

    def submit(
        self, tokens: Sequence[int], *, limit: int, priority: int = 0, **settings: Any
    ) -> Handle:
        """Let a thread of the engine work on a request; return its Handle at once.

        ``tokens``: a source to translate, without marks, or a prompt to continue. ``limit``: the
        most new tokens. ``settings``: of ``translations``, with ``prefix`` a list of tokens, or of
        ``generate``, with ``number`` that of the sample. Requests share steps with others of the
        same settings and of similar lengths. They wait for a slot by ``priority``, the greatest
        first, then by age; ``scheduler.Scheduler`` says how none waits for ever. Where there is no
        memory for another kind of search, its requests wait until others are over.

        Raises ValueError, before anything runs, as ``translations`` and ``generate`` do, and
        RuntimeError after ``close``. An error while it runs ends the request: ``result`` raises it.
        """
        if arguments.is_translator(self.model):
            return self._submit_source(tokens, limit, priority, **settings)
        return self._submit_prompt(tokens, limit, priority, **settings)

    def translate(
        self, sources: Sequence[Sequence[int]], *, limits: Sequence[int], **options: Any
    ) -> list[list[Hypothesis]]:
        """Return for each source a list of up to ``nbest`` Hypotheses, the best first.

        Arguments and errors: those of ``translations``.
        """
        found: dict[int, list[Hypothesis]] = {}
        for chosen, hypotheses in self.translations(sources, limits=limits, **options):
            found.update(zip(chosen, hypotheses, strict=True))
        return [found[i] for i in range(len(sources))]

    def translations(
        self, sources: Sequence[Sequence[int]], *, limits: Sequence[int], bos: int,
        prefix: Sequence[Sequence[int]] | None = None, batch_tokens: int | None = None,
        **settings: Any,
    ) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:  # fmt: skip
        """Yield (indices of sources, their lists of up to ``nbest`` Hypotheses), as they are found.

        ``sources``: token ids without marks. ``limits``: the most tokens of each translation, the
        end mark included. ``batch_tokens``: beams that run together times their greatest length, at
        most. Other arguments as in ``decode.beam.beam_search``, which also searches where the
        device cannot: ``notify`` is then called with the reason. The longest sources come first;
        others take the places of those that are done. A translation does not depend on the sources
        that run with it, but for rounding. Raises ValueError for settings out of range and for
        texts longer than the model's ``max_length``, TypeError for unknown settings, for arguments
        of other types and for a language model.
        """
        arguments.check_model("translate", self.model, translates=True)
        options = BeamOptions.of(settings)
        lengths = arguments.lengths_of(sources, limits, self.model.config.max_length)
        if self._by_host(options):
            yield from self._on_host(sources, limits, bos, prefix, options, batch_tokens)
            return
        prefixes = arguments.prefixes_of(options, bos, limits, prefix, self.model.config.vocab)
        order = list(range(len(limits)))
        if 0 in limits:
            empty, order = [i for i in order if limits[i] == 0], [i for i in order if limits[i]]
            yield empty, [[_no_text()] for _ in empty]
        order.sort(key=lengths.__getitem__, reverse=True)
        requests = [Request(sources[i], limits[i], prefixes[i], 0, None, i) for i in order]
        for plan, alike in self._plans.of_sources(requests, bos, options, batch_tokens):
            with contextlib.closing(self._flow(plan, alike)) as flow:  # also where a caller stops
                for found in flow:
                    yield [request.owner for request, _ in found], [texts for _, texts in found]

    def generate(
        self, prompts: Sequence[Sequence[int]], *, limits: Sequence[int], eos: Any = None,
        temperature: float = 1.0, seed: Any = None, numbers: Sequence[int] | None = None,
        tell: Callable[[int, list[int]], None] | None = None,
        speculate: Speculation | None = None, **settings: Any,
    ) -> list[Hypothesis]:  # fmt: skip
        """Return for each prompt a Hypothesis: the tokens that a language model continues it by.

        ``prompts``: token ids, 1 or more each. ``limits``: the most new tokens of each. ``eos``:
        the tokens that end a text, or None. ``temperature`` 0 takes the most probable token each
        time. ``seed``, ``numbers`` (the number of each sample) and ``settings`` as in
        ``decode.sample.sample``. The tokens of a text depend on its prompt, number and seed, not on
        its batch, but for rounding. ``tell(i, tokens)``: called with the next tokens of text i
        whenever some are known. Prompts that begin alike share keys and values, see ``pages``.
        ``speculate``: with temperature 0, several tokens in a pass where a text repeats itself, see
        ``lookup``. The tokens are those of generating without, but for rounding: passes of other
        sizes add in other orders, so two tokens with nearly equal logits may change places. Raises
        ValueError for settings out of range, for those that ``speculate`` does not take, and for a
        prompt and limit that are longer than the model's ``block`` + 1; TypeError for unknown
        settings, for arguments of other types and for a translator; IndexError for a token that is
        not in the vocabulary.
        """
        arguments.check_model("generate", self.model, translates=False)
        options = arguments.sampling(eos, temperature, settings)
        lengths = generation.check_lengths(self.model, prompts, limits, options)
        if speculate is not None:
            lookup.check(options, temperature, self.batch_invariant)
            generation.read_tokens(self.model, prompts)
            return self._speculated(prompts, limits, options, speculate, tell)
        numbers = range(len(prompts)) if numbers is None else numbers
        key = rng.as_key(seed)
        # NumPy is faster in batches of one length, unless most of the prompts is computed once
        if not (self.on_gpu or self.batch_invariant or mostly_shared(prompts)):
            generation.read_tokens(self.model, prompts)
            found = generation.on_host(self.model, prompts, limits, numbers, key, asdict(options))
            for i, text in enumerate(found):
                if tell and text.tokens:
                    tell(i, list(text.tokens))
            return found
        results = [_no_text() for _ in prompts]
        order = [i for i, limit in enumerate(limits) if limit]
        order.sort(key=lambda i: lengths[i] + limits[i], reverse=True)
        requests = [Request(prompts[i], limits[i], (), numbers[i], key, i, False) for i in order]

        def say(request, tokens):
            tell(request.owner, tokens)

        for plan, alike in self._plans.of_prompts(requests, options):
            for over in self._flow(plan, alike, say if tell else None):
                for request, (text,) in over:
                    results[request.owner] = text
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
        model's ``max_length``, TypeError for a language model.
        """
        arguments.check_model("score", self.model, translates=True)
        if not pairs:
            return []
        longest = max(len(side) for pair in pairs for side in pair) + 1
        xp = get_xp(self.model.parameters()[0].data)
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(pairs)
        config, size = self.model.config, max(batch_tokens, longest)
        for batch in PackedLoader(pairs, size, 0, bos=config.bos, eos=config.eos).epoch(0):
            scores = to_cpu(self.model.log_probabilities(batch_to(batch, xp)))
            parts = np.split(scores, batch.cu_target[1:-1])
            for i, part in zip(batch.sentences, parts, strict=True):
                found[i] = part
        return found

    def _speculated(self, prompts, limits, options, speculation, tell):
        """Return what ``generate`` does, by ``lookup`` as long as enough proposals hold."""
        texts = [
            lookup.Text(Request(prompt, limit, owner=i))
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        order = sorted((text for text in texts if not text.over), key=lambda text: -text.most_keys)
        given_up = speculation.given_up
        for first in range(0, len(order), lookup.MOST_TEXTS):
            if speculation.given_up == given_up:
                for found in self._passes(order[first : first + lookup.MOST_TEXTS], options,
                                          speculation):  # fmt: skip
                    for text, tokens in found if tell else ():
                        tell(text.request.owner, tokens)
        left = [text for text in texts if not text.over]
        rest = self.generate(
            [[*text.request.tokens, *text.tokens] for text in left],
            limits=[text.request.limit - len(text.tokens) for text in left], temperature=0,
            eos=options.eos, banned=options.banned,
            tell=tell and (lambda i, tokens: tell(left[i].request.owner, tokens)),
        )  # fmt: skip
        for text, more in zip(left, rest, strict=True):
            text.extend(more)
        return [text.hypothesis() for text in texts]

    def _passes(self, texts, options, speculation):
        """Yield what ``lookup.passes`` does. Another thread may queue its launches in between."""
        searches, count = self._searches, rounded(len(texts), lookup.MOST_TEXTS, 1)
        room = rounded(max(text.most_keys for text in texts), self.model.config.block)
        key = count, 1, room, speculation.tokens, options.banned

        def new():
            return lookup.LookupSearch(self.model, count, room, speculation.tokens, options.banned)

        with searches.lent(key, new) as search:

            def run(name, step):
                searches.run(name, (search, search.width), step)

            turns, found = lookup.passes(search, texts, options.eos, speculation, run), []
            while found is not None:
                yield found
                with searches.lock, searches.on_stream():
                    found = next(turns, None)

    def _on_host(self, sources, limits, bos, prefix, options, batch_tokens=None):
        def search(stepper, chosen):
            most = [limits[i] for i in chosen]
            given = None if prefix is None else [prefix[i] for i in chosen]
            return beam_search(stepper, bos=bos, max_length=most, prefix=given, **asdict(options))

        return search_all(
            self.model, sources, search, limits=limits, beam=options.beam, max_rows=self.max_rows,
            batch_tokens=batch_tokens,
        )  # fmt: skip

    def _flow(self, plan, requests, tell=None):
        """Yield lists of (request, its Hypotheses), as they are found; the first ones start first.

        Another thread or call may queue its launches between two turns.
        """
        searches, most = self._searches, min(len(requests), plan.most)
        slots = plan.slots(len(requests)) if self.on_gpu else most
        with searches.lent((slots, *plan.key), lambda: plan.new(slots)) as search:
            scheduler, left = Scheduler(slots), iter(requests)
            said: list[tuple] = []
            note = (lambda *told: said.append(told)) if tell else None
            lane = Lane(search, scheduler, searches.run, tell=note, behind=int(self.on_gpu))

            def add(count):
                if added := list(itertools.islice(left, count)):
                    generation.read(self.model, added)
                    scheduler.extend(added, [request.limit for request in added])

            # the GPU computes the first prompts while the host reads the others
            first = 0
            if self.on_gpu and not requests[0].read:
                first = generation.opening([len(one.tokens) for one in requests[:slots]])
            for count in (first, slots - first) if first else ():
                add(count)
                with searches.lock, searches.on_stream():
                    lane.join()
            while True:
                # the first texts start before the others are queued, of which some always wait
                add(max(0, 2 * slots - scheduler.waiting) if lane.busy else slots)
                if not lane.busy:
                    return
                with searches.lock, searches.on_stream():
                    found = lane.turn()
                for told in said:
                    tell(*told)
                said.clear()
                if found:
                    yield found

    def _submit_source(self, source, limit, priority, *, bos, prefix=None, **settings):
        options = BeamOptions.of(settings)
        arguments.lengths_of([source], [limit], self.model.config.max_length)
        source, forced = list(source), None if prefix is None else [list(prefix)]
        if limit == 0:
            return self._over()
        if self._by_host(options, submitted=True):

            def search():
                ((_, (texts,)),) = self._on_host([source], [limit], bos, forced, options)
                return texts

            return self._called(search)
        (own,) = arguments.prefixes_of(options, bos, [limit], forced, self.model.config.vocab)
        request = Request(source, limit, own)
        return self._queued(self._plans.of_source(request, bos, options), request, priority)

    def _submit_prompt(
        self, prompt, limit, priority, *, eos=None, temperature=1.0, seed=None, number=0, **settings
    ):  # fmt: skip
        options = arguments.sampling(eos, temperature, settings)
        (prompt,) = generation.checked(self.model, [prompt], [limit], options)
        if limit == 0:
            return self._over()
        request = Request(prompt, limit, number=number, key=rng.as_key(seed))
        return self._queued(self._plans.of_prompt(request, options), request, priority)

    def _by_host(self, options, submitted=False):
        """Return whether the host searches; notify where it does what the device could.

        Raises ConfigError, a ValueError, where it would have to with ``batch_invariant``.
        """
        reason = arguments.refusal(options)
        if self.batch_invariant and reason:
            accepted = f"False, as {reason}, and the host's search depends on the batch"
            raise ConfigError(problem("Engine", "batch_invariant", True, accepted))
        if self.on_gpu and reason:
            self._notify(f"the search runs on the host: {reason}")
        return bool(reason) or not (self.on_gpu or self.batch_invariant or submitted)

    def _over(self):
        handle = Handle(self._runner.cancel)
        handle.finish("done", [_no_text()])
        return handle

    def _called(self, search):
        handle = Handle(self._runner.cancel)
        self._runner.call(handle, search)
        return handle

    def _queued(self, plan, request, priority):
        handle = Handle(self._runner.cancel)
        request.owner = handle
        self._runner.submit(Queued(plan, request, priority, self._searches.event()))
        return handle


def _no_text():
    """Return a text whose limit is 0, with a list of its own."""
    return Hypothesis([], 0.0, 0.0, False)
