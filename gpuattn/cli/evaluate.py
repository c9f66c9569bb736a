"""gpuattn evaluate: exact match, BLEU and chrF of a run."""

import json

import click

from gpuattn.cli.options import NearChoice, PathName, decoding_options, device_option, run_argument
from gpuattn.train.config import TRANSLATION
from gpuattn.train.evaluation import evaluate, pairs_for
from gpuattn.train.metrics import TOKENIZERS
from gpuattn.train.run import load_run


@click.command("evaluate")
@run_argument
@click.argument("files", nargs=-1, metavar="[SRC REF]", type=PathName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--lowercase", is_flag=True, help="Compare in lower case.")
@click.option("--tokenize", type=NearChoice(TOKENIZERS), default="13a", show_default=True,
              help="How BLEU finds words.")  # fmt: skip
@decoding_options
@device_option
def command(folder, files, as_json, lowercase, tokenize, beam, length_penalty, device):
    """Translate SRC with the run in DIR and score it against REF, all figures from 0 to 100.

    Without files: the run's own held-out pairs, for built-in tasks ones never seen in training.
    """
    if len(files) not in (0, 2):
        raise click.UsageError("give a source and a reference file, or none")
    translator = load_run(folder, device=device, model=TRANSLATION)
    pairs = pairs_for(translator.config, *files)
    decoding = {"beam": beam, "length_penalty": length_penalty}
    beam = translator.config.beam if beam is None else beam
    click.echo(f"translating {len(pairs):,} sentences, beam {beam} ...", err=True)
    row = evaluate(translator, pairs, lowercase=lowercase, tokenize=tokenize, **decoding)
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    click.echo(f"exact match  {row['exact_match']:6.2f} %")
    kinds = row["exact_by_kind"] if len(row["exact_by_kind"]) > 1 else {}
    for name, value in kinds.items():
        click.echo(f"  {name:10} {value:6.2f} %")
    click.echo(f"BLEU         {row['bleu']:6.2f}    {row['bleu_signature']}")
    click.echo(f"chrF         {row['chrf']:6.2f}")
    click.echo(f"sentences    {row['sentences']:,} at {row['tokens_per_second']:,.0f} tokens/s")
