"""What a GPU has, and which of it our kernels use. Every question about the GPU model ends here.

``GPUATTN_ARCH=75`` (another capability of LIMITS) in the environment makes this GPU stand for one
of that compute capability: ops choose the forms that run there, within the shared memory and the
threads that a multiprocessor has there, and kernels are compiled to PTX of it, which the driver
compiles for the card. It is read at the first use of a GPU. Nonsense is refused by every command
of ``gpuattn``, and where an op chooses its implementation (``impls.choose``): on NumPy too.
"""

import functools
import os
import re
from dataclasses import dataclass, replace

from gpuattn.arrays import import_cupy
from gpuattn.errors import ConfigError, HardwareRefusal, problem

FORCED = "GPUATTN_ARCH"
OLDEST, TURING, AMPERE, HOPPER = 70, 75, 80, 90
LIMITS = {
    75: (64, 64, 1024), 80: (163, 164, 2048), 86: (99, 100, 1536), 87: (163, 164, 1536),
    89: (99, 100, 1536), 90: (227, 228, 2048), 100: (227, 228, 2048), 103: (227, 228, 2048),
    120: (99, 100, 1536), 121: (99, 100, 1536),
}  # fmt: skip
"""Compute capability: KiB of shared memory of a block and of a multiprocessor, threads of a
multiprocessor. The CUDA programming guide, "technical specifications per compute capability"."""
GRAPHS_TAKE_DEPENDENT_LAUNCHES = 12030  # version of the driver: CUDA 12.3


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it. Sizes are in bytes.

    ``capability``: the compute capability times ten, such as 90. ``shared_bytes``: the shared
    memory that one block may ask for. ``driver_version``: of CUDA, such as 13000. ``forced``:
    whether GPUATTN_ARCH named the capability.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int
    shared_bytes_per_multiprocessor: int
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    driver_version: int
    forced: bool = False

    @property
    def has_mma(self) -> bool:
        """Whether tensor cores multiply float16 by mma.sync and ldmatrix."""
        return self.capability >= TURING

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16, on tensor cores and elsewhere; TF32 came with it."""
        return self.capability >= AMPERE

    @property
    def has_tma(self) -> bool:
        """Whether it copies tiles of arrays by tensor maps (TMA)."""
        return self.capability >= HOPPER

    @property
    def has_clusters(self) -> bool:
        """Whether thread blocks of a cluster read each other's shared memory."""
        return self.capability >= HOPPER

    @property
    def has_wgmma(self) -> bool:
        """Whether it runs sm_90a code: wgmma exists on Hopper alone, not on later GPUs."""
        return self.capability == HOPPER

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels get programmatic dependent launches (``driver_launch``).

        Only on 9.0: later GPUs have such launches too, but they were never measured there.
        """
        new_enough = self.driver_version >= GRAPHS_TAKE_DEPENDENT_LAUNCHES
        return self.capability == HOPPER and new_enough

    @property
    def has_l2_prefetch(self) -> bool:
        """Whether kernels prefetch rows to L2 in bulk (``ops/l2_prefetch.py``).

        Only on 9.0: later GPUs have the instruction too, but it was never measured there.
        """
        return self.capability == HOPPER


@functools.cache
def gpu(device: int) -> Gpu:
    """Return the Gpu of a device by its number."""
    cuda = import_cupy().cuda
    found = cuda.Device(device)
    attributes = found.attributes
    own = Gpu(
        capability=int(found.compute_capability),
        multiprocessors=attributes["MultiProcessorCount"],
        shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_bytes_per_multiprocessor=attributes["MaxSharedMemoryPerMultiprocessor"],
        registers_per_multiprocessor=attributes["MaxRegistersPerMultiprocessor"],
        threads_per_multiprocessor=attributes["MaxThreadsPerMultiProcessor"],
        l2_bytes=attributes["L2CacheSize"],
        driver_version=cuda.runtime.driverGetVersion(),
    )
    asked = forced_capability()
    return own if asked is None or asked == own.capability else _standing_for(own, asked)


def forced_capability() -> int | None:
    """Return the compute capability that GPUATTN_ARCH names, or None. Raises ConfigError."""
    text = os.environ.get(FORCED, "").strip()
    if not text:
        return None
    digits = text.replace(".", "") if re.fullmatch(r"\d+\.\d", text) else text
    if not digits.isdecimal() or int(digits) not in LIMITS:
        accepted = f"{', '.join(map(str, LIMITS))} (such as 75 or 7.5), or unset"
        advice = "It makes kernels run as on a GPU of another compute capability."
        raise ConfigError(problem("gpuattn", FORCED, repr(text), accepted, advice))
    return int(digits)


def _standing_for(own: Gpu, capability: int) -> Gpu:
    """Return the record of a GPU that runs what GPUs of an earlier compute capability run."""
    if capability > own.capability:
        accepted = f"at most {own.capability}, the compute capability of this GPU"
        raise ConfigError(problem("gpuattn", FORCED, capability, accepted))
    shared, shared_per_multiprocessor, threads = LIMITS[capability]
    return replace(
        own,
        capability=capability,
        shared_bytes=min(own.shared_bytes, shared << 10),
        shared_bytes_per_multiprocessor=min(
            own.shared_bytes_per_multiprocessor, shared_per_multiprocessor << 10
        ),
        threads_per_multiprocessor=min(own.threads_per_multiprocessor, threads),
        forced=True,
    )


def kernels_refusal(device: int) -> HardwareRefusal | None:
    """Return why no kernel runs on a device, or None."""
    found = gpu(device)
    if found.capability >= OLDEST:
        return None
    return HardwareRefusal(
        f"the GPU's compute capability is {dotted(found.capability)}, kernels need "
        f"{dotted(OLDEST)} or newer: NumPy's forms run on CuPy"
    )


def tensor_core_refusal(device: int, dtype: object, name: str = "q") -> HardwareRefusal | None:
    """Return why tensor cores of a device do not multiply a ``dtype`` by mma.sync, or None."""
    found = gpu(device)
    if found.has_bfloat16 or (found.has_mma and dtype == "float16"):
        return None
    takes = "float16 alone" if found.has_mma else "none of its instructions"
    return HardwareRefusal(
        f"{name} is {dtype}; the GPU's compute capability is {dotted(found.capability)}, whose "
        f"tensor cores take {takes} by mma.sync"
    )


def hopper_refusal(device: int) -> HardwareRefusal | None:
    """Return why a kernel of TMA and wgmma (sm_90a) does not run on a device, or None."""
    found = gpu(device)
    if found.has_wgmma:
        return None
    return HardwareRefusal(
        f"the GPU's compute capability is {dotted(found.capability)}, the kernel needs "
        f"{dotted(HOPPER)} (Hopper)"
    )


def dotted(capability: int) -> str:
    """Return a compute capability as it is written: "9.0" for 90."""
    return f"{capability // 10}.{capability % 10}"
