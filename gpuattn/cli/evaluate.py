"""gpuattn evaluate: exact match, BLEU and chrF of a translator; the loss of other models."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from gpuattn.cli.shared.decoding import decoding_options, loading_options
from gpuattn.cli.shared.gpus import gpus_option, ranks_of
from gpuattn.cli.shared.lines import LineErrors
from gpuattn.cli.shared.options import GroupedCommand, NearChoice, PathName, run_argument
from gpuattn.parallel.agreement import together
from gpuattn.parallel.dealing import Dealing
from gpuattn.runs.evaluation import (
    evaluate,
    evaluate_images,
    evaluate_labels,
    evaluate_masked,
    evaluate_text,
    pairs_for,
)
from gpuattn.runs.loading import load_run
from gpuattn.tasks.labels import Mistake
from gpuattn.tasks.score import TOKENIZERS

SHOWN = 10  # wrong labels
OF_TRANSLATORS = ("lowercase", "tokenize", "beam", "length_penalty")


@click.command("evaluate", cls=GroupedCommand)
@run_argument
@click.argument("files", nargs=-1, metavar="[SRC REF | FILE]", type=PathName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--lowercase", is_flag=True, help="Compare in lower case.")
@click.option("--tokenize", type=NearChoice(TOKENIZERS), default="13a", show_default=True,
              help="BLEU's tokenizer.")  # fmt: skip
@decoding_options
@gpus_option
@loading_options
@click.pass_context
def command(
    ctx: click.Context,
    folder: str,
    files: tuple[str, ...],
    as_json: bool,
    device: str,
    dtype: str,
    gpus: int | str | None,
    **options: Any,
) -> None:
    """Translate SRC with the run in DIR and score it against REF, all figures from 0 to 100.
    Of a language model: the exact loss (nats a token) and the perplexity of the text in FILE. Of a
    classifier: the share of images in FILE, a folder of classes or an .npz, or of texts, lines of a
    text, a tab and its label, that it labels right. Of a bert with a head for masks: the share of
    the hidden tokens of FILE that it guesses right, and their loss.

    Without files: what the run held out, for built-in tasks pairs never seen in training. A source
    longer than the model takes gives a message and an empty translation, which is scored; the exit
    code is then 1. DIR may be a folder of Hugging Face with a translator or a language model, which
    needs files. With --gpus, or by ranks of mpirun, each of them computes a part.
    """

    def loaded():
        user = load_run(folder, device=device, dtype=dtype)
        if user.task == "embedding" and user.config is None:
            raise click.UsageError(f"{folder} has an encoder, which has no scores: gpuattn embed")
        CHECK[user.task](ctx, user, files)
        return user

    errors = LineErrors()
    with ranks_of(ctx, gpus, device) as ranks:
        user, deal = together(ranks, loaded), Dealing(ranks)
        options["refused"] = errors.add if deal.is_first else lambda number, message: None
        row, lines = SHOW[user.task](user, files, options, deal)
    if deal.is_first:
        click.echo(json.dumps(row, indent=2) if as_json else "\n".join(lines))
    sys.exit(1 if errors.count else 0)


def _refuse_options(ctx, what):
    """Refuse the options of translators for a model that is ``what``."""
    for name in OF_TRANSLATORS:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            word = name.replace("_", "-")
            raise click.UsageError(f"--{word} is for translators, and this is {what}")


def _check_one(ctx, user, files, what, accepted, missing):
    """Refuse options of translators, more than one file, and none where no run held one out.

    ``accepted``, ``missing``: what the errors say besides.
    """
    _refuse_options(ctx, what)
    if len(files) > 1:
        raise click.UsageError(f"give one {accepted}, or none")
    if not files and user.config is None:
        raise click.UsageError(f"give {missing}")


def _check_pairs(ctx, translator, files):
    """Refuse another number of files than a translator is scored on."""
    if len(files) not in (0, 2):
        raise click.UsageError("give a source and a reference file for a translator, or none")
    if not files and translator.config is None:
        raise click.UsageError("give two files: this is no run, which would have held pairs out")


CHECK: dict[str, Callable[..., None]] = {
    "translation": _check_pairs,
    "language": partial(
        _check_one, what="a language model", accepted="text file for a language model",
        missing="a text file: this is no run, which would have held one out",
    ),
    "images": partial(
        _check_one, what="a classifier of images",
        accepted="folder of classes or .npz for a classifier",
        missing="images: this is no run, which would have held some out",
    ),
    "labels": partial(
        _check_one, what="a classifier of texts",
        accepted="file of lines with labels for a classifier",
        missing="a file: this is no run, which would have held texts out",
    ),
    "embedding": partial(
        _check_one, what="an encoder", accepted="text file for an encoder", missing="",
    ),  # one that is no run is refused before
}  # fmt: skip


def _of_text(sampler, files, options, deal):
    """Return the scores of a language model as (row, lines to print)."""
    row = evaluate_text(sampler, *files, deal=deal)
    return row, [
        f"loss         {row['loss']:.4f} nats a token",
        f"perplexity   {row['perplexity']:.3f}",
        f"tokens       {row['tokens']:,} at {row['tokens_per_second']:,.0f} tokens/s",
    ]


def _of_pairs(translator, files, options, deal):
    """Return the scores of a translator as (row, lines to print)."""
    pairs = deal.read(lambda: pairs_for(translator.config, *files))
    beam = options["beam"] or translator.search.beam
    if deal.is_first:
        click.echo(f"translating {len(pairs):,} sentences, beam {beam} ...", err=True)
    row = evaluate(translator, pairs, deal=deal, **options)
    kinds = row["exact_by_kind"] if len(row["exact_by_kind"]) > 1 else {}
    return row, [
        f"exact match  {row['exact_match']:6.2f} %",
        *(f"  {name:10} {value:6.2f} %" for name, value in kinds.items()),
        f"BLEU         {row['bleu']:6.2f}    {row['bleu_signature']}",
        f"chrF         {row['chrf']:6.2f}",
        f"sentences    {row['sentences']:,} at {row['tokens_per_second']:,.0f} tokens/s",
    ]


def _of_images(classifier, files, options, deal):
    """Return the scores of a classifier of images as (row, lines to print)."""
    row = evaluate_images(classifier, *files, deal=deal)
    return row, [
        f"accuracy     {row['accuracy']:6.2f} %",
        f"loss         {row['loss']:.4f} nats an image",
        f"images       {row['images']:,} at {row['images_per_second']:,.0f} images/s",
    ]


def _of_labels(classifier, files, options, deal):
    """Return the scores of a classifier of texts as (row, lines to print)."""
    row = evaluate_labels(classifier, *files, deal=deal)
    wrong = [Mistake(**one) for one in row["wrong"]]
    cut = [f"too long     {row['cut']:,}, which were cut"] if row["cut"] else []
    more = [f"... and {len(wrong) - SHOWN:,} more (--json)"] if len(wrong) > SHOWN else []
    return row, [
        f"accuracy     {row['accuracy']:6.2f} %",
        f"loss         {row['loss']:.4f} nats a text",
        f"texts        {row['texts']:,} at {row['texts_per_second']:,.0f} texts/s",
        *cut,
        *(f"  line {one.line}: {one.describe()}" for one in wrong[:SHOWN]), *more,
    ]  # fmt: skip


def _of_masked(unmasker, files, options, deal):
    """Return the scores of an encoder that guesses hidden tokens as (row, lines to print)."""
    row = evaluate_masked(unmasker, *files, deal=deal)
    return row, [
        f"accuracy     {row['accuracy']:6.2f} % of the hidden tokens",
        f"loss         {row['loss']:.4f} nats a hidden token",
        f"tokens       {row['tokens']:,} hidden; {row['tokens_per_second']:,.0f} tokens/s in all",
    ]


SHOW = {
    "language": _of_text, "translation": _of_pairs, "images": _of_images, "labels": _of_labels,
    "embedding": _of_masked,
}  # fmt: skip
