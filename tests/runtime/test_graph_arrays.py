"""Copies that a graph makes itself: the right slot and bytes, whatever the host does next."""

import contextlib
import gc

import fake_graphs
import numpy as np
import pytest
from captured import check, full
from in_threads import in_threads

import gpuattn
from gpuattn import nn
from gpuattn.arrays import to_cpu
from gpuattn.errors import KernelCompileError
from gpuattn.runtime import graph_arrays
from gpuattn.runtime.graph_arrays import HALF, MOST, SLOTS


def late(cp):
    """Return a context in which the device lags behind the host as far as it may."""
    return fake_graphs.late() if hasattr(cp.ndarray, "number") else contextlib.nullcontext()


def ring_of(f):
    (entry,) = f._entries.values()
    return entry.ring


def same(a, b):
    a, b = to_cpu(a), to_cpu(b)
    assert (a.shape, a.dtype, a.strides) == (b.shape, b.dtype, b.strides)
    assert a.tobytes() == b.tobytes()


def test_two_thousand_calls_in_a_row(cp):
    f = gpuattn.capture(lambda x, y: (x + y, {"twice": x * 2}))
    for _ in range(2):
        f(full(cp, 0), full(cp, 0))
    x = [full(cp, i) for i in range(2000)]
    cp.cuda.get_current_stream().synchronize()
    with late(cp):
        outs = [f(x[i], x[-i]) for i in range(2000)]
        assert ring_of(f).sent == 2001 and f.graphs == 1
        for i, (total, rest) in enumerate(outs):
            check(total, i + (2000 - i if i else 0))
            check(rest["twice"], 2 * i)
    assert len({total.data.ptr for total, _ in outs}) == 2000


def test_a_full_ring_waits_for_the_device(cp):
    f, x = gpuattn.capture(lambda x: x + 1), full(cp, 1)
    f(x)
    f(x)
    with late(cp):
        for i in range(SLOTS + HALF):
            f(x)
            if fake_graphs.queue is not None and i < SLOTS - 1:
                assert fake_graphs.over == 0, "the ring was not full"
        if fake_graphs.queue is not None:  # it waited for 256 of 384 replays, not for more
            assert 3 * len(fake_graphs.queue) > fake_graphs.over > 0


def test_one_array_several_times(cp):
    f = gpuattn.capture(lambda x, pair, y: (x + 10 * pair[0] + 100 * pair[1] + 1000 * y, x, y))
    x, y = full(cp, 1), full(cp, 2)
    for a, b in ((x, x), (x, x), (x, y), (y, x)):
        out, first, last = f(a, (a, b), b)
        one, other = (float(to_cpu(z)[0, 0]) for z in (a, b))
        check(out, 11 * one + 1100 * other)
        assert first is a and last is b
    assert f.graphs == 1


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64"])
def test_sizes_and_addresses(cp, dtype):
    """Views may begin anywhere; the same signature takes each of them."""
    f = gpuattn.capture(lambda x: (x * 2, x + 1))
    for n in (1, 3, 17, 4096, 8209):
        room = cp.arange(n + 40).astype(dtype)
        for start in (0, 1, 2, 3, 8, 1, 16, 0):
            x = room[start : start + n]
            for mine, plain in zip(f(x), f.function(x), strict=True):
                same(mine, plain)
    assert f.graphs == 5


def test_what_a_graph_does_not_copy_itself(cp):
    """Other strides than those of a copy, no elements, and results that are not C-contiguous."""
    f = gpuattn.capture(lambda x: (x.T + 0, x[::-1] * 1, x[:0] + 1, x.sum()))
    base = cp.arange(48).reshape(6, 8).astype("float32")
    for x in (base, base[::2], base[:, ::-2], base.T, base[:, :0], base[0:0], base[:1, :1]):
        for i in range(4):
            y = x + i if i % 2 and x.strides == (x + i).strides else x
            for mine, plain in zip(f(y), f.function(y), strict=True):
                same(mine, plain)
    nothing = gpuattn.capture(lambda x: None)
    for _ in range(4):
        assert nothing(full(cp, 1, (0, 3))) is None


