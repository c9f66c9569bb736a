"""A scheduler for Numba's CUDA simulator: fast, deterministic, with warps and error checks.

Numba's own scheduler runs every CUDA thread as a polling thread of the operating system and has no
warps. Here each is a greenlet, which switches only where it waits:

- shuffles, votes and ``syncwarp`` work over the lanes of their mask;
- a barrier that some threads never reach raises RuntimeError ("deadlock") instead of hanging;
- shared and local memory is poisoned at the start of every block, so that reading it before
  writing it gives wrong results;
- threads run in the order that GPUATTN_SIM_ORDER names: ``forward``, ``reverse``, or the seed of a
  shuffle after every barrier. A kernel that lacks a barrier gives results that depend on the order.
"""

import inspect
import os
import random
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda
from numba.cuda.simulator import api, kernel, kernelapi

WARP = 32
_current = None  # the running CUDA thread
_dynamic_shared_array = kernelapi.FakeCUDAShared.array


def install():
    """Replace the scheduler, add warp operations, and ignore jit options for compilers."""
    kernelapi.threading = SimpleNamespace(current_thread=lambda: _current, Lock=threading.Lock)
    kernel.BlockManager = Block
    kernel.swapped_cuda_module = module_of_the_launch
    kernelapi.FakeCUDAShared.array = shared_array
    kernelapi.FakeCUDALocal.array = local_array
    for operation in WARP_OPERATIONS:
        setattr(kernelapi.FakeCUDAModule, operation.__name__, operation)

    known = inspect.signature(api.jit).parameters
    jit = api.jit
    cuda.jit = lambda function=None, **options: jit(
        function, **{name: value for name, value in options.items() if name in known}
    )


class Thread:
    """A CUDA thread, with the attributes that the simulator reads of the current thread."""

    def __init__(self, block, block_index, index, function):
        width, height, _ = block.shape
        self.block = block
        self.blockIdx = kernelapi.Dim3(*block_index)
        self.threadIdx = kernelapi.Dim3(*index)
        self.thread_id = index[0] + width * (index[1] + height * index[2])
        self.greenlet = greenlet(function, block.scheduler)

    def wait(self, *barrier):
        """Let others run until all threads of the barrier wait at it."""
        self.barrier = barrier
        self.block.scheduler.switch()

    def syncthreads(self):
        self.wait("block")

    def syncthreads_count(self, value):
        votes = self.block.votes
        votes[self.thread_id] = bool(value)
        self.syncthreads()
        count = sum(votes.values())
        self.syncthreads()  # until all have read the votes
        return count

    def syncthreads_and(self, value):
        return int(self.syncthreads_count(not value) == 0)

    def syncthreads_or(self, value):
        return int(self.syncthreads_count(value) > 0)


class Block:
    """Runs the threads of one block, each up to its next barrier. Replaces BlockManager."""

    def __init__(self, function, grid_shape, block_shape, debug):
        self.function, self.shape = function, tuple(block_shape)
        self.size = int(np.prod(self.shape))
        self.votes = {}  # thread -> its vote in syncthreads_count
        self.exchanges = {}  # (warp, mask) -> the values of the 32 lanes
        self.arrays = {}  # call in the source -> shared array
        self.order = thread_order(os.environ.get("GPUATTN_SIM_ORDER", "forward"))

    def run(self, block_index, *arguments):
        self.scheduler = getcurrent()
        width, height, depth = self.shape
        threads = [
            Thread(self, block_index, (x, y, z), lambda: self.function(*arguments))
            for z in range(depth) for y in range(height) for x in range(width)
        ]  # fmt: skip
        try:
            self._run_to_the_end(threads)
        finally:
            for thread in threads:
                if not thread.greenlet.dead:  # still waiting after an error
                    thread.greenlet.throw()

    def _run_to_the_end(self, threads):
        alive, waiting, ready = len(threads), {}, threads
        while alive:
            for thread in self.order(ready):
                _switch_to(thread)
                if thread.greenlet.dead:
                    alive -= 1
                else:
                    waiting.setdefault(thread.barrier, []).append(thread)
            full = [b for b, there in waiting.items() if len(there) == _count(b, alive)]
            ready = [thread for barrier in full for thread in waiting.pop(barrier)]
            if alive and not ready:
                stuck = [
                    f"{len(there)} of {_count(b, alive)} at {b}" for b, there in waiting.items()
                ]
                raise RuntimeError(f"deadlock: {', '.join(stuck)}")


