"""Runs the tests marked `simulator` in another process, and tests the simulator itself.

Numba reads NUMBA_ENABLE_CUDASIM when it is imported, so this process cannot switch it on.
"""

import importlib.util
import os
import re

import background
import numpy as np
import pytest
from checks import sampled

REQUIRED = "simulator" in os.environ.get("GPUATTN_REQUIRE", "")
ORDERS = ["forward", "reverse", "1", "2"]


@pytest.mark.background(run=background.run_simulator, long=True)
@pytest.mark.parametrize(
    "order, options",
    sampled([("2", ()), *((order, ("--all",)) for order in ("forward", "reverse", "1"))], 1),
)
def test_numba_kernels_in_the_simulator(order, options, result_of_background):
    missing = [m for m in ("numba", "greenlet") if importlib.util.find_spec(m) is None]
    if missing:
        assert not REQUIRED, f"{missing} not installed: pip install '.[test]'"
        pytest.skip(f"no {', '.join(missing)}: pip install '.[test]'")
    status, output = result_of_background()
    passed = re.search(r"(\d+) passed", output)
    assert status == 0, output[-4000:]
    assert passed and int(passed[1]) >= 10, "the simulator ran almost nothing"
    print(output[-200:])


if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    from gpuattn.numbakernels.device import cuda, jit

    @jit
    def half_the_warp(x):
        if cuda.threadIdx.x < 16:
            x[cuda.threadIdx.x] = cuda.shfl_xor_sync(0xFFFFFFFF, cuda.threadIdx.x, 1)

    @jit
    def half_the_block(x):
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()
        else:
            cuda.syncwarp()

    @jit
    def warp_operations(x):
        me = cuda.threadIdx.x
        x[0, me] = cuda.shfl_xor_sync(0xFFFFFFFF, me, 1)
        x[1, me] = cuda.shfl_sync(0xFFFFFFFF, me, 2, 8)
        x[2, me] = cuda.shfl_up_sync(0xFFFFFFFF, me, 3)
        x[3, me] = cuda.shfl_down_sync(0xFFFFFFFF, me, 3, 16)
        x[4, me] = cuda.ballot_sync(0xFFFFFFFF, me % 32 < 3)
        x[5, me] = cuda.all_sync(0xFFFFFFFF, me < 32)
        x[6, me] = cuda.any_sync(0xFFFFFFFF, me == 40)
        x[7, me] = cuda.syncthreads_count(me < 40)
        x[8, me] = cuda.syncthreads_and(me < 40)
        x[9, me] = cuda.syncthreads_or(me < 40)

    @jit
    def reverse_rows(x, barriers):
        tile = cuda.shared.array(32, np.float32)
        me = cuda.threadIdx.x
        tile[me] = x[cuda.blockIdx.x, me]
        if barriers > 0:
            cuda.syncthreads()
        x[cuda.blockIdx.x, me] = tile[31 - me]
        if barriers > 1:
            cuda.syncthreads()
        tile[me] = 0

    @jit
    def last_to_write(x):
        x[0] = cuda.threadIdx.x


@pytest.mark.simulator
@pytest.mark.parametrize("kernel", ["half_the_warp", "half_the_block"])
def test_a_deadlock_is_an_error(kernel):
    with pytest.raises(RuntimeError, match="deadlock: 16 of 32 at "):
        globals()[kernel][1, 32](np.zeros(32))
    test_operations_of_warps_and_blocks()  # the simulator still works after the error


@pytest.mark.simulator
def test_operations_of_warps_and_blocks():
    x, me = np.zeros((10, 64), np.int64), np.arange(64)
    warp_operations[1, 64](x)
    want = [
        me ^ 1, me // 8 * 8 + 2, np.where(me % 32 >= 3, me - 3, me),
        np.where(me % 16 < 13, me + 3, me), 7, me < 32, me >= 32, 40, 0, 1,
    ]  # fmt: skip
    for row, numbers in zip(x, want, strict=True):
        np.testing.assert_array_equal(row, numbers)


@pytest.mark.simulator
@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_gives_wrong_results_in_every_order(monkeypatch, order):
    monkeypatch.setenv("GPUATTN_SIM_ORDER", order)
    x = np.arange(1, 65, dtype=np.float32).reshape(2, 32)
    right = [x.copy() for _ in range(3)]
    for barriers, y in enumerate(right):
        reverse_rows[2, 32](y, barriers)
    unwritten, overwritten, reversed_rows = right
    assert np.isnan(unwritten).any(axis=1).all(), "each block begins with NaN in shared memory"
    assert (overwritten == 0).any()
    np.testing.assert_array_equal(reversed_rows, x[:, ::-1])


@pytest.mark.simulator
def test_the_order_of_threads(monkeypatch):
    last = {}
    for order in [*ORDERS, *ORDERS]:
        monkeypatch.setenv("GPUATTN_SIM_ORDER", order)
        x = np.zeros(1)
        last_to_write[1, 32](x)
        assert last.setdefault(order, x[0]) == x[0], "a seed gives the same order twice"
    assert (last["forward"], last["reverse"]) == (31, 0)
    assert last["1"] != last["2"]
