"""PyTorch's training step on several GPUs, a process for each: ``peers.train`` in DDP or FSDP2.

All of them sum gradients in bfloat16; those of DDP are views of buckets. "torch-ddp": DDP compiled,
which cuts the graph at buckets. "torch-ddp-static": of the compiled model, with a static graph.
"torch-ddp-graph": the same as one CUDA graph. "torch-zero": the first, whose ranks share the update
by a ZeroRedundancyOptimizer. "torch-fsdp": ``shared_model`` compiled, without autocast.
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
        torch._dynamo.reset()
        if name == "torch-fsdp":
            self._wrapped = torch.compile(shared_model(self.model), dynamic=False)
            self.optimizer, self.autocast = self._new_optimizer(), False
            self._first = {name: x.clone() for name, x in self.model.state_dict().items()}
        else:
            self._wrapped = self._ddp(torch)

    def _ddp(self, torch):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        name = self._name
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
        return wrapped if static else torch.compile(wrapped, dynamic=False)

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


def shared_model(model: Any) -> Any:
    """Let FSDP2 share parameters and gradients of a ``torch_models`` model among all ranks.

    Each layer is gathered and summed in one call, and so is the rest, with its tables. Gathered
    parameters are kept for the backward pass, as in ZeRO-2: memory is no matter here. Returns the
    model, changed in place. UnsupportedError before PyTorch 2.6.
    """
    import torch

    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        raise UnsupportedError(f"FSDP2 needs PyTorch 2.6, this is {torch.__version__}") from error
    from gpuattn.bench.peers.torch_models import Layer

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in [*(m for m in model.modules() if isinstance(m, Layer)), model]:
        fully_shard(part, mp_policy=policy, reshard_after_forward=False)
    return model


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
