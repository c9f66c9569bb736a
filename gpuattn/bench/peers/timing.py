"""Shared by the peers: importing PyTorch, CUDA graphs, and the reasons why a peer is missing.

A peer works on tensors with our values in its own layout; converting them is not timed. The call of
a peer has ``run()``, which computes; ``results(run())``, which returns arrays in our layout;
``restart()``, which resets inputs that ``run`` changes; and ``is_captured``, False if the host must
read a result before the next launch, so that it cannot be captured as a CUDA graph.
"""

import collections
import contextlib
import functools
import importlib.metadata
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from gpuattn.arrays import import_cupy
from gpuattn.bench.samples import DTYPES
from gpuattn.errors import UnsupportedError

WARM_UPS = 3
COMPILE_SECONDS = {  # a peer's limit in one process
    "torch-compile": 90, "quack": 90, "liger": 60, "torch-graph": 180, "hf-static": 90,
    "ctranslate2": 90, "hf-compile": 180,
}  # fmt: skip
LIBRARIES = (
    "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn-4", "quack-kernels",
    "liger-kernel", "transformers", "ctranslate2",
)  # fmt: skip
_spent: dict[str, float] = collections.defaultdict(float)


@functools.cache
def torch_here() -> ModuleType:
    """Return PyTorch. Raises UnsupportedError where it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"PyTorch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise UnsupportedError("PyTorch sees no GPU")
    return torch


def on_stream(stream: Any) -> AbstractContextManager:
    """Return a context in which PyTorch works on a CuPy stream; an empty one without PyTorch."""
    try:
        torch = torch_here()
    except UnsupportedError:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr))


def versions() -> dict[str, str]:
    """Return ``{distribution: version}`` of the peers that are installed."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Launches:
    """Runs calls one after another on the current stream. ``peak_bytes``: see ``Graph``."""

    is_captured = False

    def __init__(self, calls: Sequence[Any]) -> None:
        self.calls = calls
        self.warm_up()

    def warm_up(self) -> None:
        """Run the calls WARM_UPS times and set ``peak_bytes``."""
        torch = torch_here()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UPS):
            self()
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before

    def __call__(self) -> None:
        self.parts = [call.run() for call in self.calls]

    def first_results(self) -> Sequence:
        """Return the results of the first call on its original inputs, in our layout."""
        for call in self.calls:
            call.restart()
        self()
        return self.calls[0].results(self.parts[0])


class Graph(Launches):
    """Calls captured one after another in a CUDA graph on the current stream; calling replays it.

    ``peak_bytes``: the device memory that they allocated, without their inputs.
    """

    is_captured = True

    def __init__(self, calls: Sequence[Any]) -> None:
        torch = torch_here()
        self.graph = None
        super().__init__(calls)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            super().__call__()
        self.graph = graph

    def __call__(self) -> None:
        if self.graph is None:
            super().__call__()
        else:
            self.graph.replay()


def capture(name: str, make: Callable, sets: Sequence[tuple]) -> Launches:
    """Return a peer's calls on several sets of (inputs, gradient of the output), ready to launch.

    ``make(*arrays)`` returns the call on a set. Raises UnsupportedError with the reason if the
    peer is missing, refuses, takes too long to compile, or runs out of memory.
    """
    with reasons():
        with time_limit(name):
            calls = [make(*arrays) for arrays in sets]
            calls[0].run()
        return (Graph if calls[0].is_captured else Launches)(calls)


@contextlib.contextmanager
def reasons() -> Iterator[None]:
    """Turn every error of a peer in the block into an UnsupportedError that gives the reason."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
            return
        except UnsupportedError:
            raise
        except Exception as error:  # noqa: BLE001 any error of a peer is its reason
            reason = _reason(error, heard)
    release()
    raise UnsupportedError(reason)


@contextlib.contextmanager
def noting(missing: dict[str, str], name: str) -> Iterator[None]:
    """End the block where the peer ``name`` cannot run or is wrong; ``missing`` gets the reason."""
    try:
        yield
    except (UnsupportedError, AssertionError) as error:
        missing[name] = str(error)


@contextlib.contextmanager
def time_limit(name: str) -> Iterator[None]:
    """Raise TimeoutError in the block when a peer has taken COMPILE_SECONDS in this process."""
    limit = COMPILE_SECONDS.get(name)
    if limit is None or not hasattr(signal, "SIGALRM"):
        yield
        return
    left, begin = limit - _spent[name], time.perf_counter()
    if left <= 0:
        raise UnsupportedError(f"its limit of {limit} s to compile in one run is used up")

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
    """Return a peer's error as text, with the warnings in which a backend says why it refused."""
    said = [str(warning.message).partition(" (Triggered")[0] for warning in heard]
    said = [text for text in said if not text.endswith("because:") and "disabled" not in text]
    text = " / ".join(" ".join(part.split()) for part in dict.fromkeys([str(error), *said]))
    return f"{type(error).__name__}: {text[:300]}"


def release() -> None:
    """Free PyTorch's unused device memory, if PyTorch was used."""
    if torch_here.cache_info().currsize:
        torch_here().cuda.empty_cache()


def tensor(x: Any, dtype: str) -> Any:
    """Return a tensor that shares memory with a CuPy array; floats are exchanged as integers."""
    torch = torch_here()
    bits = x.view(f"i{x.itemsize}")
    return torch.from_dlpack(bits).view(getattr(torch, dtype))


def array(x: Any, dtype: str) -> Any:
    """Return a CuPy array that shares memory with a tensor of this dtype."""
    torch, target = torch_here(), DTYPES[dtype]
    bits = x.detach().contiguous().view(getattr(torch, f"int{8 * target.itemsize}"))
    return import_cupy().from_dlpack(bits).view(target)
