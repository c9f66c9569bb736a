"""Translation of lines with a trained model and its tokenizer."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpuattn.arrays import on_gpu
from gpuattn.data.tokenizer import BOS, EOS, PAD, UNK
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.engine import Engine
from gpuattn.errors import ConfigError, DataError, problem
from gpuattn.tasks.task import MOST_BEAMS

BUCKET = 8  # sources whose lengths round up to the same multiple are translated together
CACHED_TOKENS = {"cpu": 1 << 14, "gpu": 1 << 18}  # of a batch: beams x limit of length
MARKS = (PAD, BOS, UNK)  # never part of a translation


class Translation(NamedTuple):
    """A text and its ``score``: the log-probability, divided by the length penalty."""

    text: str
    score: float


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

    def translate(
        self,
        lines: Sequence[str],
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        kv_cache: bool = True,
        stop: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Return the translation of each line, as a list of str; that of an empty line is empty.

        ``beam``: 1 (greedy) to 200. ``length_penalty``: exponent of the length that scores are
        divided by. ``kv_cache=False`` recomputes the whole prefix at each token. ``stop``: called
        between batches; once it returns true, the remaining lines stay empty.
        Raises DataError for a line longer than the model takes, TypeError for a str instead of
        a list.
        """
        options: dict[str, Any] = {
            "beam": beam, "length_penalty": length_penalty, "kv_cache": kv_cache
        }  # fmt: skip
        return [found[0].text for found in self.nbest(lines, 1, stop=stop, **options)]

    def nbest(
        self,
        lines: Sequence[str],
        n: int,
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        kv_cache: bool = True,
        stop: Callable[[], bool] | None = None,
    ) -> list[list[Translation]]:
        """Return, for each line, a list of up to ``n`` Translations, the best first.

        The beam is at least ``n``. Other arguments and errors as ``translate``.
        """
        if isinstance(lines, str):
            raise TypeError(problem("translate", "lines", "a str", "a list of str, a line each"))
        beam = max(n, self.config.beam if beam is None else beam)
        penalty = self.config.length_penalty if length_penalty is None else length_penalty
        if n < 1 or not 1 <= beam <= MOST_BEAMS:
            accepted = f"1 to {MOST_BEAMS}"
            raise ConfigError(problem("nbest", "n and beam", f"{n} and {beam}", accepted))
        sources = [self.check(line) for line in lines]
        found = [[Translation("", 0.0)] for _ in lines]
        options = {"bos": BOS, "eos": EOS, "banned": MARKS, "beam": beam, "nbest": n}
        options["length_penalty"] = penalty if beam > 1 else 1.0
        search = self._by_engine if kv_cache and self._on_gpu() else self._on_host
        for chosen, hypotheses in search(sources, options, kv_cache):
            for i, best in zip(chosen, hypotheses, strict=True):
                found[i] = [Translation(self._text(h.tokens), h.normalised) for h in best]
            if stop is not None and stop():
                break
        return found

    def _by_engine(self, sources, options, kv_cache):
        """Yield (indices, lists of Hypotheses) of batches that the engine translates."""
        if self._engine is None:
            self._engine = Engine(self.model)
        chosen = [i for i, source in enumerate(sources) if source]
        limits = [self._limit(len(sources[i])) for i in chosen]
        given = [sources[i] for i in chosen]
        batches = self._engine.translations(given, limits=limits, **options)
        for members, hypotheses in batches:
            yield [chosen[i] for i in members], hypotheses

    def _on_host(self, sources, options, kv_cache):
        """Yield the same of batches that are translated with the host in the loop."""
        for chosen, limit in self._batches(sources, options["beam"]):
            packed = self.model.pack([sources[i] for i in chosen])
            stepper = self.model.stepper(packed, limit, options["beam"], kv_cache=kv_cache)
            if options["beam"] == 1:
                ends = {name: options[name] for name in ("bos", "eos", "banned")}
                yield chosen, [[one] for one in greedy(stepper, max_length=limit, **ends)]
            else:
                yield chosen, beam_search(stepper, max_length=limit, **options)

    def _on_gpu(self):
        return on_gpu(next(iter(self.model.parameters())).data)

    def _limit(self, length):
        """Return the most tokens of a translation: by the bucket of its source alone."""
        length = -(-length // BUCKET) * BUCKET
        return min(2 * length + 16, self.model.config.max_length)

    def check(self, line: str) -> list[int]:
        """Return the token ids of a line. DataError if it is longer than the model takes."""
        ids = self.tokenizer.encode(" ".join(line.split("\n")).strip())
        if len(ids) > self.config.max_len:
            accepted = f"up to {self.config.max_len} (--max-len of the run)"
            raise DataError(problem("translate", "the line", f"{len(ids)} tokens long", accepted))
        return ids

    def _text(self, tokens):
        """Return a translation as one line: byte tokens may spell line breaks."""
        return " ".join(self.tokenizer.decode(tokens).split())

    def _batches(self, sources, beam):
        """Yield (indices, limit of length) of sources that are translated together.

        The limit depends on the bucket alone, so a line gets the same limit in any batch.
        """
        buckets = defaultdict(list)
        for i, source in enumerate(sources):
            if source:
                buckets[-(-len(source) // BUCKET) * BUCKET].append(i)
        room = CACHED_TOKENS["gpu" if self._on_gpu() else "cpu"]
        for length, members in sorted(buckets.items()):
            limit = self._limit(length)
            size = max(1, room // (beam * limit))
            for begin in range(0, len(members), size):
                yield members[begin : begin + size], limit
