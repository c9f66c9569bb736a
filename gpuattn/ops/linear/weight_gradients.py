"""Gradients of many weights in one launch on Hopper: ``weight_gradients_hopper.cu``.

A weight's gradient is a product of few tiles and a long sum. Alone it fills a GPU only in many
parts, which somebody has to add; those of several layers fill it together.
"""

import numpy as np

from gpuattn.arrays import ctype, import_cupy, on_gpu
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.scratch import workspace
from gpuattn.gemm.matmul import matmul

FILE, NAME = "linear/weight_gradients_hopper.cu", "weight_gradients"
ROWS, COLUMNS, DEPTH = 128, 384, 64  # of a tile, and of a stage of the sum
TEAM = 6  # pairs of blocks
MOST = 24  # weights of a launch
LEAST_ROWS = 1024  # of dz and x
LEAST_TILES, LEAST_STEPS = 36, 2304  # of a launch; with less a library is faster
SHARED_BYTES = 2048 + 3 * (ROWS + COLUMNS) * DEPTH * 2
MAX_SIDE = 2**31 - 2**10  # for 32-bit coordinates
WEIGHT = np.dtype("u8, i4, i4, i4, i4, i4, i4")


def takes(dz, x, out):
    """Return whether ``launch`` takes ``dz`` (N, out), ``x`` (N, in) for a place (out, in)."""
    if not on_gpu(dz) or not gpu(dz.device.id).has_wgmma:
        return False
    return len(dz) >= LEAST_ROWS and fits(dz, x, out)


def fits(dz, x, out):
    """Return whether the kernel does, whatever it is faster than."""
    kinds = {dz.dtype, x.dtype}
    if len(kinds) > 1 or ctype(dz.dtype) not in tensor_maps.KINDS:
        return False
    if out.dtype not in (dz.dtype, np.float32) or out.data.ptr % (2 * out.itemsize):
        return False
    if not out.flags.c_contiguous or max(len(dz), *out.shape) > MAX_SIDE:
        return False
    if not out.size or _is_turned(out.shape) is None:
        return False
    return not any(tensor_maps.refusal(y[:, None], "") for y in (dz, x))


def launch(problems):
    """Write or add ``dz.T @ x`` to each ``out`` of [(dz, x, out, accumulate)]."""
    alike = {}
    for dz, x, out, accumulate in problems:
        kind = len(dz), dz.dtype, out.dtype
        alike.setdefault(kind, []).append((dz, x, out, accumulate))
    for same in alike.values():
        for i in range(0, len(same), MOST):
            few = same[i : i + MOST]
            tiles = sum(_tiles(out) for *_, out, _ in few)
            if tiles >= LEAST_TILES and tiles * _steps(few[0][0]) >= LEAST_STEPS:
                launch_kernel(few)
                continue
            for dz, x, out, accumulate in few:
                matmul(dz, x, transpose_a=True, out=out, accumulate=accumulate)


def launch_kernel(problems):
    """Do what ``launch`` does by the kernel, for up to ``MOST`` of the same rows and dtypes.

    Tiles of all weights by twelve, times ``DEPTH`` rows: steps, at least one for each team, or
    one for each twelve tiles.
    """
    dz, _, out, _ = problems[0]
    maps, problem = _arguments(problems)
    blocks = gpu(dz.device.id).multiprocessors // (2 * TEAM) * 2 * TEAM
    sums, given = _workspaces(blocks)
    constants = {"scalar": ctype(dz.dtype), "WIDE": out.dtype == np.float32, "TEAM": TEAM}
    kernel(FILE, NAME, **constants)(
        (blocks,), (384,), maps, problem, sums, given, shared_bytes=SHARED_BYTES
    )


def _arguments(problems):
    """Return the kernel's ``maps`` and ``problem`` as bytes."""
    maps = np.zeros(2 * MOST, "V128")
    problem = np.zeros(MOST * WEIGHT.itemsize + 16, np.uint8)
    weights, tiles = problem[:-16].view(WEIGHT), 0
    for i, (dz, x, out, accumulate) in enumerate(problems):
        steps = out.shape[1], 1
        if _is_turned(out.shape):
            dz, x, steps = x, dz, steps[::-1]
        for j, y in enumerate((dz, x)):
            maps[2 * i + j] = tensor_maps.tensor_map(y[:, None], DEPTH)[0]
        weights[i] = (out.data.ptr, dz.shape[1], x.shape[1], *steps, accumulate, tiles)
        tiles += _tiles(out)
    groups, steps = -(-tiles // (2 * TEAM)), _steps(problems[0][0])
    problem[-16:].view(np.int32)[:3] = len(problems), groups, steps
    return maps.view(f"V{maps.nbytes}"), problem.view(f"V{problem.nbytes}")


def _is_turned(shape):
    """Return whether a gradient's transpose is cut into tiles; None: they cover neither."""
    for turned in (shape[0] < shape[1], shape[0] >= shape[1]):  # tall ones share more
        rows, columns = shape[::-1] if turned else shape
        if rows % ROWS == 0 and columns % COLUMNS == 0:
            return turned
    return None


def _tiles(out):
    return out.size // (ROWS * COLUMNS)


def _steps(dz):
    return -(-len(dz) // DEPTH)


def _workspaces(blocks):
    """Return the addresses of what blocks leave to others, and of whether they did: zeros."""
    cuda = import_cupy().cuda
    device, stream = cuda.runtime.getDevice(), cuda.get_current_stream().ptr
    sums = workspace(f"{NAME}: sums", blocks * ROWS * COLUMNS * 4, device, stream)
    given = workspace(f"{NAME}: given", blocks * 4, device, stream, zeroed=True)
    return np.uint64(sums), np.uint64(given)
