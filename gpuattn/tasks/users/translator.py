"""Translation of lines with a trained model and its tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from gpuattn.arrays import on_gpu
from gpuattn.decode.batches import search_all
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.options import BeamOptions, GreedyOptions
from gpuattn.engine import SCORED_TOKENS, Engine
from gpuattn.errors import ConfigError, DataError, problem
from gpuattn.tasks.task import MOST_BEAMS
from gpuattn.tasks.users.engines import check_cache, engine_for
from gpuattn.tasks.users.scored import Scored

BUCKET = 8  # sources whose lengths round up to the same multiple have the same limit of length


class Translation(NamedTuple):
    """A translation of a line, or of nothing.

    ``score``: what translations are ordered by, ``logprob`` divided by the length penalty.
    ``logprob``: the sum of the tokens' log-probabilities. ``tokens``: how many they are, the end
    mark among them.
    """

    text: str = ""
    score: float = 0.0
    logprob: float = 0.0
    tokens: int = 0


class Translator:
    """Translates lines with a TranslationModel.

    ``config``: the run's TrainConfig, whose ``beam`` and ``length_penalty`` are the defaults; None
    with ``search``, the BeamOptions that are the defaults then, and ``most``, a limit of tokens.
    ``metrics``: what was saved with the weights: update, loss, scores.
    A line's translation does not depend on the lines around it.
    """

    task = "translation"
    by_line = {
        "translate": ("prefixes", "notify"), "nbest": ("prefixes", "notify"), "score": (),
    }  # what ranks share, see ``dealt``  # fmt: skip

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None, *,
        search: BeamOptions | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}
        self.search = search or BeamOptions(
            eos=model.config.eos, beam=config.beam,
            banned=[mark for mark in tokenizer.specials if mark != model.config.eos],
            length_penalty=config.length_penalty,
        )  # fmt: skip
        longest = model.config.max_length
        self.most = longest if most is None else min(most, longest)
        self._engine: Engine | None = None  # made when it is first needed

    def translate(self, lines: Sequence[str], **options: Any) -> list[str]:
        """Return the translation of each line, as a list of str; that of an empty line is empty.

        ``options`` and errors: those of ``nbest``.
        """
        return [found[0].text for found in self.nbest(lines, 1, **options)]

    def nbest(
        self, lines: Sequence[str], n: int, *, beam: int | None = None,
        length_penalty: float | None = None, prefixes: Sequence[str] | None = None,
        min_length: int | None = None, max_length: int | None = None,
        no_repeat_ngram: int | None = None, stopping: str | None = None,
        batch_tokens: int | None = None, kv_cache: bool = True, batch_invariant: bool = False,
        stop: Callable[[], bool] | None = None, notify: Callable[[int], None] | None = None,
    ) -> list[list[Translation]]:  # fmt: skip
        """Return, for each line, a list of up to ``n`` Translations, the best first.

        ``beam``: 1 (greedy) to 200, at least ``n``. ``length_penalty``: exponent of the length that
        scores are divided by. ``prefixes``: for each line what its translations begin with, or "".
        ``min_length``, ``max_length``: tokens of a translation, those of its prefix included; the
        end mark is one of them, and comes after ``min_length`` others at the earliest. By default
        the most are twice the source and 16. ``no_repeat_ngram``, ``stopping``: see
        ``decode.options``. What is None is as in ``search``. ``batch_tokens``: the most tokens of a
        batch, over all beams. ``kv_cache=False`` recomputes the whole prefix at each token.
        ``batch_invariant``: the bits of a translation do not depend on the other lines, see
        ``Engine``. ``stop``: called between batches; once it returns true, the remaining lines stay
        empty. ``notify``: called after each batch with the number of lines in it.

        Raises DataError for a line or a prefix longer than the model takes, TypeError for a str
        instead of a list, ConfigError and ValueError for other settings out of range.
        """
        if isinstance(lines, str):
            raise TypeError(problem("translate", "lines", "a str", "a list of str, a line each"))
        beam = max(n, self.search.beam if beam is None else beam)
        if n < 1 or not 1 <= beam <= MOST_BEAMS:
            accepted = f"1 to {MOST_BEAMS}"
            raise ConfigError(problem("nbest", "n and beam", f"{n} and {beam}", accepted))
        given: dict[str, Any] = {
            "min_length": min_length, "length_penalty": length_penalty, "stopping": stopping,
            "no_repeat_ngram": no_repeat_ngram,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        if beam == 1:
            given["length_penalty"] = 1.0
        check_cache(kv_cache, batch_invariant)
        self.check_lengths(min_length, max_length)
        options = replace(self.search, beam=beam, nbest=n, **given)
        sources = [self.check(line) for line in lines]
        forced = self._prefixes(lines, prefixes, max_length)
        limits = [
            max_length or self._limit(len(source), max(len(first), options.min_length))
            for source, first in zip(sources, forced or [()] * len(sources), strict=True)
        ]
        work = sources, limits, forced, options, batch_tokens
        if batch_invariant or (kv_cache and self._on_gpu()):
            batches = self._by_engine(*work, batch_invariant)
        else:
            batches = self._on_host(*work, kv_cache)
        found = [[Translation()] for _ in lines]
        for chosen, hypotheses in batches:
            for i, best in zip(chosen, hypotheses, strict=True):
                found[i] = [self._translation(each) for each in best] or found[i]
            if notify is not None:
                notify(len(chosen))
            if stop is not None and stop():
                break
        return found

    def score(
        self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int = SCORED_TOKENS
    ) -> list[Scored]:
        """Return how probable each target is as the translation of its source.

        ``pairs``: (source, target) texts, a line each. The sum over the tokens of a target, its end
        mark included, is minus the loss of training, and what a search returns as the ``score`` of
        a hypothesis. A pair of two empty lines has no tokens. ``batch_tokens``: of the packed
        batches, on each side.
        Raises DataError for a pair with one empty side, and for longer texts than the model takes.
        """
        ids = [self.check_pair(*pair) for pair in pairs]
        chosen = [i for i, pair in enumerate(ids) if any(pair)]
        found = [Scored([], []) for _ in pairs]
        scores = self._new_engine().score([ids[i] for i in chosen], batch_tokens=batch_tokens)
        for i, logprobs in zip(chosen, scores, strict=True):
            pieces = [self.tokenizer.piece(token) for token in (*ids[i][1], self.model.config.eos)]
            found[i] = Scored(pieces, logprobs.tolist())
        return found

    def check_pair(self, source: str, target: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair to score. DataError: see ``score``."""
        written = self._checked(target, "score: the target", self.tokenizer.target)
        pair = self.check(source, "score: the source"), written
        if any(pair) and not all(pair):
            empty = "target" if pair[0] else "source"
            accepted = "text on both sides, or on neither"
            raise DataError(problem("score", f"the {empty}", "empty", accepted))
        return pair

    def _new_engine(self):
        """Return the Engine, made at its first use."""
        if self._engine is None:
            self._engine = Engine(self.model)
        return self._engine

    def _by_engine(self, sources, limits, forced, options, batch_tokens, batch_invariant):
        """Yield (indices, lists of Hypotheses) of batches that the engine translates."""
        chosen = [i for i, source in enumerate(sources) if source]
        given = asdict(options) | {"limits": [limits[i] for i in chosen]}
        given["batch_tokens"] = batch_tokens
        if forced:
            given["prefix"] = [forced[i] for i in chosen]
        given |= {"sources": [sources[i] for i in chosen], "bos": self.model.config.bos}
        self._engine = engine_for(
            self._engine, self.model, lambda engine: next(engine.translations(**given), None),
            batch_invariant=batch_invariant,
        )  # fmt: skip
        batches = self._engine.translations(**given)
        for members, hypotheses in batches:
            yield [chosen[i] for i in members], hypotheses

    def _on_host(self, sources, limits, forced, options, batch_tokens, kv_cache):
        """Yield the same of batches that are translated with the host in the loop."""
        chosen = [i for i, source in enumerate(sources) if source]
        most = [limits[i] for i in chosen]
        beam, settings = options.beam, asdict(options)
        greedily = {field.name: settings[field.name] for field in fields(GreedyOptions)}

        def search(stepper, members):
            given = {"bos": self.model.config.bos, "max_length": [most[i] for i in members]}
            given["prefix"] = [forced[chosen[i]] for i in members] if forced else None
            if beam == 1:
                return [[one] for one in greedy(stepper, **given, **greedily)]
            return beam_search(stepper, **given, **settings)

        batches = search_all(
            self.model, [sources[i] for i in chosen], search, limits=most, beam=beam,
            batch_tokens=batch_tokens, kv_cache=kv_cache,
        )  # fmt: skip
        for members, hypotheses in batches:
            yield [chosen[i] for i in members], hypotheses

    def _on_gpu(self):
        return on_gpu(next(iter(self.model.parameters())).data)

    def _limit(self, source, least):
        """Return the most tokens of a translation: by the bucket of its source, and room for 16
        tokens behind the ``least`` that it has in any case."""
        bucket = -(-source // BUCKET) * BUCKET
        return min(max(2 * bucket, least) + 16, self.most)

    def _prefixes(self, lines, prefixes, max_length):
        """Return the token ids of each prefix, or None where all are empty."""
        if prefixes is None:
            return None
        if isinstance(prefixes, str) or len(prefixes) != len(lines):
            got = "a str" if isinstance(prefixes, str) else f"{len(prefixes)} of them"
            accepted = f"a list of str, one for each of the {len(lines)} lines"
            raise ConfigError(problem("translate", "prefixes", got, accepted))
        forced = [self.check_prefix(prefix, max_length) for prefix in prefixes]
        return forced if any(forced) else None

    def check_lengths(self, min_length: int | None, max_length: int | None) -> None:
        """Raise ConfigError for limits of the length that the model cannot keep."""
        most = self.model.config.max_length
        if max_length is not None and not 1 <= max_length <= most:
            accepted = f"1 to {most} (--max-len of the run, and the end mark)"
            raise ConfigError(problem("translate", "max_length", max_length, accepted))
        min_length = self.search.min_length if min_length is None else min_length
        if not 0 <= min_length <= (max_length or most):
            accepted = f"0 to the greatest length, {max_length or most}"
            raise ConfigError(problem("translate", "min_length", min_length, accepted))

    def check_prefix(self, prefix: str, max_length: int | None = None) -> list[int]:
        """Return the token ids of a prefix. DataError if it is longer than a translation may be."""
        ids, most = self._ids(prefix, self.tokenizer.target), max_length or self.most
        if len(ids) > most:
            got, accepted = f"{len(ids)} tokens long", f"up to the greatest length, {most}"
            raise DataError(problem("translate", "the prefix", got, accepted))
        return ids

    def check(self, line: str, name: str = "translate: the line") -> list[int]:
        """Return the token ids of a line. DataError if it is longer than the model takes.

        ``name``: what the message calls the line.
        """
        return self._checked(line, name, self.tokenizer)

    def _checked(self, line, name, tokenizer):
        ids, most = self._ids(line, tokenizer), self.model.config.max_length - 1
        if len(ids) > most:
            whose = "--max-len of the run" if self.config else "and the end mark, of the model"
            raise DataError(f"{name} is {len(ids)} tokens long; accepted: up to {most} ({whose})")
        return ids

    def _ids(self, line, tokenizer):
        return tokenizer.encode(" ".join(line.split("\n")).strip())

    def _translation(self, found):
        """Return the Translation of a Hypothesis: one line, though tokens may spell line breaks."""
        text = " ".join(self.tokenizer.decode(found.tokens).split())
        return Translation(text, found.normalised, found.score, len(found.tokens) + found.ended)
