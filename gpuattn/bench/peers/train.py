"""PyTorch's training step: autocast to bfloat16, AdamW(fused=True), the gradient's norm clipped.

As it is ("torch-eager"), by torch.compile, and what torch.compile makes as one CUDA graph
("torch-graph"). All three are one model and one optimizer.
"""

import functools

import numpy as np

from gpuattn.bench.peers.timing import torch_here


class Peer:
    """PyTorch's like of ``train.Ours``, with its first weights. ``loss``: of the last step."""

    def __init__(self, case, ours):
        torch = torch_here()
        from gpuattn.bench.peers.torch_models import GPT, Translator

        self.case = case
        with torch.device("cuda"):
            self.model = (Translator if case.translates else GPT)(case)
            self.loss = torch.zeros(())
        self.read(ours.inputs)
        weights = by_layers(ours.weights, case.layers[-1])
        self._first = {  # on the host; tables without the rows that only pad ours
            name: torch.from_numpy(weights[name][: len(own)])
            for name, own in self.model.state_dict().items()
        }
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": case.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=case.learning_rate, betas=case.betas, eps=case.eps, fused=True,
            capturable=True,
        )  # fmt: skip
        self.restart()

    def read(self, inputs):
        """Go on with other ``inputs``, as ours has them."""
        self.inputs = [torch_here().from_numpy(x).cuda().long() for x in inputs]

    def restart(self):
        """Take back all updates."""
        self.model.load_state_dict(self._first)
        for state in self.optimizer.state.values():
            for x in state.values():
                x.zero_()

    def call(self, name):
        """Return one of the three ways to step, as ``peers.capture`` takes it."""
        return _Call(self, self.model if name == "torch-eager" else self._compiled, name)

    @functools.cached_property
    def _compiled(self):
        torch = torch_here()
        torch._dynamo.reset()
        return torch.compile(self.model, dynamic=False)

    def step(self, model):
        torch = torch_here()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(*self.inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())

    def held_bytes(self):
        """Return the bytes of parameters and moments."""
        held = list(self.model.parameters())
        held += [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in held)


def by_layers(weights, layers):
    """Return our weights by the names of the peers, whose layers project the memory themselves."""
    weights = dict(weights)
    for kind in ("weight", "bias"):
        whole = weights.pop(f"memory.kv.{kind}", None)
        for i, own in enumerate([] if whole is None else np.split(whole, layers)):
            weights[f"decoder.{i}.cross_attention.kv.{kind}"] = own
    return weights


class _Call:
    """A way to step."""

    def __init__(self, peer, model, name):
        self.is_captured = name == "torch-graph"
        self.run = functools.partial(peer.step, model)
