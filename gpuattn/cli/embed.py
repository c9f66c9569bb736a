"""gpuattn embed: a vector for each line."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from gpuattn.cli.shared.gpus import gpus_option, shared_user
from gpuattn.cli.shared.lines import text_of
from gpuattn.cli.shared.options import GroupedCommand, NearChoice, PathName, device_option
from gpuattn.cli.shared.streams import STANDARD, reading, writing
from gpuattn.errors import DataError
from gpuattn.models.bert import POOLS
from gpuattn.runs.loading import load_run

LINES = 1024  # read, embedded and written at a time


@click.command("embed", cls=GroupedCommand)
@click.argument("folder", metavar="DIR", type=PathName(file_okay=False))
@click.option("--input", "source", metavar="FILE", type=PathName(), default=STANDARD,
              help="UTF-8 text, a line for each vector.  [default: -, standard input]")  # fmt: skip
@click.option(
    "--output",
    "target",
    metavar="FILE",
    type=PathName(),
    default=STANDARD,
    help="FILE.npy: a NumPy array; others: JSON lines.  [default: -, standard output]",
)
@click.option("--pool", type=NearChoice(POOLS), default=POOLS[0], show_default=True,
              help="A line's vector: the mean of its tokens' states, or the first.")  # fmt: skip
@click.option("--raw", is_flag=True, help="Do not scale vectors to length 1.")
@click.option("--truncate", is_flag=True, help="Cut lines that are too long for the model.")
@gpus_option
@device_option
@click.pass_context
def command(
    ctx: click.Context, folder: str, source: str, target: str, pool: str, raw: bool,
    truncate: bool, gpus: int | str | None, device: str,
) -> None:  # fmt: skip
    """Turn lines into vectors with the encoder in DIR, a folder of Hugging Face with a BERT, or the
    run of one.

    \b
    gpuattn embed all-MiniLM-L6-v2 < sentences.txt > vectors.jsonl
    gpuattn embed all-MiniLM-L6-v2 --input sentences.txt --output vectors.npy

    A line of input gives one vector, of length 1 without --raw: dot products of such vectors are
    cosine similarities. With --gpus, or by ranks of mpirun, each of them embeds a part of the
    lines.
    """

    def loaded():
        return load_run(folder, device=device, task="embedding")

    with contextlib.ExitStack() as stack:
        embedder, ranks = stack.enter_context(shared_user(ctx, gpus, device, loaded))
        if embedder is None:
            return
        settings = {"pool": pool, "normalised": not raw, "truncate": truncate}
        stream, out = stack.enter_context(reading(source)), stack.enter_context(writing(target))
        parts = _vectors(embedder, stream, settings, LINES * ranks)
        if target.endswith(".npy"):
            width = embedder.model.config.d_model
            np.save(out, np.concatenate([np.zeros((0, width), np.float32), *parts]))
            return
        for part in parts:
            for vector in part:
                out.write((json.dumps([float(str(x)) for x in vector]) + "\n").encode())
            out.flush()


def _vectors(
    embedder: Any, stream: Any, settings: dict[str, Any], together: int
) -> Iterator[np.ndarray]:
    """Yield arrays of the vectors of some lines. DataError names a line that is unusable."""
    lines = (_text(number, raw) for number, raw in enumerate(stream, 1))
    first = 1
    while some := list(itertools.islice(lines, together)):
        numbers = range(first, first + len(some))
        yield np.stack(embedder.embed(some, numbers=numbers, **settings))
        first += len(some)


def _text(number, raw):
    try:
        return text_of(number, raw).strip()
    except UnicodeDecodeError as error:
        raise DataError(f"line {number} is not UTF-8, from byte {error.start + 1} on") from error
