"""Attention beside its peers: on a GPU all as CUDA graphs, in turns, in one process.

A result is compared with the float64 reference (a peer's with ours) before it gets a figure.
"""

import math

import numpy as np

import gpuattn
from gpuattn import rng
from gpuattn.bench import peers, results, timing
from gpuattn.bench.samples import DTYPES
from gpuattn.errors import UnsupportedError
from gpuattn.impls import OPS, choose, explain
from gpuattn.ops.flash_attention import IMPLS

TOLERANCE = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-3}
ROTATED = 100e6  # bytes that the inputs have at least, in several sets: more than a cache holds
BLOCK = 4096  # elements compared at a time: a wrong tile must not drown in a long sequence
DIGITS = 3  # of a sample in microseconds


def _normal(xp, seed, dtype):
    """Return ``floats(*shape)``, which draws normal numbers where they are used."""
    random = xp.random.default_rng(seed)
    return lambda *shape: random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


class Ours:
    """One of our implementations on a problem: ``call(inputs)`` computes one direction of it.

    ``impl``: a name, or None for what the op itself would choose. Raises UnsupportedError.
    """

    def __init__(self, case, direction, xp, impl=None):
        self.case, self.direction, self.xp = case, direction, xp
        longest = max(case.lengths())
        self.params = {
            "window": (case.window, 0 if case.causal else None), "align": "bottom_right",
            "scale": case.shape[-1] ** -0.5, "softcap": None, "dropout_p": case.dropout,
            "key": rng.as_key(1) if case.dropout else None, "max_seqlen_q": longest,
            "max_seqlen_k": longest, "deterministic": case.deterministic,
        }  # fmt: skip
        trains = direction != "forward"
        self.needs = (trains,) * 3 + (trains and case.bias,) + (False,) * 5
        self.wanted = impl

    def draw(self, seed):
        """Return random inputs, nine arrays or Nones, and the gradient of the output."""
        case, floats = self.case, _normal(self.xp, seed, self.case.dtype)
        batch, tokens, heads, head_dim = case.shape
        lead = (tokens,) if case.captions else (batch, tokens)
        q, dout = (floats(*lead, heads, head_dim) for _ in range(2))
        k, v = (floats(*lead, case.key_heads, head_dim) for _ in range(2))
        bias = floats(1, heads, tokens, tokens) if case.bias else None
        starts = None
        if case.captions:
            starts = self.xp.asarray(np.cumsum([0, *case.lengths()]), np.int32)
        return (q, k, v, bias, None, starts, starts, None, None), dout

    def choose(self, inputs):
        """Return the implementation that runs."""
        return choose(IMPLS, inputs, self.wanted, **self.params)

    def call(self, impl, inputs, dout):
        """Return a function without arguments that computes, as a list of arrays."""

        def forward():
            return impl.forward(*inputs, needs=self.needs, **self.params)

        def backward(saved):
            grads = impl.backward(
                saved, dout, None, needs=self.needs, into=(None,) * 9, **self.params
            )
            return [grad for grad in grads if grad is not None]

        if self.direction == "forward":
            return lambda: list(forward()[0])
        if self.direction == "backward":
            _, saved = forward()
            return lambda: backward(saved)
        return lambda: backward(forward()[1])

    def check(self, results, inputs, dout):
        """Raise AssertionError unless ``results`` of ``call`` are the reference's, on some heads.

        The bits of dropout are numbered by (sequence, head): there, the first of both.
        """
        case, heads = self.case, self.case.shape[2]
        group, batch = heads // case.key_heads, slice(0, 1) if case.dropout else slice(None)
        first = 0 if case.dropout else case.key_heads - 1
        own, shared = slice(first * group, (first + 1) * group), slice(first, first + 1)

        def part(x, axis, heads):
            if x is None or x.dtype.kind == "i":
                return x
            x = x[:, heads] if axis == 1 else x[batch][..., heads, :]
            return x.astype(np.float64)

        by_input = [(-2, own), (-2, shared), (-2, shared), (1, own)]
        by_output = [(-2, own), (-2, own)] if self.direction == "forward" else by_input
        exact = [part(x, *by_input[min(i, 3)]) for i, x in enumerate(inputs)]
        reference = IMPLS[-1]
        outs, saved = reference.forward(*exact, needs=self.needs, **self.params)
        wants = outs
        if self.direction != "forward":
            wants = reference.backward(
                saved, part(dout, -2, own), None, needs=self.needs, into=(None,) * 9, **self.params
            )
        for i, (result, where) in enumerate(zip(results, by_output, strict=False)):
            compare(part(result, *where), wants[i], TOLERANCE[case.dtype], f"{case}, result {i}")


