"""Delay streams by a kernel, so that a missing wait gives wrong results in every run.

A stream runs in order: every launch, copy and graph after the delaying kernel is late. Only one of
two streams is delayed at a time; if both were, a missing wait could go unnoticed.
"""

import contextlib
from unittest import mock

import numpy as np

from gpuattn.runtime.graphs import Calls, Replays

HOLD = r"""
extern "C" __global__ void hold(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""
NANOSECONDS = 1_000_000
LATE = ("nothing", "others", "steps")


@contextlib.contextmanager
def delays(cupy, late, hold=None):
    """Delay work inside a block, also in a graph that is captured there.

    ``late``: "others" delays streams other than the current one, when they become the current one,
    when they are told to wait for an event, and when graphs are launched on them. "steps" delays
    the steps of a Trainer on their stream. "nothing" delays none.
    ``hold()``: launches the delay on the current stream; the default is a kernel.
    """
    stream, hold = cupy.cuda.Stream, hold or _holder(cupy)
    enter, leave, wait_event = stream.__enter__, stream.__exit__, stream.wait_event

    def delay(where):
        enter(where)
        hold()
        leave(where)

    def delay_other(where):
        if where.ptr != cupy.cuda.get_current_stream().ptr:
            delay(where)

    def entered(self):
        delay_other(self)
        return enter(self)

    def waiting(self, event):
        wait_event(self, event)
        delay_other(self)

    def before(call, delay):
        def step(self, *args, **settings):
            delay(getattr(self, "stream", None) or cupy.cuda.get_current_stream())
            return call(self, *args, **settings)

        return step

    delay_step = {"others": delay_other, "steps": delay}.get(late)
    with contextlib.ExitStack() as stack:
        if late == "others":
            stack.enter_context(mock.patch.multiple(stream, __enter__=entered, wait_event=waiting))
        if delay_step:
            for steps in (Calls, Replays):
                step = before(steps.__call__, delay_step)
                stack.enter_context(mock.patch.object(steps, "__call__", step))
        yield


def _holder(cupy):
    kernel = cupy.RawKernel(HOLD, "hold")
    kernel.compile()  # now, because a stream may be capturing at the first launch
    return lambda: kernel((1,), (1,), (np.int64(NANOSECONDS),))
