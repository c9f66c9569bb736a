"""Which ranks hold which parts of masters, moments and averages: ``parallel.exchange``."""

from typing import NamedTuple

from gpuattn.errors import ConfigError
from gpuattn.parallel.agreement import together
from gpuattn.parallel.communicator import Communicator
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime.precision import Precision

SHARD = ("auto", "none", "node")


class Sharing(NamedTuple):
    """This rank holds part ``part`` of ``parts``. ``group``: the ranks that hold all parts, those
    of a host; ``across``: those with the same part, or None for one host."""

    part: int
    parts: int
    group: Communicator
    across: Communicator | None


def share_parameters(
    asked: str, config: TrainConfig, precision: Precision, device: str, ranks: Communicator
) -> Sharing | None:
    """Return what this rank holds, or None where each rank holds all. All ranks call it.

    ``asked``: one of SHARD; "auto" is "node" on GPUs, where nothing speaks against it. Raises
    ConfigError, on all ranks, where "node" is impossible.
    """
    if ranks.size == 1 or asked == "none" or (asked == "auto" and device == "numpy"):
        return None
    places = ranks.gather((ranks.local_rank, ranks.local_size))
    reason = _reason(config, precision, places)
    if reason and asked == "auto":
        return None

    def check():
        if reason:
            raise ConfigError(f"--shard node: {reason}. Try --shard auto")

    together(ranks, check)
    parts = ranks.local_size
    if parts == ranks.size:
        return Sharing(ranks.local_rank, parts, ranks, None)
    host = sum(local == 0 for local, _ in places[: ranks.rank - ranks.local_rank + 1])
    return Sharing(ranks.local_rank, parts, ranks.split(host), ranks.split(ranks.local_rank))


def _reason(config, precision, places):
    """Return why ranks cannot hold parts, or "". ``places``: (rank, ranks) on its host, of each."""
    parts = places[0][1]
    if places != [(i % parts, parts) for i in range(len(places))]:
        return "hosts have different numbers of ranks, or their ranks do not follow each other"
    if parts == 1:
        return "each host has one rank, and parts are shared inside a host"
    if config.outer_every:
        return "--outer-every lets each rank have parameters of its own"
    if config.optimizer == "lamb":
        return "lamb adapts the step of a tensor to its norm, and needs whole tensors"
    if not precision.masters:
        return "pure-bf16 rounds at random by the place of a parameter among all"
    if config.deterministic:
        return "--deterministic takes the norm of all gradients in one order for any ranks"
    if config.average > 1:
        return "--average evaluates means of checkpoints, which rank 0 holds alone"
    return ""
