"""Work that comes late, so that what does not wait for it is wrong each time, not now and then.

A kernel holds a stream up where work is put on it. Every launch, copy and graph behind it is late:
a stream runs in order. Streams that run beside each other are late in turns: where both were, one
would not notice that it need not have waited.
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
LATE = ("nobody", "others", "steps")


@contextlib.contextmanager
def delays(cupy, late, hold=None):
    """Make work late inside a block; in a graph that is captured there, too.

    ``late``: "others": what streams get that are not the current one, as the current stream enters
    them, as they are told to wait for it, and as graphs are launched on them. "steps": the steps of
    a Trainer, on their stream, for who does not wait for that. "nobody": none.
    ``hold()``: holds the current stream up.
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
        def step(self, *args):
            delay(getattr(self, "stream", None) or cupy.cuda.get_current_stream())
            return call(self, *args)

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
    kernel.compile()  # now: a stream may be capturing later
    return lambda: kernel((1,), (1,), (np.int64(NANOSECONDS),))
