"""gpuattn recover: write missing manifests of checkpoints."""

import click

from gpuattn.cli.shared.options import run_argument
from gpuattn.errors import CheckpointError
from gpuattn.runs.damage import recover
from gpuattn.runs.folder import RunFolder


@click.command("recover")
@run_argument
def command(folder: str) -> None:
    """Write the missing manifests (.json) of checkpoints of the run in DIR, such as after a copy
    without them, so that the run can continue.

    Each file is read first: it must be a whole safetensors file of finite numbers. A flipped bit
    cannot be detected, since the SHA-256 written with the checkpoint is lost.
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
