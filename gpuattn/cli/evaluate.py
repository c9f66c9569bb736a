"""gpuattn evaluate: exact match, BLEU and chrF of a translator, perplexity of a language model."""

import json
import sys
from typing import Any

import click
from click.core import ParameterSource

from gpuattn.cli.shared.decoding import decoding_options, loading_options
from gpuattn.cli.shared.lines import LineErrors
from gpuattn.cli.shared.options import NearChoice, PathName, run_argument
from gpuattn.runs.evaluation import evaluate, evaluate_text, pairs_for
from gpuattn.runs.folder import load_run
from gpuattn.tasks.score import TOKENIZERS

OF_TRANSLATORS = ("lowercase", "tokenize", "beam", "length_penalty")


@click.command("evaluate")
@run_argument
@click.argument("files", nargs=-1, metavar="[SRC REF | FILE]", type=PathName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--lowercase", is_flag=True, help="Compare in lower case.")
@click.option("--tokenize", type=NearChoice(TOKENIZERS), default="13a", show_default=True,
              help="BLEU's tokenizer.")  # fmt: skip
@decoding_options
@loading_options
@click.pass_context
def command(
    ctx: click.Context,
    folder: str,
    files: tuple[str, ...],
    as_json: bool,
    device: str,
    dtype: str,
    **options: Any,
) -> None:
    """Translate SRC with the run in DIR and score it against REF, all figures from 0 to 100.
    Of a language model: the exact loss (nats a token) and the perplexity of the text in FILE.

    Without files: what the run held out, for built-in tasks pairs never seen in training. A source
    longer than the model takes gives a message and an empty translation, which is scored; the exit
    code is then 1. DIR may be a folder of Hugging Face with a language model, which needs a FILE.
    """
    user = load_run(folder, device=device, dtype=dtype)
    if user.task not in SHOW:
        raise click.UsageError(f"{folder} has an encoder, which has no scores: gpuattn embed")
    errors = LineErrors()
    row, lines = SHOW[user.task](ctx, user, files, options | {"refused": errors.add})
    click.echo(json.dumps(row, indent=2) if as_json else "\n".join(lines))
    sys.exit(1 if errors.count else 0)


def _of_text(ctx, sampler, files, options):
    """Return the scores of a language model as (row, lines to print)."""
    for name in OF_TRANSLATORS:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            word = name.replace("_", "-")
            raise click.UsageError(f"--{word} is for translators, and this is a language model")
    if len(files) > 1:
        raise click.UsageError("give one text file for a language model, or none")
    if not files and sampler.config is None:
        raise click.UsageError("give a text file: this is no run, which would have held one out")
    row = evaluate_text(sampler, *files)
    return row, [
        f"loss         {row['loss']:.4f} nats a token",
        f"perplexity   {row['perplexity']:.3f}",
        f"tokens       {row['tokens']:,} at {row['tokens_per_second']:,.0f} tokens/s",
    ]


def _of_pairs(ctx, translator, files, options):
    """Return the scores of a translator as (row, lines to print)."""
    if len(files) not in (0, 2):
        raise click.UsageError("give a source and a reference file for a translator, or none")
    pairs = pairs_for(translator.config, *files)
    beam = options["beam"] or translator.config.beam
    click.echo(f"translating {len(pairs):,} sentences, beam {beam} ...", err=True)
    row = evaluate(translator, pairs, **options)
    kinds = row["exact_by_kind"] if len(row["exact_by_kind"]) > 1 else {}
    return row, [
        f"exact match  {row['exact_match']:6.2f} %",
        *(f"  {name:10} {value:6.2f} %" for name, value in kinds.items()),
        f"BLEU         {row['bleu']:6.2f}    {row['bleu_signature']}",
        f"chrF         {row['chrf']:6.2f}",
        f"sentences    {row['sentences']:,} at {row['tokens_per_second']:,.0f} tokens/s",
    ]


SHOW = {"language": _of_text, "translation": _of_pairs}
