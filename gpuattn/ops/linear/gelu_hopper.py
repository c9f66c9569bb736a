"""A linear layer with GELU on Hopper: the implementation "raw-hopper" of ``linear``.

``linear_gelu_hopper.cu`` writes GELU of the matmul, and for the gradient the slope of each result,
rounded to a byte (Novikov et al., "Few-bit backward: quantized gradients of activation functions
for memory footprint reduction", 2022). Other layers save the input of GELU: twice the bytes, and
the gradient has to compute the slopes.

Slopes of 0 and 1 are exact. Others, from -0.13 to 1.13, are off by at most 1/256 for bfloat16
(1/512 below 0.36), which is the rounding of bfloat16 above 1, and by 1/400 and two roundings for
float16. The slope at NaN and infinity is some number up to 1.36; y itself is NaN or infinite there.
"""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import as_rows, ctype, get_xp
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import gpu, hopper_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import SlowerRefusal
from gpuattn.typing import Array

FILE, NAME = "linear/linear_gelu_hopper.cu", "linear_gelu"
ALONE_FILE, ALONE = "linear/gelu_slopes.cu", "gelu_slopes_backward"
THREADS = 384
TILE = 128  # rows and columns of a tile
PARTS = 4  # of the rows of a tile: each warp writes its sums of columns
FORMS = {"gelu": False, "gelu_exact": True}  # activation: the constant EXACT
DEPTH = 64  # columns of x in one pipeline stage
HELD = 6  # stages of a weight that can stay in shared memory: the constant HELD, or 0 for none
MIN_BUSY = 0.95  # share of the multiprocessors that must have a column of tiles for HELD
MIN_TILES = 1024  # where it was measured faster than a library; and inputs, with a gradient or not
DEPTHS, DEPTHS_ALONE = (384, 1600), (768, 1024)
SHARED_BYTES = {0: 198656, HELD: 231424}
BLOCK_ROWS, BLOCK_COLUMNS = 64, 32  # of a block of neighbouring codes
MAX_SIDE = 2**31 - 2**10  # coordinates have 32 bits


def refuse(
    x: Array, weight: Array, bias: Array | None, *, needs: tuple[bool, ...], activation: str | None
) -> str | None:
    """Return why this implementation does not run ``linear``, or None."""
    if activation not in FORMS:
        return "the kernel computes GELU"
    if reason := kernel_refusal(x) or hopper_refusal(x.device.id):
        return reason
    rows = as_rows(x)
    return refusal(rows, weight) or _slower(rows, weight, needs)


def refusal(x: Array, weight: Array) -> str | None:
    """Return why ``forward`` cannot take ``x`` (rows, in) and ``weight`` (out, in), or None."""
    if x.dtype != weight.dtype:
        return f"x is {x.dtype} but weight is {weight.dtype}"
    (rows, depth), columns = x.shape, len(weight)
    if min(rows, depth, columns) == 0 or max(rows, depth, columns) > MAX_SIDE:
        return f"{rows} rows, {depth} inputs, {columns} outputs; accepted: 1 to {MAX_SIDE} of each"
    if columns % 8:
        return f"{columns} outputs, the kernel takes multiples of 8"
    return _layout_refusal(x, "x") or _layout_refusal(weight, "weight")


def _layout_refusal(x, name):
    return tensor_maps.refusal(x[:, None], name)


def _slower(x, weight, needs):
    """Return why the library's matmul is preferred, as measured, or None."""
    tiles, depth = _across(len(x)) * _across(len(weight)), x.shape[1]
    least, most = DEPTHS if any(needs) else DEPTHS_ALONE
    if tiles < MIN_TILES or not least <= depth <= most:
        return SlowerRefusal(
            f"a result of {tiles} tiles of {TILE} x {TILE} and {depth} inputs; faster than the "
            f"library from {MIN_TILES} tiles and for {least} to {most} inputs"
            + ("" if any(needs) else " where no gradient is wanted")
        )
    return None


