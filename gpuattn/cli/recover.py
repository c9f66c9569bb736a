"""gpuattn recover: manifests for checkpoints that have lost theirs."""

import click

from gpuattn.cli.options import run_argument
from gpuattn.errors import CheckpointError
from gpuattn.runs.damage import recover
from gpuattn.runs.folder import RunFolder


@click.command("recover")
@run_argument
def command(folder: str) -> None:
    """Write the manifests (.json) that checkpoints of the run in DIR have lost, such as in a copy
    without them; then the run can go on.

    Each file is read first: it has to be a whole safetensors file of finite numbers. A flipped bit
    cannot be found, since the SHA-256 noted at saving is lost.
    """
    done, faults = recover(RunFolder(folder))
    for name in done:
        click.echo(f"{name} has a manifest again")
    if faults:
        raise CheckpointError(
            f"not recovered: {'; '.join(faults)}. Put these files back or remove them"
        )
    if not done:
        click.echo("every checkpoint has its manifest: nothing to do")
