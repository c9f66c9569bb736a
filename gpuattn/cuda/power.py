"""What the GPU draws and has used, by NVIDIA's management library, which comes with the driver."""

import ctypes
import os
import time
from typing import NamedTuple

from gpuattn.arrays import import_cupy

LIBRARY = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"
FRESH = 2.0  # seconds that an answer is given again: asking takes 3 ms


class Draw(NamedTuple):
    """``watts`` now, and ``joules`` since the driver was loaded; None for what is not known."""

    watts: float | None = None
    joules: float | None = None


class PowerMeter:
    """Asks about CuPy's current device. Where nobody answers, nothing is known."""

    def __init__(self):
        self._device, self._asked, self._draw = None, -FRESH, Draw()
        try:
            self._library = ctypes.CDLL(LIBRARY)
            bus = import_cupy().cuda.Device().pci_bus_id.encode()
            device = ctypes.c_void_p()
            if self._library.nvmlInit_v2() == 0:
                found = self._library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device))
                self._device = device if found == 0 else None
        except (OSError, AttributeError):  # no library, or an old one
            pass

    def read(self, now=False):
        """Return the latest Draw, of the last FRESH seconds; with ``now``, of this moment."""
        if self._device and (now or time.perf_counter() - self._asked > FRESH):
            watts = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint)
            joules = self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
            self._draw, self._asked = Draw(watts, joules), time.perf_counter()
        return self._draw

    def _ask(self, function, kind):
        """Return thousandths of what a function gives, or None."""
        answer = kind()
        failed = getattr(self._library, function)(self._device, ctypes.byref(answer))
        return None if failed else answer.value / 1000
