"""PyTorch's training step: autocast to bfloat16, AdamW(fused=True), the gradient's norm clipped.

Eager ("torch-eager"), by torch.compile, and the compiled step as one CUDA graph ("torch-graph").
All three share one model and one optimizer. "hf-compile" is the class of transformers, compiled.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn.bench.peers.timing import torch_here
from gpuattn.bench.train.cases import Step
from gpuattn.errors import UnsupportedError


class Peer:
    """The model of a ``train.Ours`` in PyTorch, with its first weights, its inputs and AdamW."""

    autocast = True  # False: something else keeps the model in bfloat16

    def __init__(self, case: Step, ours: Any) -> None:
        torch = torch_here()
        self.case = case
        with torch.device("cuda"):
            self._loss = torch.zeros(())
        self.read(ours.inputs)
        self.model, self._first = self._new_model(ours)
        self.optimizer = self._new_optimizer()
        self.restart()

    def _new_optimizer(self):
        case, groups = self.case, parameter_groups(self.model, self.case.weight_decay)
        return torch_here().optim.AdamW(
            groups, lr=case.learning_rate, betas=case.betas, eps=case.eps, fused=True,
            capturable=True,
        )  # fmt: skip

    def _new_model(self, ours):
        """Return the model, and its first weights on the host."""
        torch = torch_here()
        from gpuattn.bench.peers.torch_models import first_weights, new_model

        with torch.device("cuda"):
            model = new_model(self.case)
        return model, first_weights(model, by_layers(ours.weights, self.case.layers[-1]))

    def read(self, inputs: Sequence[np.ndarray]) -> None:
        """Continue with other ``inputs``, NumPy arrays like those of ``train.Ours``."""
        there = [torch_here().from_numpy(np.array(x)).cuda() for x in inputs]
        self.inputs = [x if x.dtype == torch_here().uint8 else x.long() for x in there]

    def restart(self) -> None:
        """Undo all updates."""
        self.model.load_state_dict(self._first)
        for state in self.optimizer.state.values():
            for x in state.values():
                x.zero_()

    def call(self, name: str) -> "_Call":
        """Return the step of the peer ``name``, for ``peers.timing.capture``."""
        return _Call(self, self.model if name == "torch-eager" else self._compiled, name)

    @functools.cached_property
    def _compiled(self):
        torch = torch_here()
        torch._dynamo.reset()
        return torch.compile(self.model, dynamic=False)

    def step(self, model: Any) -> None:
        """Update the parameters once, with the gradients that ``model`` computes."""
        torch = torch_here()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.autocast):
            loss = model(*self.inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss.copy_(loss.detach())

    def loss(self) -> float:
        """Return the loss of the last step as a float."""
        return float(self._loss)

    def held_bytes(self) -> int:
        """Return the bytes of parameters and moments."""
        held = list(self.model.parameters())
        held += [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in held)


class HuggingFacePeer(Peer):
    """The same of transformers' ViT or BERT. UnsupportedError where it is not installed."""

    def _new_model(self, ours):
        kind: Any
        try:
            if self.case.image:
                from gpuattn.bench.peers.hugging_face_vit import Classifier as kind
            else:
                from gpuattn.bench.peers.hugging_face_bert import HiddenTokens as kind
        except ImportError as error:
            raise UnsupportedError(f"transformers cannot be imported: {error}") from error
        model = kind(self.case, ours.weights).cuda()
        return model, {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters of a model of PyTorch for its AdamW: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def by_layers(weights: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """Return our weights under the peer's names: each of its decoder layers has a ``kv``."""
    weights = dict(weights)
    for kind in ("weight", "bias"):
        whole = weights.pop(f"memory.kv.{kind}", None)
        for i, own in enumerate([] if whole is None else np.split(whole, layers)):
            weights[f"decoder.{i}.cross_attention.kv.{kind}"] = own
    return weights


class _Call:
    """A training step of ``peer`` with its eager or compiled model."""

    def __init__(self, peer, model, name):
        self.is_captured = name == "torch-graph"
        self.run = functools.partial(peer.step, model)