def test_only_inputs_or_only_results(cp):
    weight, count = full(cp, 0), gpuattn.capture(lambda w, x: w.__iadd__(x), donate=0)
    made = gpuattn.capture(lambda: full(cp, 1) * weight)
    for i in range(5):
        assert count(weight, full(cp, i)) is weight
        check(made(), sum(range(i + 1)))
    assert count.graphs == made.graphs == 1
    for f in (count, made):
        assert to_cpu(ring_of(f).state).view("u4")[0] == 4


@pytest.mark.parametrize("n", [MOST, MOST + 1, 3 * MOST - 1])
def test_many_arrays(cp, n):
    f = gpuattn.capture(lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)])
    for i in range(4):
        xs, ys = ([full(cp, i + k * s, (k % 5 + 1,)) for k in range(n)] for s in (1, 2))
        for k, out in enumerate(f(xs, ys)):
            check(out, 2 * i + 3 * k)
    assert f.graphs == 1 and ring_of(f).words == 3 * n


def test_tensors_numbers_and_containers(cp):
    f = gpuattn.capture(lambda t, x: {"a": [t * 2, (x + 1, 3)], "b": (t, x + 2, None)})
    with gpuattn.no_grad():
        for i in range(4):
            t, x = gpuattn.Tensor(full(cp, i), requires_grad=True), full(cp, 10 + i)
            out = f(t, x)
            made = out["a"][0]
            assert type(made) is gpuattn.Tensor and not made.requires_grad and made.node is None
            assert out["b"][0] is t and out["a"][1][1] == 3 and out["b"][2] is None
            check(made.data, 2 * i)
            check(out["a"][1][0], 11 + i)
            check(out["b"][1], 12 + i)
    assert f.graphs == 1


