"""What a run learns from where its data are built-in pairs, pairs of text files, or one text.

Built-in pairs are new in every epoch, a function of (seed, epoch).
"""

import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gpuattn.data import generated
from gpuattn.data.packing import Mix
from gpuattn.data.store import TokenStore
from gpuattn.data.text import encode_pairs, pieces, read_language_model, read_parallel
from gpuattn.data.tokenizer import EOS, CharTokenizer, Tokenizer
from gpuattn.errors import DataError
from gpuattn.tasks.task import DATA_FILES

GENERATED_PAIRS = 20_000  # an epoch of built-in pairs
HELD_OUT = 1000  # pairs, at most, for validation and for tests
HELD_OUT_SHARE = 50  # of a corpus without validation files, one pair in so many
TEXT_SHARE = 10  # of a text without a validation file, one character in so many, the last ones


class PairData(NamedTuple):
    """Pairs to learn from and pairs held out, with the tokenizer that made their ids.

    ``train``, ``held``: as PackedLoader takes them; ``valid``: those of ``held`` as text. ``name``:
    of what is learnt from; ``left_out``: what is not in ``train``, a sentence part by reason.
    ``guess``: entropy of the target ids held out, in nats: the loss of guessing by frequency.
    ``fingerprint``: of the pairs to learn from. ``digests``: {option: SHA-256} of the data.
    ``mix``: (begin, end, weight) of parts of ``train``, see ``data.batching``. ``store``: the
    TokenStore that the data are in, or None.
    """

    tokenizer: Any
    train: Any
    held: Any
    valid: Sequence[Any]
    name: str
    left_out: Sequence[str]
    guess: float
    fingerprint: int
    digests: dict[str, str]
    mix: Mix = ()
    store: TokenStore | None = None


class TextData(NamedTuple):
    """The ids of a text to learn from and of a text held out; fields as those of PairData.

    ``counts``: what is learnt from, in words. ``documents``: whether its documents end with
    ``eos``.
    """

    tokenizer: Any
    train: Any
    held: Any
    counts: str
    guess: float
    fingerprint: int
    digests: dict[str, str]
    mix: Mix = ()
    store: TokenStore | None = None
    documents: bool = False


# ---- pairs ----


def pairs(config: Any, tokenizer: Any = None) -> PairData:
    """Return the PairData of a built-in task or of files; ``tokenizer``: None to train one.

    Raises DataError for files that cannot be used.
    """
    digests: dict[str, str] = {}
    train, valid = _task_pairs(config) if config.task else file_pairs(config, digests)
    if tokenizer is None:
        lines = (line for pair in train for line in pair[:2])
        tokenizer = Tokenizer.train(lines, config.vocab_size, config.seed)
    ids, kept = encode(config, tokenizer, train)
    held, held_kept = encode(config, tokenizer, valid)
    text = "\n".join(chain.from_iterable(pair[:2] for pair in train))
    return PairData(
        tokenizer, ids, held, [valid[i] for i in held_kept],
        f"{config.task}, generated" if config.task else config.source,
        _reasons(train, kept, config), targets_entropy(held), zlib.crc32(text.encode()),
        by_option(config, digests),
    )  # fmt: skip


def encode(config: Any, tokenizer: Any, some: Sequence[Any]) -> tuple[list, list[int]]:
    """Return ``data.text.encode_pairs`` within the limits of a config."""
    return encode_pairs(some, tokenizer, max_tokens=config.max_len, on_long=config.on_long)


def targets_entropy(ids: Sequence[Any]) -> float:
    """Return the entropy of the target ids of pairs, ``eos`` among them, in nats."""
    return entropy([token for _, target in ids for token in (*target, EOS)])


def test_pairs(config: Any) -> Sequence[Any]:
    """Return pairs of a built-in task that no run learns from."""
    return generated.generate(config.task, "test", HELD_OUT, config.seed)


def _task_pairs(config):
    valid = generated.generate(config.task, "valid", HELD_OUT, config.seed)
    return task_epoch(config, 0), valid


def task_epoch(config: Any, epoch: int) -> Sequence[Any]:
    """Return the pairs of an epoch of a built-in task."""
    return generated.generate(config.task, "train", GENERATED_PAIRS, config.seed << 32 | epoch)


