"""raw-hopper, by TMA and wgmma: ``rawkernels/attention/flash_attention_forward_hopper.cu``.

The gradient is in ``hopper_backward.py``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.scratch import counters
from gpuattn.cuda.tensor_maps import refusal, tensor_map
from gpuattn.ops.attention.launch import (
    UNLIMITED,
    Launch,
    outputs,
    result,
    tiles_refusal,
    tma_refusal,
)
from gpuattn.typing import Array

MAX_HEAD_DIM = 256
WIDTHS = (64, 96, 128, 192, 256)  # what both head sizes are rounded up to
# head size 64: tiles of 256 x 64 for at most so many queries, of 192 x 128 for more
TALL_TILES, TALL_TILES_BANDED, TALL_TILES_DROPOUT = 1024, 2048, 512
LONG_TILES = 8192  # head size 128: tiles of 176 keys from so many queries on
TILE_BYTES = 224 << 10  # of shared memory; 2048 more are for barriers and alignment
L2_SECTION = 32 << 20  # bytes of keys and values that neighbouring tiles may keep in L2
MAX_STAGED_BIAS_WIDTH = 128  # HEAD_DIM up to which TMA loads a bias that is not float32
BIAS_ROW_STEP = 16  # rows of a copied bias have a multiple of so many elements


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, *_: Any,
    max_seqlen_q: int, **__: Any,
) -> str | None:  # fmt: skip
    """Return why the forward does not run here, or None."""
    if reason := tma_refusal(q, k, v):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes multiples of 8 up to {MAX_HEAD_DIM}"
    return tiles_refusal(q, cu_q, max_seqlen_q, 64)


def variant(
    width: int, queries: int, bands: bool, bias: bool, extras: bool, dropout: bool
) -> dict[str, Any]:
    """Return the kernel's constants but for the dtype: the tiles were chosen by measurement.

    ``width``: both head sizes, rounded up; ``bands``: a causal mask or a window; ``bias``: there is
    one; ``extras``: a softcap, ALiBi, scale <= 0, or a bias that is float32 or a mask. They depend
    on no number of sequences or heads, so neither do the bits of a sequence.
    """
    alone = bias and not extras and not dropout and width <= MAX_STAGED_BIAS_WIDTH
    extras = (bias or extras) and not alone
    rows, keys = 128, 128
    if width == 64 and not (alone or extras):
        most = TALL_TILES_BANDED if bands else TALL_TILES_DROPOUT if dropout else TALL_TILES
        rows, keys = (256, 64) if queries <= most else (192, 128)
    elif width == 128 and queries >= LONG_TILES and not (bands or alone or extras or dropout):
        keys = 176
    elif width == 192:
        keys = 96 if extras or dropout else 112
    elif width == 256:
        keys = 80 if not dropout else 32 if extras else 64
    return {
        "HEAD_DIM": width, "BM": rows, "BN": keys, "BANDED": bands, "BIAS": alone,
        "EXTRAS": extras, "DROPOUT": dropout,
    }  # fmt: skip


def shared_bytes(constants: dict[str, Any]) -> int:
    """Return the shared memory of a thread block, as the kernel lays it out."""
    width, rows, keys = (constants[name] for name in ("HEAD_DIM", "BM", "BN"))
    line, stages = -(-width // 64) * 128, 3 if width == 64 else 2
    stages_bias = constants["BIAS"] or (constants["EXTRAS"] and width <= MAX_STAGED_BIAS_WIDTH)
    operands = rows * line + stages * (2 * keys * line + (rows * 256 if stages_bias else 0))
    if constants["DROPOUT"] and not stages_bias:
        operands += (stages + 1) * keys * 16
    separate_out = operands + rows * line <= TILE_BYTES  # else out overwrites q
    return 2048 + operands + (rows * line if separate_out else 0)


class _Plan:
    """The kernel of one call, and how it is launched."""

    def __init__(self, launch, q, bias):
        fields = launch.fields
        head_dim, value_dim = fields["head_dim"], fields["value_dim"]
        width = next(w for w in WIDTHS if max(head_dim, value_dim) <= w)
        bands = min(launch.left, launch.right) < UNLIMITED
        extras = bool(
            fields["scale"] <= 0 or fields["softcap"] or fields["slopes"]
            or (bias is not None and bias.dtype != q.dtype)
        )  # fmt: skip
        constants = variant(
            width, launch.queries, bands, bias is not None, extras, launch.dropout
        )  # fmt: skip
        self.constants = {"scalar": ctype(q.dtype), **constants}
        self.rows, self.keys = constants["BM"], constants["BN"]
        if launch.packed:  # see find_tile
            self.row_blocks = q.shape[0] // self.rows + launch.sequences
            self.all_heads = launch.heads
        else:
            self.row_blocks = -(-launch.queries // self.rows)
            self.all_heads = launch.heads * launch.sequences
        self.tiles = self.row_blocks * self.all_heads
        self.section = self._section(launch, bands, (head_dim + value_dim) * q.itemsize, bias)
        self.shared_bytes = shared_bytes(constants)
        self.grid = (min(self.tiles, gpu(q.device.id).multiprocessors),)
        self.block = (2 * self.rows + 128,)
        self.queries = launch.queries

    def _section(self, launch, bands, row_bytes, bias):
        """Return how many heads are computed side by side, tile by tile: see find_tile.

        Their keys and values fit in L2 together. Where sequences share a bias with a row per head,
        these are the same head of several sequences.
        """
        across = bias is not None and not launch.packed and bias.shape[0] == 1 < bias.shape[1]
        kv_heads = max(1, L2_SECTION // max(1, launch.keys * row_bytes))
        kv_heads = 1 << kv_heads.bit_length() - 1  # a power of two
        if across:
            return max(1, min(launch.sequences, kv_heads))
        return max(1, min(self.all_heads, kv_heads * launch.fields["group"])) if bands else 1

    def kernel(self):
        name = "flash_attention_forward_hopper"
        return kernel(f"attention/{name}.cu", name, **self.constants)

    def describe(self, device):
        """Return what the launch uses of the GPU: see ``impls.WORDS``."""
        used = self.kernel().resources(self.grid, self.block, self.shared_bytes)
        waves = self.tiles / gpu(device).multiprocessors
        bound = "exponentials" if self.constants["HEAD_DIM"] == 64 else "matrix products"
        limit = "fewer tiles than multiprocessors" if waves < 1 else bound
        tile = self.rows, self.keys
        return {"tile": tile, **used, "tiles": self.tiles, "waves": waves, "limit": limit}

    def bias_map(self, bias):
        """Return the tensor map of the bias, or None where the kernel loads it without TMA."""
        width = self.constants["HEAD_DIM"]
        if bias is None or not bias.size:
            return None
        if bias.dtype == np.float32 or width > MAX_STAGED_BIAS_WIDTH:
            return None
        one_row = bias.shape[2] == 1 < self.queries
        return tensor_map(_in_16_bits(bias).swapaxes(1, 2), 1 if one_row else self.rows)


def _in_16_bits(bias):
    """Return a mask viewed as 16-bit numbers, two entries each; a bias of 16 bits as it is."""
    if bias.dtype != bool:
        return bias
    shape, strides = (*bias.shape[:3], -(-bias.shape[3] // 2)), (*bias.strides[:3], 2)
    return type(bias)(shape, np.float16, bias.data, strides)


def _with_whole_rows(bias, keys):
    """Return the bias with contiguous rows of all keys, as TMA needs them: a copy if need be.

    Axes that repeat one entry by a stride of 0 have size 1.
    """
    if bias is None:
        return None
    bias = bias[tuple(slice(None if step else 1) for step in bias.strides[:3])]
    whole = bias.shape[3] == keys and bias.strides[3] == bias.itemsize
    if whole and (bias.dtype == np.float32 or not refusal(_in_16_bits(bias), "bias")):
        return bias
    length = -(-keys // BIAS_ROW_STEP) * BIAS_ROW_STEP
    copy = arrays.empty(bias, (*bias.shape[:3], length))[..., :keys]
    arrays.unrecorded_write()
    copy[...] = bias
    return copy


def forward(q: Array, k: Array, v: Array, *extras: Any, needs: tuple, **params: Any) -> tuple:
    """Return (out, lse) and what the gradient needs."""
    out, lse = outputs(q, v)
    found = result((q, k, v, *extras), out, lse, needs)
    if not out.size:
        return found
    bias = _with_whole_rows(extras[0], params["max_seqlen_k"])
    launch = Launch(q, k, v, bias, *extras[1:], **params, out=out)
    plan = _Plan(launch, q, bias)
    q_map, bias_map = tensor_map(q, 64), plan.bias_map(bias)
    # without keys nothing is loaded, and there may be no address
    k_map, v_map = (tensor_map(x, plan.keys) if x.size else q_map for x in (k, v))
    plan.kernel()(
        plan.grid, plan.block, launch.problem, q_map, k_map, v_map, tensor_map(out, 64),
        q_map if bias_map is None else bias_map, out, lse, counters(), plan.row_blocks,
        plan.all_heads, plan.section, bias_map is not None, shared_bytes=plan.shared_bytes,
    )  # fmt: skip
    return found


def describe(q: Array, k: Array, v: Array, *extras: Any, **params: Any) -> dict[str, Any]:
    """Return what the forward uses of the GPU: see ``impls.WORDS``."""
    launch = Launch(q, k, v, *extras, **params, tables=False)
    return _Plan(launch, q, extras[0]).describe(q.device.id)
