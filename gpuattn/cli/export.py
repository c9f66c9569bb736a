"""gpuattn export: a run as a folder of Hugging Face."""

import click

from gpuattn.cli.shared.options import PathName, run_argument
from gpuattn.pretrained import save_pretrained
from gpuattn.runs.folder import load_run


@click.command("export")
@run_argument
@click.argument("target", metavar="FOLDER", type=PathName())
def command(folder: str, target: str) -> None:
    """Write the best weights of the run in DIR as a new FOLDER that transformers can load.

    \b
    gpuattn train --lm book.txt --bias --out runs/book
    gpuattn export runs/book book-gpt2

    The model must be one that transformers has: a gpt2 with biases, learned positions and GELU.
    FOLDER has the tokenizer of the run too, which gpuattn reads and transformers does not.
    """
    user = load_run(folder, device="numpy")
    save_pretrained(user.model, target, user.tokenizer)
    click.echo(f"{target} has the model; use it: gpuattn info {target}", err=True)
