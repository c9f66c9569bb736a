"""gpuattn classify: the label of each image, or of each line of text."""

import sys
from typing import Any

import click

from gpuattn.cli.shared.decoding import loading_options
from gpuattn.cli.shared.gpus import gpus_option, shared_user
from gpuattn.cli.shared.lines import LineErrors, arriving
from gpuattn.cli.shared.options import GroupedCommand, PathName, run_argument
from gpuattn.cli.shared.streams import STANDARD, reading
from gpuattn.errors import DataError
from gpuattn.runs.loading import load_run
from gpuattn.tasks.pretrained import USERS

FILES = 8  # of images that a rank of several classifies at a time


@click.command("classify", cls=GroupedCommand)
@run_argument
@click.option("--input", "source", metavar="FILE", type=PathName(), default=STANDARD,
              help="Texts, or names of images.  [default: -, standard input]")  # fmt: skip
@click.option("--truncate", is_flag=True, help="Cut texts that are too long for the model.")
@gpus_option
@loading_options
@click.pass_context
def command(
    ctx: click.Context, folder: str, source: str, truncate: bool, gpus: int | str | None,
    device: str, dtype: str,
) -> None:  # fmt: skip
    """Label texts or images with the classifier in DIR: a run, or a folder of Hugging Face with a
    BERT for sequence classification, or a ViT.

    \b
    gpuattn classify runs/reviews < reviews.txt
    ls photos/new/*.jpg | gpuattn classify runs/photos
    echo digits.npz | gpuattn classify runs/digits

    A line of input is a text; or it names an image file, or an .npz with images (N, H, W) or
    (N, H, W, C) of uint8. For each text or image a line is printed: the most probable label, a tab,
    its probability; for an empty text an empty line. A line that cannot be used gives a message and
    an empty line; the exit code is then 1. With --gpus, or by ranks of mpirun, each of them labels
    a part of the lines.
    """

    def loaded():
        user = load_run(folder, device=device, dtype=dtype)
        if user.task not in LABELS:
            raise click.UsageError(
                f"{folder} has no classifier; it is used by: {USERS[user.task][1]} {folder}"
            )
        if truncate and user.task == "images":
            raise click.UsageError("--truncate is for texts, and this is a classifier of images")
        return user

    errors, first = LineErrors(), 1
    with shared_user(ctx, gpus, device, loaded) as (user, ranks):
        if user is None:
            return
        with reading(source) as stream:
            for lines in arriving(stream, ranks=ranks):
                numbered = list(enumerate(lines, first))
                for found in LABELS[user.task](user, numbered, errors, truncate, ranks):
                    click.echo("\n".join(f"{name}\t{p:.4f}" for name, p in found))
                first += len(lines)
    sys.exit(1 if errors.count else 0)


def _of_images(classifier, lines, errors, truncate, ranks):
    """Yield the Labels of each numbered line of names of files, none for an empty one."""
    together = FILES * ranks if ranks > 1 else 1
    for begin in range(0, len(lines), together):
        some = lines[begin : begin + together]
        names = [errors.checked(number, (raw,), str)[0] for number, raw in some]
        usable = [name[0] for name in names if name and name[0].strip()]
        labels = iter(classifier.classify_each(usable))
        for (number, _), name in zip(some, names, strict=True):
            found: Any = next(labels) if name and name[0].strip() else []
            if isinstance(found, DataError):
                errors.add(number, str(found))
                found = []
            yield found


def _of_texts(classifier, lines, errors, truncate, ranks):
    """Yield the Label of each numbered line of text as a list, which is empty without one."""

    def check(line):
        classifier.check(line, truncate)

    texts = [errors.checked(number, (raw,), check)[0] for number, raw in lines]
    usable = [text[0] for text in texts if text and text[0].strip()]
    labels = iter(classifier.classify(usable, truncate=truncate))
    for text in texts:
        yield [next(labels)] if text and text[0].strip() else []


LABELS = {"images": _of_images, "labels": _of_texts}
