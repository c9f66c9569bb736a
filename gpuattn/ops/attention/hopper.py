"""Attention on Hopper's matrix units: ``attention/flash_attention_forward_hopper.cu``."""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype
from gpuattn.cuda.gpu import gpu, hopper_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.scratch import counters
from gpuattn.cuda.tensor_maps import refusal, tensor_map
from gpuattn.ops.attention import (
    ampere_backward,
    hopper_backward,
    hopper_head_backward,
    hopper_head_forward,
)
from gpuattn.ops.attention import (
    short as attention_short,
)
from gpuattn.ops.attention.launch import UNLIMITED, Launch

MAX_HEAD_DIM, MAX_TILES = 256, 2**31 - 1
WIDTHS = (64, 96, 128, 192, 256)  # what both head sizes are rounded up to
SHORT, SHORT_BANDED, SHORT_DROPPED, LONG = 1024, 2048, 512, 8192  # queries
TILE_BYTES = 224 << 10  # of shared memory, beside 2048 for barriers and alignment
L2_SECTION = 32 << 20  # bytes of keys and values that neighbouring tiles may keep in L2
STAGED_BIAS_WIDTH = 128  # up to which the copy engine brings a bias that is not float32
ROW = 16  # numbers of the bias: what the length of a copy's rows is rounded up to


