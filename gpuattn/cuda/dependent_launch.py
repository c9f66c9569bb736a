"""Programmatic dependent launches: a kernel's blocks may start before the kernel before it ended.

Kernels that the ``Launch:`` lines of their headers call dependent are launched like this on
GPUs with ``Gpu.has_dependent_launch``. Their first statement is ``grid_dependency_wait()``
(``rawkernels/common/grid_dependency.cuh``). CuPy launches without attributes, so this calls the
driver's ``cuLaunchKernelEx``, which can be captured in graphs too.
"""

import ctypes
import functools
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy

FORMATS = {
    "int": "i", "unsigned int": "I", "long long": "q", "unsigned long long": "Q", "float": "f",
    "bool": "?",
}  # fmt: skip
CONFIG = "7IPPQ"  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number
ATTRIBUTE = "QQ56x"  # CUlaunchAttribute: its id, its value
EXTRA = "5PQ"  # (name, address) of the parameters and of their size, END; then the size itself
ATTRIBUTE_AT, EXTRA_AT, SIZE_AT, PARAMETERS_AT = (
    Struct(head).size
    for head in (CONFIG, CONFIG + ATTRIBUTE, CONFIG + ATTRIBUTE + "5P", CONFIG + ATTRIBUTE + EXTRA)
)
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*
END, BUFFER_POINTER, BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*
INVALID_CONTEXT = 201  # CUDA_ERROR_*


class DependentLaunch:
    """Launches a CuPy ``function`` whose parameters have the C types ``kinds``."""

    def __init__(self, function: Any, kinds: Sequence[str]) -> None:
        self.function, self.kinds, self.cuda = function, kinds, import_cupy().cuda
        self.driver_launch = _driver_launch()
        self.pointers = [i for i, kind in enumerate(kinds) if kind.endswith("*")]
        known = {*self.pointers, *(i for i, kind in enumerate(kinds) if kind in FORMATS)}
        self.structs = [i for i in range(len(kinds)) if i not in known]
        # the compiler chooses where tensor maps lie among the parameters: pass each by its address
        self.by_address = any(kind.startswith("TensorMap") for kind in kinds)
        self.layout: Any = None

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int
    ) -> None:
        values = list(args)
        for i in self.pointers:
            if values[i] is None:
                values[i] = 0
            elif type(values[i]) is not np.uint64:
                values[i] = values[i].data.ptr
        for i in self.structs:
            values[i] = values[i].tobytes()
        if self.layout is None:
            self._lay_out(values)
        gx, gy, gz = (*grid, 1, 1)[:3]
        bx, by, bz = (*block, 1, 1)[:3]
        stream = self.cuda.get_current_stream().ptr
        memory = self.memory()  # one for each call: several threads may launch at a time
        at = ctypes.addressof(memory)
        places: Sequence[int]
        given: tuple[int | None, int | None]  # the driver takes one of two forms of parameters
        if self.by_address:
            places, given = [at + offset for offset in self.offsets], (at + EXTRA_AT, None)
        else:
            places = (
                BUFFER_POINTER, at + PARAMETERS_AT, BUFFER_SIZE, at + SIZE_AT, END,
                self.layout.size - PARAMETERS_AT,
            )  # fmt: skip
            given = None, at + EXTRA_AT
        self.layout.pack_into(
            memory, 0, gx, gy, gz, bx, by, bz, shared_mem, stream, at + ATTRIBUTE_AT, 1,
            PROGRAMMATIC_STREAM_SERIALIZATION, 1, *places, *values,
        )  # fmt: skip
        status = self.driver_launch(at, self.function.ptr, *given)
        if status == INVALID_CONTEXT:  # this thread's first call
            self.cuda.Device().use()
            status = self.driver_launch(at, self.function.ptr, *given)
        if status:
            self.cuda.driver.check_status(status)

    def _lay_out(self, values: list[Any]) -> None:
        """Set the layout of what the driver reads; structs have the sizes of the first call."""
        head = CONFIG + ATTRIBUTE + (f"{len(values)}P" if self.by_address else EXTRA)
        formats = dict.fromkeys(self.pointers, "P")
        formats |= {i: f"0Q{len(values[i])}s" for i in self.structs}
        words = [formats.get(i) or FORMATS[kind] for i, kind in enumerate(self.kinds)]
        ends = [Struct(head + "".join(words[: i + 1])).size for i in range(len(words))]
        self.offsets = [end - Struct(word).size for end, word in zip(ends, words, strict=True)]
        layout = Struct(head + "".join(words))
        self.memory, self.layout = ctypes.c_char * layout.size, layout


@functools.cache
def _driver_launch() -> Any:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch
