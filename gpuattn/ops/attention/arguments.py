"""Checks of the arguments of ``flash_attention``: shapes, dtypes and numbers."""

from typing import Any

import numpy as np

from gpuattn.arrays import check_floats, check_together, is_floating, on_gpu, to_cpu
from gpuattn.autodiff import tape
from gpuattn.errors import problem
from gpuattn.ops.arguments import integer

NAME = "flash_attention"


def window_sides(causal: bool, window: Any) -> tuple[int | None, int | None]:
    """Return the window as (left, right), None for no limit. Raises ValueError or TypeError."""
    accepted = "None, or widths >= 0 as w or (left, right)"
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2:
        raise ValueError(problem(NAME, "window", window, accepted))
    left, right = (
        None if side is None else integer(NAME, "window", side, accepted) for side in sides
    )
    return left, 0 if causal else right


def check(
    given: dict[str, Any], max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int, int]:
    """Return the longest lengths of queries and keys.

    ``given``: arrays or None by their argument names. Raises ValueError for shapes that do not
    match, TypeError for dtypes.
    """
    check_together(NAME, **given)
    q, k, v, bias = (given[name] for name in ("q", "k", "v", "bias"))
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    check_floats(NAME, q=q, k=k, v=v)
    packed = cu_k is not None
    form = "(tokens, H, D)" if packed else "(B, T, H, D)"
    for name in ("q", "k", "v"):
        if given[name].ndim != 4 - packed:
            advice = "" if packed else "Packed sequences need cu_seqlens_q."
            raise ValueError(problem(NAME, f"{name}.shape", given[name].shape, form, advice))
    if not packed and q.shape[0] != k.shape[0]:
        accepted = f"batch size {q.shape[0]}, as in q"
        raise ValueError(problem(NAME, "k.shape", k.shape, accepted))
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(problem(NAME, "v.shape", v.shape, f"{k.shape[:-1]} + (Dv,), as in k"))
    (H, D), (kv_heads, key_dim) = q.shape[-2:], k.shape[-2:]
    if key_dim != D or D == 0 or v.shape[-1] == 0:
        sizes = f"{D}, {key_dim} and {v.shape[-1]}"
        accepted = "the same size >= 1 for q and k, any size >= 1 for v"
        raise ValueError(problem(NAME, "the head size of q, k and v", sizes, accepted))
    if (H % kv_heads or not H) if kv_heads else H:
        accepted = f"a multiple of the {kv_heads} heads of k and v"
        raise ValueError(problem(NAME, "the number of heads of q", H, accepted))
    if packed:
        sequences, limits = _check_offsets(
            (cu_q, cu_k), (q.shape[0], k.shape[0]), (max_seqlen_q, max_seqlen_k)
        )
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        name, got = "max_seqlen_q", max_seqlen_q
        if got is None:
            name, got = "max_seqlen_k", max_seqlen_k
        raise ValueError(problem(NAME, name, got, "None, except with cu_seqlens_q"))
    else:
        sequences, limits = q.shape[0], (q.shape[1], k.shape[1])
    lengths, slopes, sink = given["key_lengths"], given["alibi_slopes"], given["sink"]
    if bias is not None:
        _check_bias(bias, (sequences, H, *limits), q.dtype)
    _check_extra("key_lengths", lengths, "iu", [(sequences,)])
    _check_extra("alibi_slopes", slopes, "f", [(H,), (sequences, H)])
    if sink is not None and sink.shape != (H,):
        raise ValueError(problem(NAME, "sink.shape", sink.shape, f"({H},)"))
    if sink is not None and not is_floating(sink.dtype):
        raise TypeError(problem(NAME, "sink.dtype", sink.dtype, "a float dtype"))
    return limits


def _check_bias(bias, full, dtype):
    accepted = (dtype, np.dtype("float32"), np.dtype(bool))
    if bias.dtype not in accepted:
        names = " or ".join(dict.fromkeys(map(str, accepted)))
        raise TypeError(problem(NAME, "bias.dtype", bias.dtype, names))
    shape = (1,) * (4 - bias.ndim) + bias.shape
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        accepted = f"what broadcasts to (B, H, T, S) = {full}"
        raise ValueError(problem(NAME, "bias.shape", bias.shape, accepted))


def _check_extra(name, x, kinds, shapes):
    if x is None:
        return
    if x.dtype.kind not in kinds:
        accepted = "integers" if "i" in kinds else "float32 or float64"
        raise TypeError(problem(NAME, f"{name}.dtype", x.dtype, accepted))
    if x.shape not in shapes:
        raise ValueError(problem(NAME, f"{name}.shape", x.shape, " or ".join(map(str, shapes))))


def _check_offsets(offsets, tokens, longest):
    """Check cu_seqlens; return the number of sequences and the longest lengths.

    On a GPU the values are checked only in debug(), because reading them synchronizes.
    """
    if offsets[0] is None:
        accepted = "None, except with cu_seqlens_q"
        raise ValueError(problem(NAME, "cu_seqlens_k", "given", accepted))
    limits = []
    for side, cu, n, limit in zip("qk", offsets, tokens, longest, strict=True):
        name, limit_name = f"cu_seqlens_{side}", f"max_seqlen_{side}"
        if cu.dtype != np.int32:
            advice = f"Try {name}.astype('int32')."
            raise TypeError(problem(NAME, f"{name}.dtype", cu.dtype, "int32", advice))
        if cu.ndim != 1 or len(cu) == 0:
            raise ValueError(problem(NAME, f"{name}.shape", cu.shape, "(B + 1,)"))
        sequences, least = len(cu) - 1, "at least the longest length"
        limit = n if limit is None else integer(NAME, limit_name, limit, least)
        if limit * sequences < n:
            accepted = f"{least}: there are {n} tokens in {sequences} sequences"
            raise ValueError(problem(NAME, limit_name, limit, accepted))
        limits.append(limit)
        if on_gpu(cu) and not tape.is_debugging():
            continue
        values = to_cpu(cu)
        lengths = np.diff(values)
        if values[0] != 0 or values[-1] != n or (lengths < 0).any():
            accepted = f"offsets that start at 0, never fall and end at the {n} tokens"
            raise ValueError(problem(NAME, name, values, accepted))
        if lengths.max(initial=0) > limit:
            raise ValueError(problem(NAME, limit_name, limit, f"{least}, {lengths.max()}"))
    if len(offsets[0]) != len(offsets[1]):
        got, accepted = len(offsets[1]) - 1, f"{len(offsets[0]) - 1}, as of queries"
        raise ValueError(problem(NAME, "the number of key sequences", got, accepted))
    return len(offsets[0]) - 1, tuple(limits)