class OursDecoding:
    """The same of ``decode_attention``: the last tokens over a cache, all sequences at its end."""

    def __init__(self, case, direction, xp, impl=None):
        self.case, self.xp, self.wanted = case, xp, impl

    def draw(self, seed):
        case, floats = self.case, _normal(self.xp, seed, self.case.dtype)
        batch, tokens, heads, head_dim = case.shape
        q = floats(batch, tokens, heads, head_dim)
        k, v = (floats(batch, case.keys, case.key_heads, head_dim) for _ in range(2))
        return (q, k, v, self.xp.full(batch, case.keys, np.int32)), q

    def choose(self, inputs):
        name = explain(gpuattn.decode_attention, *inputs, impl=self.wanted).chosen
        return next(impl for impl in OPS["decode_attention"] if impl.name == name)

    def call(self, impl, inputs, dout):
        return lambda: [gpuattn.decode_attention(*inputs, impl=impl.name)]

    def check(self, results, inputs, dout):
        q, k, v, lengths = inputs
        group = q.shape[2] // k.shape[2]
        exact = (x.astype(np.float64) for x in (q[:, :, -group:], k[:, :, -1:], v[:, :, -1:]))
        want = gpuattn.decode_attention(*exact, lengths, impl="reference")
        got = results[0][:, :, -group:].astype(np.float64)
        compare(got, want, TOLERANCE[self.case.dtype], f"{self.case}, result 0")


KINDS = {"flash_attention": Ours, "decode_attention": OursDecoding}


def compare(got, want, tolerance, what):
    """Raise AssertionError unless |got - want| <= tolerance * |want| in every block.

    A block of almost nothing, such as the dq of queries that see one key, is rounding: what counts
    for it is a tenth of the blocks' root mean square.
    """
    width = min(BLOCK, want.size)
    got, want = got.reshape(-1, width), want.reshape(-1, width)
    scale = (want**2).sum(-1)
    error = ((got - want) ** 2).sum(-1) / scale.clip(scale.mean() / 100)
    worst = float(error.max()) ** 0.5
    if not worst <= tolerance:
        raise AssertionError(f"{what}: error {worst:.2g}; a wrong result gets no figure")


# ---- rows ---------------------------------------------------------------------------------------


def measure(cell, xp, ceilings, impl=None, with_peers=False):
    """Return the row of results of a Cell; ``results.py`` says what it holds.

    Raises UnsupportedError if no implementation accepts, AssertionError for a wrong result.
    """
    if xp is np:
        chosen, samples = _measure_here(cell, impl)
        return _row(cell, chosen, {"ours": samples}, {}, ceilings)
    stream = xp.cuda.Stream(non_blocking=True)
    with stream, peers.on_stream(stream):
        chosen, graphs, missing = _graphs(cell, xp, impl, cell.peers if with_peers else ())
        times = timing.alternate(graphs)
        for name, graph in graphs.items():
            times[name] = [us / len(graph.calls) for us in times[name]]
        row = _row(cell, chosen, times, missing, ceilings)
        if cell.direction == "forward+backward":
            row["peak_bytes"] = {name: graph.peak_bytes for name, graph in graphs.items()}
            for name, reason in missing.items():
                if reason.startswith("OutOfMemoryError"):
                    row["peers"][name] = results.OUT_OF_MEMORY
        del graphs, graph
    peers.release()
    xp.get_default_memory_pool().free_all_blocks()
    return row


def _measure_here(cell, impl):
    """Return (implementation, samples in microseconds) on NumPy."""
    ours = KINDS[cell.op](cell.case, cell.direction, np, impl)
    inputs, dout = ours.draw(0)
    chosen = ours.choose(inputs)
    call = ours.call(chosen, inputs, dout)
    ours.check(call(), inputs, dout)
    return chosen.name, timing.time_call(call, False)


def _graphs(cell, xp, impl, names):
    """Return (implementation, {name: Graph}, {name: why there is none}), all of them right."""
    case = cell.case
    chosen, ours, sets = _capture(cell, xp, impl)
    graphs, missing = {"ours": ours}, {}
    if case.plain():
        _, graphs["plain"], _ = _capture(cell._replace(case=case.plain()), xp, impl)
    for name in names:
        try:
            graph = peers.capture(name, case, cell.direction, sets)
            graph()
            if not case.dropout:  # whose bits are its own
                _check_peer(graph.results(), ours.results[0], case)
        except (UnsupportedError, AssertionError) as error:
            missing[name] = str(error)
        else:
            graphs[name] = graph
    return chosen, graphs, missing


def _check_peer(theirs, ours, case):
    for i, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        tolerance = 2 * TOLERANCE[case.dtype]
        compare(their.astype("f4"), our.astype("f4"), tolerance, f"differs from ours in result {i}")


def _capture(cell, xp, impl):
    """Return (implementation, its Graph on several sets of inputs, the sets)."""
    ours = KINDS[cell.op](cell.case, cell.direction, xp, impl)
    sets = [ours.draw(seed) for seed in range(math.ceil(ROTATED / cell.case.bytes("forward")))]
    chosen = ours.choose(sets[0][0])
    graph = timing.Graph([ours.call(chosen, *arrays) for arrays in sets])
    graph()
    ours.check(graph.results[0], *sets[0])
    return chosen.name, graph, sets


def _row(cell, impl, times, missing, ceilings):
    samples = {name: [round(us, DIGITS) for us in values] for name, values in times.items()}
    us = {name: timing.median(values) for name, values in samples.items()}
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction, "impl": impl,
        "us": us.pop("ours"), "samples_us": samples.pop("ours"),
    }  # fmt: skip
    if "plain" in us:
        row |= {"plain_us": us.pop("plain"), "plain_samples_us": samples.pop("plain")}
    row |= {"peers": us, "peer_samples_us": samples, "peers_missing": missing}
    return results.rated(row, ceilings)
