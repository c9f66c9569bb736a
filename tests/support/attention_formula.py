"""The formula of attention with all its matrices, and the comparison of results with it.

To run one problem again:

    PYTHONPATH=.:tests python -m attention_formula raw-simt 123
"""

import functools
import math
import sys
from contextlib import contextmanager

import numpy as np
from attention_problems import INF, NAN, Problem
from checks import dtype_of

from gpuattn import arrays
from gpuattn.errors import SlowerRefusal
from gpuattn.impls import choose_backward
from gpuattn.ops.attention.dropout import keep_block
from gpuattn.ops.attention.flash_attention import IMPLS
from gpuattn.rng import Key

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
FACTOR = (2, 2, 3, 3, 3, 3, 3)  # FlashAttention's rule: outputs, gradients
SLACK = 8  # roundings of the sums that make up a logit and a result, in the precision of lse
GUARD = 256  # bytes before and after every array that an implementation allocates


def solve(problem, dtype):
    """Return the results of a problem in the order of RESULTS; in float64 also ``_roundings``.

    Computes each sequence separately, with its full T x S matrices. In 16 bits this has the
    precision of tensor cores at best: float32 except for operands of products and results.
    """
    p, xp = problem, problem.xp
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    bias, sink = p.extras[0], p.extras[5]
    has_dbias, scale = bias is not None and bias.dtype != bool, p.params["scale"]

    def narrow(x):
        return x.astype(dtype_of(dtype)).astype(wide)

    shapes = (*p.q.shape[:-1], p.Dv), p.lse_shape, p.q.shape, p.k.shape, p.v.shape
    out, lse, dq, dk, dv = (xp.zeros(shape, wide) for shape in shapes)
    dbias = xp.zeros(bias.shape, wide) if has_dbias else None
    dsink = None if sink is None else xp.zeros(sink.shape, wide)
    roundings = [xp.zeros((), wide) for _ in RESULTS]
    for b, (T, _) in enumerate(p.lengths):
        if T == 0:
            continue
        n, queries, keys = p.visible(b), p.queries(b), p.keys(b)
        q, k, v, do, dl = _operands(p, b, n, wide)
        x, bend, loads = _logits(p, b, n, q, k, wide)
        top = x.max(-1, keepdims=True)
        top = xp.where(top == -INF, wide.type(0), top)
        prob = xp.exp(x - top)
        total = prob.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[p.rows(b)] = (top + xp.log(total))[..., 0]
        total = xp.where(total == 0, wide.type(1), total)
        keep = _keep(p, b, n, wide)
        o = narrow(narrow(prob * keep) @ v / total)
        prob /= total
        weights = prob * keep

        ds = prob * (do @ v.swapaxes(1, 2) * keep - ((do * o).sum(-1) - dl)[..., None])
        bent = narrow(ds * bend)
        out[queries], dq[queries] = o.swapaxes(0, 1), (bent @ k).swapaxes(0, 1) * scale
        dk_here, dv_here = bent.swapaxes(1, 2) @ q, narrow(weights).swapaxes(1, 2) @ do
        for total, here, factor in ((dk, dk_here, scale), (dv, dv_here, 1)):
            by_group = here[:, :n].reshape(p.Hk, p.group, n, here.shape[-1])
            total[keys][:n] = by_group.sum(1).swapaxes(0, 1) * factor
        if has_dbias:
            target = _part(dbias, b, p.lengths[b][0], n)
            target += _sum_to(ds[..., :n], dbias.shape)
        if sink is not None:
            dsink += ds[..., n].sum(-1)

        if wide == np.float64:
            parts = q, k, v, do, dl, o, prob, keep, ds, bend, _largest(loads) + _largest(top)
            found = _roundings(p, n, *parts, dbias)
            roundings = [xp.maximum(old, new) for old, new in zip(roundings, found, strict=True)]
    results = [out, lse, dq, dk, dv, dbias, dsink]
    kinds = [dtype, wide, dtype, dtype, dtype, bias, sink]
    if wide == np.float32:
        results = [None if x is None else x.astype(dtype_of(getattr(kind, "dtype", kind)))
                   for x, kind in zip(results, kinds, strict=True)]  # fmt: skip
    return results, roundings


