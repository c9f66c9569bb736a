"""Options of the commands that use a trained run: how it is loaded, and how it searches."""

from collections.abc import Callable

import click

from gpuattn.cli.options import BEAMS, COUNT, GroupedOption, NearChoice, Parsed, device_option
from gpuattn.runs.folder import LOAD_DTYPES
from gpuattn.units import number


def loading_options(function: Callable) -> Callable:
    """Add ``--device`` and ``--dtype``: where and in which dtype a run is loaded."""
    dtype = click.option(
        "--dtype", type=NearChoice(LOAD_DTYPES), default="auto", show_default=True,
        cls=GroupedOption, group="Machine",
        help="auto: bfloat16 on a GPU; float32 is exact, and all that NumPy has.",
    )  # fmt: skip
    return device_option(dtype(function))


def decoding_options(function: Callable) -> Callable:
    """Add ``--beam`` and ``--length-penalty``, whose defaults are the run's."""
    penalty = click.option(
        "--length-penalty", type=Parsed(number(0), "X"),
        help="Exponent of the length that scores are divided by.  [default: the run's]",
    )  # fmt: skip
    beam = click.option(
        "--beam", type=BEAMS, help="Hypotheses kept; 1 is greedy.  [default: the run's]"
    )
    return beam(penalty(function))


def batch_tokens_option(function: Callable) -> Callable:
    """Add ``--batch-tokens``."""
    return click.option(
        "--batch-tokens", type=COUNT, cls=GroupedOption, group="Machine",
        help="Tokens of a batch; fewer take less memory.",
    )(function)  # fmt: skip
