"""Gpu records of every compute capability that kernels are made for: plans go by nothing else.

The numbers are those of one product each, by the CUDA programming guide's table of technical
specifications and NVIDIA's data sheets.
"""

from gpuattn.cuda.gpu import Gpu

KIB, MIB = 1 << 10, 1 << 20


def _gpu(capability, multiprocessors, shared, threads, l2):
    """``shared``: KiB that a block may ask for; a multiprocessor from 8.0 on has one more. ``l2``:
    MiB."""
    return Gpu(
        capability=capability,
        multiprocessors=multiprocessors,
        shared_bytes=shared * KIB,
        shared_bytes_per_multiprocessor=(shared + (capability >= 80)) * KIB,
        registers_per_multiprocessor=65536,
        threads_per_multiprocessor=threads,
        l2_bytes=l2 * MIB,
        driver_version=13000,
    )


GPUS = {
    "7.5": _gpu(75, 40, 64, 1024, 4),
    "8.0": _gpu(80, 108, 163, 2048, 40), "8.6": _gpu(86, 84, 99, 1536, 6),
    "8.7": _gpu(87, 16, 163, 1536, 4), "8.9": _gpu(89, 128, 99, 1536, 72),
    "9.0": _gpu(90, 132, 227, 2048, 50), "10.0": _gpu(100, 148, 227, 2048, 126),
    "10.3": _gpu(103, 148, 227, 2048, 126), "12.0": _gpu(120, 170, 99, 1536, 96),
    "12.1": _gpu(121, 48, 99, 1536, 24),
}  # fmt: skip
