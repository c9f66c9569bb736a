"""The Communicator of NCCL on a stand-in for it, whose ranks are threads."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from fake_nccl import Nccl, array, run_ranks

from gpuattn.arrays import BFLOAT16
from gpuattn.errors import ConfigError
from gpuattn.parallel import nccl
from gpuattn.parallel.communicator import add_in_pairs
from gpuattn.parallel.nccl import NCCL, version_text


def values(size, count, dtype="float32"):
    return np.random.default_rng(0).standard_normal((size, count)).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_all_calls(size, dtype):
    every = values(size, 24 * size, dtype)
    exact = every.astype(np.float64).sum(0)
    tree = add_in_pairs([x.copy() for x in every])
    close = {"rtol": 4e-2, "atol": 4e-2} if dtype == BFLOAT16 else {"rtol": 1e-5, "atol": 1e-5}

    def work(control):
        ranks, found = NCCL(control), {}
        assert (ranks.rank, ranks.size) == (control.rank, size)
        found["sum"] = array(every[ranks.rank])
        ranks.all_reduce(found["sum"])
        found["ordered"] = array(every[ranks.rank])
        ranks.all_reduce(found["ordered"], ordered=True)
        for name, ordered in (("piece", False), ("ordered piece", True)):
            whole = array(every[ranks.rank])
            mine = whole.reshape(size, -1)[ranks.rank]
            ranks.reduce_scatter(whole, mine, ordered)
            found[name] = mine.copy()
            if not ordered:
                with ranks.grouped():
                    ranks.all_gather(mine, whole)
                found["gathered"] = whole
        found["first"] = array(every[ranks.rank])
        ranks.broadcast(found["first"])
        return found

    found = run_ranks(size, work)
    for rank, one in enumerate(found):
        assert isinstance(one, dict), one
        np.testing.assert_allclose(one["sum"].astype(np.float64), exact, **close)
        assert one["sum"].tobytes() == one["gathered"].tobytes() == found[0]["sum"].tobytes()
        assert one["piece"].tobytes() == one["sum"].reshape(size, -1)[rank].tobytes()
        assert one["ordered"].tobytes() == tree.tobytes()
        assert one["ordered piece"].tobytes() == tree.reshape(size, -1)[rank].tobytes()
        assert one["first"].tobytes() == every[0].tobytes()


def test_all_ranks_make_the_same_calls_in_the_same_order():
    module = Nccl()

    def work(control):
        ranks, x = NCCL(control), array(np.ones(16, np.float32))
        ranks.all_reduce(x)
        ranks.broadcast(x)

    assert run_ranks(4, work, module=module) == [None] * 4
    sequences = [[call[1:] for call in module.calls if call[0] == rank] for rank in range(4)]
    assert len(sequences[0]) > 4 and sequences == [sequences[0]] * 4


def test_ranks_of_a_host_and_the_same_ranks_of_several_hosts():
    every = values(6, 12)

    def work(control):
        ranks = NCCL(control)
        host, place = divmod(ranks.rank, 3)
        group, across = ranks.split(host), ranks.split(place)
        assert (group.rank, group.size, across.rank, across.size) == (place, 3, host, 2)
        whole = array(every[ranks.rank])
        mine = whole.reshape(3, -1)[place]
        group.reduce_scatter(whole, mine)
        across.all_reduce(mine)
        group.all_gather(mine, whole)
        return whole

    for found in run_ranks(6, work, near=3):
        np.testing.assert_allclose(found, every.sum(0), rtol=1e-5, atol=1e-5)


def test_two_ranks_on_one_gpu_are_refused_by_name():
    found = run_ranks(3, NCCL, cards=["bus 1", "bus 2", "bus 1"])
    for rank, error in enumerate(found):
        assert isinstance(error, ConfigError) and error.silent == (rank > 0)
        assert "ranks 0 and 2 have the same GPU, bus 1; accepted: a GPU for each" in str(error)


def test_other_versions_on_a_rank_are_refused():
    class Mixed(Nccl):
        asked = 0

        def get_version(self):
            self.asked += 1
            return 22809 if self.asked == 1 else 23004

    found = run_ranks(2, NCCL, module=Mixed())
    assert all("ranks have NCCL 2.28.9 and 2.30.4" in str(error) for error in found)


@pytest.mark.parametrize("found, said", [
    (None, "NCCL, which CuPy cannot load .*pip install nvidia-nccl-cu12"),
    (SimpleNamespace(available=False, NCCL_BFLOAT16=1), "this CuPy has not, or without bfloat16"),
    (SimpleNamespace(available=True), "Try cupy 14.1 or newer, and pip install nvidia-nccl"),
])  # fmt: skip
def test_no_nccl_and_one_without_bfloat16(found, said, monkeypatch):
    module = ModuleType("cupy.cuda")
    if found is not None:
        module.nccl = found
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", module)
    monkeypatch.setattr(nccl, "import_cupy", lambda: None)
    with pytest.raises(ConfigError, match=said):
        nccl.nccl_module()


@pytest.mark.parametrize("seen, ranks, used", [(4, 3, 2), (3, 3, 2), (1, 3, 0), (2, 3, None)])
def test_each_rank_takes_a_gpu_and_more_ranks_than_gpus_are_refused(seen, ranks, used, monkeypatch):
    taken = []
    device = SimpleNamespace(use=lambda: None)
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: seen),
        Device=lambda number: taken.append(number) or device,
    )
    monkeypatch.setattr(nccl, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    control = SimpleNamespace(local_rank=2, local_size=ranks)
    if used is None:
        with pytest.raises(ConfigError, match="3 ranks on a host with 2 GPUs; .* one rank a GPU"):
            nccl.take_card(control)
    else:
        nccl.take_card(control)  # where each sees one GPU, ``_check`` finds out whose it is
    assert taken == ([] if used is None else [used])


def test_a_version_in_words():
    assert [version_text(n) for n in (22809, 21805)] == ["2.28.9", "2.18.5"]
