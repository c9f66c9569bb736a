import re
from dataclasses import replace

import numpy as np
import pytest
from checks import check_implementation, implementations, module_named

from gpuattn import Tensor, append_kv, arrays, decode_attention, flash_attention
from gpuattn.arrays import to_cpu
from gpuattn.cuda import sources
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.errors import UnsupportedError
from gpuattn.impls import explain
from gpuattn.ops.attention import decode_attention as module
from gpuattn.ops.attention.append_kv import IMPLS as APPEND
from gpuattn.ops.attention.decode_attention import (
    FIXED_SPLIT,
    IMPLS,
    PROBLEM,
    best_splits,
    pipeline,
)

HERE = implementations(IMPLS)
PLAIN = {
    "scale": None, "window": None, "softcap": None, "splits": None, "batch_invariant": False,
}  # fmt: skip


def draw(rng, *, N=3, K=1, T=1, H=4, kv_heads=2, D=16, Dv=None, S=70, page=None, beam=None,
         lengths=None, slopes=None, sink=False):  # fmt: skip
    """The arrays of a call: q, k, v, lengths, page_table, slots, slopes, sink."""
    Dv = Dv or D
    lengths = rng.integers(1, S + 1, N) if lengths is None else np.resize(lengths, N)
    q = rng.standard_normal((N * K, T, H, D))
    shape, page_table, slots = (N, S), None, None
    if page:
        columns = -(-S // page)
        page_table = rng.permutation(N * columns + 2)[: N * columns].reshape(N, columns)
        unused = np.arange(columns) * page >= lengths[:, None]
        page_table = np.where(unused, -5, page_table).astype(np.int32)
        shape = (N * columns + 2, page)
    if beam:
        slots = rng.integers(0, beam, (N // beam, beam, S)).astype(np.int16)
    k, v = (rng.standard_normal((*shape, kv_heads, d)) for d in (D, Dv))
    slopes = None if slopes is None else rng.random((N * K, H) if slopes == "batch" else H)
    sink = rng.standard_normal(H) if sink else None
    return [q, k, v, lengths.astype(np.int32), page_table, slots, slopes, sink]


def oracle(q, k, v, lengths, page_table, slots, slopes, sink, *, scale, window, softcap, **_):
    """Gather the visible keys of each row, then call ``flash_attention``, in float64."""
    outs, B = [], len(q)
    for b in range(B):
        n = b // (B // len(lengths))
        length = int(np.clip(lengths[n], 0, k.shape[1] if page_table is None else 1 << 30))
        rows = [(n, j) for j in range(length)]
        if page_table is not None:
            rows = [(page_table[n, j // k.shape[1]], j % k.shape[1]) for _, j in rows]
        if slots is not None:
            beam = slots.shape[1]
            rows = [(n // beam * beam + slots[n // beam, n % beam, j], j) for _, j in rows]
        keys, values = (
            np.array([x[row] for row in rows]).reshape(1, length, *x.shape[2:]) for x in (k, v)
        )
        slope = slopes[b] if slopes is not None and slopes.ndim == 2 else slopes
        outs.append(flash_attention(
            q[b : b + 1], keys, values, causal=True, window=(window, None), scale=scale,
            softcap=softcap, alibi_slopes=slope, sink=sink, return_lse=True, impl="reference",
        ))  # fmt: skip
    return tuple(np.concatenate(part) for part in zip(*outs, strict=True))


CASES = {
    "one_key": {"S": 1}, "short": {"S": 5}, "64_keys": {"S": 64, "lengths": [64, 63, 65]},
    "long": {"S": 1500}, "empty_sequence": {"lengths": [0, 7, 70]},
    "lengths_beyond": {"lengths": [-3, 71, 1000]}, "no_room": {"S": 0, "lengths": [0]},
    "no_batch": {"N": 0}, "mha": {"kv_heads": 4}, "mqa": {"kv_heads": 1}, "one_head": {"H": 2},
    "d64": {"D": 64, "S": 200}, "d80_v24": {"D": 80, "Dv": 24}, "d128": {"D": 128, "S": 300},
    "d256": {"D": 256, "S": 150}, "d8": {"D": 8}, "v_wider": {"D": 16, "Dv": 136},
    "t2": {"T": 2, "lengths": [1, 2, 40]}, "t16": {"T": 16, "lengths": [9, 16, 70]},
    "t16_mqa": {"T": 16, "H": 8, "kv_heads": 1, "S": 200}, "t7_d128": {"T": 7, "D": 128, "H": 6},
    "48_rows": {"T": 12, "H": 8, "D": 64}, "t5_d256": {"T": 5, "H": 8, "D": 256},
    "window": {"window": 20}, "window_0": {"window": 0, "T": 3}, "window_t4": {"window": 9, "T": 4},
    "window_long": {"window": 700, "S": 1600, "lengths": [1600, 1000, 300]},
    "softcap": {"softcap": 0.7}, "slopes": {"slopes": "head"}, "slopes_batch": {"slopes": "batch"},
    "sink": {"sink": True, "lengths": [0, 30, 70]}, "scale_negative": {"scale": -0.2},
    "paged": {"page": 16}, "paged_64": {"page": 64, "S": 300}, "paged_48_t3": {"page": 48, "T": 3},
    "paged_empty": {"page": 16, "lengths": [0, 16, 17]},
    "slots": {"N": 6, "beam": 3}, "slots_long": {"N": 8, "beam": 4, "S": 600, "D": 64},
    "slots_t2": {"N": 4, "beam": 2, "T": 2, "slopes": "batch"},
    "shared": {"K": 5, "D": 64}, "shared_t2": {"K": 3, "T": 2, "slopes": "batch", "sink": True},
    "shared_many": {"K": 11, "H": 8, "kv_heads": 1, "T": 3, "lengths": [2, 70, 40]},
    "shared_pages": {"K": 4, "page": 32, "N": 2},
    "splits_3": {"splits": 3, "S": 500, "sink": True}, "splits_many": {"splits": 40, "S": 500},
    "splits_empty": {"splits": 4, "lengths": [0, 1, 64], "sink": True},
    "splits_none_see": {"splits": 4, "lengths": [0, 0, 1]},
    "splits_d80": {"splits": 5, "S": 700, "D": 80, "T": 4}, "invariant": {"batch_invariant": True},
    "splits_v136": {"splits": 2, "S": 200, "Dv": 136},
    "invariant_long": {"batch_invariant": True, "S": 3 * FIXED_SPLIT + 7, "sink": True},
    "everything": {
        "K": 2, "T": 3, "H": 8, "D": 40, "Dv": 24, "S": 333, "window": 100, "softcap": 2.0,
        "slopes": "batch", "sink": True, "page": 16, "splits": 3, "lengths": [2, 333, 150],
    },
}  # fmt: skip


def split(case):
    sizes = {name: x for name, x in case.items() if name not in PLAIN}
    params = PLAIN | {name: x for name, x in case.items() if name in PLAIN}
    if params["scale"] is None:
        params["scale"] = sizes.get("D", 16) ** -0.5
    return sizes, params


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference_against_attention_of_each_row(rng, case):
    sizes, params = split(case)
    inputs = draw(rng, **sizes)
    if not len(inputs[0]):
        return
    got, _ = IMPLS[-1].forward(*inputs, needs=(False,) * 8, **params)
    for g, w in zip(got, oracle(*inputs, **params), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width, limit, stages", [
    (64, 99, 4), (128, 227, 3), (128, 163, 3), (128, 99, 2), (256, 99, 3),
])  # fmt: skip
def test_stages_fill_the_shared_memory(width, limit, stages):
    found, size = pipeline(width, limit << 10)
    assert found == stages and size % stages == 0 and size < limit << 10


@pytest.mark.parametrize("T", [1, 12])
def test_two_stages(gpu, rng, monkeypatch, T):
    """The two stages that GPUs with 99 KiB of shared memory use, forced on this GPU."""
    record = replace(gpu_of(0), shared_bytes=99 << 10)
    monkeypatch.setattr(module, "gpu", lambda device: record)
    inputs = draw(rng, D=128, S=900, T=T, H=8, sink=True, lengths=[900, 1, 64])
    params = PLAIN | {"scale": 0.1, "splits": 2}
    more = {"needs": (False,) * 8, **params}
    check_implementation(IMPLS, "raw-ampere", "cupy", inputs, "bfloat16", **more)


HERE_BY_DTYPE = [
    pytest.param(*each.values, dtype, marks=each.marks, id=f"{each.id}-{dtype}")
    for each in HERE
    for dtype in ("float32", "float16", "bfloat16")
    if each.values[0] != "raw-ampere" or dtype != "float32"  # tensor cores take 16 bits
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("name", "where", "dtype"), HERE_BY_DTYPE)
def test_implementations(rng, name, where, case, dtype):
    sizes, params = split(case)
    inputs = draw(rng, **sizes)
    check_implementation(IMPLS, name, where, inputs, dtype, needs=(False,) * 8, **params)


@pytest.mark.parametrize("feature", ["dense", "paged", "slots", "window"])
@pytest.mark.parametrize(("name", "where"), HERE)
def test_nan_in_masked_positions_has_no_effect(rng, name, where, feature):
    xp, lengths = module_named(where), np.array([40, 64, 0, 129], np.int32)
    sizes = {"N": 4, "S": 200, "D": 64, "lengths": lengths}
    sizes |= {"paged": {"page": 32}, "slots": {"beam": 2}}.get(feature, {})
    params = {"window": 10} if feature == "window" else {}
    inputs = draw(rng, **sizes)
    q, k, v = (x.astype(np.float16) for x in inputs[:3])
    seen = np.zeros(k.shape[:2], bool)
    for n, length in enumerate(lengths):
        for j in range(max(0, length - 11) if feature == "window" else 0, length):
            if feature == "paged":
                seen[inputs[4][n, j // 32], j % 32] = True
            elif feature == "slots":
                seen[n // 2 * 2 + inputs[5][n // 2, n % 2, j], j] = True
            else:
                seen[n, j] = True
    extras = {"page_table": inputs[4], "slots": inputs[5]}
    extras = {n: None if x is None else xp.asarray(x) for n, x in extras.items()}
    found = []
    for filling in (0, np.nan):
        for x in (k, v):
            x[~seen] = filling
        arrays = [xp.asarray(x) for x in (q, k, v, lengths)]
        found.append(to_cpu(decode_attention(*arrays, **extras, **params, impl=name)))
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


@pytest.mark.parametrize(("name", "where"), HERE)
def test_strides(rng, name, where):
    """Caches of any layout: heads first, keys next to values, reversed; q from a projection."""
    xp = module_named(where)
    q, k, v, lengths, *_ = draw(rng, D=64, S=90)
    q, k, v = (xp.asarray(x.astype(np.float16)) for x in (q, k, v))
    lengths = xp.asarray(lengths)
    want = to_cpu(decode_attention(q, k, v, lengths, impl=name))
    by_heads = [xp.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v)]
    beside = xp.concatenate([k, v], axis=-1)
    projected = xp.concatenate([q, q], axis=2)[:, :, q.shape[2] :]
    shifted = xp.concatenate([q, q], axis=-1)[..., 1:65]
    shifted[...] = q
    for caches in (by_heads, (beside[..., :64], beside[..., 64:]), (k[::-1][::-1], v)):
        for queries in (q, projected, shifted):
            np.testing.assert_array_equal(
                to_cpu(decode_attention(queries, *caches, lengths, impl=name)), want
            )


@pytest.mark.parametrize(("name", "where"), [p for p in HERE if "raw" in p.id])
def test_a_sequence_has_the_same_bits_in_any_batch(rng, name, where):
    xp = module_named(where)
    q, k, v, lengths, *_ = draw(rng, N=40, S=2000, D=64)
    q, k, v = (xp.asarray(x.astype(np.float16)) for x in (q, k, v))
    lengths = xp.asarray(lengths)

    def run(rows):
        arrays = (q[rows], k[rows], v[rows], lengths[rows])
        return to_cpu(decode_attention(*arrays, batch_invariant=True, impl=name))

    together = run(slice(None))
    for rows in (slice(0, 1), slice(7, 10), slice(39, 40)):
        np.testing.assert_array_equal(run(rows), together[rows])


def test_split_counts():
    assert best_splits(1000, 64, 264) == 1
    assert best_splits(8, 8192, 264) * 8 <= 264, "one round"
    assert best_splits(8, 8192, 264) * 8 >= 200, "most multiprocessors get a part"
    assert best_splits(8, 0, 264) == 1
    assert best_splits(1, 20 * 64, 264) == 20, "a step each"
    assert best_splits(264, 100 * 64, 264) == 1, (
        "no split is needed: the blocks already fill the GPU"
    )


@pytest.mark.parametrize("paged", [False, True])
def test_a_graph_replays_with_other_lengths(gpu, rng, paged):
    q, k, v, lengths, table, *_ = draw(rng, S=500, D=64, page=16 if paged else None, lengths=[500])
    q, k, v = (gpu.asarray(x.astype(np.float16)) for x in (q, k, v))
    new_k, new_v = (
        gpu.asarray(rng.standard_normal((3, 1, 2, 64)).astype(np.float16)) for _ in "kv"
    )
    table = gpu.asarray(table) if paged else None
    lengths = gpu.asarray(lengths)

    def step():
        append_kv(k, v, new_k, new_v, lengths, page_table=table)
        gpu.add(lengths, 1, out=lengths)
        return decode_attention(q, k, v, lengths, page_table=table, impl="raw-ampere")

    lengths[...] = 0
    step()
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        out = step()
        graph = stream.end_capture()
        for start in ([10, 0, 130], [450, 300, 499]):
            lengths.set(np.array(start, np.int32))
            graph.launch(stream)
            got = out.get()
            want = decode_attention(q, k, v, lengths, page_table=table, impl="reference")
            np.testing.assert_allclose(got, to_cpu(want), atol=2e-3)
            assert lengths.tolist() == [n + 1 for n in start]


# ---- append_kv --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize(("name", "where"), implementations(APPEND))
def test_append(rng, name, where, page, dtype):
    xp, T = module_named(where), 3
    dtype = arrays.BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    _, k, v, _, table, *_ = draw(rng, S=70, page=page, Dv=24, lengths=[70])
    k, v = k.astype(dtype), v.astype(dtype)
    new_k, new_v = (rng.standard_normal((3, 2, T, d)).astype(dtype) for d in (16, 24))
    lengths = np.array([0, 15, 67], np.int32)
    mine = [xp.asarray(x) for x in (k, v, new_k, new_v, lengths)]
    mine[2:4] = [x.swapaxes(1, 2) for x in mine[2:4]]
    assert (
        append_kv(*mine, page_table=None if page is None else xp.asarray(table), impl=name) is None
    )
    for n, length in enumerate(lengths):
        for t in range(T):
            j = length + t
            row = (table[n, j // page], j % page) if page else (n, j)
            k[row], v[row] = new_k[n, :, t], new_v[n, :, t]
    for got, want in zip(mine[:2], (k, v), strict=True):
        np.testing.assert_array_equal(to_cpu(got).astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize(("name", "where"), implementations(APPEND))
def test_append_beyond_the_capacity_is_an_index_error(name, where):
    xp = module_named(where)
    k, new = xp.zeros((2, 8, 1, 4), np.float32), xp.ones((2, 2, 1, 4), np.float32)
    v = xp.zeros_like(k)
    with pytest.raises(IndexError, match="append_kv: lengths is holding 8; .* index < 8"):
        append_kv(k, v, new, new, xp.asarray([0, 7], np.int32), impl=name)
        to_cpu(k)
    table = xp.asarray([[0], [2]], np.int32)
    k, v = (xp.zeros((2, 16, 1, 4), np.float32) for _ in "kv")
    with pytest.raises(IndexError, match="append_kv: page_table is holding 2"):
        append_kv(k, v, new, new, xp.zeros(2, np.int32), page_table=table, impl=name)
        to_cpu(k)


@pytest.mark.parametrize(("name", "where"), HERE)
def test_pages_and_slots_out_of_range(rng, name, where):
    xp = module_named(where)
    q, k, v, lengths, *_ = draw(rng, N=2, S=32, lengths=[32])
    q, k, v = (xp.asarray(x.astype(np.float16)) for x in (q, k, v))
    lengths = xp.asarray(lengths)
    with pytest.raises(IndexError, match="decode_attention: page_table is holding 2"):
        to_cpu(decode_attention(
            q, k, v, lengths, page_table=xp.asarray([[0], [2]], np.int32), impl=name
        ))  # fmt: skip
    with pytest.raises(IndexError, match="decode_attention: slots is holding -1"):
        slots = xp.full((1, 2, 32), -1, np.int16)
        to_cpu(decode_attention(q, k, v, lengths, slots=slots, impl=name))


def test_the_struct_has_the_fields_of_the_header():
    text = (sources.ROOT / "attention/cache/decode.cuh").read_text()
    inside = re.sub(r"//[^\n]*", "", re.search(r"struct Decode \{(.*?)\};", text, re.DOTALL)[1])
    words = re.findall(r"(?:Strides|long long|int|float|short)\b\s*([^;]+);", inside)
    names = [name.strip(" *\n") for line in words for name in line.split(",")]
    assert names == list(PROBLEM.names)


# ---- arguments --------------------------------------------------------------------------------


def test_bad_arguments(xp):
    q, k = xp.zeros((4, 1, 4, 8), np.float32), xp.zeros((4, 32, 2, 8), np.float32)
    lengths, table = xp.zeros(4, np.int32), xp.zeros((4, 2), np.int32)
    slots = xp.zeros((2, 2, 32), np.int16)

    def wrong(error, match, *args, **kwargs):
        with pytest.raises(error, match=match):
            decode_attention(*args, **kwargs)

    wrong(ValueError, r"T, q.shape\[1\], is 17; accepted: 1 to 16", xp.zeros((4, 17, 4, 8), "f"),
          k, k, lengths)  # fmt: skip
    wrong(ValueError, "q.shape is", q[0], k, k, lengths)
    wrong(ValueError, "v_cache.shape is", q, k, k[:, :5], lengths)
    wrong(ValueError, "multiple of the 2 heads", q[:, :, :3], k, k, lengths)
    wrong(ValueError, "head size of q", q[..., :4], k, k, lengths)
    wrong(ValueError, "a multiple of the 4 sequences", q[:3], k, k, lengths)
    wrong(ValueError, r"lengths.shape is \(3,\); accepted: \(4,\)", q, k, k, lengths[:3])
    wrong(TypeError, "lengths.dtype is int64; accepted: int32", q, k, k, lengths.astype("l"))
    wrong(TypeError, "q is float32 but k_cache is float16", q, k.astype("e"), k, lengths)
    wrong(ValueError, "the page, .* is 8; accepted: a multiple of 16", q, k[:, :8], k[:, :8],
          lengths, page_table=table)  # fmt: skip
    wrong(TypeError, "page_table.dtype", q, k, k, lengths, page_table=table.astype("l"))
    wrong(ValueError, "page_table is of shape", q, k[:0], k[:0], lengths, page_table=table)
    wrong(TypeError, "slots.dtype is int32; accepted: int16", q, k, k, lengths,
          slots=slots.astype("i"))  # fmt: skip
    wrong(ValueError, "slots.shape", q, k, k, lengths, slots=slots[:, :, :31])
    wrong(ValueError, "slots is given with page_table", q, k, k, lengths, slots=slots,
          page_table=table)  # fmt: skip
    wrong(ValueError, "window is -1", q, k, k, lengths, window=-1)
    wrong(ValueError, "softcap is 0", q, k, k, lengths, softcap=0)
    wrong(ValueError, "scale is inf", q, k, k, lengths, scale=np.inf)
    wrong(ValueError, "splits is 0; accepted: 1 to", q, k, k, lengths, splits=0)
    wrong(ValueError, "splits is 2; accepted: None with", q, k, k, lengths, splits=2,
          batch_invariant=True)  # fmt: skip
    wrong(ValueError, "sink.shape", q, k, k, lengths, sink=xp.zeros(3, "f"))
    wrong(TypeError, "alibi_slopes.dtype", q, k, k, lengths, alibi_slopes=xp.zeros(4, "i"))
    with pytest.raises(ValueError, match=r"append_kv: k.shape .* accepted: \(4, T, 2, 8\)"):
        append_kv(k, k, k[:, :1, :1], k[:, :1], lengths)
    with pytest.raises(ValueError, match="append_kv: v.shape .* 1 tokens, as in k"):
        append_kv(k, k, k[:, :1], k[:, :2], lengths)


def test_there_is_no_gradient(rng):
    q, k, v, lengths, *_ = draw(rng)
    out = decode_attention(Tensor(q, requires_grad=True), k, v, lengths)
    with pytest.raises(UnsupportedError, match="no gradient"):
        out.sum().backward()


def test_refusals_of_the_tensor_core_kernel(gpu, rng):
    q, k, v, lengths, *_ = (x if x is None else gpu.asarray(x) for x in draw(rng, D=12))

    def refusal(q, k, v):
        return dict(explain(decode_attention, q, k, v, lengths).reasons)["raw-ampere"]

    assert "float32" in refusal(*(x.astype("f") for x in (q, k, v)))
    assert "12, the kernel takes multiples of 8" in refusal(*(x.astype("e") for x in (q, k, v)))
    q, k, v = (gpu.zeros((3, 4, 2, 65), "e")[..., 1:] for _ in "qkv")
    assert "rows of k_cache do not start at multiples of 16 bytes" in refusal(q, k, v)
