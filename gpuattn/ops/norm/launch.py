"""How the norms' kernels lay rows over threads, and the second stage of their column sums."""

import functools

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.autodiff.side_stream import on_side_stream
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal

MAX_COLS = 2**31 - 2**14  # columns are counted in 32 bits
TEAMS = (8, 16, 32, 64, 128, 256, 512)  # threads that share a row
REGISTERS = 65536  # of a multiprocessor
MOST_SHARED, SPARE = 216 << 10, 3 << 10  # bytes for rows on the way, at most; left for sums
PAIRS_COLS, PAIRS_THREADS = {256: 3, 384: 2}, 256  # columns: how many sums fit into registers
SUM_COLS, SUM_THREADS = 32, 1024  # of a block of column_sums
SUMS = 3  # of one launch of it


def refuse_raw(x, *others, **params):
    """Return why the norms' kernels do not take ``x``, or None."""
    if reason := kernel_refusal(x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"x has {x.shape[-1]} columns, the kernel takes at most {MAX_COLS}"
    return None


def rows_of(x):
    """Return (x, elements from one row to the next) for ``x`` (..., D), a copy where need be.

    Rows of a multiple of 16 bytes begin at one.
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
    return get_xp(x).array(x, order="C"), cols  # a copy also of what is contiguous


def width(cols, dtype):
    """Return how many elements are moved at once."""
    vec = 16 // dtype.itemsize
    return 1 if cols % vec else vec


@functools.cache
def layout(cols, dtype, most, most_of_a_warp):
    """Return (constants of ``norm/norm.cuh``, elements of a row that a thread holds).

    At most ``most``, or ``most_of_a_warp`` where that lets 32 threads, which need no barrier, hold
    the row; 16 where not every thread holds as many. 0: the row is longer, and read again.
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


def words(constants, held, dtype):
    """Return the registers of a row or a vector as it was read."""
    return held if constants["VEC"] == 1 else held * dtype.itemsize // 4


def fit(constants, held, registers):
    """Return (constants, elements held, threads of a multiprocessor that may hold so many).

    ``registers``: what each needs, about. A row that a block could not hold is not held.
    """
    if not constants["FULL"]:  # what tells whether a pack is in the row
        registers += 16 if constants["VEC"] > 1 else 32
    threads = REGISTERS // (-(-registers // 8) * 8) // 128 * 128
    if threads >= constants["TEAM"]:
        return constants, held, threads
    return constants | {"PACKS": 0, "FULL": False}, 0, constants["TEAM"]


def forward_layout(cols, dtype, read, vectors):
    """Return (a forward's constants, rows of a block), by the arrays and vectors that it reads."""
    constants, held = layout(cols, dtype, 32, 32)
    # many threads that wait for each other: more rows on the way are worth more than early vectors
    early = read > 1 or constants["TEAM"] <= 128
    registers = words(constants, held, dtype) * (read + vectors) + 16 + 16 * read
    constants, held, threads = fit(constants, held, registers if early else held + 32)
    block = max(64, constants["TEAM"])
    constants = constants | {"BLOCK": block, "BLOCKS": threads // block, "EARLY": early}
    return constants, block // constants["TEAM"]


def backward_layout(x, read, sums, pairs=False):
    """Return (a backward's constants, the most blocks, bytes of shared memory).

    ``read``: arrays of rows that it reads; ``sums``: over columns that it keeps. ``pairs``: it has
    ROWS, the rows that a team takes at a time.
    """
    cols, device = x.shape[-1], gpu(x.device.id)
    constants, held = layout(cols, x.dtype, 16, 32 if x.itemsize == 2 else 16)
    if read == 3 and x.itemsize == 2 and cols == 384:  # 32 threads would leave a fourth idle
        constants, held = constants | {"TEAM": 16, "PACKS": 3, "FULL": True}, 24
    # a row's gradient and normalized values, the sums, a vector
    registers = held * (2 + sums) + words(constants, held, x.dtype) + 20 * (read - 1)
    constants, held, threads = fit(constants, held, registers)
    team, threads = constants["TEAM"], min(512, threads)
    # two blocks; one of two teams took the same time in every run, two of one up to 7 % more
    share = threads if team == 256 and read == 2 else threads // 2
    block = max(share // team, 1) * team
    blocks = threads // block
    stage = 16 * constants["PACKS"] * block * read  # bytes of the rows that a block has on the way
    room = min(MOST_SHARED, device.shared_bytes - SPARE) // blocks
    stages = max(1, min(6 // read, room // max(stage, 1))) if constants["VEC"] > 1 else 1
    constants = constants | {"BLOCK": block, "BLOCKS": blocks, "STAGES": stages, "EARLY": True}
    if pairs:
        # all warps wait for a row's sums where it takes all of them: half as often with two rows
        alone = team == 512 and constants["FULL"] and room >= 2 * stages * stage
        constants["ROWS"] = 2 if alone and registers + 2 * held <= REGISTERS // block else 1
        stage *= constants["ROWS"]
    shared = max(stages * stage if constants["VEC"] > 1 else 0, 4 * held * block)
    rows = x.size // max(cols, 1)
    return constants, min(device.multiprocessors * blocks, -(-rows * team // block)), shared


def pairs_layout(x, wanted):
    """Return (constants, threads, blocks, bytes of shared memory) where a warp takes two rows.

    ``x``: the rows; ``wanted``: which of the sums over columns. None where that is not faster.
    """
    cols, count = x.shape[-1], sum(map(bool, wanted))
    rows = x.size // max(cols, 1)
    if x.itemsize != 2 or cols not in PAIRS_COLS or not 0 < count <= PAIRS_COLS[cols]:
        return None
    if rows > 2**31 - 2:
        return None
    sums = sum(1 << i for i, want in enumerate(wanted) if want)
    constants = {"scalar": ctype(x.dtype), "COLUMNS": cols, "SUMS": sums}
    warps = PAIRS_THREADS // 32
    blocks = min(2 * gpu(x.device.id).multiprocessors, -(-rows // (2 * warps)))
    return constants, PAIRS_THREADS, blocks, 4 * warps * count * cols


def parts_of(x, grid, wanted):
    """Return [(grid, D) float32 array for a column sum, or None, for each ``wanted``]."""
    shape = grid, x.shape[-1]
    return [arrays.empty(x, shape, np.float32) if want else None for want in wanted]


def add_parts(parts, slots, dtype):
    """Return the sums over the rows of each of ``parts`` in ``dtype``, None where there are none.

    A sum with a slot (place, add to it?) goes there, and None stands for it.
    """
    outs = []
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
    none = [None] * (SUMS - len(parts))
    places = [out if here else None for (out, _), here in zip(outs, now, strict=True)]
    accumulate = sum(1 << i for i, (_, add) in enumerate(outs) if add)
    count, cols = next(part.shape for part, here in zip(parts, now, strict=True) if here)
    add = kernel("column_sum.cu", "column_sums", scalar=scalar, BLOCK=128)
    grid = -(-cols // SUM_COLS), SUMS
    add(grid, (SUM_THREADS,), *parts, *none, *places, *none, count, cols, accumulate)