def _operands(p, b, n, wide):
    """Return q, k, v, dout (H, rows, ..) and dlse of a sequence; its k and v end with the sink."""
    xp, T = p.xp, p.lengths[b][0]
    q = p.q[p.queries(b)].astype(wide).swapaxes(0, 1)
    k, v = (xp.zeros((p.H, n + 1, x.shape[-1]), wide) for x in (p.k, p.v))
    for target, x in ((k, p.k), (v, p.v)):
        target[:, :n] = xp.repeat(x[p.keys(b)][:n].astype(wide).swapaxes(0, 1), p.group, 0)
    do, dl = xp.zeros((p.H, T, p.Dv), wide), xp.zeros((p.H, T), wide)
    if p.dout is not None:
        do[...] = p.dout[p.queries(b)].astype(wide).swapaxes(0, 1)
    if p.dlse is not None:
        dl[...] = p.dlse[p.rows(b)]
    return q, k, v, do, dl


def _logits(p, b, n, q, k, wide):
    """Return the logits (H, T, n + 1), their slope by the softcap, and their magnitudes."""
    xp, (T, S), cap = p.xp, p.lengths[b], p.params["softcap"]
    bias, slopes, sink = p.extras[0], *p.extras[4:]
    x, bend = q @ k.swapaxes(1, 2) * p.params["scale"], 1
    loads = abs(q) @ abs(k).swapaxes(1, 2) * abs(p.params["scale"])
    if cap:
        t = xp.tanh(x / cap)
        x, bend, loads = cap * t, 1 - t * t, loads + cap  # a rounding of cap, by exponentials
    offset = S - T if p.params["align"] == "bottom_right" else 0
    i, j = xp.arange(T)[:, None] + offset, xp.arange(n + 1)
    left, right = p.params["window"]
    seen = (j < n) & (i == i)
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    if slopes is not None:
        slope = (slopes if slopes.ndim == 1 else slopes[b]).astype(wide)
        fall = slope[:, None, None] * abs(i - j)
        x, loads = x - fall, loads + fall
    if bias is not None:
        here = _part(bias, b, T, n)
        if bias.shape[3] != 1:
            here = xp.concatenate((here, xp.zeros((*here.shape[:2], 1), here.dtype)), 2)
        if here.dtype == bool:
            seen = seen & here
        else:
            x, seen = x + here.astype(wide), seen & (here != -INF)
            loads = loads + abs(here.astype(wide))
    x, loads = xp.where(seen, x, -INF), xp.where(seen, loads, 0)
    x[..., n] = -INF if sink is None else sink.astype(wide)[:, None]
    return x, bend, loads


def _part(x, b, T, n):
    """Return the part of a bias, or of its gradient, for sequence ``b``."""
    x = x[b if x.shape[0] > 1 else 0]
    x = x[:, :T] if x.shape[1] > 1 else x
    return x[..., :n] if x.shape[2] != 1 else x


def _sum_to(x, shape):
    return x.sum(tuple(a for a in range(3) if shape[a + 1] == 1), keepdims=True)


def _keep(p, b, n, wide):
    """Return 1 / (1 - p) where a probability (H, T, n + 1) is kept, else 0."""
    if not p.params["dropout_p"] or not n:
        return p.xp.ones((), wide)
    heads = p.xp.arange(b * p.H, (b + 1) * p.H, dtype=np.uint64)
    rows, cols = slice(0, p.lengths[b][0]), slice(0, n)
    kept = keep_block(p.xp, heads, rows, cols, p.params["dropout_p"], p.params["key"])
    keep = p.xp.ones((*kept.shape[:2], n + 1), wide)
    keep[..., :n] = kept / wide.type(1 - p.params["dropout_p"])
    return keep


