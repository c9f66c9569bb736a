"""What a run learns from where its data are a token store: ``gpuattn.data.store``."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data.generated import Pair
from gpuattn.data.rows import RowPairs, Rows
from gpuattn.data.store import TokenStore
from gpuattn.data.text import read_language_model, read_parallel
from gpuattn.data.tokenizer import EOS, CharTokenizer
from gpuattn.errors import DataError
from gpuattn.tasks import prepared, texts
from gpuattn.tasks.prepared import Say, is_large, store_of
from gpuattn.tasks.texts import PairData, TextData

USE = {"text": ("a text", "--lm"), "pairs": ("pairs", "--pairs")}  # kind -> what, the option
VALID_TOKENS = 1 << 18  # of what a store holds out, used at each evaluation,
SLICES = 64  # in so many slices of a text


def is_folder(path: str) -> bool:
    """Return whether a path is a folder: a store, where a file may stand too."""
    return Path(path).is_dir()


def open_store(path: str, kind: str) -> TokenStore:
    """Return the store in a folder. DataError if it is none, damaged, or not of this kind."""
    what, option = USE[kind]
    if not is_folder(path):
        found = "is a file" if Path(path).exists() else "does not exist"
        raise DataError(f"{path} {found}; accepted by {option}: the folder of a store of {what}")
    store = TokenStore(path)
    if store.kind != kind:
        what, option = USE[store.kind]
        raise DataError(f"{path} is a store of {what}; accepted: {option} {path}")
    return store


def is_source(config: Any) -> bool:
    """Return whether a config learns from a store, given or made of large files."""
    if config.origin:  # with a tokenizer that no store has
        return False
    return bool(config.pairs) or bool(config.lm and is_folder(config.lm)) or is_large(config)


def _store(config, tokenizer=None, say=lambda text: None):
    """Return the store that a config learns from, and {path: digest} of the data."""
    if is_large(config):
        store = store_of(config, tokenizer, say)
        found = prepared.digests(config, store)
        return store, {getattr(config, name): digest for name, digest in found.items()}
    path, kind = (config.pairs, "pairs") if config.pairs else (config.lm, "text")
    store = open_store(path, kind)
    return store, {path: store.fingerprint}


def _tokenizer(store, config, tokenizer):
    """Return the tokenizer of a store; ``tokenizer``: the run's, or None."""
    found = store.tokenizer()
    if tokenizer is not None and tokenizer.to_bytes() != found.to_bytes():
        raise DataError(
            f"{store.folder} was prepared with another tokenizer than the run's. "
            "Prepare the text with it: --tokenizer RUN/tokenizer.model"
        )
    if config.tokenizer == "chars" and not isinstance(found, CharTokenizer):
        raise DataError(
            f"tokenizer is chars, and {store.folder} has {found.units}. Leave out --tokenizer, or "
            "prepare the text again"
        )
    return found


def _crc(store):
    """Return the fingerprint of a store as the number that a run keeps."""
    return zlib.crc32(store.fingerprint.encode())


# ---- one text ----


