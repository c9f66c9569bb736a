"""How good a run is, on its own held-out pairs or on files."""

import time

from gpuattn.data.text import read_parallel
from gpuattn.train.corpus import held_out
from gpuattn.train.metrics import score


def pairs_for(config, source=None, reference=None):
    """Return the pairs of two files, or the held-out ones of a run. DataError for bad files."""
    return read_parallel(source, reference) if source else held_out(config)


def evaluate(translator, pairs, *, lowercase=False, tokenize="13a", beam=None, length_penalty=None):
    """Return ``train.metrics.score`` of a Translator on pairs, and its ``tokens_per_second``.

    Tokens are those of the translations, end marks left out; loading the run is not counted.
    """
    begin = time.perf_counter()
    sources = [pair.source for pair in pairs]
    found = translator.translate(sources, beam=beam, length_penalty=length_penalty)
    spent = time.perf_counter() - begin
    tokens = sum(map(len, translator.tokenizer.encode_lines(found)))
    references, kinds = [pair.target for pair in pairs], [pair.kind for pair in pairs]
    row = score(found, references, kinds, lowercase=lowercase, tokenize=tokenize)
    return row | {"tokens_per_second": tokens / spent}