def _roundings(p, n, q, k, v, do, dl, o, prob, keep, ds, bend, load, dbias):
    """Return the errors that roundings may cause in each result of a sequence.

    (FACTOR times what 16-bit operands and results make of it, as independent errors) plus (SLACK
    roundings of the largest sums of absolute values, of the logits too: of float32 or float64).
    """
    xp, scale, weights = p.xp, abs(p.params["scale"]), prob * keep
    narrow = {"float16": 2.0**-11, "bfloat16": 2.0**-8 / 2}.get(p.dtype, 0)
    unit = SLACK * (2.0**-53 if p.dtype == "float64" else 2.0**-24) * (1 + load)

    def by_group(x):
        return x.reshape(p.Hk, p.group, n + 1, -1).sum(1)

    def across(x):
        return _sum_to(x, dbias.shape) if dbias is not None else x

    def spread(variance):
        return narrow * _largest(xp.sqrt(variance))

    q, k, v, do = (abs(x) for x in (q, k, v, do))
    terms = prob * (do @ v.swapaxes(1, 2) * keep + ((do * abs(o)).sum(-1) + abs(dl))[..., None])
    sums = (
        weights @ v, xp.ones(1), terms @ k * scale, by_group(terms.swapaxes(1, 2) @ q) * scale,
        by_group(weights.swapaxes(1, 2) @ do), across(terms) * p.B, terms[..., n].sum(-1) * p.B,
    )  # fmt: skip
    q, k, v, do = (x * x for x in (q, k, v, do))
    of_out = weights**2 @ v + o * o
    of_ds = prob**2 * (do * of_out).sum(-1)[..., None]
    of_bent = (ds * ds + of_ds) * bend**2
    of_dq, of_dk = of_bent @ k, by_group(of_bent.swapaxes(1, 2) @ q)
    of_dv, of_dsink = by_group(weights.swapaxes(1, 2) ** 2 @ do), of_ds[..., n].sum(-1)
    spreads = (
        of_out, xp.zeros(1), of_dq * scale**2, of_dk * scale**2, of_dv, across(of_ds) * p.B,
        of_dsink * p.B,
    )  # fmt: skip
    return [factor * spread(variance) + unit * _largest(total)
            for factor, variance, total in zip(FACTOR, spreads, sums, strict=True)]  # fmt: skip


def _largest(x):
    return abs(x).max()


# ---- the results of an implementation ----------------------------------------------------------


@functools.lru_cache(maxsize=32)
def expected(problem):
    """Return (exact results, their roundings, the results in the problem's own precision)."""
    return *solve(problem, "float64"), solve(problem, problem.dtype)[0]


def gradients(impl, xp, *, queries, keys, heads, kv_heads, causal, head_dim=64, p=0):
    """Return dq, dk and dv of random 16-bit numbers, as float32."""
    rng = np.random.default_rng(0)
    shapes = [(1, queries, heads, head_dim)] * 2 + [(1, keys, kv_heads, head_dim)] * 2
    q, dout, k, v = (xp.asarray(rng.standard_normal(x, np.float32), np.float16) for x in shapes)
    params = {
        "window": (None, 0 if causal else None), "align": "bottom_right", "scale": head_dim**-0.5,
        "softcap": None, "dropout_p": p, "key": Key(1, 2, 3) if p else None,
        "max_seqlen_q": queries, "max_seqlen_k": keys, "deterministic": False,
    }  # fmt: skip
    needs = (True,) * 3 + (False,) * 6
    inputs = q, k, v, *[None] * 6
    _, saved = impl.forward(*inputs, needs=needs, **params)
    backward = backward_of(impl, inputs, needs, params)
    found = backward(saved, dout, None, needs=needs, into=(None,) * 9, **params)
    return [x.astype(np.float32) for x in found[:3]]


def backward_of(impl, inputs, needs, params):
    """Return the backward that follows ``impl`` where that was asked for by name."""
    if impl in IMPLS:
        impl = choose_backward(IMPLS, impl, inputs, impl.name, needs=needs, **params)
    return impl.backward


def assert_close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert abs(x - y).max() <= 0.004 * abs(y).max()


