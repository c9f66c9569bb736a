"""Appends keys and values to a key-value cache, in place.

Device code: ``rawkernels/attention/cache/append_kv.cu``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_floats, check_together, checked_index, ctype, get_xp
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import take_arrays
from gpuattn.ops.attention.decode_attention import check_cache
from gpuattn.typing import Array

NAME = "append_kv"


@op
def append_kv(
    k_cache: Array, v_cache: Array, k: Array, v: Array, lengths: Array, *,
    page_table: Array | None = None, impl: str | None = None,
) -> Any:  # fmt: skip
    """Write the keys and values of T new tokens after those in the cache. Returns None.

    ``k_cache``, ``v_cache``, ``lengths`` (N,), ``page_table`` (N, P) as in ``decode_attention``,
    but ``lengths`` counts the tokens already in the cache: token t of sequence n is written to
    position lengths[n] + t. ``decode_attention`` then takes ``lengths + T``.
    ``k``: (N, T, Hk, D), ``v``: (N, T, Hk, Dv), in the dtype of the caches, any strides.

    Does not synchronize. ``impl``: "raw-simt", "reference", or None for the first that
    accepts. Raises ValueError for shapes that do not fit, TypeError for dtypes; a position past
    the end of the cache, or a page out of range, is not written and raises IndexError (on a GPU: at
    the next ``to_cpu``). There is no gradient.
    """
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "lengths": lengths}
    given = take_arrays(NAME, caches, {"page_table": page_table})
    given = {name: raw(x) for name, x in given.items()}
    check_together(NAME, **given)
    k_cache, v_cache, k, v = (given[name] for name in ("k_cache", "v_cache", "k", "v"))
    check_floats(NAME, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    sequences, _, kv_heads = check_cache(
        NAME, k_cache, v_cache, given["lengths"], given["page_table"]
    )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        width = cache.shape[-1]
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (sequences, kv_heads, width):
            accepted = f"({sequences}, T, {kv_heads}, {width}), as {name}_cache"
            raise ValueError(problem(NAME, f"{name}.shape", x.shape, accepted))
    if k.shape[1] != v.shape[1]:
        raise ValueError(problem(NAME, "v.shape", v.shape, f"{k.shape[1]} tokens, as in k"))
    return Call(IMPLS, given.values(), impl)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(k_cache, v_cache, k, v, lengths, page_table, *, needs):
    xp, (sequences, tokens) = get_xp(k_cache), k.shape[:2]
    page = k_cache.shape[1]
    room = page * (1 if page_table is None else page_table.shape[1])
    inner = lengths[:, None] + xp.arange(tokens)
    inside = (inner >= 0) & (inner < room)
    inner = checked_index(inner, room, "append_kv: lengths")
    outer = xp.arange(sequences)[:, None]
    if page_table is not None:
        outer = xp.take_along_axis(page_table, inner // page, 1)
        inside &= (outer >= 0) & (outer < len(k_cache))
        outer, inner = checked_index(outer, len(k_cache), "append_kv: page_table"), inner % page
    inside = inside[:, :, None, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[outer, inner] = xp.where(inside, new, cache[outer, inner])
    return None, None


# ---- raw: rawkernels/attention/cache/append_kv.cu -----------------------------------------------


def _refuse_raw(k_cache, *_, **__):
    return kernel_refusal(k_cache, "k_cache")


def _forward_raw(k_cache, v_cache, k, v, lengths, page_table, *, needs):
    run = kernel("attention/cache/append_kv.cu", NAME, scalar=ctype(k.dtype))
    sequences, tokens, kv_heads, head_dim = k.shape
    steps = [
        np.array([[step // x.itemsize for step in x.strides]]).view("V32")
        for x in (k, v, k_cache, v_cache)
    ]
    xp, page, flags = get_xp(k), k_cache.shape[1], [arrays.index_flag(k, f"{NAME}: lengths"), None]
    lengths = xp.ascontiguousarray(lengths)
    room = page
    if page_table is not None:
        page_table, room = xp.ascontiguousarray(page_table), page * page_table.shape[1]
        flags[1] = arrays.index_flag(k, f"{NAME}: page_table")
    run(
        (sequences * tokens,), (128,), k, v, k_cache, v_cache, lengths, page_table, *steps, tokens,
        kv_heads, head_dim, v.shape[3], room, page, len(k_cache), *flags,
    )  # fmt: skip
    return None, None


IMPLS = Impls(
    NAME,
    Impl("raw-simt", _forward_raw, refuse=_refuse_raw),
    Impl("reference", _forward_reference),
)
