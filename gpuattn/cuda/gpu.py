"""What a GPU has, and which of it our kernels use. Every question about the GPU model ends here."""

import functools
from dataclasses import dataclass

from gpuattn.arrays import import_cupy
from gpuattn.errors import HardwareRefusal

HOPPER = 90
GRAPHS_TAKE_DEPENDENT_LAUNCHES = 12030  # version of the driver: CUDA 12.3


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it. Sizes are in bytes.

    ``capability``: the compute capability times ten, such as 90. ``shared_bytes``: the shared
    memory that one block may ask for. ``driver_version``: of CUDA, such as 13000.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int
    shared_bytes_per_multiprocessor: int
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    driver_version: int

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
    return Gpu(
        capability=int(found.compute_capability),
        multiprocessors=attributes["MultiProcessorCount"],
        shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_bytes_per_multiprocessor=attributes["MaxSharedMemoryPerMultiprocessor"],
        registers_per_multiprocessor=attributes["MaxRegistersPerMultiprocessor"],
        threads_per_multiprocessor=attributes["MaxThreadsPerMultiProcessor"],
        l2_bytes=attributes["L2CacheSize"],
        driver_version=cuda.runtime.driverGetVersion(),
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
