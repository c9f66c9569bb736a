"""Updates of models launched one by one, without a graph: a TrainingStep's, and plain loops'."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn import nn
from gpuattn.arrays import to_cpu
from gpuattn.bench.calls.cases import EAGER, NETWORK, Called
from gpuattn.bench.peers.calls import NetworkLoop as EagerNetworkLoop
from gpuattn.bench.peers.timing import noting, reasons
from gpuattn.bench.peers.train import Peer
from gpuattn.bench.train import measure as train
from gpuattn.bench.train.cases import MODELS, small
from gpuattn.optim import AdamW
from gpuattn.runtime.device import batch_to

SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.98), "eps": 1e-9}
"""Of AdamW in README's plain loop; the last two are our defaults."""


class ModelLoop:
    """The plain loop on the model and the batch of a ``train.Ours``."""

    def __init__(self, ours: train.Ours) -> None:
        self.ours, self.batch = ours, batch_to(ours.batch, ours.xp)

    def __call__(self) -> None:
        optimizer = self.ours.optimizer
        loss = self.ours.loss(self.batch, None)
        loss.backward(optimizer.loss_scale)
        optimizer.step(self.ours.case.learning_rate)
        self._loss = loss.data

    def restart(self) -> None:
        """Undo all updates."""
        self.ours.restart()

    def loss(self) -> float:
        """Return the loss of the last update."""
        return float(self._loss)


class Network(nn.Module):
    """The model of README's plain loop."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.hidden = nn.Linear(1, 64, activation="gelu", rng=rng)
        self.out = nn.Linear(64, 1, rng=rng)

    def __call__(self, x: Any) -> Any:
        return self.out(self.hidden(x))


class NetworkLoop:
    """README's plain loop. ``x``: (rows, 1) float32 on the host."""

    def __init__(self, case: Called, xp: ModuleType) -> None:
        self.x = np.linspace(-3, 3, case.shape[0], dtype=np.float32).reshape(case.shape)
        self._x = xp.asarray(self.x)
        self.network = Network().to(device="numpy" if xp is np else "cuda")
        self.optimizer = AdamW(self.network, **SETTINGS)
        self._first = self.optimizer.state_dict()
        self.weights = {
            name: np.array(to_cpu(parameter.data))
            for name, parameter in self.network.named_parameters()
        }

    def __call__(self) -> None:
        loss = np.mean((self.network(self._x) - np.sin(self._x)) ** 2)
        loss.backward()
        self.optimizer.step()
        self._loss = loss.data

    def restart(self) -> None:
        """Undo all updates."""
        self.optimizer.load_state_dict(self._first)

    def loss(self) -> float:
        """Return the loss of the last update."""
        return float(self._loss)


def updates(
    case: Called, xp: ModuleType, names: Sequence[str]
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Return ({name: an update}, {name: why there is none}) of ours and of the peers ``names``.

    Their losses were compared. Raises AssertionError if that of ours does not fall.
    """
    own, peer_of = _network(case, xp) if case.model == NETWORK else _model(case, xp)
    losses = {"eager": train.losses_of(own, own)}
    train.check_losses("eager", losses)
    calls, missing = {"ours": own}, dict[str, str]()
    for name in names:
        with noting(missing, name):
            with reasons():
                peer, run = peer_of()
                losses[name] = train.losses_of(peer, run)
            train.check_losses(name, losses)
            calls[name] = run
    return calls, missing


def _network(case, xp):
    own = NetworkLoop(case, xp)

    def peer():
        loop = EagerNetworkLoop(own.weights, own.x, SETTINGS)
        return loop, loop

    return own, peer


def _model(case, xp):
    step = MODELS[case.model]
    ours = train.Ours(small(step) if xp is np else step, xp)
    loop = case.op == "loop"
    own = ModelLoop(ours) if loop else train.Updates(ours, graphs=False, tuned=False)

    def peer():
        theirs = Peer(ours.case, ours)
        return theirs, theirs.call(f"{EAGER}-eager").run

    return own, peer