def refuse(q, k, v, bias, key_lengths, cu_q, *_, max_seqlen_q, **__):
    if reason := kernel_refusal(q, "q"):
        return reason
    if reason := hopper_refusal(q.device.id):
        return reason
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if reason := refusal(x, name):
            return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes multiples of 8 up to {MAX_HEAD_DIM}"
    sequences = q.shape[0] if cu_q is None else len(cu_q) - 1
    tiles = (max_seqlen_q // 64 + 1) * q.shape[-2] * sequences
    if tiles > MAX_TILES:
        return f"{tiles} tiles, the kernel takes {MAX_TILES}; give the true max_seqlen_q"
    return None


def variant(width, queries, bands, bias, extras, dropout):
    """Return the kernel's constants but for the dtype: tiles as measured, as registers reach.

    ``width``: both head sizes rounded up; ``bands``: a causal mask or a window; ``bias``: there is
    one; ``extras``: a softcap, ALiBi, scale <= 0 or a bias that is float32 or a mask. It depends on
    no other sequence and no number of heads, so neither do a sequence's bits.
    """
    alone = bias and not extras and not dropout and width <= STAGED_BIAS_WIDTH
    extras = (bias or extras) and not alone
    rows, keys = 128, 128
    if width == 64 and not (alone or extras):
        short = SHORT_BANDED if bands else SHORT_DROPPED if dropout else SHORT
        rows, keys = (256, 64) if queries <= short else (192, 128)
    elif width == 128 and queries >= LONG and not (bands or alone or extras or dropout):
        keys = 176
    elif width == 192:
        keys = 96 if extras or dropout else 112
    elif width == 256:
        keys = 80 if not dropout else 32 if extras else 64
    return {
        "HEAD_DIM": width, "BM": rows, "BN": keys, "BANDED": bands, "BIAS": alone,
        "EXTRAS": extras, "DROPOUT": dropout,
    }  # fmt: skip


def shared_bytes(constants):
    """Return the shared memory of a thread block, as the kernel lays it out."""
    width, rows, keys = (constants[name] for name in ("HEAD_DIM", "BM", "BN"))
    line, stages = -(-width // 64) * 128, 3 if width == 64 else 2
    stages_bias = constants["BIAS"] or (constants["EXTRAS"] and width <= STAGED_BIAS_WIDTH)
    operands = rows * line + stages * (2 * keys * line + (rows * 256 if stages_bias else 0))
    if constants["DROPOUT"] and not stages_bias:
        operands += (stages + 1) * keys * 16
    own_out = operands + rows * line <= TILE_BYTES  # else out takes the place of q
    return 2048 + operands + (rows * line if own_out else 0)


class _Plan:
    """The kernel of one call, and how it is launched."""

    def __init__(self, launch, q, bias):
        fields = launch.fields
        head_dim, value_dim = fields["head_dim"], fields["value_dim"]
        width = next(w for w in WIDTHS if max(head_dim, value_dim) <= w)
        bands = min(launch.left, launch.right) < UNLIMITED
        bent = fields["scale"] <= 0 or fields["softcap"] or fields["slopes"]
        extras = bool(bent or (bias is not None and bias.dtype != q.dtype))
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
        """Return how many neighbouring heads take turns, see find_tile.

        Their keys and values fit in L2. Where sequences share a bias, their same heads do.
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
        """Return what the launch takes of the GPU: see ``impls.WORDS``."""
        taken = self.kernel().resources(self.grid, self.block, self.shared_bytes)
        waves = self.tiles / gpu(device).multiprocessors
        bound = "exponentials" if self.constants["HEAD_DIM"] == 64 else "matrix products"
        limit = "fewer tiles than multiprocessors" if waves < 1 else bound
        tile = self.rows, self.keys
        return {"tile": tile, **taken, "tiles": self.tiles, "waves": waves, "limit": limit}

    def bias_map(self, bias):
        """Return the tensor map of the bias, or None where the kernel reads it by its rows."""
        width = self.constants["HEAD_DIM"]
        if bias is None or not bias.size or bias.dtype == np.float32 or width > STAGED_BIAS_WIDTH:
            return None
        one_row = bias.shape[2] == 1 < self.queries
        return tensor_map(_in_16_bits(bias).swapaxes(1, 2), 1 if one_row else self.rows)


def _in_16_bits(bias):
    """Return a mask as half as many 16-bit numbers; a bias of 16 bits as it is."""
    if bias.dtype != bool:
        return bias
    shape, strides = (*bias.shape[:3], -(-bias.shape[3] // 2)), (*bias.strides[:3], 2)
    return type(bias)(shape, np.float16, bias.data, strides)


def _with_rows(bias, keys):
    """Return the bias with each row of all keys once and contiguous, as the copy engine wants.

    That is a copy where it is anything else.
    """
    if bias is None:
        return None
    bias = bias[tuple(slice(None if step else 1) for step in bias.strides[:3])]
    whole = bias.shape[3] == keys and bias.strides[3] == bias.itemsize
    if whole and (bias.dtype == np.float32 or not refusal(_in_16_bits(bias), "bias")):
        return bias
    copy = arrays.empty(bias, (*bias.shape[:3], -(-keys // ROW) * ROW))[..., :keys]
    copy[...] = bias
    return copy


def forward(q, k, v, *extras, needs, **params):
    if attention_short.suits(q, k, v, *extras, **params):
        return attention_short.forward(q, k, v, *extras, needs=needs, **params)
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = arrays.empty(q, (*lead, heads, rows), np.float32)
    saved = (q, k, v, *extras, out, lse) if any(needs) else None
    if not out.size:
        return (out, lse), saved
    inputs = q, k, v, *extras
    whole_heads = hopper_head_forward.takes(*inputs, **params)
    bias = _with_rows(extras[0], params["max_seqlen_k"])
    launch = Launch(q, k, v, bias, *extras[1:], **params, out=out, tables=not whole_heads)
    if saved and hopper_head_backward.takes(*inputs, **params):
        hopper_head_backward.compile_ahead(q.device.id, q.dtype, launch.dropout)
    elif saved and bias is None and not hopper_backward.refuse_backward(*inputs, **params):
        hopper_backward.compile_ahead(
            q.device.id, q.dtype, max(q.shape[-1], v.shape[-1]), extras=launch.extras,
            dropout=launch.dropout, biased=False, deterministic=launch.deterministic,
            chained=hopper_backward.chain_of(launch, q.device.id) > 1,
        )  # fmt: skip
    if whole_heads:
        random = {name: params[name] for name in ("key", "dropout_p")}
        hopper_head_forward.forward(launch, q, k, v, out, lse, **random)
        return (out, lse), saved
    plan = _Plan(launch, q, bias)
    q_map, bias_map = tensor_map(q, 64), plan.bias_map(bias)
    # without keys nothing is loaded, and there may be no address
    k_map, v_map = (tensor_map(x, plan.keys) if x.size else q_map for x in (k, v))
    plan.kernel()(
        plan.grid, plan.block, launch.problem, q_map, k_map, v_map, tensor_map(out, 64),
        q_map if bias_map is None else bias_map, out, lse, counters(), plan.row_blocks,
        plan.all_heads, plan.section, bias_map is not None, shared_bytes=plan.shared_bytes,
    )  # fmt: skip
    return (out, lse), saved


def describe(q, k, v, *extras, **params):
    """Return what the forward takes of the GPU: see ``impls.WORDS``."""
    if attention_short.suits(q, k, v, *extras, **params):
        return attention_short.describe(q, k, v, *extras, **params)
    whole_heads = hopper_head_forward.takes(q, k, v, *extras, **params)
    launch = Launch(q, k, v, *extras, **params, tables=False)
    if whole_heads:
        details = hopper_head_forward.describe(launch, q)
    else:
        details = _Plan(launch, q, extras[0]).describe(q.device.id)
    if reason := hopper_backward.refuse_backward(q, k, v, *extras, **params):
        details["gradient"] = f"raw-ampere's, because {reason}"
    elif hopper_head_backward.takes(q, k, v, *extras, **params):
        details["gradient"] = "a block for a whole head, in one launch"
    return details


def backward(saved, dout, dlse, *, needs, into, **params):
    inputs = saved[:9]
    form = hopper_backward
    short = attention_short.suits(*inputs, **params)
    if short or form.refuse_backward(*inputs, **params, needs=needs):
        form = ampere_backward
    elif hopper_head_backward.takes(*inputs, **params):
        form = hopper_head_backward
    return form.backward(saved, dout, dlse, needs=needs, into=into, **params)
