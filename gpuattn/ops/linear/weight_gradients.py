"""Gradients of many weights and biases in one launch on Hopper: ``weight_gradients_hopper.cu``.

A weight's gradient, dz.T @ x, is a matmul of few tiles, each a long sum. Alone it fills a GPU only
if the sums are split, whose parts must then be added up; those of several layers fill it together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuattn.arrays import ctype, import_cupy, on_gpu
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.scratch import workspace
from gpuattn.gemm.matmul import matmul
from gpuattn.ops.linear.bias_activation import launch_backward
from gpuattn.typing import Array

FILE, NAME = "linear/weight_gradients_hopper.cu", "weight_gradients"
ROWS, COLUMNS = 128, (384, 256)  # of a tile
STAGES = {384: 3, 256: 4}  # by columns
DEPTH = 64  # rows of dz and x in one step of a sum
TEAM = 6  # pairs of blocks
MAX_WEIGHTS = 24  # of a launch
MIN_ROWS = 1024  # of dz and x
MIN_TILES, MIN_STEPS = 36, 2304  # of a launch; with fewer the library is faster
MAX_SIDE = 2**31 - 2**10  # coordinates have 32 bits
WEIGHT = np.dtype("u8, u8, i4, i4, i4, i4, i4, i4, i4, i4")  # struct Weight of the kernel


class Problem(NamedTuple):
    """``dz.T @ x``, of (N, out) and (N, in), is written or added to ``out`` (out, in).

    ``bias``: None, or an array (out,) to which the sums of dz are written or, with
    ``accumulate_bias``, added.
    """

    dz: Array
    x: Array
    out: Array
    accumulate: bool
    bias: Array | None = None
    accumulate_bias: bool = False


def takes(dz: Array, x: Array, out: Array) -> bool:
    """Return whether ``launch`` is for ``dz`` (N, out), ``x`` (N, in) and ``out`` (out, in)."""
    if not on_gpu(dz) or not gpu(dz.device.id).has_wgmma:
        return False
    return len(dz) >= MIN_ROWS and fits(dz, x, out)


def fits(dz: Array, x: Array, out: Array) -> bool:
    """Return whether the kernel can compute this, be it faster or not."""
    kinds = {dz.dtype, x.dtype}
    if len(kinds) > 1 or ctype(dz.dtype) not in tensor_maps.KINDS:
        return False
    if out.dtype not in (dz.dtype, np.float32) or out.data.ptr % (2 * out.itemsize):
        return False
    if not out.flags.c_contiguous or max(len(dz), *out.shape) > MAX_SIDE:
        return False
    if not out.size or tiling(out.shape) is None:
        return False
    return not any(tensor_maps.refusal(y[:, None], "") for y in (dz, x))


def takes_bias(bias: Array, out: Array) -> bool:
    """Return whether ``launch`` can write the sums of dz to ``bias``, beside ``out``.

    The kernel sums up the first operand of its products, which is dz where tiles cover dweight.
    """
    tiles = tiling(out.shape)
    if tiles is None or tiles.turned:
        return False
    return bias.dtype == out.dtype and bias.flags.c_contiguous


def launch(problems: Sequence[Problem]) -> None:
    """Compute each Problem.

    By as few launches as possible; by the library where a launch would have too little to do.
    """
    alike: dict[tuple, list[Problem]] = {}
    for problem in problems:
        kind = len(problem.dz), problem.dz.dtype, problem.out.dtype, _columns(problem.out)
        alike.setdefault(kind, []).append(problem)
    for same in alike.values():
        for i in range(0, len(same), MAX_WEIGHTS):
            few = same[i : i + MAX_WEIGHTS]
            tiles = sum(_tiles(problem.out) for problem in few)
            if tiles >= MIN_TILES and tiles * _steps(few[0].dz) >= MIN_STEPS:
                launch_kernel(few)
                continue
            for dz, x, out, accumulate, bias, accumulate_bias in few:
                matmul(dz, x, transpose_a=True, out=out, accumulate=accumulate)
                if bias is not None:
                    launch_backward(None, None, dz, True, (bias, accumulate_bias), None)


def launch_kernel(problems: Sequence[Problem]) -> None:
    """Do what ``launch`` does by one launch of the kernel.

    ``problems``: up to ``MAX_WEIGHTS``, of the same rows, dtypes and columns of tiles. The work is
    divided among the teams by steps: a step is a group of twelve tiles, of any weights, times
    ``DEPTH`` rows.
    """
    dz, _, out, *_ = problems[0]
    maps, problem = _arguments(problems)
    blocks = gpu(dz.device.id).multiprocessors // (2 * TEAM) * 2 * TEAM
    places, columns = _workspaces(blocks), _columns(out)
    constants = {"scalar": ctype(dz.dtype), "WIDE": out.dtype == np.float32, "TEAM": TEAM}
    kernel(FILE, NAME, **constants, COLUMNS=columns)(
        (blocks,), (384,), maps, problem, *places, shared_bytes=shared_bytes(columns)
    )


def shared_bytes(columns: int) -> int:
    """Return the shared memory of a thread block, as the kernel lays it out."""
    return 3072 + STAGES[columns] * (ROWS + columns) * DEPTH * 2


def _arguments(problems):
    """Return the kernel's ``maps`` and ``problem`` as bytes."""
    maps = np.zeros(2 * MAX_WEIGHTS, "V128")
    problem = np.zeros(MAX_WEIGHTS * WEIGHT.itemsize + 16, np.uint8)
    weights, tiles = problem[:-16].view(WEIGHT), 0
    for i, (dz, x, out, accumulate, bias, accumulate_bias) in enumerate(problems):
        steps = out.shape[1], 1
        if tiling(out.shape).turned:
            dz, x, steps = x, dz, steps[::-1]
        for j, y in enumerate((dz, x)):
            maps[2 * i + j] = tensor_maps.tensor_map(y[:, None], DEPTH)[0]
        assert bias is None or takes_bias(bias, out), "``takes_bias`` refuses others"
        place = 0 if bias is None else bias.data.ptr
        shape = dz.shape[1], x.shape[1]
        weights[i] = (out.data.ptr, place, *shape, *steps, accumulate, accumulate_bias, tiles, 0)
        tiles += _tiles(out)
    groups, steps = -(-tiles // (2 * TEAM)), _steps(problems[0][0])
    problem[-16:].view(np.int32)[:3] = len(problems), groups, steps
    return maps.view(f"V{maps.nbytes}"), problem.view(f"V{problem.nbytes}")


class Tiling(NamedTuple):
    """The columns of a tile, and whether tiles cover the transpose of dweight, else dweight."""

    columns: int
    turned: bool


def tiling(shape: tuple[int, int]) -> Tiling | None:
    """Return the Tiling of a gradient, or None if no tiles cover it.

    The wider tiles for layers whose width they divide, since all gradients of a layer should share
    a launch. Where tiles cover dweight and its transpose, the one with more rows: its tiles share
    more of what is read.
    """
    wide_first = min(shape) % max(COLUMNS) == 0
    for width in sorted(COLUMNS, reverse=wide_first):
        for turned in (shape[0] < shape[1], shape[0] >= shape[1]):
            rows, columns = shape[::-1] if turned else shape
            if rows % ROWS == 0 and columns % width == 0:
                return Tiling(width, turned)
    return None


def _tiles(out):
    return out.size // (ROWS * _columns(out))


def _columns(out):
    tiles = tiling(out.shape)
    assert tiles is not None, "``fits`` refuses others"
    return tiles.columns


def _steps(dz):
    return -(-len(dz) // DEPTH)


def _workspaces(blocks):
    """Return the addresses of what blocks leave to others: parts of tiles, of sums, and flags."""
    cuda = import_cupy().cuda
    device, stream = cuda.runtime.getDevice(), cuda.get_current_stream().ptr
    sums = workspace(f"{NAME}: sums", blocks * ROWS * max(COLUMNS) * 4, device, stream)
    bias_sums = workspace(f"{NAME}: sums of biases", blocks * ROWS * 4, device, stream)
    given = workspace(f"{NAME}: given", blocks * 4, device, stream, zeroed=True)
    return np.uint64(sums), np.uint64(bias_sums), np.uint64(given)
