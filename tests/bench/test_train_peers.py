"""PyTorch's training step on several ranks, a peer of bench train: FSDP2 beside DDP."""

import json
import sys
from types import ModuleType

import pytest
from ranks import Ranks

from gpuattn.bench.peers.train_ranks import shared_model
from gpuattn.errors import UnsupportedError

SHARED = """
import json, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo on the CPU, also beside a GPU
from dataclasses import replace
import numpy as np
import torch
import torch.distributed as dist
from gpuattn.bench.peers.torch_models import first_weights, new_model
from gpuattn.bench.peers.train import by_layers
from gpuattn.bench.peers.train_ranks import shared_model
from gpuattn.bench.train import measure as train
from gpuattn.bench.train.cases import CELLS, small

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
case = replace(small(CELLS[sys.argv[3]].case), dropout=0.0)
ours = train.Ours(case, np)
there = [torch.from_numpy(np.array(x)) for x in ours.inputs]
inputs = [x if x.dtype == torch.uint8 else x.long() for x in there]
for shared in (False, True):
    model = new_model(case)
    model.load_state_dict(first_weights(model, by_layers(ours.weights, case.layers[-1])))
    if shared:
        wrapped = shared_model(model)
        held = sum(x.to_local().numel() for x in model.parameters())
        assert abs(held / sum(x.numel() for x in model.parameters()) - 0.5) < 0.02
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate)
    losses = []
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not shared):
            loss = wrapped(*inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    found = [*losses, (norm.full_tensor() if shared else norm).item()]
    if rank == 0:
        print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["tiny", "vit-b16"])
def test_ranks_that_share_a_model_learn_as_in_ddp(tmp_path, name):
    pytest.importorskip("torch", "2.11", "no PyTorch, a peer of bench, with FSDP2 on the CPU")
    each = [(rank, tmp_path / "store", name) for rank in range(2)]
    ranks = Ranks(2, SHARED, each=each)
    code, said = ranks.end()
    assert code == 0, said
    ddp, fsdp = map(json.loads, ranks.printed.splitlines())
    assert fsdp[:-1] == pytest.approx(ddp[:-1], rel=2e-3) and ddp[4] < ddp[0]
    assert fsdp[-1] == pytest.approx(ddp[-1], rel=0.05)  # the gradient's norm


def test_fsdp_of_an_old_pytorch_is_refused(monkeypatch):
    for name in ("torch", "torch.distributed", "torch.distributed.fsdp"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torch"].__version__ = "2.5.1"
    with pytest.raises(UnsupportedError, match=r"FSDP2 needs PyTorch 2\.6, this is 2\.5\.1"):
        shared_model(None)