def text(config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> TextData:
    """Return the TextData of a store, or of a large file; ``tokenizer``: the run's, or None.

    Without ``valid_lm`` what the store holds out is, VALID_TOKENS at most; where it has nothing,
    the end. Raises DataError for a store that cannot be used.
    """
    store, digests = _store(config, tokenizer, say)
    tokenizer = _tokenizer(store, config, tokenizer)
    if config.valid_lm:
        train, held = store.tokens("text"), _valid_ids(config, tokenizer, digests)
        guess = texts.entropy(held)
    else:
        train, held, guess = _parts(store)
    characters = store.head["counts"].get("characters")
    size = f"{characters:,} characters in all" if characters else f"{len(store):,} documents"
    counts = f"{config.lm}: {size}, {len(train):,} tokens"
    digests = texts.by_option(config, digests)
    return TextData(
        tokenizer, train, held, counts, guess, _crc(store), digests, _mix(store, len(train)),
        store, store.head["documents"],
    )  # fmt: skip


def held_out_ids(config: Any, tokenizer: Any) -> Sequence[int]:
    """Return the ids that a run of a store holds out."""
    if config.valid_lm:
        return _valid_ids(config, tokenizer, {})
    return _parts(_store(config, tokenizer)[0])[1]


def _has_share(store):
    """Return whether a store holds out a share. DataError for a mix that does not: its end would
    be of one part alone."""
    if store.head["mix"] and not store.valid:
        raise DataError(
            f"{store.folder} is a mix and holds out nothing. Name validation files, or prepare it "
            "with --valid"
        )
    return store.valid is not None


def _parts(store):
    """Return (ids to learn from, ids held out, entropy of ids in nats)."""
    ids, guess = store.tokens("text"), store.head["unigram"]["text"]
    if _has_share(store):
        return ids, _some(store.valid.tokens("text")), store.valid.head["unigram"]["text"]
    cut = len(ids) - min(len(ids) // texts.TEXT_SHARE, VALID_TOKENS)
    return ids[:cut], ids[cut:], guess


def _some(ids):
    """Return VALID_TOKENS ids at most, in slices from everywhere."""
    if len(ids) <= VALID_TOKENS:
        return ids
    size = VALID_TOKENS // SLICES
    starts = np.arange(SLICES) * (len(ids) - size) // (SLICES - 1)
    return np.concatenate([ids[start : start + size] for start in starts.tolist()])


def _valid_ids(config, tokenizer, digests):
    """Return the ids of ``valid_lm``, a store or a file."""
    if is_folder(config.valid_lm):
        store = open_store(config.valid_lm, "text")
        _tokenizer(store, config, tokenizer)
        digests[config.valid_lm] = store.fingerprint
        return _some(store.tokens("text"))
    return texts.text_ids(tokenizer, config.valid_lm, read_language_model(config.valid_lm, digests))


# ---- pairs ----


def pairs(config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> PairData:
    """Return the PairData of a store, or of large files; ``tokenizer``: the run's, or None.

    Without validation files what the store holds out is, up to VALID_TOKENS on a side; where it has
    nothing, its last pairs. Raises DataError for a store that cannot be used.
    """
    store, digests = _store(config, tokenizer, say)
    tokenizer = _tokenizer(store, config, tokenizer)
    if isinstance(tokenizer, CharTokenizer):
        raise DataError(
            f"{store.folder} has {tokenizer.units}; pairs need subwords. Prepare them again"
        )
    if config.valid_source:
        train = row_pairs(store)
        files = (config.valid_source, config.valid_target)
        valid: Any = read_parallel(*files, on_long=config.on_long, digests=digests)
        held, kept = texts.encode(config, tokenizer, valid)
        valid, guess = [valid[i] for i in kept], texts.targets_entropy(held)
    else:
        train, held, guess = _pair_parts(store)
        valid = _decoded(held, config, tokenizer)
    return PairData(
        tokenizer, train, held, valid, config.pairs or config.source, _skipped(store), guess,
        _crc(store), texts.by_option(config, digests), _mix(store, len(train.source)),
        store,
    )  # fmt: skip


def held_out_pairs(config: Any) -> Sequence[Any]:
    """Return the pairs that a run of a store holds out."""
    if config.valid_source:
        return read_parallel(config.valid_source, config.valid_target)
    store, _ = _store(config)
    return _decoded(_pair_parts(store)[1], config, store.tokenizer())


def row_pairs(store: TokenStore, begin: int = 0, end: int | None = None) -> RowPairs:
    """Return the pairs ``begin`` to ``end`` of a store."""
    sides = []
    for side in store.sides:
        ends = store.ends(side)
        first = int(ends[begin - 1]) if begin else 0
        ends = ends[begin:end] - np.uint64(first) if begin else ends[:end]
        sides.append(Rows(store.tokens(side)[first:], ends))
    return RowPairs(*sides)


def _pair_parts(store):
    """Return (pairs to learn from, pairs held out, entropy of target ids in nats)."""
    if _has_share(store):
        held = _some_pairs(row_pairs(store.valid), max(store.valid.head["tokens"].values()))
        return row_pairs(store), held, store.valid.head["unigram"]["target"]
    if len(store) < 2:
        raise DataError(
            f"{store.folder} has {len(store)} pair; accepted: two or more, or give --valid SRC TGT"
        )
    cut = len(store) - min(texts.HELD_OUT, max(1, len(store) // texts.HELD_OUT_SHARE))
    guess = store.head["unigram"]["target"]
    return row_pairs(store, 0, cut), row_pairs(store, cut), guess


def _some_pairs(held, tokens):
    """Return pairs from everywhere with about VALID_TOKENS on the longer side, of ``tokens``."""
    total = len(held.source)
    count = max(1, total * VALID_TOKENS // max(tokens, 1))
    if count >= total:
        return held
    rows = np.arange(count) * total // count
    parts = (side.gather(rows, EOS, False) for side in held)
    return RowPairs(*(Rows(flat, bounds[1:]) for flat, _, bounds in parts))


def _mix(store, end):
    """Return the mix of a store's text or pairs up to ``end``, of tokens or rows."""
    kind = {"text": lambda part: part["tokens"]["text"], "pairs": lambda part: part["rows"]}
    parts = [(*kind[store.kind](part), part["weight"]) for part in store.head["mix"]]
    return [(begin, min(last, end), weight) for begin, last, weight in parts]


def _skipped(store):
    """Return what was left out of a store, such as "3 (empty side)"."""
    return [f"{count:,} ({reason})" for reason, count in store.head["skipped"].items()]


def _decoded(held, config, tokenizer):
    sizes = np.maximum(*(side.lengths(slice(None)) for side in held))
    kept = np.flatnonzero(sizes <= config.max_len + 1)
    if not len(kept):
        raise DataError(
            f"each of the {len(sizes)} pairs held out is longer than {config.max_len} tokens"
        )
    return DecodedPairs(held, kept, tokenizer)


class DecodedPairs(Sequence):
    """The pairs ``kept`` (indices) of RowPairs as text, decoded when they are asked for."""

    def __init__(self, pairs: RowPairs, kept: np.ndarray, tokenizer: Any) -> None:
        self._pairs, self._kept, self._tokenizer = pairs, kept, tokenizer

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._pair(row) for row in self._kept[i]]
        return self._pair(self._kept[i])

    def _pair(self, row):
        ids = (side.gather(np.array([row]), EOS, False)[0].tolist() for side in self._pairs)
        return Pair(*map(self._tokenizer.decode, ids), "text")