def forward(
    x: Array, weight: Array, bias: Array | None = None, activation: str = "gelu",
    slopes: bool = True,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Return (y, codes): gelu(x @ weight.T + bias), and its slopes as bytes.

    ``x``: (rows, in). ``weight``: (out, in). ``bias``: (out,) or None. ``activation``: one of
    FORMS. ``y``: (rows, out). All of one 16-bit float dtype.
    ``codes``: (bytes,) uint8, in the order of the kernel, for whole tiles; None without ``slopes``.
    """
    y = arrays.empty(x, (len(x), len(weight)))
    codes = None
    if slopes:
        codes = arrays.empty(x, (_across(len(x)) * _across(len(weight)) * TILE**2,), np.uint8)
    if bias is not None and (not bias.flags.c_contiguous or bias.data.ptr % 4):
        bias = bias.copy()
    constants = {"EXACT": FORMS[activation], "BIAS": bias is not None, "SLOPES": slopes}
    _launch(x, weight, y, codes, bias, None, GRADIENT=False, **constants)
    return y, codes


def takes_matmul(matmul: PendingMatmul) -> bool:
    """Return whether ``backward`` takes a ``PendingMatmul`` as dy."""
    dz, weight = matmul.dz, matmul.weight
    if dz.dtype != weight.dtype or not 0 < len(weight) <= MAX_SIDE:
        return False
    return not (_layout_refusal(dz, "dz") or _layout_refusal(weight, "weight"))


def backward(dy: Array | PendingMatmul, codes: Array) -> Array:
    """Return dz = dy * slopes: (rows, out).

    ``dy``: (..., out), an array, or a ``PendingMatmul``, which is rounded to its dtype before the
    slope multiplies it.
    """
    return _of_matmul(dy, codes) if isinstance(dy, PendingMatmul) else _of_array(dy, codes)


def backward_and_sums(matmul: PendingMatmul, codes: Array) -> tuple[Array, Array]:
    """Return (``backward(matmul, codes)``, parts of its column sums).

    The parts, (P, out) float32, are sums of 32 rows each, of dz as it is rounded.
    """
    rows, columns = len(matmul.dz), matmul.weight.shape[1]
    sums = arrays.empty(matmul.dz, (_across(rows) * PARTS, columns), np.float32)
    return _of_matmul(matmul, codes, sums), sums


def _of_matmul(matmul, codes, sums=None):
    dz = arrays.empty(matmul.dz, (len(matmul.dz), matmul.weight.shape[1]))
    constants = {"EXACT": False, "BIAS": False, "SLOPES": True}
    _launch(matmul.dz, matmul.weight, dz, codes, None, sums, GRADIENT=True, **constants)
    return dz


def _of_array(dy, codes):
    dy = get_xp(dy).ascontiguousarray(as_rows(dy))
    dz = arrays.empty(dy, dy.shape)
    rows, columns = dy.shape
    across = _across(columns) * TILE // BLOCK_COLUMNS
    kernel(ALONE_FILE, ALONE, scalar=ctype(dy.dtype))(
        (-(-rows // BLOCK_ROWS) * across,), (128,), dy, codes, dz, rows, columns, across
    )
    return dz


def _launch(a, weight, out, codes, bias, sums, **constants):
    (rows, columns), depth = out.shape, a.shape[1]
    maps = [
        tensor_maps.tensor_map(x[:, None], box)
        for x, box in ((a, TILE), (weight, DEPTH if constants["GRADIENT"] else TILE), (out, 16))
    ]
    problem = np.array([rows, columns, depth], np.int32).view("V12")
    held, grid = plan(rows, columns, depth, gpu(a.device.id).multiprocessors)
    constants |= {"scalar": ctype(a.dtype), "SUMS": sums is not None, "HELD": held}
    kernel(FILE, NAME, **constants)(
        (grid,), (THREADS,), *maps, codes, bias, problem, sums, shared_bytes=SHARED_BYTES[held]
    )


def plan(rows: int, columns: int, depth: int, multiprocessors: int) -> tuple[int, int]:
    """Return (the constant HELD, the number of blocks) for a result of (rows, columns)."""
    down, across = _across(rows), _across(columns)
    high = min(multiprocessors // across, down)  # blocks in a column of tiles
    if depth <= HELD * DEPTH and high * across >= MIN_BUSY * min(multiprocessors, down * across):
        return HELD, high * across
    return 0, min(multiprocessors, down * across)


def _across(size):
    """Return how many tiles cover ``size`` rows or columns."""
    return -(-size // TILE)
