"""Translation of lines with a trained model and its tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from gpuattn.arrays import on_gpu
from gpuattn.data.tokenizer import BOS, EOS, PAD, UNK
from gpuattn.decode.batches import search_all
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.options import BeamOptions, GreedyOptions
from gpuattn.engine import SCORED_TOKENS, Engine
from gpuattn.errors import ConfigError, DataError, problem
from gpuattn.tasks.scored import Scored
from gpuattn.tasks.task import MOST_BEAMS

BUCKET = 8  # sources whose lengths round up to the same multiple have the same limit of length
MARKS = (PAD, BOS, UNK)  # never part of a translation


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

    ``config``: the run's TrainConfig, whose ``beam`` and ``length_penalty`` are the defaults.
    ``metrics``: what was saved with the weights: update, loss, scores.
    A line's translation does not depend on the lines around it.
    """

    task = "translation"

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}
        self._engine: Engine | None = None  # made when it is first needed

    def translate(self, lines: Sequence[str], **options: Any) -> list[str]:
        """Return the translation of each line, as a list of str; that of an empty line is empty.

        ``options`` and errors: those of ``nbest``.
        """
        return [found[0].text for found in self.nbest(lines, 1, **options)]

    def nbest(
        self, lines: Sequence[str], n: int, *, beam: int | None = None,
        length_penalty: float | None = None, prefixes: Sequence[str] | None = None,
        min_length: int = 0, max_length: int | None = None, no_repeat_ngram: int = 0,
        stopping: str = "fairseq", batch_tokens: int | None = None, kv_cache: bool = True,
        stop: Callable[[], bool] | None = None, notify: Callable[[int], None] | None = None,
    ) -> list[list[Translation]]:  # fmt: skip
        """Return, for each line, a list of up to ``n`` Translations, the best first.

        ``beam``: 1 (greedy) to 200, at least ``n``. ``length_penalty``: exponent of the length that
        scores are divided by. ``prefixes``: for each line what its translations begin with, or "".
        ``min_length``, ``max_length``: tokens of a translation, those of its prefix included; the
        end mark is one of them, and comes after ``min_length`` others at the earliest. By default
        the most are twice the source and 16. ``no_repeat_ngram``, ``stopping``: see
        ``decode.options``. ``batch_tokens``: the most tokens of a batch, over all beams.
        ``kv_cache=False`` recomputes the whole prefix at each token. ``stop``: called between
        batches; once it returns true, the remaining lines stay empty. ``notify``: called after each
        batch with the number of lines in it.

        Raises DataError for a line or a prefix longer than the model takes, TypeError for a str
        instead of a list, ConfigError and ValueError for other settings out of range.
        """
        if isinstance(lines, str):
            raise TypeError(problem("translate", "lines", "a str", "a list of str, a line each"))
        beam = max(n, self.config.beam if beam is None else beam)
        penalty = self.config.length_penalty if length_penalty is None else length_penalty
        if n < 1 or not 1 <= beam <= MOST_BEAMS:
            accepted = f"1 to {MOST_BEAMS}"
            raise ConfigError(problem("nbest", "n and beam", f"{n} and {beam}", accepted))
        self.check_lengths(min_length, max_length)
        sources = [self.check(line) for line in lines]
        forced = self._prefixes(lines, prefixes, max_length)
        limits = [
            max_length or self._limit(len(source), max(len(first), min_length))
            for source, first in zip(sources, forced or [()] * len(sources), strict=True)
        ]
        options = BeamOptions(
            eos=EOS, banned=MARKS, beam=beam, nbest=n, min_length=min_length, stopping=stopping,
            no_repeat_ngram=no_repeat_ngram, length_penalty=penalty if beam > 1 else 1.0,
        )  # fmt: skip
        search = self._by_engine if kv_cache and self._on_gpu() else self._on_host
        found = [[Translation()] for _ in lines]
        for chosen, hypotheses in search(sources, limits, forced, options, batch_tokens, kv_cache):
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
            pieces = [self.tokenizer.piece(token) for token in (*ids[i][1], EOS)]
            found[i] = Scored(pieces, logprobs.tolist())
        return found

    def check_pair(self, source: str, target: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair to score. DataError: see ``score``."""
        pair = self.check(source, "score: the source"), self.check(target, "score: the target")
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

    def _by_engine(self, sources, limits, forced, options, batch_tokens, kv_cache):
        """Yield (indices, lists of Hypotheses) of batches that the engine translates."""
        chosen = [i for i, source in enumerate(sources) if source]
        given = asdict(options) | {"limits": [limits[i] for i in chosen]}
        given["batch_tokens"] = batch_tokens
        if forced:
            given["prefix"] = [forced[i] for i in chosen]
        batches = self._new_engine().translations([sources[i] for i in chosen], bos=BOS, **given)
        for members, hypotheses in batches:
            yield [chosen[i] for i in members], hypotheses

    def _on_host(self, sources, limits, forced, options, batch_tokens, kv_cache):
        """Yield the same of batches that are translated with the host in the loop."""
        chosen = [i for i, source in enumerate(sources) if source]
        most = [limits[i] for i in chosen]
        beam, settings = options.beam, asdict(options)
        greedily = {field.name: settings[field.name] for field in fields(GreedyOptions)}

        def search(stepper, members):
            given = {"bos": BOS, "max_length": [most[i] for i in members]}
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
        return min(max(2 * bucket, least) + 16, self.model.config.max_length)

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

    def check_lengths(self, min_length: int, max_length: int | None) -> None:
        """Raise ConfigError for limits of the length that the model cannot keep."""
        most = self.model.config.max_length
        if max_length is not None and not 1 <= max_length <= most:
            accepted = f"1 to {most} (--max-len of the run, and the end mark)"
            raise ConfigError(problem("translate", "max_length", max_length, accepted))
        if not 0 <= min_length <= (max_length or most):
            accepted = f"0 to the greatest length, {max_length or most}"
            raise ConfigError(problem("translate", "min_length", min_length, accepted))

    def check_prefix(self, prefix: str, max_length: int | None = None) -> list[int]:
        """Return the token ids of a prefix. DataError if it is longer than a translation may be."""
        ids, most = self._ids(prefix), max_length or self.model.config.max_length
        if len(ids) > most:
            got, accepted = f"{len(ids)} tokens long", f"up to the greatest length, {most}"
            raise DataError(problem("translate", "the prefix", got, accepted))
        return ids

    def check(self, line: str, name: str = "translate: the line") -> list[int]:
        """Return the token ids of a line. DataError if it is longer than the model takes.

        ``name``: what the message calls the line.
        """
        ids = self._ids(line)
        if len(ids) > self.config.max_len:
            accepted = f"up to {self.config.max_len} (--max-len of the run)"
            raise DataError(f"{name} is {len(ids)} tokens long; accepted: {accepted}")
        return ids

    def _ids(self, line):
        return self.tokenizer.encode(" ".join(line.split("\n")).strip())

    def _translation(self, found):
        """Return the Translation of a Hypothesis: one line, though tokens may spell line breaks."""
        text = " ".join(self.tokenizer.decode(found.tokens).split())
        return Translation(text, found.normalised, found.score, len(found.tokens) + found.ended)
