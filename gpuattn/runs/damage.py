"""Run folders with missing files: which ones a run can resume without, and recovery."""

import shlex
from typing import Any

from gpuattn.errors import CheckpointError
from gpuattn.runs.folder import CHECKPOINTS, SNAPSHOTS
from gpuattn.runtime import checkpoint


def check_whole(folder: Any) -> list[str]:
    """Return sentences on missing files that a run can resume without.

    ``folder``: its RunFolder. Raises CheckpointError where a run that was trained would restart
    from nothing: its state is missing, or checkpoints have lost their manifests.
    """
    path, saved = folder.path, folder.metrics.read("stop") or folder.metrics.read("end")
    listed = {name: checkpoint.generations(path, name) for name in CHECKPOINTS}
    lost = [p for name in listed if not listed[name] for p in checkpoint.unlisted(path, name)]
    first = not saved or listed["state"]  # a kill in the first save leaves one file like this
    if first and [file.stem[-8:] for file in lost] == ["00000001"]:
        lost = []
    snapshots = checkpoint.unlisted(path / SNAPSHOTS)
    if len(snapshots) > 1 and not folder.snapshots():  # a kill leaves one at most
        lost += snapshots
    if lost:
        raise CheckpointError(f"{path}: {checkpoint.describe_unlisted(path, lost)}")
    if listed["state"]:
        return list(_missing(folder, listed))
    if saved or len(listed["last"]) > 1:
        rest = ", ".join(found[0].stem for found in listed.values() if found) or "nothing"
        raise CheckpointError(
            f"{path} has no state to go on from: state-*.safetensors and their manifests are "
            f"missing (left of its checkpoints: {rest}). Put them back, or begin a new run with "
            f"its weights: --init-from {shlex.quote(str(path))} with another --out"
        )
    return []


def _missing(folder, listed):
    """Yield sentences on missing files of a run that has a state; see ``check_whole``."""
    for name, manifests in listed.items():
        files = checkpoint.unlisted(folder.path, name)
        if files and manifests and files[0].stem > manifests[0].stem:
            yield (
                f"{files[0].name} has no manifest, as a kill during a save leaves it: "
                f"{manifests[0].stem} is used"
            )
    if not folder.metrics.path.exists():
        yield f"{folder.metrics.path} is missing: its curves begin where the run goes on"
    elif not listed["best"] and folder.metrics.read("valid"):
        yield f"the best weights are missing in {folder.path}: the last ones are used instead"


def recover(folder: Any) -> tuple[list[str], list[str]]:
    """Write the manifests that the checkpoints of a run have lost. ``folder``: its RunFolder.

    Returns (names of files that have one now, sentences on files that cannot be used). Raises
    CheckpointError where there is no run, ConfigError while another process writes to it.
    """
    folder.config()
    done, faults = [], []
    with folder.lock():
        for place in (folder.path, folder.path / SNAPSHOTS):
            for path in checkpoint.unlisted(place):
                try:
                    checkpoint.adopt(path)
                    done.append(path.name)
                except CheckpointError as error:
                    faults.append(str(error))
    return done, faults
