"""PyTorch's training step on several GPUs, a process for each: the step of ``peers.train`` in DDP.

In all of them gradients are views of buckets and are summed in bfloat16. "torch-ddp": DDP compiled,
which cuts the graph at buckets. "torch-ddp-static": of the compiled model, with a static graph.
"torch-ddp-graph": the same as one CUDA graph. "torch-zero": the first, whose ranks share the update
by a ZeroRedundancyOptimizer.
"""

import contextlib
import functools
import os
from typing import Any

from gpuattn.bench.peers import timing
from gpuattn.bench.peers.timing import torch_here
from gpuattn.bench.peers.train import Peer
from gpuattn.bench.train.cases import Step
from gpuattn.errors import UnsupportedError
from gpuattn.parallel.communicator import Communicator


class Parallel(Peer):
    """The step of the peer ``name`` on this rank; all ranks make one at the same time."""

    def __init__(self, name: str, case: Step, ours: Any, ranks: Communicator) -> None:
        connect(ranks)
        super().__init__(case, ours)
        self._name, self.is_captured = name, name == "torch-ddp-graph"
        torch = torch_here()
        torch.cuda.synchronize()
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        torch._dynamo.reset()
        static = name in ("torch-ddp-static", "torch-ddp-graph")
        model = torch.compile(self.model, dynamic=False) if static else self.model
        side = torch.cuda.Stream()  # so that a capture finds no work on the default stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            wrapped = torch.nn.parallel.DistributedDataParallel(
                model, device_ids=[torch.cuda.current_device()], static_graph=static,
                gradient_as_bucket_view=True,
            )  # fmt: skip
            wrapped.register_comm_hook(None, bf16_compress_hook)
        torch.cuda.current_stream().wait_stream(side)
        if name == "torch-zero":
            self.optimizer = self._sharded(torch)
        self._wrapped = wrapped if static else torch.compile(wrapped, dynamic=False)

    def _sharded(self, torch):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        first, *others = self.optimizer.param_groups
        settings = {"lr": self.case.learning_rate, "betas": self.case.betas, "eps": self.case.eps}
        optimizer = ZeroRedundancyOptimizer(
            first["params"], torch.optim.AdamW, weight_decay=first["weight_decay"], fused=True,
            **settings,
        )  # fmt: skip
        for group in others:
            optimizer.add_param_group(
                {"params": group["params"], "weight_decay": group["weight_decay"]}
            )
        return optimizer

    def restart(self) -> None:
        """Undo all updates."""
        self.model.load_state_dict(self._first)
        for state in getattr(self.optimizer, "optim", self.optimizer).state.values():
            for x in state.values():
                x.zero_()

    def launch(self, warm_ups: int) -> timing.Launches:
        """Return the step, ready to be timed. ``warm_ups``: steps before a capture."""
        self.run = functools.partial(self.step, self._wrapped)
        for _ in range(warm_ups):
            self.run()
        return timing.capture(self._name, lambda: self, [()])


def take_card(ranks: Communicator) -> None:
    """Let PyTorch use the GPU of this rank; do nothing without PyTorch."""
    with contextlib.suppress(UnsupportedError):
        cuda = torch_here().cuda
        cuda.set_device(ranks.local_rank if cuda.device_count() > 1 else 0)


def connect(ranks: Communicator) -> None:
    """Make PyTorch's process group of all ranks, once. UnsupportedError where it has no NCCL."""
    torch_here()
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if not dist.is_nccl_available():
        raise UnsupportedError("PyTorch has no NCCL")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as captures need it
    store = None
    if ranks.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks.size, True, wait_for_workers=False)
    port = ranks.gather(store.port if store else None)[0]
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, ranks.size, False)
    dist.init_process_group("nccl", store=store, rank=ranks.rank, world_size=ranks.size)
