"""Options of the commands that use a trained run: how it is loaded, and how it searches."""

from collections.abc import Callable
from typing import Any

import click

from gpuattn.cli.shared.options import (
    BEAMS,
    COUNT,
    GroupedOption,
    NearChoice,
    Parsed,
    device_option,
)
from gpuattn.decode.options import STOPPING
from gpuattn.runs.loading import LOAD_DTYPES
from gpuattn.units import number, whole


def loading_options(function: Callable) -> Callable:
    """Add ``--device`` and ``--dtype``: where and in which dtype a run is loaded."""
    dtype = click.option(
        "--dtype", type=NearChoice(LOAD_DTYPES), default="auto", show_default=True,
        cls=GroupedOption, group="Machine",
        help="auto: of a run bfloat16 on a GPU and float32 on NumPy, of a Hugging Face folder "
             "its own.",
    )  # fmt: skip
    return device_option(dtype(function))


def decoding_options(function: Callable) -> Callable:
    """Add ``--beam`` and ``--length-penalty``, whose defaults are the run's."""
    return _added(function, [
        search_option("--beam", type=BEAMS,
                      help="Hypotheses kept; 1 is greedy.  [default: the run's]"),
        search_option("--length-penalty", type=Parsed(number(0), "X"),
                      help="Exponent of the length that scores are divided by.  "
                      "[default: the run's]"),
    ])  # fmt: skip


def search_options(function: Callable) -> Callable:
    """Add the other rules of a search, whose defaults a Hugging Face folder may set."""
    return _added(function, [
        search_option("--min-length", type=Parsed(whole(0), "N"),
                      help="Least subwords before the end mark.  [default: 0]"),
        search_option("--max-length", type=COUNT,
                      help="Most subwords, the end mark included.  [default: by the source]"),
        search_option("--no-repeat-ngram", type=Parsed(whole(0), "N"),
                      help="Never repeat N subwords in a row.  [default: 0, no such rule]"),
        search_option("--stopping", type=NearChoice(STOPPING),
                      help="When the search of a line ends: the rule of fairseq, "
                           "Hugging Face (hf) or CTranslate2 (ct2).  [default: fairseq]"),
    ])  # fmt: skip


def batch_tokens_option(function: Callable) -> Callable:
    """Add ``--batch-tokens``."""
    return click.option(
        "--batch-tokens", type=COUNT, cls=GroupedOption, group="Machine",
        help="Most tokens in a batch, over all beams; fewer need less memory.",
    )(function)  # fmt: skip


def cache_options(function: Callable) -> Callable:
    """Add ``--no-kv-cache`` and ``--batch-invariant``."""
    given: dict[str, Any] = {"is_flag": True, "cls": GroupedOption, "group": "Machine"}
    return _added(function, [
        click.option("--no-kv-cache", help="Recompute the whole text at each token.", **given),
        click.option("--batch-invariant", **given,
                     help="The same bits whatever runs together; slower."),
    ])  # fmt: skip


def search_option(*names: str, **settings: Any) -> Callable:
    """Return a decorator that adds an option under the heading of the search."""
    return click.option(*names, cls=GroupedOption, group="Search", **settings)


def _added(function, options):
    for option in reversed(options):
        function = option(function)
    return function
