"""The figures of ``gpuattn bench machine``, measured once for all chapters."""

import functools
from typing import Any

from gpuattn.bench import machine
from gpuattn.runtime.device import array_module


@functools.cache
def here(device: str) -> dict[str, Any]:
    """Return the document of ``bench.machine`` of a device, "numpy" or "cuda"."""
    return machine.measure(array_module(device))
