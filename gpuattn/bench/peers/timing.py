"""What rivals have in common: PyTorch, where it is installed, CUDA graphs, and reasons why not.

Each works on tensors with our values, in the layout that it likes best, made before the clock runs.
A call of one has ``run()``, which computes; ``results(run())``, arrays in our layout;
``restart()``, which gives inputs that it edits their first values back; and ``is_captured``, False
for what asks the host how to go on, so that it can be no CUDA graph.
"""

import collections
import contextlib
import functools
import importlib.metadata
import signal
import time
import warnings

from gpuattn.arrays import import_cupy
from gpuattn.bench.samples import DTYPES
from gpuattn.errors import UnsupportedError

WARM_UPS = 3
PATIENCE = {"torch-compile": 90, "quack": 90, "liger": 60}  # seconds of a run to build and compile
LIBRARIES = (
    "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn-4", "quack-kernels",
    "liger-kernel",
)  # fmt: skip
_spent = collections.Counter()


@functools.cache
def torch_here():
    """Return PyTorch. Raises UnsupportedError where it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"PyTorch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise UnsupportedError("PyTorch sees no GPU")
    return torch


def on_stream(stream):
    """Return a context in which PyTorch works on a CuPy stream; an empty one without PyTorch."""
    try:
        torch = torch_here()
    except UnsupportedError:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr))


def versions():
    """Return ``{distribution: version}`` of the peers that are installed."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Launches:
    """Calls one after the other, on the current stream. ``peak_bytes``: see ``Graph``."""

    is_captured = False

    def __init__(self, calls):
        self.calls = calls
        self.warm_up()

    def warm_up(self):
        torch = torch_here()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UPS):
            self()
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before

    def __call__(self):
        self.parts = [call.run() for call in self.calls]

    def first_results(self):
        """Return what the first call computes of its inputs as they were given, in our layout."""
        for call in self.calls:
            call.restart()
        self()
        return self.calls[0].results(self.parts[0])


class Graph(Launches):
    """Calls captured one after the other as a CUDA graph on the current stream, to be replayed.

    ``peak_bytes``: the device memory that running them took beside their inputs.
    """

    is_captured = True

    def __init__(self, calls):
        torch = torch_here()
        self.graph = None
        super().__init__(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            super().__call__()
        self.graph = graph

    def __call__(self):
        if self.graph is None:
            super().__call__()
        else:
            self.graph.replay()


def capture(name, make, sets):
    """Return a peer's calls on several sets of (inputs, gradient of the output), to be launched.

    ``make(*arrays)`` returns the call on a set. Raises UnsupportedError with the reason if the
    peer is missing, refuses, or takes too long to compile; also out of memory.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            with _patience(name):
                calls = [make(*arrays) for arrays in sets]
                calls[0].run()
            return (Graph if calls[0].is_captured else Launches)(calls)
        except UnsupportedError:
            raise
        except Exception as error:  # noqa: BLE001 what a foreign library raises is its reason
            reason = _reason(error, heard)
    release()
    raise UnsupportedError(reason)


@contextlib.contextmanager
def _patience(name):
    """End what is in the block, by TimeoutError, where a peer takes longer than PATIENCE in all."""
    limit = PATIENCE.get(name)
    if limit is None or not hasattr(signal, "SIGALRM"):
        yield
        return
    left, begin = limit - _spent[name], time.perf_counter()
    if left <= 0:
        raise UnsupportedError(f"the {limit} s that it may compile in one run are over")

    def end(*_):
        raise TimeoutError(f"not compiled after {left:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _spent[name] += time.perf_counter() - begin


def _reason(error, heard):
    """Return what a peer said: its error, and the warnings that explain why a backend is out."""
    said = [str(warning.message).partition(" (Triggered")[0] for warning in heard]
    said = [text for text in said if not text.endswith("because:") and "disabled" not in text]
    text = " / ".join(" ".join(part.split()) for part in dict.fromkeys([str(error), *said]))
    return f"{type(error).__name__}: {text[:300]}"


def release():
    """Give PyTorch's unused device memory back, if it was used."""
    if torch_here.cache_info().currsize:
        torch_here().cuda.empty_cache()


def tensor(x, dtype):
    """Return a tensor that shares memory with a CuPy array; 16-bit floats cross as integers."""
    torch = torch_here()
    bits = x.view(f"i{x.itemsize}")
    return torch.from_dlpack(bits).view(getattr(torch, dtype))


def array(x, dtype):
    """Return a CuPy array that shares memory with a tensor of this dtype."""
    torch, target = torch_here(), DTYPES[dtype]
    bits = x.detach().contiguous().view(getattr(torch, f"int{8 * target.itemsize}"))
    return import_cupy().from_dlpack(bits).view(target)