def judge(problem, impl):
    """Return what is wrong with an implementation's results, as sentences.

    FlashAttention's rule: an error from float64 of at most FACTOR times that of the formula in the
    problem's own precision, plus the errors that roundings may cause, because the former is small
    by chance where a result has few numbers. Also: all allocated memory is written, nothing outside
    of it, and inputs are unchanged.
    """
    p, xp, before = problem, problem.xp, [x.copy() for x in problem.inputs[:3]]
    with guarded_memory() as guards:
        (out, lse), saved = impl.forward(*p.inputs, needs=p.needs, **p.params)
        into = (None,) * len(p.needs)
        backward = backward_of(impl, p.inputs, p.needs, p.params)
        grads = backward(saved, p.dout, p.dlse, needs=p.needs, into=into, **p.params)
    wrong = (
        ["wrote outside of an array"] if guards and (xp.concatenate(guards) != 0xAB).any() else []
    )
    for name, x, copy in zip("qkv", p.inputs[:3], before, strict=True):
        same = (x == copy) | (xp.isnan(x) & xp.isnan(copy))
        wrong += [] if same.all() else [f"changed {name}"]
    names, found = [], []
    exact, roundings, plain = expected(p)
    needed = True, True, *p.needs[:4], p.needs[8]
    results = out, lse, *grads[:4], grads[8]
    for i, name in enumerate(RESULTS):
        if not needed[i]:
            continue
        got, want = results[i], plain[i]
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            wrong.append(f"{name} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
        elif got.size:
            names.append(name)
            found.append(_compare(got, want, exact[i], FACTOR[i], roundings[i]))
    for name, (misplaced, error, limit) in zip(names, _to_host(xp, found), strict=True):
        if misplaced:
            wrong.append(f"{name}: {misplaced:.0f} infinities misplaced")
        if not error <= limit:
            wrong.append(f"{name}: error {error:.3g}, limit {limit:.3g}")
    return wrong


def _compare(got, plain, want, factor, slack):
    """Return (misplaced infinities, error, limit), arrays on the device of the results."""
    xp = arrays.get_xp(want)
    got, plain = got.astype(np.float64), plain.astype(np.float64)
    finite = xp.isfinite(want)
    misplaced = (~finite & (got != want)).sum()
    with np.errstate(invalid="ignore"):
        error, usual = (xp.where(finite, abs(x - want), 0).max() for x in (got, plain))
    return misplaced, error, factor * usual + slack


def _to_host(xp, rows):
    if not rows:
        return []
    flat = xp.stack([xp.asarray(x, np.float64) for row in rows for x in row])
    return arrays.to_cpu(flat).reshape(-1, 3).tolist()


@contextmanager
def guarded_memory():
    """Let ``arrays.empty`` return NaN between guards; yields the list of the guards' bytes."""
    guards, usual = [], arrays.allocate

    def allocate(xp, shape, dtype):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        room = xp.full(size + 2 * GUARD, 0xAB, np.uint8)
        guards.extend((room[:GUARD], room[GUARD + size :]))
        array = room[GUARD : GUARD + size].view(dtype).reshape(shape)
        floating, whole = arrays.is_floating(dtype), np.dtype(dtype) != bool
        array.fill(NAN if floating else np.iinfo(dtype).max // 2 if whole else True)
        return array

    arrays.allocate = allocate
    try:
        yield guards
    finally:
        arrays.allocate = usual


def refusal(problem, impl):
    """Return why ``impl`` does not run a problem's forward even if asked for by name, or None."""
    if impl.refuse is None:
        return None
    reason = impl.refuse(*problem.inputs, needs=problem.needs, **problem.params)
    return None if isinstance(reason, SlowerRefusal) else reason


def repro(problem, impl):
    """Return the command that runs a problem again, and its description."""
    command = f"PYTHONPATH=.:tests python -m attention_formula {impl.name} {problem.number}"
    return f"{command}\n  {problem}"


if __name__ == "__main__":
    import cupy

    _, name, *numbers = sys.argv
    chosen = next(impl for impl in IMPLS if impl.name == name)
    for number in numbers:
        drawn = Problem(int(number), cupy)
        print(drawn, refusal(drawn, chosen) or judge(drawn, chosen) or "right", sep="\n  ")
