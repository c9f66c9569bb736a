"""Launch plans of the norm kernels: threads of a row, pipeline stages; and their column sums."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.autodiff.side_stream import on_side_stream
from gpuattn.cuda.gpu import AMPERE, gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.typing import Array, DType

MAX_COLS = 2**31 - 2**14  # columns are counted in 32 bits
TEAMS = (8, 16, 32, 64, 128, 256, 512)  # threads that share a row
REGISTERS = 65536  # of a multiprocessor
MAX_STAGE_BYTES = 216 << 10  # of shared memory of a multiprocessor, for rows being loaded
SUM_BYTES = 3 << 10  # of shared memory of a block, for sums
# Columns: (warps that share a row, such teams of a block, blocks of a multiprocessor, column sums
# that fit into registers), of the kernel of row pairs
PAIRS = {
    256: (1, 8, 2, 3),
    384: (1, 8, 2, 2),
    768: (2, 3, 2, 3),
    1280: (5, 3, 1, 3),
    1536: (4, 3, 1, 3),
}
SUM_COLS, SUM_THREADS = 32, 1024  # of a block of the kernel column_sums
MAX_SUMS = 3  # of one launch of column_sums


def refuse_raw(x: Array, *others: Any, **params: Any) -> str | None:
    """Return why the norm kernels do not take ``x``, or None."""
    if reason := kernel_refusal(x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"x has {x.shape[-1]} columns, the kernel takes at most {MAX_COLS}"
    return None


def rows_of(x: Array) -> tuple[Array, int]:
    """Return (x, elements from one row to the next) for ``x`` (..., D), copied if need be.

    Rows whose size is a multiple of 16 bytes start at multiples of 16 bytes.
    """
    cols, size = x.shape[-1], x.itemsize
    axes = [axis for axis in zip(x.shape, x.strides, strict=True) if axis[0] != 1]
    if cols != 1 and axes:
        axes.pop()
    steps = [stride for _, stride in axes]
    step = steps[-1] if steps else cols * size
    along = all(
        outer == inner * count for outer, (count, inner) in zip(steps[:-1], axes[1:], strict=True)
    )
    unit = 16 if width(cols, x.dtype) > 1 else size
    aligned = step % unit == 0 and x.data.ptr % unit == 0
    if along and aligned and (cols == 1 or x.strides[-1] == size):
        return x, step // size
    return get_xp(x).array(x, order="C"), cols  # also copies a contiguous but unaligned x


def width(cols: int, dtype: np.dtype) -> int:
    """Return how many elements a thread loads at once."""
    vec = 16 // dtype.itemsize
    return 1 if cols % vec else vec


@functools.cache
def layout(
    cols: int, dtype: np.dtype, most: int, most_of_a_warp: int
) -> tuple[dict[str, Any], int]:
    """Return (constants of ``common/norm.cuh``, elements of a row that a thread keeps).

    That is at most ``most``, or ``most_of_a_warp`` if 32 threads, which need no barrier, can then
    keep the row; at most 16 if threads keep unequal numbers. 0: the row does not fit into
    registers and is read twice.
    """
    vec = width(cols, dtype)
    constants = {"scalar": ctype(dtype), "VEC": vec}
    warp = (32,) if cols > 32 * most else ()
    for teams, limit in ((warp, most_of_a_warp), (TEAMS, most), (TEAMS, 16)):
        team = next((team for team in teams if cols <= team * limit), None)
        if team is None:
            continue
        held = max(1, -(-cols // (8 * team))) * 8
        full = team * held == cols
        if held <= 16 or (full and vec > 1):
            return constants | {"TEAM": team, "PACKS": held // vec, "FULL": full}, held
    return constants | {"TEAM": TEAMS[-1], "PACKS": 0, "FULL": False}, 0


def words(constants: dict[str, Any], held: int, dtype: np.dtype) -> int:
    """Return the registers that a row or a vector takes in its own dtype."""
    return held if constants["VEC"] == 1 else held * dtype.itemsize // 4


def fit(constants: dict[str, Any], held: int, registers: int) -> tuple[dict[str, Any], int, int]:
    """Return (constants, elements kept by a thread, threads per multiprocessor that can do so).

    ``registers``: about how many a thread needs. If a block cannot keep a row, no element is kept.
    """
    if not constants["FULL"]:  # for checks whether a pack is inside the row
        registers += 16 if constants["VEC"] > 1 else 32
    threads = REGISTERS // (-(-registers // 8) * 8) // 128 * 128
    if threads >= constants["TEAM"]:
        return constants, held, threads
    return constants | {"PACKS": 0, "FULL": False}, 0, constants["TEAM"]


def forward_layout(
    cols: int, dtype: np.dtype, read: int, vectors: int
) -> tuple[dict[str, Any], int]:
    """Return (constants of a forward kernel, rows of a block).

    ``read``, ``vectors``: how many arrays of rows and vectors it reads.
    """
    constants, held = layout(cols, dtype, 32, 32)
    # with many threads at a barrier, more rows in flight gain more than vectors loaded early
    early = read > 1 or constants["TEAM"] <= 128
    registers = words(constants, held, dtype) * (read + vectors) + 16 + 16 * read
    constants, held, threads = fit(constants, held, registers if early else held + 32)
    block = max(64, constants["TEAM"])
    constants = constants | {"BLOCK": block, "BLOCKS": threads // block, "EARLY": early}
    return constants, block // constants["TEAM"]


def backward_layout(
    x: Array, read: int, sums: int, pairs: bool = False
) -> tuple[dict[str, Any], int, int]:
    """Return (constants of a backward kernel, blocks, bytes of shared memory of a block).

    ``read``: how many arrays of rows it reads. ``sums``: how many column sums it computes.
    ``pairs``: it has the constant ROWS, the rows that a team processes at a time.
    """
    cols, device = x.shape[-1], gpu(x.device.id)
    older = device.capability < AMPERE  # registers hold the next row while it is loaded
    most_of_a_warp = 32 if x.itemsize == 2 and not (older and read > 3) else 16
    constants, held = layout(cols, x.dtype, 16, most_of_a_warp)
    if read >= 3 and x.itemsize == 2 and cols == 384:  # of 32 threads a quarter would be idle
        constants, held = constants | {"TEAM": 16, "PACKS": 3, "FULL": True}, 24
    # the gradient and the normalized values of a row, the sums, one vector
    registers = held * (2 + sums) + words(constants, held, x.dtype) + 20 * (read - 1)
    registers += read * words(constants, held, x.dtype) if older else 0
    constants, held, threads = fit(constants, held, registers)
    if 16 * constants["PACKS"] * constants["TEAM"] * read > device.shared_bytes - SUM_BYTES:
        constants, held, threads = constants | {"PACKS": 0, "FULL": False}, 0, constants["TEAM"]
    team, threads = constants["TEAM"], min(512, threads)
    # two blocks per multiprocessor. For teams of 256 that read two arrays one block of two teams
    # took the same time in every run, and two blocks of one team up to 7 % more
    share = threads if team == 256 and read == 2 else threads // 2
    block = max(share // team, 1) * team
    blocks = threads // block
    stage = 16 * constants["PACKS"] * block * read  # bytes of a pipeline stage of a block
    room = min(MAX_STAGE_BYTES, device.shared_bytes - SUM_BYTES) // blocks
    stages = max(1, min(max(2, 6 // read), room // max(stage, 1))) if constants["VEC"] > 1 else 1
    stages = 2 if older and constants["VEC"] > 1 else stages
    constants = constants | {"BLOCK": block, "BLOCKS": blocks, "STAGES": stages, "EARLY": True}
    if pairs:
        # if one row takes all warps, they wait for its sums: half as often with two rows at a time
        alone = team == 512 and constants["FULL"] and room >= 2 * stages * stage
        constants["ROWS"] = 2 if alone and registers + 2 * held <= REGISTERS // block else 1
        stage *= constants["ROWS"]
    in_shared = 0 if constants["VEC"] == 1 else 1 if older else stages
    shared = max(in_shared * stage, 4 * held * block)
    rows = x.size // max(cols, 1)
    return constants, min(device.multiprocessors * blocks, -(-rows * team // block)), shared


def pairs_layout(x: Array, wanted: Sequence[bool]) -> tuple[dict[str, Any], int, int, int] | None:
    """Return (constants, threads, blocks, bytes of shared memory) of the kernel of row pairs.

    In it a team of warps processes two rows. ``x``: the rows. ``wanted``: which column sums.
    Returns None where it does not apply or is not faster.
    """
    cols, count = x.shape[-1], sum(map(bool, wanted))
    rows = x.size // max(cols, 1)
    if x.itemsize != 2 or cols not in PAIRS or rows > 2**31 - 2:
        return None
    warps, teams, blocks, most = PAIRS[cols]
    if not 0 < count <= most:
        return None
    sums = sum(1 << i for i, want in enumerate(wanted) if want)
    constants = {"scalar": ctype(x.dtype), "COLUMNS": cols // warps, "SUMS": sums}
    constants |= {"WARPS": warps, "TEAMS": teams, "BLOCKS": blocks}
    grid = min(blocks * gpu(x.device.id).multiprocessors, -(-rows // (2 * teams)))
    return constants, 32 * warps * teams, grid, 4 * teams * count * cols


def parts_of(x: Array, grid: int, wanted: Sequence[bool]) -> list[Array | None]:
    """Return, for each of ``wanted``, a (grid, D) float32 array of partial column sums, or None."""
    shape = grid, x.shape[-1]
    return [arrays.empty(x, shape, np.float32) if want else None for want in wanted]


def add_parts(
    parts: Sequence[Array | None], slots: Sequence[tuple[Array, bool] | None], dtype: DType
) -> list[Array | None]:
    """Return the sums over the rows of each of ``parts`` in ``dtype``; None for None.

    A sum with a slot, (array, whether to add to it), is written there, and None is returned for it.
    """
    outs: list[tuple[Any, bool]] = []
    for part, slot in zip(parts, slots, strict=True):
        if part is None:
            outs.append((None, False))
        elif slot is not None and ctype(slot[0].dtype) is not None:
            outs.append(slot)
        else:
            outs.append((arrays.empty(part, part.shape[-1], dtype), False))
    places = [
        out if slot is not None and out is slot[0] else None
        for (out, _), slot in zip(outs, slots, strict=True)
        if out is not None
    ]
    with on_side_stream(parts, places):
        for scalar in {ctype(out.dtype) for out, _ in outs if out is not None}:
            now = [out is not None and ctype(out.dtype) == scalar for out, _ in outs]
            _add(parts, outs, now, scalar)
    return [
        None if out is None or (slot is not None and out is slot[0]) else out
        for (out, _), slot in zip(outs, slots, strict=True)
    ]


def _add(parts, outs, now, scalar):
    none = [None] * (MAX_SUMS - len(parts))
    places = [out if here else None for (out, _), here in zip(outs, now, strict=True)]
    accumulate = sum(1 << i for i, (_, add) in enumerate(outs) if add)
    count, cols = next(part.shape for part, here in zip(parts, now, strict=True) if here)
    add = kernel("column_sum.cu", "column_sums", scalar=scalar, BLOCK=128)
    grid = -(-cols // SUM_COLS), MAX_SUMS
    add(grid, (SUM_THREADS,), *parts, *none, *places, *none, count, cols, accumulate)