def _switch_to(thread):
    global _current
    outside, _current = _current, thread
    try:
        thread.greenlet.switch()
    except Exception as error:
        error.add_note(f"in thread {thread.threadIdx} of block {thread.blockIdx}")
        raise
    finally:
        _current = outside


def _count(barrier, alive):
    """Return how many threads a barrier waits for."""
    return alive if barrier[0] == "block" else barrier[2].bit_count()


def thread_order(name):
    """Return a function that sorts threads that can continue into the order ``name``."""
    if name in ("forward", "reverse"):
        return lambda threads: sorted(
            threads, key=lambda thread: thread.thread_id, reverse=name == "reverse"
        )
    seeded = random.Random(int(name))
    return lambda threads: seeded.sample(threads, len(threads))


@contextmanager
def module_of_the_launch(function, fake):
    """Set ``cuda`` to ``fake``, the running launch, in the module of a kernel.

    It is not restored: Numba's own version restores it when the first thread ends.
    """
    if "cuda" in function.__globals__:
        function.__globals__["cuda"] = fake
    yield


# ---- memory -----------------------------------------------------------------------------------


def shared_array(self, shape, dtype):
    """``cuda.shared.array``: one array for each call in the source."""
    if shape == 0:  # dynamic shared memory, sized at the launch
        return _dynamic_shared_array(self, shape, dtype)
    caller = sys._getframe(1)
    arrays, place = _current.block.arrays, (caller.f_code, caller.f_lasti)
    if place not in arrays:
        arrays[place] = local_array(self, shape, dtype)
    return arrays[place]


def local_array(self, shape, dtype):
    """``cuda.local.array``, filled with NaN or with the largest integer, which is no index."""
    dtype = np.dtype(getattr(dtype, "name", dtype))  # Numba's types have NumPy's names
    return np.full(shape, np.iinfo(dtype).max if dtype.kind in "iu" else np.nan, dtype)


# ---- warps ------------------------------------------------------------------------------------


def _exchange(mask, value, pick):
    """Exchange ``value`` with the lanes of ``mask``; return pick(values, lane, mask)."""
    me = _current
    warp, lane = divmod(me.thread_id, WARP)
    mask = int(mask) & ((1 << min(WARP, me.block.size - warp * WARP)) - 1)
    if not mask >> lane & 1:
        raise RuntimeError(f"lane {lane} calls a warp operation whose mask {mask:#x} lacks it")
    values = me.block.exchanges.setdefault((warp, mask), [None] * WARP)
    values[lane] = value
    me.wait("warp", warp, mask, "given")
    picked = pick(values, lane, mask)
    me.wait("warp", warp, mask, "taken")
    return picked


def _lanes(mask):
    return (lane for lane in range(WARP) if mask >> lane & 1)


def shfl_sync(self, mask, value, source, width=WARP):
    return _exchange(mask, value, lambda v, lane, _: v[lane // width * width + source % width])


def shfl_up_sync(self, mask, value, delta, width=WARP):
    def pick(values, lane, _):
        return values[lane - delta if lane % width >= delta else lane]

    return _exchange(mask, value, pick)


def shfl_down_sync(self, mask, value, delta, width=WARP):
    def pick(values, lane, _):
        return values[lane + delta if lane % width + delta < width else lane]

    return _exchange(mask, value, pick)


def shfl_xor_sync(self, mask, value, bits):
    return _exchange(mask, value, lambda values, lane, _: values[lane ^ bits])


def syncwarp(self, mask=0xFFFFFFFF):
    _exchange(mask, None, lambda values, lane, mask: None)


def ballot_sync(self, mask, predicate):
    return _exchange(
        mask, bool(predicate), lambda votes, _, mask: sum(votes[i] << i for i in _lanes(mask))
    )


def all_sync(self, mask, predicate):
    return _exchange(mask, predicate, lambda votes, _, mask: all(votes[i] for i in _lanes(mask)))


def any_sync(self, mask, predicate):
    return _exchange(mask, predicate, lambda votes, _, mask: any(votes[i] for i in _lanes(mask)))


WARP_OPERATIONS = (
    shfl_sync, shfl_up_sync, shfl_down_sync, shfl_xor_sync,
    syncwarp, ballot_sync, all_sync, any_sync,
)  # fmt: skip
