"""``flash_attention`` by the argument names and layout of PyTorch."""

from typing import Any

from gpuattn.autodiff.tape import op
from gpuattn.errors import problem
from gpuattn.impls import OPS
from gpuattn.ops.arguments import check_flags, number, take_arrays
from gpuattn.ops.attention.flash_attention import IMPLS, flash_attention
from gpuattn.typing import Array

NAME = "scaled_dot_product_attention"
OPS[NAME] = IMPLS  # for use_impl
prepare_attention: Any = flash_attention.prepare  # type: ignore[attr-defined]


@op
def scaled_dot_product_attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Return softmax(scale * query key^T + attn_mask) value as (B, H, T, Dv), without copies.

    ``query``: (B, H, T, D); ``key``: (B, Hk, S, D); ``value``: (B, Hk, S, Dv), arrays or Tensors.
    ``attn_mask`` broadcasts to (B, H, T, S): bool (True: attend), or added to the logits.
    ``is_causal`` aligns top-left, as PyTorch does; ``flash_attention`` aligns bottom-right.
    ``scale``: 1 / sqrt(D) by default. ``enable_gqa``: Hk may be a divisor of H. A query that sees
    no key gives 0. Raises ValueError for shapes that do not fit, for a mask together with
    ``is_causal``, and for fewer KV heads without ``enable_gqa``; TypeError for dtypes.
    """
    named = take_arrays(NAME, {"query": query, "key": key, "value": value}, {})
    (mask,) = take_arrays(NAME, {}, {"attn_mask": attn_mask}).values()
    dropout_p = number(NAME, "dropout_p", dropout_p, "0 <= p < 1", lambda p: 0 <= p < 1)
    scale = None if scale is None else number(NAME, "scale", scale)
    check_flags(NAME, is_causal=is_causal, enable_gqa=enable_gqa)
    for name, x in named.items():
        if len(x.shape) != 4:
            raise ValueError(problem(NAME, f"{name}.shape", tuple(x.shape), "(B, H, T, D)"))
    if mask is not None and is_causal:
        raise ValueError(f"{NAME}: give attn_mask or is_causal, not both")
    heads, kv_heads = named["query"].shape[1], named["key"].shape[1]
    if heads != kv_heads and not enable_gqa:
        accepted, advice = f"{heads}, as in query", "Try enable_gqa=True."
        raise ValueError(problem(NAME, "the number of heads of key", kv_heads, accepted, advice))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in named.values())
    call = prepare_attention(
        q,
        k,
        v,
        causal=is_causal,
        align="top_left",
        scale=scale,
        bias=mask,
        dropout_p=dropout_p,
    )
    call.finish = _heads_first
    return call


def _heads_first(outs):
    return outs[0].transpose(0, 2, 1, 3)
