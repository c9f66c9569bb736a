"""Power and energy of the GPU, by NVIDIA's management library (NVML), a part of the driver."""

import ctypes
import os
import time
from typing import NamedTuple

from gpuattn.arrays import import_cupy

LIBRARY = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"
FRESH = 2.0  # seconds for which a reading is returned again: each takes 3 ms


class Draw(NamedTuple):
    """``watts`` now, and ``joules`` since the driver was loaded; None where unknown."""

    watts: float | None = None
    joules: float | None = None


class PowerMeter:
    """Reads CuPy's current device. Without NVML all readings are ``Draw(None, None)``."""

    def __init__(self) -> None:
        self._device, self._asked, self._draw = None, -FRESH, Draw()
        try:
            self._library = ctypes.CDLL(LIBRARY)
            bus = import_cupy().cuda.Device().pci_bus_id.encode()
            device = ctypes.c_void_p()
            if self._library.nvmlInit_v2() == 0:
                found = self._library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device))
                self._device = device if found == 0 else None
        except (OSError, AttributeError):  # no library, or one without these functions
            pass

    def read(self, now: bool = False) -> Draw:
        """Return a Draw that is at most FRESH seconds old; with ``now``, a new one."""
        if self._device and (now or time.perf_counter() - self._asked > FRESH):
            watts = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint)
            joules = self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
            self._draw, self._asked = Draw(watts, joules), time.perf_counter()
        return self._draw

    def _ask(self, function: str, kind: type) -> float | None:
        """Return what a function of NVML says, in watts or joules, or None where it fails."""
        answer = kind()
        failed = getattr(self._library, function)(self._device, ctypes.byref(answer))
        return None if failed else answer.value / 1000
