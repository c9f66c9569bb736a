"""Random attention problems: a number is always the same problem, on NumPy and on CuPy."""

import functools
import math

import numpy as np
from checks import dtype_of

from gpuattn.arrays import BFLOAT16
from gpuattn.rng import Key

INF, NAN = float("inf"), float("nan")
LENGTHS = (
    0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 95, 96, 97, 111, 112, 113,
    127, 128, 129, 143, 144, 145, 159, 160, 161, 175, 176, 177, 191, 192, 193, 255, 256, 257, 383,
    384, 385, 449, 512, 513, 577, 640, 641, 700,
)  # fmt: skip
LOGITS = 1 << 22  # the most of one problem: the formula holds them all, several times
VALUES = 1 << 22  # random numbers that all arrays are windows into
LAYOUTS = ("rows", "heads", "padded", "projection")
AWKWARD = ("sliced", "spaced", "backwards", "shifted")


@functools.cache
def _values(xp):
    return xp.asarray(np.random.default_rng(1).standard_normal(VALUES, np.float32))


class Problem:
    """The arrays and parameters of one call, as implementations take them.

    ``small``: lengths to 40, for NumPy. ``dtype``: "float64" or another instead of the drawn one.
    ``layout``: how q, k, v and dout lie in memory, instead of the drawn one.
    """

    def __init__(self, number, xp=np, small=False, dtype=None, layout=None):
        self.number, self.xp, self.small = number, xp, small
        self.rng = rng = np.random.default_rng([number, small])
        self._draw_sizes(rng, dtype)
        self.layout = rng.choice(LAYOUTS)
        if layout or (self.layout == "projection" and not self._shares_projection()):
            self.layout = layout or "padded"
        self._draw_lengths(rng)
        self.extras = self._draw_extras(rng)
        self.params = self._draw_params(rng)
        self.q, self.k, self.v = self._draw_inputs()
        shape = (*self.q.shape[:-1], self.Dv)
        which = rng.choice(["out", "both", "lse"], p=[0.6, 0.35, 0.05])
        self.dout = self._place(self._numbers(shape)) if which != "lse" else None
        *lead, rows, heads, _ = shape
        self.lse_shape = (*lead, heads, rows)
        self.dlse = self._numbers(self.lse_shape, self.wide) if which != "out" else None
        bias, *_, sink = self.extras
        wants = [True, True, True, bias is not None and bias.dtype != bool, sink is not None]
        if rng.random() < 0.15:
            wants = [want and rng.random() < 0.5 for want in wants]
            wants[0] |= not any(wants)
        self.needs = (*wants[:4], False, False, False, False, wants[4])

    # ---- drawing ----------------------------------------------------------------------------

    def _draw_sizes(self, rng, dtype):
        def pick(*values, p=None):
            return values[rng.choice(len(values), p=p)]

        def length():
            if self.small:
                return int(rng.integers(0, 41))
            return pick(*LENGTHS) if rng.random() < 0.8 else int(rng.integers(1, 701))

        odd = self.number % 8 == 7  # sizes and types for CUDA cores
        self.dtype = dtype or (pick("float32", "float16", "bfloat16") if odd else
                               pick("float16", "bfloat16"))  # fmt: skip
        sizes = [int(rng.integers(1, 257)) if odd else 8 * int(rng.integers(1, 33))
                 for _ in range(2)]  # fmt: skip
        self.D = pick(64, 128, sizes[0], p=[0.3, 0.25, 0.45])
        self.Dv = self.D if rng.random() < 0.7 else sizes[1]
        if self.small:
            self.D, self.Dv = 1 + self.D % 24, 1 + self.Dv % 24
        self.Hk, self.group = pick(1, 2, 3), pick(1, 2, 3, 4, 8, p=[0.5, 0.2, 0.1, 0.1, 0.1])
        self.H = self.Hk * self.group
        self.packed = rng.random() < 0.35
        self.B = pick(1, 2, 3, 5, 8) if self.packed else pick(0, 1, 2, 3, p=[0.02, 0.38, 0.4, 0.2])
        same = rng.random() < 0.5
        self.lengths = []
        for _ in range(self.B if self.packed else 1):
            T, S = length(), length()
            if self.packed and rng.random() < 0.15:
                T = 0
            self.lengths.append((T, T if same else S))
        while self._is_too_large():
            self.lengths = [(T // 2, S // 2) for T, S in self.lengths]
        self.T, self.S = self.lengths[0]
        if not self.packed:
            self.lengths *= self.B

    def _is_too_large(self):
        copies = 1 if self.packed else self.B
        rows = copies * max(sum(n) for n in zip(*self.lengths, strict=True))
        logits = self.B * self.H * max(T * S for T, S in self.lengths)
        return logits > LOGITS or rows * (self.H + 2 * self.Hk) * max(self.D, self.Dv) > VALUES

    def _shares_projection(self):
        return self.Dv == self.D and all(T == S for T, S in self.lengths)

    def _draw_lengths(self, rng):
        self.cu = None
        if self.packed:
            self.cu = [np.cumsum([0, *n]).astype(np.int32)
                       for n in zip(*self.lengths, strict=True)]  # fmt: skip
            self.T, self.S = (int(cu[-1]) for cu in self.cu)

    def _numbers(self, shape, dtype=None):
        """Return normal numbers: a window into the values that all arrays share."""
        count = math.prod(shape)
        first = int(self.rng.integers(0, max(VALUES - count, 1)))
        return (
            _values(self.xp)[first : first + count]
            .reshape(shape)
            .astype(dtype_of(dtype or self.dtype))
        )

    def _place(self, x, layout=None):
        return place(self.xp, x, layout or self.layout)

    def _draw_inputs(self):
        lead_q, lead_k = ((n,) if self.packed else (self.B, n) for n in (self.T, self.S))
        if self.layout == "projection":
            both = self._numbers((*lead_q, self.H + 2 * self.Hk, self.D))
            cuts = 0, self.H, self.H + self.Hk, self.H + 2 * self.Hk
            q, k, v = (both[..., a:b, :] for a, b in zip(cuts[:-1], cuts[1:], strict=True))
        else:
            shapes = (
                (*lead_q, self.H, self.D), (*lead_k, self.Hk, self.D), (*lead_k, self.Hk, self.Dv),
            )  # fmt: skip
            q, k, v = (self._place(self._numbers(shape)) for shape in shapes)
        if self.hidden_nan:
            for b in range(self.B):
                at, keys = self.keys(b), self.visible(b)
                k[at][keys:] = v[at][keys:] = NAN
        return q, k, v

    def _draw_extras(self, rng):
        xp, longest = self.xp, [max((n[i] for n in self.lengths), default=0) for i in (0, 1)]
        if self.packed:
            tokens = self.T, self.S
            margin = rng.choice(["exact", "more", "all"], p=[0.7, 0.2, 0.1])
            longest = [n if margin == "exact" else n + 5 if margin == "more" else t
                       for n, t in zip(longest, tokens, strict=True)]  # fmt: skip
            if self.H * self.B * longest[0] * longest[1] > LOGITS:
                longest = [max(n[i] for n in self.lengths) for i in (0, 1)]
        self.longest = tuple(longest)
        bias = key_lengths = slopes = sink = None
        self.key_lengths = None
        kind = rng.choice(["none", "mask", "float", "wide", "holes"], p=[0.6, 0.1, 0.1, 0.1, 0.1])
        if kind != "none":
            full = self.B, self.H, *self.longest
            bias = self._numbers([n if rng.random() < 0.6 else 1 for n in full], "float32")
            if kind == "mask":
                bias = bias < 0.8
            elif kind == "holes":
                bias[bias > 1] = -INF
            wide = kind == "wide" and self.dtype != "float64"
            bias = bias if kind == "mask" or wide else bias.astype(dtype_of(self.dtype))
        if rng.random() < 0.2:
            ends = [rng.choice([0, S // 2, S, S + 3, rng.integers(0, S + 1)])
                    for _, S in self.lengths]  # fmt: skip
            self.key_lengths = np.asarray(ends, np.int32)
            key_lengths = xp.asarray(self.key_lengths)
        self.hidden_nan = key_lengths is not None and rng.random() < 0.5
        if rng.random() < 0.12:
            shape = (self.H,) if rng.random() < 0.5 else (self.B, self.H)
            slopes = abs(self._numbers(shape, "float32")) / 4
        if rng.random() < 0.15:
            sink = self._numbers((self.H,), rng.choice([self.wide, self.dtype]))
        cu = [None, None] if self.cu is None else [xp.asarray(cu) for cu in self.cu]
        return [bias, key_lengths, *cu, slopes, sink]

    def _draw_params(self, rng):
        def side():
            return int(rng.choice([0, 1, 5, 16, 40, 64, 127, 200, 1000]))

        kind = rng.choice(["full", "causal", "window", "left", "right", "local"],
                          p=[0.35, 0.35, 0.1, 0.05, 0.05, 0.1])  # fmt: skip
        window = {
            "full": (None, None), "causal": (None, 0), "window": (side(), side()),
            "left": (side(), None), "right": (None, side()), "local": (side(), 0),
        }[kind]  # fmt: skip
        dropout_p = float(rng.choice([0, 0.1, 0.5, 0.99], p=[0.8, 0.1, 0.08, 0.02]))
        return {
            "window": window,
            "align": "top_left" if rng.random() < 0.25 else "bottom_right",
            "scale": float(rng.choice([1, 0, -1.5, 4], p=[0.88, 0.02, 0.05, 0.05])) * self.D**-0.5,
            "softcap": float(rng.choice([0.5, 2, 30])) if rng.random() < 0.12 else None,
            "dropout_p": dropout_p,
            "key": Key(int(rng.integers(0, 1 << 63)), int(rng.integers(0, 9)), 3)
            if dropout_p else None,
            "max_seqlen_q": self.longest[0],
            "max_seqlen_k": self.longest[1],
            "deterministic": bool(rng.random() < 0.5),
        }  # fmt: skip

    # ---- parts of it --------------------------------------------------------------------------

    @property
    def wide(self):
        """The dtype of lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def inputs(self):
        return self.q, self.k, self.v, *self.extras

    def queries(self, b):
        """Return the index of sequence ``b`` into q, out and dout: (T, H, D) is left."""
        return slice(*self.cu[0][b : b + 2]) if self.packed else b

    def keys(self, b):
        return slice(*self.cu[1][b : b + 2]) if self.packed else b

    def rows(self, b):
        """Return the index of sequence ``b`` into lse: (H, T) is left."""
        return (slice(None), self.queries(b)) if self.packed else b

    def visible(self, b):
        S = self.lengths[b][1]
        return S if self.key_lengths is None else min(S, max(0, int(self.key_lengths[b])))

    def __str__(self):
        given = zip(("bias", "key_lengths", "", "", "slopes", "sink"), self.extras, strict=True)
        extras = {name: f"{x.dtype}{x.shape}" for name, x in given if name and x is not None}
        params = {name: x for name, x in self.params.items() if x}
        sizes = self.lengths if self.packed else f"{self.T}x{self.S}"
        grads = [name for name in ("dout", "dlse") if getattr(self, name) is not None]
        shape = f"B={self.B} lengths={sizes} H={self.H}/{self.Hk} D={self.D}/{self.Dv}"
        return f"{self.number}: {self.dtype} {self.layout} {shape} {extras} {params} {grads}"


def place(xp, x, layout):
    """Return an array equal to ``x`` (.., rows, heads, columns) in a memory layout, among NaN."""

    def nan(shape):
        return xp.full(shape, NAN, x.dtype)

    *lead, rows, heads, columns = x.shape
    if layout in ("rows", "shifted"):
        first = 64 if layout == "rows" else 1  # one: two bytes away from any alignment
        view = nan(x.size + 128)[first : first + x.size].reshape(x.shape)
    elif layout == "heads":
        view = nan((*lead, heads, rows, columns)).swapaxes(-3, -2)
    elif layout == "padded":
        step = max(16 // x.itemsize, 1)
        wide = -(-columns // step) * step
        base = nan((*lead, rows + 3, heads + 1, wide + 2 * step))
        view = base[..., 1 : rows + 1, :heads, step : step + columns]
    elif layout == "sliced":
        view = nan((*lead, rows, heads, columns + 1))[..., 1:]
    elif layout == "spaced":
        view = nan((*lead, rows, heads, 2 * columns))[..., ::2]
    elif layout == "backwards":
        view = nan(x.shape)[..., ::-1, ::-1, ::-1]
    else:  # "projection", for what has no part in one
        return x
    view[...] = x
    return view


def whole_head_arguments(
    xp, *, B=2, T=256, S=None, H=6, D=64, Dv=64, Hk=None, growth=1, **changes,
):  # fmt: skip
    """Return q, k, v and six more, and parameters. The last key is ``growth`` times as long."""
    rows, S = np.random.default_rng(0), T if S is None else S
    shapes = (B, T, H, D), (B, S, Hk or H, D), (B, S, Hk or H, Dv)
    q, k, v = (rows.standard_normal(shape, np.float32) for shape in shapes)
    k *= np.linspace(1, growth, S, dtype=np.float32)[:, None, None]
    names = "bias", "key_lengths", "cu_q", "cu_k", "slopes", "sink"
    extras = [changes.pop(name, None) for name in names]
    params = {
        "window": (None, 0), "align": "bottom_right", "scale": D**-0.5, "softcap": None,
        "dropout_p": 0.0, "key": None, "max_seqlen_q": T, "max_seqlen_k": S, "deterministic": False,
    }  # fmt: skip
    return [*(xp.asarray(x.astype(BFLOAT16)) for x in (q, k, v)), *extras], params | changes
