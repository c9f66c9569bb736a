"""Stores that a run makes by itself of text files too large to be tokenised at every start.

They lie in the cache (``tasks.store_cache``) and are found again by the files (path, size, time of
change) and the options of the tokenizer. A run that is continued uses a store made with its own
tokenizer.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import Done, prepare
from gpuattn.data.preparing.sources import Source
from gpuattn.data.store import TokenStore, is_store
from gpuattn.environment import usable_cores
from gpuattn.errors import CheckpointError, ConfigError, DataError
from gpuattn.tasks import store_cache

LARGE = 8 << 20  # bytes of the files to learn from; Multi30k has 4 MB, Shakespeare 1 MB
SECONDS = 10  # between sentences on the progress
Say = Callable[[str], None]


def is_large(config: Any) -> bool:
    """Return whether the files that a config names to learn from are learnt from as a store."""
    if config.task or config.pairs:
        return False
    paths = [Path(path) for path in (config.lm, config.source, config.target) if path]
    return all(path.is_file() for path in paths) and sum(p.stat().st_size for p in paths) > LARGE


def store_of(config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> TokenStore:
    """Return the store of the files of a config, made unless it is there.

    ``tokenizer``: the run's, or None to learn it. ``say`` is given sentences on what is done.
    Raises DataError for files that cannot be used, and where the cache cannot be written to,
    ConfigError while another process makes the same store.
    """
    chars = "chars" if config.lm and config.tokenizer == "chars" else None
    files = [Source(str(Path(path).resolve()), "text") for path in _files(config)]
    plan = Plan(
        sources=() if config.source else (files[0],),
        pairs=((files[0], files[1]),) if config.source else (),
        tokenizer=chars, vocab_size=config.vocab_size, seed=config.seed, workers=usable_cores(),
    )  # fmt: skip
    out = store_cache.folder() / plan.key()[:32]
    if tokenizer is not None and not _has(out, tokenizer):
        plan = Plan(**vars(plan) | {"tokenizer": tokenizer})
        out = store_cache.folder() / plan.key()[:32]
    if is_store(out):
        store_cache.mark_used(out)
        return TokenStore(out)
    say(f"{' and '.join(_files(config))}: tokens are made once, and kept in {out}")
    try:
        store = prepare(plan, out, say, _Progress(say))
    except ConfigError as error:
        raise ConfigError(
            f"{' and '.join(_files(config))}: another run makes tokens of this text. "
            f"{str(error).removesuffix(', stop it, or choose another --out')}, then run this again"
        ) from error
    except CheckpointError as error:
        raise DataError(
            f"{' and '.join(_files(config))}: the tokens of so large a text are kept in the cache. "
            f"{str(error).removesuffix('. Choose another --out')}. Set GPUATTN_CACHE_DIR, or run "
            "gpuattn prepare and give the store"
        ) from error
    store_cache.prune(out, say)
    return store


def digests(config: Any, store: TokenStore) -> dict[str, str]:
    """Return {option: SHA-256 of the text} of the files that a store was made of."""
    names = ("source", "target") if config.source else ("lm",)
    found = (source["sha256"] for source in store.head["sources"])
    return dict(zip(names, found, strict=True))


def _files(config):
    return [config.source, config.target] if config.source else [config.lm]


def _has(out, tokenizer):
    """Return whether a store is there and was made with a tokenizer."""
    digest = hashlib.sha256(tokenizer.to_bytes()).hexdigest()
    return is_store(out) and TokenStore(out).head["tokenizer"] == digest


class _Progress:
    """Tells MB/s and the time left, every SECONDS."""

    def __init__(self, say):
        self._say, self._told = say, time.monotonic()

    def __call__(self, done: Done) -> None:
        if time.monotonic() - self._told < SECONDS:
            return
        self._told = time.monotonic()
        self._say(done.describe())
