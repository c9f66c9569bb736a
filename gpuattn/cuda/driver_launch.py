"""Launches by the driver's ``cuLaunchKernelEx``, which takes attributes that CuPy's launches lack.

With the attribute PROGRAMMATIC a launch is a programmatic dependent one: the kernel's blocks may
start before the kernel before it ended. It is set for kernels whose header says "dependent" in its
``Launch:`` line, on GPUs with ``Gpu.has_dependent_launch``. Their first statement is
``grid_dependency_wait()`` (``rawkernels/common/grid_dependency.cuh``).
"""

import ctypes
import functools
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import import_cupy

FORMATS = {
    "int": "i", "unsigned int": "I", "long long": "q", "unsigned long long": "Q", "float": "f",
    "bool": "?",
}  # fmt: skip
CONFIG = "7IPPQ"  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number
ATTRIBUTE = "QQ56x"  # CUlaunchAttribute: its id, its value
STREAM_AT, ATTRIBUTE_AT, PLACES_AT = (
    Struct(head).size for head in ("7I0P", CONFIG, CONFIG + ATTRIBUTE)
)  # PLACES_AT: the addresses of the parameters, which follow them
CLUSTER = "I4x3I52x"  # CUlaunchAttribute: its id, the blocks of a cluster along x, y, z
# CU_LAUNCH_ATTRIBUTE_*: COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC = 2, 4, 6
INVALID_CONTEXT = 201  # CUDA_ERROR_*


# an address as an argument of a C function. Made ahead, it is passed on: ctypes takes 0.3 us to
# make four of integers
pointer = ctypes.c_void_p.from_param


class Packed(NamedTuple):
    """What the driver reads for one launch, in ``memory``: ``config``, ``places``: ``pointer``s."""

    memory: Any
    config: Any
    places: Any


class DriverLaunch:
    """Launches a CuPy ``function`` whose parameters have the C types ``kinds``.

    ``attribute``: COOPERATIVE, PROGRAMMATIC or None. ``pointers``, ``structs``: which parameters
    are addresses, and which are structs.
    """

    def __init__(self, function: Any, kinds: Sequence[str], attribute: int | None) -> None:
        self.function, self.kinds, self.cuda = function, kinds, import_cupy().cuda
        self.attribute, self.driver_launch = attribute, _driver_launch()
        self.handle = pointer(function.ptr)
        self.pointers = [i for i, kind in enumerate(kinds) if kind.endswith("*")]
        known = {*self.pointers, *(i for i, kind in enumerate(kinds) if kind in FORMATS)}
        self.structs = [i for i in range(len(kinds)) if i not in known]
        self.layout: Any = None

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int
    ) -> None:
        stream = self.cuda.get_current_stream().ptr
        self.launch(self.pack(grid, block, self.values(args), shared_mem, stream))

    def values(self, args: Sequence[Any]) -> list[Any]:
        """Return what the driver takes for ``args``: addresses, bytes of structs, numbers."""
        values = list(args)
        for i in self.pointers:
            if values[i] is None:
                values[i] = 0
            elif type(values[i]) is not np.uint64:
                values[i] = values[i].data.ptr
        for i in self.structs:
            values[i] = values[i].tobytes()
        return values

    def pack(
        self, grid: tuple[int, ...], block: tuple[int, ...], values: list[Any], shared_mem: int,
        stream: int,
    ) -> Packed:  # fmt: skip
        """Return the launch of ``values`` in memory of its own: several threads may launch."""
        if self.layout is None:
            self._lay_out(values)
        gx, gy, gz = (*grid, 1, 1)[:3]
        bx, by, bz = (*block, 1, 1)[:3]
        memory = self.memory()
        at = ctypes.addressof(memory)
        places = [at + offset for offset in self.offsets]
        self.layout.pack_into(
            memory, 0, gx, gy, gz, bx, by, bz, shared_mem, stream, at + ATTRIBUTE_AT,
            self.attribute is not None, self.attribute or 0, 1, *places, *values,
        )  # fmt: skip
        return Packed(memory, pointer(at), pointer(at + PLACES_AT))

    def launch(self, packed: Packed) -> None:
        """Launch. Raises what CuPy raises for an error of the driver."""
        _, config, places = packed
        status = self.driver_launch(config, self.handle, places, None)
        if status == INVALID_CONTEXT:  # this thread's first call
            self.cuda.Device().use()
            status = self.driver_launch(config, self.handle, places, None)
        if status:
            self.cuda.driver.check_status(status)

    def _lay_out(self, values: list[Any]) -> None:
        """Set the layout of what the driver reads; structs have the sizes of the first call."""
        head = CONFIG + ATTRIBUTE + f"{len(values)}P"
        formats = dict.fromkeys(self.pointers, "P")
        formats |= {i: f"0Q{len(values[i])}s" for i in self.structs}
        self.words = words = [formats.get(i) or FORMATS[kind] for i, kind in enumerate(self.kinds)]
        ends = [Struct(head + "".join(words[: i + 1])).size for i in range(len(words))]
        self.offsets = [end - Struct(word).size for end, word in zip(ends, words, strict=True)]
        layout = Struct(head + "".join(words))
        self.memory, self.layout = ctypes.c_char * (-(-layout.size // 8) * 8), layout


def clusters_at_once(function: Any, blocks: int, threads: int, shared_bytes: int) -> int:
    """Return how many clusters of ``blocks`` of a CuPy ``function`` run at a time; 0: none."""
    found = ctypes.c_int()
    config, attribute = (
        ctypes.create_string_buffer(Struct(form).size) for form in (CONFIG, CLUSTER)
    )
    Struct(CLUSTER).pack_into(attribute, 0, CLUSTER_DIMENSION, blocks, 1, 1)
    Struct(CONFIG).pack_into(
        config, 0, blocks, 1, 1, threads, 1, 1, shared_bytes, 0, ctypes.addressof(attribute), 1
    )
    query = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    query.argtypes = [ctypes.c_void_p] * 3
    failed = query(ctypes.byref(found), function.ptr, config)
    return 0 if failed else found.value


@functools.cache
def _driver_launch() -> Any:
    """Return the driver's function, of a ``pointer`` to the configuration, to the function and to
    the addresses of the parameters, and None."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
