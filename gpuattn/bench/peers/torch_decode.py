"""What generations in PyTorch share: weights by layer, steps as CUDA graphs, parts of a layer.

Each step is one CUDA graph of compiled parts: torch.compile compiles a layer once, for all layers,
and the choice of tokens. Replays are queued without reading anything back. Weights are those of our
models, by our names (the packed layout of both is the same). On a CPU the same code runs eagerly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WARM_UPS = 3


class Named(dict):
    """Weights by name, and those of each layer: ``layers["decoder.0."]["norms.0.weight"]``."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights)
        self.layers: dict[str, dict[str, Tensor]] = {}
        for name, x in weights.items():
            stack, number, *rest = name.split(".")
            if number.isdigit():
                self.layers.setdefault(f"{stack}.{number}.", {})[".".join(rest)] = x


def compiled(device: str) -> Any:
    """Return torch.compile, with nothing known of other shapes; on a CPU what changes nothing."""
    if device == "cpu":
        return lambda function: function
    torch._dynamo.reset()
    return torch.compile


class Replay:
    """A function of device memory, captured as a CUDA graph after WARM_UPS calls; eager on a CPU.

    ``pool``: of memory that graphs share which run one after the other.
    """

    def __init__(self, function: Callable[[], None], device: str, pool: Any) -> None:
        self.function, self.graph = function, None
        if device == "cpu":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # other threads may compile kernels meanwhile
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            function()

    def __call__(self) -> None:
        if self.graph is None:
            self.function()
        else:
            self.graph.replay()


def pool(device: str) -> Any:
    """Return memory that graphs may share which run one after the other."""
    return None if device == "cpu" else torch.cuda.graph_pool_handle()


# ---- parts of a layer ---------------------------------------------------------------------------


def enter(tokens: Tensor, pos: Tensor, table: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return the embedded ``tokens`` (...), all at position ``pos``."""
    return F.embedding(tokens, table) * scale + positions[pos]


def linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    """Return ``x`` through the linear layer ``name``."""
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    """Return ``x`` through the layer norm ``name``."""
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def feed_forward(x: Tensor, w: Mapping[str, Tensor], activation: Callable) -> Tensor:
    """Return ``x`` through the feed-forward network of a layer."""
    return linear(activation(linear(x, w, "feed_forward.inner")), w, "feed_forward.out")
