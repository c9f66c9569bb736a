"""What a machine is: its units, and the rates of its memories and of products in each dtype.

On a GPU: the driver's figures, copies that read every n-th number, reads of shared memory, launches
one by one and in a CUDA graph, and products by cuBLASLt. On NumPy: cores, the same copies, copies
within a cache, calls of an empty operation, and products by BLAS.
"""

import platform
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gpuattn.bench import timing
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import launches
from gpuattn.environment import usable_cores
from gpuattn.gemm import cublaslt

STRIDES = (1, 2, 4, 8, 16, 32)
COPIED = {"cupy": 1 << 24, "numpy": 1 << 20}  # float32 numbers of a copy
CACHED = 1 << 14  # float32 numbers of a copy within a cache
LAUNCHES = 200
SIDE = {"FP64": 4096}  # of products on a GPU; others 8192
HERE = {  # on NumPy: the dtype and the side of its products
    "FP64": ("float64", 768), "FP32": ("float32", 1024), "FP16": ("float16", 128),
    "INT8": ("int8", 256),
}  # fmt: skip
SOURCE = """
extern "C" __global__ void nothing() {}
extern "C" __global__ void shared_reads(float4* out, int rounds) {
  __shared__ float4 tile[2048];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) tile[i] = make_float4(i, 1, 2, 3);
  __syncthreads();
  float4 sum = make_float4(0, 0, 0, 0);
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 v = tile[(threadIdx.x + 32 * (j + 8 * r)) & 2047];
      sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
READERS, ROUNDS, UNROLLED = 1024, 2000, 8  # threads of a block, and reads of each: see SOURCE


class Kind(NamedTuple):
    """A kind of product of cuBLASLt: cudaDataType of operands, result and factors, and compute."""

    operand: int
    result: int
    factor: int
    compute: int
    width: int  # bytes of an operand


KINDS = {
    "FP64": Kind(1, 1, 1, cublaslt.COMPUTE_64F, 8),
    "FP32": Kind(0, 0, 0, cublaslt.COMPUTE_32F, 4),
    "TF32": Kind(0, 0, 0, cublaslt.COMPUTE_TF32, 4),
    "FP16": Kind(2, 2, 0, cublaslt.COMPUTE_32F, 2),
    "BF16": Kind(14, 14, 0, cublaslt.COMPUTE_32F, 2),
    "FP8": Kind(28, 14, 0, cublaslt.COMPUTE_32F, 1),  # e4m3, summed in float32
    "INT8": Kind(3, 10, 10, 72, 1),  # summed in int32
}
ONES = {"FP64": "float64", "FP32": "float32", "TF32": "float32", "FP16": "float16"}
RESULTS = {1: "float64", 0: "float32", 2: "float16", 14: "uint16", 10: "int32"}
BITS_OF_ONE = {"BF16": 0x3F80, "FP8": 0x38, "INT8": 1}
FINITE = {"BF16": 0xBFFF, "FP8": 0xBF, "INT8": 0xFF}  # bits that random numbers below 2 may have


def measure(xp: ModuleType) -> dict[str, Any]:
    """Return a document on the machine.

    Keys: ``where``, ``units``: {name: figure}; ``copy_tbs``: {stride: TB/s of the numbers copied,
    read and written}; ``on_chip_tbs``: of shared memory, or of a cache; ``launch_us``: {"alone",
    "graph"}, "graph" None without graphs; ``products``: {kind: TFLOP/s, or why there is none}.
    """
    machine = _Here() if xp is np else _Card(xp)
    return {
        "where": machine.name, "units": machine.units(),
        "copy_tbs": {stride: machine.copy(stride) for stride in STRIDES},
        "on_chip_tbs": machine.on_chip(), "launch_us": machine.launches(),
        "products": {kind: _tried(machine.product, kind) for kind in KINDS},
    }  # fmt: skip


def _tried(product: Callable[[str], float], kind: str) -> float | str:
    try:
        return product(kind)
    except Exception as error:  # noqa: BLE001 the other kinds are measured
        return " ".join(str(error).split()) or type(error).__name__


class _Here:
    """This computer, by NumPy."""

    name = f"NumPy {np.__version__} on {platform.machine()}"

    def units(self):
        return {"cores": usable_cores()}

    def copy(self, stride):
        count = COPIED["numpy"]
        source, target = np.ones((count, stride), np.float32), np.empty(count, np.float32)
        return 8 * count / _best(lambda: np.copyto(target, source[:, 0])) / 1e6

    def on_chip(self):
        source, target = np.ones(CACHED, np.float32), np.empty(CACHED, np.float32)

        def copies():
            for _ in range(64):
                np.copyto(target, source)

        return 64 * 8 * CACHED / _best(copies) / 1e6

    def launches(self):
        one = np.ones(1, np.float32)

        def calls():
            for _ in range(LAUNCHES):
                np.copyto(one, one)

        return {"alone": _best(calls) / LAUNCHES, "graph": None}

    def product(self, kind):
        if kind not in HERE:
            raise ValueError(f"NumPy has no {kind}")
        dtype, side = HERE[kind]
        a = np.ones((side, side), dtype)
        return 2 * side**3 / _best(lambda: a @ a) / 1e6


def _best(call):
    """Return the least microseconds of some calls."""
    times = []
    call()
    for _ in range(5):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return max(min(times), 1e-3)


class _Card:
    """The current GPU."""

    def __init__(self, cupy):
        from gpuattn.cuda import compiler

        self.cupy, self.device = cupy, cupy.cuda.runtime.getDevice()
        properties = cupy.cuda.runtime.getDeviceProperties(self.device)
        self.name, self.memory = properties["name"].decode(), properties["totalGlobalMem"]
        found = gpu(self.device)
        arch = compiler.architecture(found.capability)
        arch = arch.replace("sm_", "compute_") if found.forced else arch
        self.module = cupy.cuda.function.Module()
        self.module.load(compiler.compile_text(SOURCE, arch, "machine.cu")[0])

    def units(self):
        found, known = gpu(self.device), self.cupy.cuda.Device(self.device).attributes
        bus, rate = (known.get(name) for name in ("GlobalMemoryBusWidth", "MemoryClockRate"))
        facts = {
            "multiprocessors": found.multiprocessors,
            "threads each": found.threads_per_multiprocessor,
            "KB of shared memory each": found.shared_bytes_per_multiprocessor / 1024,
            "MB of L2 cache": found.l2_bytes / 2**20, "GB of memory": self.memory / 1e9,
            "MHz of the multiprocessors": known.get("ClockRate", 0) / 1000,
            "MHz of the memory": (rate or 0) / 1000,
        }  # fmt: skip
        if bus and rate:
            facts["TB/s of the memory, by its clock"] = 2 * rate * 1e3 * bus / 8 / 1e12
        return {name: value for name, value in facts.items() if value}

    def copy(self, stride):
        count = COPIED["cupy"]
        source = self.cupy.ones((count, stride), np.float32)[:, 0]
        target = self.cupy.empty(count, np.float32)
        us = _median(lambda: self.cupy.copyto(target, source))
        return 8 * count / us / 1e6

    def on_chip(self):
        blocks = 2 * gpu(self.device).multiprocessors
        out = self.cupy.empty((blocks, READERS, 4), np.float32)
        kernel = self.module.get_function("shared_reads")
        us = _median(lambda: kernel((blocks,), (READERS,), (out, np.int32(ROUNDS))))
        return 16 * blocks * READERS * ROUNDS * UNROLLED / us / 1e6

    def launches(self):
        nothing = self.module.get_function("nothing")

        def calls():
            for _ in range(LAUNCHES):
                nothing((1,), (32,), ())

        with self.cupy.cuda.Stream(non_blocking=True):
            graph = timing.Graph([calls])
            return {
                "alone": _median(calls) / LAUNCHES, "graph": _median(graph) / LAUNCHES,
            }  # fmt: skip

    def product(self, kind):
        """Return TFLOP/s of random numbers, after a product of ones gave its side."""
        side = SIDE.get(kind, 8192)
        product = _Product(self.cupy, self.device, kind, side)
        product.fill_ones()
        product()
        if (got := product.first()) != side:
            raise AssertionError(f"a product of ones of side {side} gave {got}")
        product.fill_random()
        return 2 * side**3 / _median(product) / 1e6


def _median(call):
    call()
    return timing.median(timing.alternate({"call": call})["call"])


class _Product:
    """A product A^T B of square matrices by cuBLASLt, in any Kind."""

    def __init__(self, cupy, device, name, side):
        lt, missing = cublaslt.library()
        if lt is None:
            raise ValueError(f"cuBLASLt cannot be loaded: {missing}")
        self.cupy, self.name, self.kind, self.side = cupy, name, KINDS[name], side
        kind, shape = self.kind, (side, side)
        self.a, self.b = (cupy.zeros((side, side), f"u{kind.width}") for _ in range(2))
        self.out = cupy.zeros((side, side), RESULTS[kind.result])
        plan = cublaslt.MatmulPlan(lt, cublaslt.handle(device), device, shape, (False, False), name)
        self.factors = np.array([0, 1], {1: "float64", 0: "float32", 10: "int32"}[kind.factor])
        plan.beta, plan.alpha = (self.factors[i:].ctypes.data for i in (0, 1))
        plan.count, plan.swap = launches.place(name), False
        plan.operation = lt.matmul_desc_create(kind.compute, kind.factor)
        plan._set(lt.MatmulDescAttribute.TRANSA, 1, np.int32)
        types = kind.operand, kind.operand, kind.result
        plan.layouts = [lt.matrix_layout_create(one, side, side, side) for one in types]
        plan.first, plan.second, plan.target = plan.layouts
        found = plan.candidates(256, 1)
        if not found:
            raise ValueError(f"cuBLASLt has no algorithm for {name} on this GPU")
        plan.take(found[0])
        self.plan = plan

    def __call__(self):
        stream = self.cupy.cuda.get_current_stream().ptr
        if not self.plan.run_at(stream, *(x.data.ptr for x in (self.a, self.b, self.out))):
            raise ValueError(f"cuBLASLt refuses to launch {self.name}")

    def fill_ones(self):
        for x in (self.a, self.b):
            if self.name in ONES:
                x.view(ONES[self.name])[...] = 1
            else:
                x[...] = BITS_OF_ONE[self.name]

    def fill_random(self):
        for seed, x in enumerate((self.a, self.b)):
            rng = self.cupy.random.default_rng(seed)
            if self.name in ONES:
                x.view(ONES[self.name])[...] = rng.standard_normal(x.shape, np.float32)
            else:
                drawn = rng.integers(0, 1 << 16, x.shape)
                x[...] = (drawn & FINITE[self.name]).astype(x.dtype)

    def first(self):
        """Return the first number of the result."""
        value = self.out[0, 0].get()
        if self.kind.result == 14:  # the bits of bfloat16 are the high half of float32's
            value = np.array([int(value) << 16], np.uint32).view(np.float32)[0]
        return float(value)