def file_pairs(config: Any, digests: dict[str, str] | None = None) -> tuple[Any, Any]:
    """Return the pairs of files to learn from, and those held out, as ``data.text.Corpus``.

    ``digests``: a dict that gets {path: SHA-256}.
    """
    files = (config.source, config.target)
    train = read_parallel(*files, on_long=config.on_long, digests=digests)
    if config.valid_source:
        return train, read_parallel(config.valid_source, config.valid_target, digests=digests)
    if len(train) < 2:
        raise DataError(
            f"{config.source} has one usable pair; accepted: two or more, or give --valid SRC TGT"
        )
    order = np.random.Generator(np.random.Philox([config.seed, 1])).permutation(len(train))
    count = min(HELD_OUT, max(1, len(train) // HELD_OUT_SHARE))
    chosen = set(order[:count].tolist())
    valid = [pair for i, pair in enumerate(train) if i in chosen]
    left = [i for i in range(len(train)) if i not in chosen]
    kept = type(train)([train[i] for i in left], [train.lines[i] for i in left],
                       train.empty, train.too_long)  # fmt: skip
    return kept, valid


def _reasons(train, kept, config):
    """Return "3 longer than 256 tokens (line 8,211 first)" and the like."""
    reasons = []
    if getattr(train, "empty", []):
        reasons.append(f"{len(train.empty):,} with an empty side (line {train.empty[0]:,} first)")
    long = list(getattr(train, "too_long", []))
    lines = getattr(train, "lines", range(1, len(train) + 1))
    long += [lines[i] for i in sorted(set(range(len(train))) - set(kept))]
    if long:
        reasons.append(
            f"{len(long):,} longer than {config.max_len} tokens (line {min(long):,} first)"
        )
    return reasons


# ---- one text ----


def text(config: Any, tokenizer: Any = None) -> TextData:
    """Return the TextData of a file; ``tokenizer``: None to make one.

    Characters are those of the whole file, subwords are learnt from the text to train on. Without
    ``valid_lm`` the end of the text is held out. Raises DataError for files that cannot be used.
    """
    digests: dict[str, str] = {}
    whole = read_language_model(config.lm, digests)
    if config.valid_lm:
        train, valid = whole, read_language_model(config.valid_lm, digests)
    else:
        cut = held_out_from(whole)
        train, valid = whole[:cut], whole[cut:]
    if tokenizer is None:
        chars = config.tokenizer == "chars"
        subwords = (pieces(train), config.vocab_size, config.seed)
        tokenizer = CharTokenizer.train([whole]) if chars else Tokenizer.train(*subwords)
    ids = text_ids(tokenizer, config.lm, train)
    held = text_ids(tokenizer, config.valid_lm or config.lm, valid)
    return TextData(
        tokenizer, ids, held, f"{config.lm}: {len(train):,} characters, {len(ids):,} tokens",
        entropy(held), zlib.crc32(train.encode()), by_option(config, digests),
    )  # fmt: skip


def text_ids(tokenizer: Any, path: Any, content: str) -> list[int]:
    """Return the ids of the text of a file. DataError that names it."""
    try:
        return tokenizer.encode_text(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def held_out_text(config: Any) -> str:
    """Return the text that a run of a text file holds out."""
    if config.valid_lm:
        return read_language_model(config.valid_lm)
    whole = read_language_model(config.lm)
    return whole[held_out_from(whole) :]


def held_out_from(content: str) -> int:
    """Return the index at which the held-out end of a text begins."""
    return len(content) * (TEXT_SHARE - 1) // TEXT_SHARE


# ---- both ----


def by_option(config: Any, digests: dict[str, str]) -> dict[str, str]:
    """Return {option: SHA-256} of files by {path: SHA-256}."""
    paths = {name: getattr(config, name) for name in DATA_FILES}
    return {name: digests[path] for name, path in paths.items() if path in digests}


def entropy(tokens: Any) -> float:
    """Return the entropy of tokens, in nats: the least loss of a model without context."""
    if not len(tokens):
        return 0.0
    counts = np.unique(tokens, return_counts=True)[1]
    return float(np.log(len(tokens)) - (counts * np.log(counts)).sum() / len(tokens))
