"""Evaluation of a run on its held-out data or on files.

All ranks of a Dealing may call these together: it deals the work out, and each gets the same
figures, which do not depend on the number of ranks.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.data.batching import LanguageModelLoader
from gpuattn.data.text import read_language_model, read_parallel
from gpuattn.errors import DataError
from gpuattn.parallel.dealing import ALONE, Dealing
from gpuattn.runtime.device import batch_to
from gpuattn.tasks.corpus import held_out, held_out_ids
from gpuattn.tasks.images import held_out_images
from gpuattn.tasks.labels import encoded, held_out_texts, mistakes
from gpuattn.tasks.masked import held_out_masked
from gpuattn.tasks.score import score
from gpuattn.tasks.texts import text_ids
from gpuattn.tasks.translation import translated
from gpuattn.typing import StrPath

TOKENS = 4096  # of a batch, where no run says it


def pairs_for(
    config: Any, source: StrPath | None = None, reference: StrPath | None = None
) -> Sequence[Any]:
    """Return the pairs of two files, or the held-out ones of a run. DataError for bad files."""
    return read_parallel(source, reference) if source and reference else held_out(config)


def evaluate(
    translator: Any,
    pairs: Sequence[Any],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    beam: int | None = None,
    length_penalty: float | None = None,
    refused: Callable[[int, str], None] | None = None,
    deal: Dealing = ALONE,
) -> dict[str, Any]:
    """Return ``tasks.score.score`` of a Translator on pairs, and its ``tokens_per_second``.

    Tokens are those of the translations, end marks left out; loading the run is not counted.
    ``refused``: called with its line and the reason where a source is longer than the model takes;
    its translation is then empty. Without, that is a DataError.
    """
    begin = time.perf_counter()
    sources = _usable(translator, pairs, refused) if refused else [pair.source for pair in pairs]
    found = translated(translator, sources, deal, beam=beam, length_penalty=length_penalty)
    spent = time.perf_counter() - begin
    tokens = sum(map(len, translator.tokenizer.target.encode_lines(found)))
    references, kinds = [pair.target for pair in pairs], [pair.kind for pair in pairs]
    row = score(found, references, kinds, lowercase=lowercase, tokenize=tokenize)
    return row | {"tokens_per_second": tokens / spent}


def _usable(translator, pairs, refused):
    """Return the sources, "" for those that the model does not take."""
    sources = []
    for number, pair in zip(getattr(pairs, "lines", count(1)), pairs, strict=False):
        try:
            translator.check(pair.source)
            sources.append(pair.source)
        except DataError as error:
            refused(number, str(error))
            sources.append("")
    return sources


def evaluate_text(
    sampler: Any, path: StrPath | None = None, deal: Dealing = ALONE
) -> dict[str, Any]:
    """Return how well a Sampler's model predicts a text file, or what its run held out.

    Keys: ``loss``, the exact mean cross-entropy of a token in nats; ``perplexity``, its
    exponential; ``tokens`` that were predicted, all but the first; ``tokens_per_second``. As at an
    evaluation of the run, the text is cut into blocks, and a token is predicted from those before
    it in its block, or, of a run with ``documents``, in its document there. Raises DataError for a
    file that cannot be used, or has fewer than two tokens.
    """
    config, model = sampler.config, sampler.model  # no config: a folder of Hugging Face
    name = path or config.valid_lm or config.lm

    def read() -> Sequence[int]:
        ids: Sequence[int]
        if path:
            ids = text_ids(sampler.tokenizer, path, read_language_model(path))
        else:
            ids = held_out_ids(config, sampler.tokenizer)
        if len(ids) < 2:
            raise DataError(f"{name} has {len(ids)} token; accepted: two or more. Give more text")
        return ids

    ids = deal.read(read)
    block = model.config.block
    rows = max(1, (config.batch if config else TOKENS) // block)
    block, documents = min(block, len(ids) - 1), bool(config and config.documents)
    begin, xp = time.perf_counter(), get_xp(model.parameters()[0].data)

    def loss_of(batch):
        batch = batch_to(batch, xp)
        loss = model.loss(batch.tokens, batch.labels, order=batch.order, **batch.packing)
        return float(loss) * batch.target_tokens, batch.target_tokens

    with model.evaluating():
        batches = LanguageModelLoader(ids, block, rows, 0, documents=documents).blocks()
        losses, counts = zip(*deal.each(batches, loss_of), strict=True)
    tokens = sum(counts)
    loss, spent = sum(losses) / tokens, time.perf_counter() - begin
    return {
        "loss": loss, "perplexity": math.exp(loss), "tokens": tokens,
        "tokens_per_second": tokens / spent,
    }  # fmt: skip


def evaluate_masked(
    user: Any, path: StrPath | None = None, deal: Dealing = ALONE
) -> dict[str, Any]:
    """Return how well an Unmasker guesses hidden tokens of a text file, or of what its run held
    out, masked as at its evaluations.

    ``accuracy``: of 100; ``loss``: mean in nats; ``tokens`` that were hidden, or exchanged, or left
    as they are; ``tokens_per_second``, of all that were read. Raises DataError for a file that
    cannot be used.
    """

    def figures(batch):
        guesses, loss = user.guess(batch)
        count, right = batch.target_tokens, int((guesses == batch.labels).sum())
        return right, loss * count, count, batch.all_tokens

    begin, batches = time.perf_counter(), deal.read(lambda: held_out_masked(user, path))
    right, total, tokens, read = map(sum, zip(*deal.each(batches, figures), strict=True))
    return {
        "accuracy": 100 * right / tokens, "loss": total / tokens, "tokens": tokens,
        "tokens_per_second": read / (time.perf_counter() - begin),
    }  # fmt: skip


def evaluate_images(
    classifier: Any, path: StrPath | None = None, deal: Dealing = ALONE
) -> dict[str, Any]:
    """Return how a Classifier labels the images of a folder or .npz, or those its run holds out.

    ``accuracy``: of 100; ``loss``: mean in nats; ``images``; ``images_per_second``. Raises
    DataError for images that cannot be used, such as those of a class unseen in training.
    """

    def figures(batch):
        found = np.concatenate(list(classifier.probabilities(batch.images)))
        right = int((found.argmax(1) == batch.labels).sum())
        return right, _loss(found, batch.labels), len(found)

    begin, loader = time.perf_counter(), deal.read(lambda: held_out_images(classifier, path))
    right, total, images = map(sum, zip(*deal.each(loader.all(), figures), strict=True))
    spent = time.perf_counter() - begin
    return {
        "accuracy": 100 * right / images, "loss": total / images, "images": images,
        "images_per_second": images / spent,
    }  # fmt: skip


def evaluate_labels(
    classifier: Any, path: StrPath | None = None, deal: Dealing = ALONE
) -> dict[str, Any]:
    """Return how a TextClassifier labels the texts of a file, or those its run holds out.

    ``accuracy``: of 100; ``loss``: mean in nats; ``texts``; ``texts_per_second``; ``wrong``: dicts
    with ``line``, ``text``, ``label`` and ``found``, the label that it got; ``cut``: how many texts
    were longer than the model takes, and cut as in training. Raises DataError for a file that
    cannot be used, such as one with a label unseen in training.
    """
    config, names = classifier.config, classifier.tokenizer.names
    most = config.block if config else classifier.model.config.max_length

    def read():
        texts = held_out_texts(classifier, path)
        return texts, *encoded(classifier.tokenizer, texts, most, path or "the texts held out")

    begin, (texts, ids, long) = time.perf_counter(), deal.read(read)
    found, labels = np.zeros((len(ids), len(names)), np.float32), texts.numbers(names)
    for sentences, part in deal.each(
        classifier.batches(ids), lambda batch: (batch.sentences, classifier.of_batch(batch))
    ):
        found[sentences] = part
    wrong = mistakes(texts, [names[i] for i in found.argmax(1)])
    spent = time.perf_counter() - begin
    return {
        "accuracy": 100 * (1 - len(wrong) / len(labels)),
        "loss": _loss(found, labels) / len(labels),
        "texts": len(labels),
        "texts_per_second": len(labels) / spent,
        "cut": len(long),
        "wrong": [one._asdict() for one in wrong],
    }


def _loss(probabilities, labels):
    """Return the sum of the losses of labels, in nats."""
    of_label = probabilities[np.arange(len(labels)), labels]
    return -float(np.log(np.maximum(of_label, np.finfo(np.float32).tiny)).sum())