def test_streams_in_turn(cp):
    f = gpuattn.capture(lambda x: x * 2)
    for _ in range(2):
        f(full(cp, 1))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    x = [full(cp, i) for i in range(2 * SLOTS + 9)]
    cp.cuda.get_current_stream().synchronize()
    outs = []
    with late(cp):
        for i, one in enumerate(x):
            with streams[i // 3 % 2]:
                outs.append(f(one))
        for stream in streams:
            stream.synchronize()
        for i, out in enumerate(outs):
            check(out, 2 * i)


def test_streams_in_turn_of_which_some_are_late(gpu, delayed):
    f = gpuattn.capture(lambda x: x * 2)
    for _ in range(2):
        f(full(gpu, 1))
    streams = [gpu.cuda.Stream(non_blocking=True) for _ in range(2)]
    x = [full(gpu, i) for i in range(2 * SLOTS)]
    gpu.cuda.Device().synchronize()
    outs = []
    for start in range(0, len(x), 16):
        with streams[start // 16 % 2]:
            outs += [f(one) for one in x[start : start + 16]]
    gpu.cuda.Device().synchronize()
    for i, out in enumerate(outs):
        check(out, 2 * i)


def test_threads(cp):
    f, wrong = gpuattn.capture(lambda x, y: x * y + 1), []
    for _ in range(2):
        f(full(cp, 0), full(cp, 0))
    cp.cuda.get_current_stream().synchronize()

    def work(number):
        with contextlib.ExitStack() as stack:
            if hasattr(cp, "RawKernel"):
                stream = stack.enter_context(cp.cuda.Stream(non_blocking=True))
            outs = [f(full(cp, i), full(cp, number)) for i in range(150)]
            if hasattr(cp, "RawKernel"):
                stream.synchronize()
            wrong.extend(i for i, x in enumerate(outs) if (to_cpu(x) != i * number + 1).any())

    in_threads(work, range(4))
    assert not wrong and f.graphs == 1 and ring_of(f).sent == 601


def test_memory_is_reused_at_once(cp):
    """What a call took may be overwritten on its stream right after the call."""
    f, outs = gpuattn.capture(lambda x: x + 1), []
    for i in range(300):
        x = full(cp, i, (64, 33))
        outs.append(f(x))
        x.fill(-1)
        del x
        full(cp, -2, (64, 33))
    for i, out in enumerate(outs):
        check(out, i + 1)
    first = outs.pop()
    first.fill(7)  # nor does a later call write what an earlier one returned
    f(full(cp, 5, (64, 33)))
    check(first, 7)


@pytest.mark.parametrize("runs", [True, False])
def test_a_launch_that_fails_or_is_interrupted(cp, runs):
    """Whether the graph ran or not: the next call has a graph of its own, and later ones too."""
    f = gpuattn.capture(lambda x: x + 1)
    for i in range(3):
        check(f(full(cp, i)), i + 1)
    (entry,) = f._entries.values()
    graph = entry.graph

    class Failing:
        def launch(self, stream):
            if runs:
                graph.launch(stream)
            raise KeyboardInterrupt

    entry.graph = Failing()
    with pytest.raises(KeyboardInterrupt):
        f(full(cp, 9))
    assert f.graphs == 0
    for i in range(3):
        check(f(full(cp, i)), i + 1)
    assert f.graphs == 1 and ring_of(f).sent == 3


def test_no_memory_for_a_result(cp, monkeypatch):
    """Then nothing was launched, and the slot is taken by the next call."""
    f = gpuattn.capture(lambda x: x + 1)
    for i in range(3):
        check(f(full(cp, i)), i + 1)
    (entry,) = f._entries.values()
    begin = entry.begin

    def fails(leaves, at):
        begin(leaves, at)
        raise MemoryError

    entry.begin = fails
    with pytest.raises(MemoryError):
        f(full(cp, 9))
    entry.begin = begin
    for i in range(3):
        check(f(full(cp, i)), i + 1)
    assert f.graphs == 1


def test_a_dropped_function_waits_for_its_replays(cp):
    f, x = gpuattn.capture(lambda x: x + 1), [full(cp, i) for i in range(50)]
    for _ in range(2):
        f(x[0])
    gc.collect()
    with late(cp):
        outs = [f(one) for one in x]
        del f
        gc.collect()
        if fake_graphs.queue is not None:
            assert not cp.get_default_pinned_memory_pool().early
        for i, out in enumerate(outs):
            check(out, i + 1)


def does_not_compile(file, name):
    raise KernelCompileError("no compiler")


@pytest.mark.filterwarnings("ignore:captured functions copy:gpuattn.errors.SlowPathWarning")
@pytest.mark.parametrize("lacking", [
    {"kernels_refusal": lambda device: "too old"}, {"kernel": does_not_compile},
], ids=["old", "no compiler"])  # fmt: skip
def test_devices_without_kernels(cp, monkeypatch, lacking):
    with monkeypatch.context() as patch:  # ends before `cp` does
        for name, value in lacking.items():
            patch.setattr(graph_arrays, name, value)
        f = gpuattn.capture(lambda x, y: (x + y, x.T * 2, y[:0]))
        for i in range(5):
            total, turned, nothing = f(full(cp, i), full(cp, 3))
            check(total, i + 3)
            check(turned, 2 * i)
            assert nothing.shape == (0, 3)
        assert f.graphs == 1 and ring_of(f).words == 0


def test_a_layer_bit_by_bit(gpu):
    random = gpu.random.default_rng(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128).to(np.float16, "cuda").eval()
    f = gpuattn.capture(lambda x: layer(x))
    with gpuattn.no_grad():
        for shape in ((2, 33, 64), (1, 128, 64)):
            for _ in range(5):
                x = random.standard_normal(shape, dtype=np.float32).astype(np.float16)
                same(f(x).data, layer(x).data)
    assert f.graphs == 2
