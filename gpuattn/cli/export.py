"""gpuattn export: a run as a folder of Hugging Face."""

import click

from gpuattn.cli.shared.options import PathName, run_argument
from gpuattn.pretrained import save_pretrained
from gpuattn.pretrained.generation import describe_search
from gpuattn.runs.loading import load_run


@click.command("export")
@run_argument
@click.argument("target", metavar="FOLDER", type=PathName())
def command(folder: str, target: str) -> None:
    """Write the best weights of the run in DIR as a new FOLDER that transformers can load.

    \b
    gpuattn train --lm book.txt --bias --out runs/book
    gpuattn export runs/book book-gpt2

    The model must be one that transformers has: a gpt2 with biases, learned positions and GELU, or
    a Marian: a translator with --norm post and --positions sinusoidal_halves; a bert; or a vit.
    FOLDER has the tokenizer of the run and the names of its classes too; transformers reads the
    names, the tokenizer of a Marian, and one that came with --from.
    """
    user = load_run(folder, device="numpy")
    beside = {}
    if user.task == "translation":
        beside = describe_search(user.search, user.model.config, user.tokenizer.pad)
    save_pretrained(user.model, target, user.tokenizer, beside)
    click.echo(f"{target} has the model; use it: gpuattn info {target}", err=True)
