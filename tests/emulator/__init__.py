"""An emulator of kernels, of Hopper or of another card: their source, by g++, runs on a CPU.

``translate.py`` turns CUDA C++ into C++, ``machine.cpp`` runs thread blocks concurrently as fibers
in an order set by a seed, and ``ptx.cpp`` implements PTX instructions. It is built to find errors:

- asynchronous work (copies by TMA or cp.async, wgmma) happens at a random moment before the wait
  that covers it; until then its destination holds NaN, and its source must not change;
- lanes run independently between warp-wide instructions, some lanes and warps are slow, and a wait
  waits for its own condition only;
- shared memory begins as NaN, and is aligned as its declarations ask and no better; an access at an
  address that its type does not allow is an error, and so is a change of what lies after it;
- TMA or wgmma reading a store before the storing thread's proxy fence is an error; descriptors,
  swizzles and tensor maps are decoded bit by bit;
- registers must not be used while wgmma uses them;
- a deadlock reports which warps wait for what.

- relaxed stores to global memory happen late and in any order, each word of a vector alone;
- a wait with a limit on its time ends after some million steps.

It models neither caches nor time, sums in another order than tensor cores, and makes other stores
to global memory visible to all blocks at once.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from fake_gpu import GPUS

from emulator.translate import translate
from gpuattn import arrays
from gpuattn.cuda import disk_cache, kernels, sources, tensor_maps
from gpuattn.errors import SlowerRefusal
from gpuattn.impls import OPS, Impl, Impls, choose, choose_backward
from gpuattn.ops import embedding
from gpuattn.ops.attention import (
    ampere,
    decode_attention,
    dropout,
    gradient,
    hopper,
    hopper_backward,
    hopper_head,
    short,
    simt,
    step_attention,
)
from gpuattn.ops.attention import (
    launch as attention_launch,
)
from gpuattn.ops.attention.flash_attention import IMPLS
from gpuattn.ops.linear import (
    bias_activation,
    gelu_hopper,
    linear_dropout_add_norm,
    weight_gradients,
)
from gpuattn.ops.linear import (
    hopper as linear_hopper,
)
from gpuattn.ops.loss import launch as loss_launch
from gpuattn.ops.norm import dropout_add_norm
from gpuattn.ops.norm import launch as norm_launch
from gpuattn.ops.sampling import beam_step, sample_tokens, topk_logprobs

with mock.patch.dict(OPS):  # Impls registers itself there
    HOPPER = Impls("flash_attention", *[impl for impl in IMPLS if "hopper" in impl.name])
HERE = Path(__file__).parent
SOURCES = ("machine.cpp", "ptx.cpp")
MODULES = (
    arrays,
    tensor_maps,
    dropout,
    attention_launch,
    gradient,
    hopper_head,
    hopper,
    hopper_backward,
    ampere,
    simt,
    short,
    decode_attention,
    dropout_add_norm,
    linear_dropout_add_norm,
    bias_activation,
    gelu_hopper,
    linear_hopper,
    norm_launch,
    beam_step,
    sample_tokens,
    topk_logprobs,
    embedding,
    loss_launch,
    step_attention,
    weight_gradients,
)
HEADERS = ("cuda.h", "machine.h", "kernel.h")
COMPILE = ("g++", "-std=c++17", "-w", "-fPIC", "-U_FORTIFY_SOURCE")
KERNEL = ("-O1", "-c", "-fsanitize=alignment")
PROBE = (
    "float f(_Float16 x) { return __builtin_bit_cast(unsigned short, x); }\n#include <ucontext.h>"
)


@functools.cache
def refusal():
    """Return the reason why kernels cannot be emulated here, or None."""
    if not shutil.which("g++"):
        return "no g++"
    command = [*COMPILE, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=PROBE, capture_output=True, text=True)
    return None if done.returncode == 0 else f"g++ is too old or for another system: {done.stderr}"


# ---- compiled kernels ---------------------------------------------------------------------------


@functools.cache
def library(file, constants, capability=90):
    """Return a file of ``rawkernels`` as a host library; ``constants``: (name, value) pairs."""
    text = sources.source_text(file, **dict(constants))
    return library_of(text, sources.signatures(file), capability)


def library_of(text, signatures, capability=90):
    """Return CUDA text as a host library. ``signatures``: as of ``sources.signatures``."""
    arch = f"-D__CUDA_ARCH__={10 * capability}"
    expand = ("g++", "-E", "-P", "-x", "c++", arch, f"-I{sources.ROOT}", "-")
    text = subprocess.run(expand, input=text, capture_output=True, text=True, check=True).stdout
    text = translate(text, signatures)
    objects = [_compiled((HERE / name).read_text(), "-O2", "-c") for name in SOURCES]
    objects.append(_compiled(text, *KERNEL))
    return ctypes.CDLL(_compiled("", "-O1", "-shared", *objects))  # without g++'s own sanitizer


def _compiled(text, *options):
    """Compile C++ by g++; return the path, cached by a hash of sources and options."""
    path = _place(text, *options)
    if not path.exists():
        folders = [_headers_read(), HERE] if options == KERNEL else [HERE]
        command = [*COMPILE, *(f"-I{folder}" for folder in folders)]
        command += ["-x", "c++", "-", "-x", "none", *options]
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        _run([*command, "-o", temporary], text)
        os.replace(temporary, path)
    return str(path)


@functools.cache
def _headers_read():
    """Return a folder with ``kernel.h`` as g++ keeps it once read, for the options ``KERNEL``."""
    text = (HERE / "kernel.h").read_text()
    path = _place(text, "c++-header", *KERNEL)
    if not path.exists():
        options = [option for option in KERNEL if option != "-c"]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, "made")
            made.mkdir()
            command = [*COMPILE, *options, "-x", "c++-header", HERE / "kernel.h"]
            _run([*command, "-o", made / "kernel.h.gch"])
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(path)
    return path


def _place(text, *options):
    """Return the path of what g++ makes of ``text``; its folder exists."""
    headers = [(HERE / name).read_text() for name in HEADERS]
    known = "\0".join([text, *headers, *COMPILE, *options])
    folder = disk_cache.folder().parent / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / hashlib.sha256(known.encode()).hexdigest()[:32]


def _run(command, text=""):
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


# ---- arrays in host memory that kernels accept --------------------------------------------------


class Array(np.ndarray):
    """A NumPy array with the attributes of a CuPy array that launches read."""

    def __new__(cls, shape, dtype, memory, strides):
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if n)
        room = (ctypes.c_char * (reach + np.dtype(dtype).itemsize)).from_address(memory.ptr)
        return np.ndarray.__new__(cls, shape, dtype, room, 0, strides)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self):
        return SimpleNamespace(id=0)


def as_array(x):
    return None if x is None else np.asarray(x).view(Array)


class _Module:
    """NumPy, with functions that return ``Array``."""

    def __getattr__(self, name):
        found = getattr(np, name)
        if name not in ("empty", "zeros", "full", "ascontiguousarray", "broadcast_to"):
            return found
        return lambda *args, **kwargs: as_array(found(*args, **kwargs))


def _encode(words, kind, rank, pointer, sizes, steps, box, *_):
    """Replace cuTensorMapEncodeTiled: write the struct Map of ptx.cpp."""
    assert all(step % 16 == 0 and step > 0 for step in steps) and pointer.value % 16 == 0
    fields = (pointer.value, *sizes, 2, *steps, box[1])
    ctypes.memmove(words, (ctypes.c_int64 * len(fields))(*fields), 8 * len(fields))
    return 0


# ---- launches -----------------------------------------------------------------------------------


class Machine:
    """Runs kernels, and attention on NumPy arrays. ``seed``: of the order of events.

    ``forward_impl``, ``backward_impl``: Hopper's form of attention, or None for the one chosen.
    ``card``: the compute capability, such as "7.5".
    """

    def __init__(
        self, seed, multiprocessors=2, forward_impl=None, backward_impl=None, card="9.0"
    ):  # fmt: skip
        self.seed, self.multiprocessors = seed, multiprocessors
        self.gpu = replace(GPUS[card], multiprocessors=multiprocessors)
        self.forward_impl, self.backward_impl = forward_impl, backward_impl
        self.counter = np.zeros(64, np.int32)

    def kernel(self, file, name, **constants):
        """Replace ``kernels.kernel``; a launch raises AssertionError with the error found."""
        assert sources.serves(file, self.gpu.capability), f"{file} on {self.gpu.capability}"
        compiled = library(file, tuple(sorted(constants.items())), self.gpu.capability)
        cooperative = name in sources.cooperative_kernels(file)
        return self._launcher(compiled, name, sources.signatures(file)[name], cooperative)

    def kernel_of(self, text, name, parameters):
        """Return the kernel of a CUDA text; ``parameters``: (C type, name) of each."""
        return self._launcher(library_of(text, {name: parameters}), name, parameters, False)

    def _launcher(self, compiled, name, parameters, cooperative):
        run = getattr(compiled, f"launch_{name}")
        run.restype = ctypes.c_char_p
        kinds = [kernels.SCALARS.get(kind) for kind, _ in parameters]

        def launch(grid, block, *args, shared_bytes=0):
            values = [_value(x, kind) for x, kind in zip(args, kinds, strict=True)]
            pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
            if cooperative:
                assert np.prod(grid) <= self.multiprocessors, "its blocks must all run at once"
            size = ctypes.c_size_t(shared_bytes)
            dimensions = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
            wrong = run(dimensions, block[0], self.multiprocessors, size, self.seed, pointers)
            assert wrong is None, f"{name}: {wrong.decode()}"

        return launch

    @contextlib.contextmanager
    def in_place(self):
        """Replace CuPy, the driver and the GPU by this machine."""
        module, driver = _Module(), SimpleNamespace(cuTensorMapEncodeTiled=_encode)
        stand_ins = {
            "kernel": self.kernel,
            "gpu": lambda _: self.gpu,
            "tensor_core_refusal": lambda *_: None,
            "hopper_refusal": lambda _: None,
            "get_xp": lambda *_: module,
            "kernel_refusal": lambda *_: None,
            "_driver": lambda: driver,
            "compile_ahead": lambda *_, **__: None,
            "counters": lambda count=1: np.uint64(self.counter.ctypes.data),
        }  # fmt: skip
        tensor_maps._encode.cache_clear()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(arrays._flags, clear=True))
            for where in MODULES:
                names = {name: x for name, x in stand_ins.items() if hasattr(where, name)}
                stack.enter_context(mock.patch.multiple(where, **names))
            yield
        assert not self.counter.any(), "the kernel must reset its counters to 0"

    def form(self, name):
        """Return the Impl that runs a form of attention, such as "raw-ampere", here."""
        impl = next(impl for impl in IMPLS if impl.name == name)

        def forward(*inputs, **params):
            with self.in_place():
                return impl.forward(*map(as_array, inputs), **params)

        def backward(saved, dout, dlse, **params):
            with self.in_place():
                return impl.backward(
                    tuple(map(as_array, saved)), as_array(dout), as_array(dlse), **params
                )

        return Impl(f"emulated {name}", forward, backward)

    def forward(self, *inputs, **params):
        with self.in_place():
            inputs = list(map(as_array, inputs))
            return choose(HOPPER, inputs, self.forward_impl, **params).forward(*inputs, **params)

    def backward(self, saved, dout, dlse, **params):
        saved = tuple(map(as_array, saved))
        with self.in_place():
            asked, known = self.backward_impl, dict(params)
            del known["into"]
            chosen = next(impl for impl in HOPPER if impl.name == (asked or "raw-hopper"))
            rule = choose_backward(HOPPER, chosen, saved[:9], asked, **known)
            reason = rule.refuse_backward(*saved[:9], **known)
            assert reason is None or (asked and isinstance(reason, SlowerRefusal)), reason
            return rule.backward(saved, as_array(dout), as_array(dlse), **params)


def _value(x, kind):
    """Return the bytes of a kernel's argument, as an array."""
    if kind is not None:
        return np.array([x], kind)
    if isinstance(x, np.ndarray) and x.dtype.type is np.void:  # a struct or a tensor map
        room = np.empty(x.nbytes + 128, np.uint8)  # parameters are aligned as their types ask
        start = -room.ctypes.data % 128
        room[start : start + x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
        return room[start:]
    if isinstance(x, np.float64):
        return np.array([x])
    address = x.ctypes.data if isinstance(x, np.ndarray) else x or 0
    return np.array([address], np.uint64)
