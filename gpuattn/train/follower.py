"""Ranks other than 0: each computes its share of the updates, and neither writes nor tells.

Rank 0 gives them what it has read: the tokenizer, the kind of the model, the state of the run. The
training data each of them reads by itself.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from gpuattn.errors import ConfigError
from gpuattn.nn.dropout import random_states
from gpuattn.nn.module import uninitialised
from gpuattn.parallel.agreement import check_same, together
from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.dealing import Dealing
from gpuattn.parallel.world import check_replicas
from gpuattn.runs.config import OPTIONS, TrainConfig, option_key
from gpuattn.runs.fine_tuning import freeze
from gpuattn.runtime.device import card_memory, choose_device, installed_version
from gpuattn.runtime.precision import choose
from gpuattn.tasks.registry import task_of
from gpuattn.tasks.task import DATA_FILES
from gpuattn.train.averaging import evaluated_with
from gpuattn.train.progress import Listener
from gpuattn.train.sharding import Sharing, share_parameters
from gpuattn.train.state import Outcome
from gpuattn.train.trainer import Trainer
from gpuattn.units import shown

LOCAL = (*DATA_FILES, "origin", "init_from")  # options with names of files: each host its own


class Terms(NamedTuple):
    """What ranks have agreed on. ``device``: "numpy" or "cuda". ``free``: bytes of the GPU with the
    least free memory, or None for one rank, and on NumPy. ``sharing``: what this rank holds."""

    device: str
    free: int | None
    sharing: Sharing | None


def agree(config: TrainConfig, device: str, ranks: Communicator, shard: str) -> Terms:
    """Return the Terms of a run.

    Raises ConfigError, on all ranks, unless all have the same version and options, and may share
    the replicas of the run. ``shard``: one of ``sharding.SHARD``.
    """

    def check():
        check_replicas(config.replicas, ranks.size)
        if config.outer_every and not 1 < config.replicas == ranks.size:
            raise ConfigError(
                f"--outer-every {config.outer_every} with {config.replicas} replicas and "
                f"{ranks.size} rank{'s' * (ranks.size > 1)}; accepted: two replicas or more, and a "
                "rank for each, as each has parameters of its own"
            )
        if ranks.size == 1:
            return device
        return choose_device(device)[0]

    device = together(ranks, check)
    if ranks.size == 1:
        return Terms(device, None, None)
    options = {
        f"--{option_key(name)}": shown(getattr(config, name))
        for name in OPTIONS if name not in LOCAL
    }  # fmt: skip
    options |= {"--shard": shard, "device": device}
    check_same(ranks, {"version of gpuattn": installed_version(), **options})
    free = min(ranks.gather(card_memory()[0])) if device == "cuda" else None
    precision = choose(config.precision, device)
    return Terms(device, free, share_parameters(shard, config, precision, device, ranks))


def lead(task: Any, ranks: Communicator) -> None:
    """On rank 0: let the others make the same Task, and compare their data with these."""
    if ranks.size > 1:
        model = task.model
        seeds = [state.seed for state in random_states(model)]
        ranks.gather((task.config, task.corpus.tokenizer, type(model), model.config, seeds))
        together(ranks, lambda: None)
        check_same(ranks, _facts(task))


def follow(
    config: TrainConfig, stop: Callable[[], bool], listener: Listener, ranks: Communicator,
    terms: Terms, graphs: bool = True,
) -> Outcome:  # fmt: skip
    """Train with rank 0, which trains by ``session.train``; return the same Outcome.

    ``listener``: is told when training begins, and nothing else. ``graphs``: see ``Trainer``.
    """
    together(ranks, lambda: None)  # rank 0 opens the run
    theirs, tokenizer, kind, sizes, seeds = ranks.gather(None)[0]
    files = {name: getattr(config, name) for name in LOCAL}

    def prepared():
        mine = dataclasses.replace(theirs, **files)
        with uninitialised():
            model = kind(sizes).train()
        for state, seed in zip(random_states(model), seeds, strict=True):
            state.seed = seed
        task = task_of(mine)(mine, tokenizer, model=model)
        if mine.freeze:
            freeze(model, mine.freeze)
        return Trainer(task, terms.device, Listener(), graphs, ranks, terms.sharing)

    trainer = together(ranks, prepared)
    check_same(ranks, _facts(trainer.task))

    def evaluate():
        average = trainer.average
        with average.applied() if average else contextlib.nullcontext():
            trainer.valid_loss()
            trainer.task.answers(trainer.task.user, Dealing(ranks, stop))

    listener.begin()
    with trainer.computing():
        if trainer.begin():
            return Outcome(True, trainer.at.best, trainer.at.update)
        finished = trainer.run(stop, evaluate, lambda row: None)
        if finished and theirs.average > 1:
            finished = evaluated_with(trainer, evaluate) is not None
    return Outcome(finished, trainer.at.best, trainer.at.update)


def _facts(task):
    """Return what the ranks must have alike of the data and the model."""
    digests = {f"content of --{option_key(n)}": sha for n, sha in task.corpus.digests.items()}
    return digests | {
        "training data (its fingerprint)": task.corpus.fingerprint,
        "number of parameters": sum(parameter.size for parameter in task.model.parameters()),
    }
