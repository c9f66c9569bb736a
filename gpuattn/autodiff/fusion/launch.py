"""Launches of fused programs: how arrays lie in memory, and the compiled kernel for that."""

import functools
import hashlib
import itertools
import math
import threading
from collections.abc import Sequence

import numpy as np

from gpuattn.arrays import empty, import_cupy
from gpuattn.autodiff.fusion import source
from gpuattn.autodiff.fusion.source import BLOCK, Layout
from gpuattn.autodiff.fusion.trace import Program
from gpuattn.cuda import disk_cache
from gpuattn.cuda.compiler import architecture, compile_text, nvrtc_version
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import Kernel
from gpuattn.errors import UnsupportedError

MOST_PLANS = 1024  # of a program, by shapes and strides
WIDEST = 8  # elements of a thread
_lock = threading.Lock()


class Launcher:
    """Runs a Program on GPU arrays."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._plans: dict[tuple, tuple] = {}
        self._used = source.numbers_used(program)

    def __call__(self, arrays: Sequence, scalars: Sequence[float]) -> tuple:
        """Return the outputs, which one kernel computes. ``arrays``: on the current GPU.

        Raises UnsupportedError for what no kernel is made for, ValueError for shapes that do not
        broadcast, KernelCompileError where the kernel does not compile.
        """
        device = import_cupy().cuda.runtime.getDevice()
        key = device, *[(x.shape, x.strides, x.data.ptr & 15) for x in arrays]
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(device, arrays)
        shape, kernel, grid, tail = plan
        outs = [empty(arrays[0], shape, symbol.dtype) for symbol in self.program.outputs]
        known = self.program.numbers(scalars) if self._used else {}
        numbers = [np.float64(known[symbol]) for symbol in self._used]
        kernel(grid, (BLOCK,), *arrays, *outs, *numbers, *tail)
        return tuple(outs)

    def _plan(self, device, arrays):
        """Return (shape of the outputs, kernel, grid, its arguments behind the numbers)."""
        shape, layout, lengths, steps, chunks = self.lay_out(arrays)
        kernel = _kernel(device, self, layout)
        return shape, kernel, (-(-chunks // BLOCK),), (chunks, *lengths, *steps)

    def lay_out(self, arrays: Sequence) -> tuple:
        """Return (shape of the outputs, Layout, lengths of axes but the first, steps, chunks).

        Raises as a call does.
        """
        shape = np.broadcast_shapes(*[x.shape for x in arrays])
        for out in self.program.outputs:
            own = np.broadcast_shapes(*[arrays[i].shape for i in self.program.sources(out)])
            if own != shape:
                raise UnsupportedError(f"its results have several shapes: {own} and {shape}")
        lengths, steps = _joined(shape, [_steps(x, shape) for x in arrays])
        inner = [{1: 1, 0: 0}.get(of_one[-1]) for of_one in steps]
        sizes = [x.itemsize for x in arrays]
        width = _width(self.program, arrays, lengths, steps, inner, sizes)
        count = math.prod(shape)
        layout = Layout(len(lengths), width, tuple(inner), count < 1 << 31)
        given = [
            step
            for of_one, kind in zip(steps, inner, strict=True)
            for step in (of_one if kind is None else of_one[:-1])
        ]
        return shape, layout, lengths[1:], given, count // width


@functools.lru_cache(maxsize=512)
def _kernel(device: int, launcher: Launcher, layout: Layout) -> Kernel:
    text = source.text(launcher.program, layout)
    module = import_cupy().cuda.function.Module()
    found, arch = gpu(device), architecture(gpu(device).capability)
    code = cubin(text, arch.replace("sm_", "compute_") if found.forced else arch)
    with _lock:
        module.load(code)
    return Kernel(
        module.get_function("fused"), "fused", source.parameters(launcher.program, layout)
    )


def cubin(text: str, arch: str) -> bytes:
    """Return the machine code of a source, from the disk cache or compiled and put there."""
    key = hashlib.sha256(f"{arch} {nvrtc_version()} {text}".encode()).hexdigest()
    path = disk_cache.folder() / f"fused-{arch}-{key[:32]}.cubin"
    code = disk_cache.read_bytes(path)
    if code is None:
        code, _ = compile_text(text, arch, name="fused.cu")
        disk_cache.write_bytes(path, code)
    return code


def _steps(x, shape):
    """Return the step of ``x`` along each axis of ``shape``, in elements: 0 where it repeats."""
    if any(step % x.itemsize for step in x.strides):
        raise UnsupportedError("the strides of an array are no multiples of its elements")
    lead = len(shape) - x.ndim
    own = zip(x.shape, x.strides, strict=True)
    return [0] * lead + [0 if n == 1 else step // x.itemsize for n, step in own]


def _joined(shape, steps):
    """Return (lengths, steps) without axes of length 1, where axes are one if they can be."""
    axes = [(n, [of_one[i] for of_one in steps]) for i, n in enumerate(shape) if n != 1]
    lengths: list[int] = []
    kept: list[list[int]] = []
    for n, of_axis in axes:
        if kept and all(a == b * n for a, b in zip(kept[-1], of_axis, strict=True)):
            lengths[-1], kept[-1] = lengths[-1] * n, of_axis
        else:
            lengths.append(n)
            kept.append(of_axis)
    if not kept:
        return [1], [[0] for _ in steps]
    return lengths, [list(of_one) for of_one in zip(*kept, strict=True)]


def _width(program, arrays, lengths, steps, inner, sizes):
    """Return how many adjacent elements a thread takes: those of 16 bytes, if they lie so."""
    least = min([x.dtype.itemsize for x in program.outputs] + sizes)
    for width in itertools.takewhile(lambda w: w > 1, (WIDEST >> i for i in range(4))):
        if lengths[-1] % width or width * least > 16:
            continue
        if all(_is_aligned(x, of_one, size, width) for x, of_one, kind, size
               in zip(arrays, steps, inner, sizes, strict=True) if kind == 1):  # fmt: skip
            return width
    return 1


def _is_aligned(x, steps, size, width):
    unit = min(16, width * size)
    return not any(n * size % unit for n in (x.data.ptr // size, *steps[:-1]))
