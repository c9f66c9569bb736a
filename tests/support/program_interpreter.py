"""The program of a DecoderStep, run with NumPy in float32 on the memory of fake GPU arrays."""

import ctypes

import numpy as np

from gpuattn.engine.decoder_phases import (
    ATTEND,
    EMBED,
    HEAD,
    LAYER_NORM,
    LINEAR,
    NO_NORM,
    SUM,
    WIDE,
)

SHARED = (  # fields of the attention that the linear layer behind it has too, if blocks share keys
    "counts", "slots", "heads", "room", "warps", "per_beam", "split", "split_keys", "shares",
)  # fmt: skip


def memory(address, shape, dtype):
    """Return a copy of an array, which lies at ``address``."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(int(address), size), dtype).reshape(shape).copy()


class Interpreter:
    """A call is a step and returns logits (rows, outputs), float32.

    What a phase writes is kept in float32 by its address, also in caches, and not in memory.
    """

    def __init__(self, decoder):
        self.decoder, self.state, self.rows = decoder, decoder.state, decoder.count
        self.layers = {int(layer["packed"]): layer for layer in decoder._packed}
        self.written = {}

    def __call__(self):
        for phase in self.decoder.phases:
            kinds = {EMBED: self.embed, LINEAR: self.multiply, ATTEND: self.attend}
            kinds |= {HEAD: self.head, SUM: self.sum, WIDE: self.multiply}
            kinds[int(phase["kind"])](phase)
        return self.read(self.decoder.phases[-1]["out"], (self.rows, -1))

    def read(self, address, shape):
        """Return what was written at ``address``, or the 16-bit numbers there, as float32."""
        if int(address) in self.written:
            return self.written[int(address)].reshape(shape)
        return memory(address, shape, self.decoder.like.dtype).astype(np.float32)

    def vector(self, address, size, default):
        return self.read(address, (size,)) if address else np.full(size, default, np.float32)

    def embed(self, phase):
        state, width = self.state, phase["inputs"]
        tokens, positions = (np.asarray(x).ravel() for x in (state.tokens, state.positions))
        x = self.read(phase["x"], (phase["outputs"], width))[tokens] * phase["scale"]
        if phase["weights"]:
            x = x + self.read(phase["weights"], (phase["room"], width))[positions]
        self.written[int(phase["out"])] = x

    def multiply(self, phase):
        layer = self.layers[int(phase["weights"])]
        outputs, inputs = layer["outputs"], layer["inputs"]
        assert (outputs, inputs) == (phase["outputs"], phase["inputs"])
        x = self.read(phase["x"], (self.rows, inputs))
        if phase["split"]:
            assert phase["x"] == self.attended["out"] and phase["norm"] == NO_NORM
            for name in SHARED:
                assert phase[name] == self.attended[name], name
        if phase["slicing"]:
            slices = 1 << phase["slicing"]
            assert phase["norm"] == NO_NORM and not (phase["residual"] or layer["bias"])
            assert -(-outputs // 16) * slices << self.decoder.shift <= self.decoder.blocks
            weight = self.read(layer["weight"], (outputs, slices, inputs // slices))
            x = x.reshape(self.rows, slices, -1)
            self.written[int(phase["parts"])] = np.einsum("rsi,osi->rso", x, weight)
            return
        y = self.product(phase, layer, x)
        if phase["activation"] == 1:
            y = np.maximum(y, 0)
        elif phase["activation"] == 2:
            y = y / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)))
        if phase["residual"]:
            old = self.read(phase["residual"], (self.rows, outputs))
            if phase["statistics"]:
                mean, rstd = self.written[int(phase["statistics"])]
                gain, shift = phase["gain"], phase["shift"]
                old = (old - mean) * rstd * self.vector(gain, outputs, 1)
                old = old + self.vector(shift, outputs, 0)
            y = y + old
        self.written[int(phase["out"])] = y.astype(np.float32)

    def product(self, phase, layer, x):
        """Return norm(x) weight^T + bias, with the norm of ``phase``."""
        outputs, inputs = layer["outputs"], layer["inputs"]
        assert bool(layer["gain"]) == (phase["norm"] != NO_NORM)
        if phase["norm"] != NO_NORM:
            mean = x.mean(1, keepdims=True) if phase["norm"] == LAYER_NORM else np.zeros((1, 1))
            rstd = 1 / np.sqrt((x**2).mean(1, keepdims=True) - mean**2 + phase["eps"])
            assert phase["statistics_out"] != phase["statistics"], "others still read them"
            self.written[int(phase["statistics_out"])] = mean, rstd
            gain, shift = layer["gain"], layer["shift"]
            x = (x - mean) * rstd * self.vector(gain, inputs, 1) + self.vector(shift, inputs, 0)
        y = x @ self.read(layer["weight"], (outputs, inputs)).T
        return y + self.vector(layer["bias"], outputs, 0)

    def summed(self, phase):
        """Return x of HEAD or SUM with what is added to it, which is then in ``out``."""
        inputs, rows = int(phase["inputs"]), self.rows
        x = self.read(phase["x"], (rows, inputs))
        if not phase["added"]:
            return x
        if phase["statistics"]:
            mean, rstd = self.written[int(phase["statistics"])]
            gain, shift = phase["gain"], phase["shift"]
            x = (x - mean) * rstd * self.vector(gain, inputs, 1) + self.vector(shift, inputs, 0)
        parts = self.written[int(phase["added"])]
        assert parts.shape == (rows, phase["adds"], inputs)
        x = x + self.vector(phase["bias"], inputs, 0) + parts.sum(1)
        assert phase["out"] != phase["x"], "others still read it"
        self.written[int(phase["out"])] = x.astype(np.float32)
        return x

    def sum(self, phase):
        assert phase["added"] and phase["norm"] == NO_NORM
        self.summed(phase)

    def head(self, phase):
        rows, heads, size = self.rows, int(phase["heads"]), self.decoder.head_dim
        assert phase["units"] == rows // phase["each"] * heads <= self.decoder.blocks
        assert phase["each"] * phase["warps"] <= 8 and phase["each"] in (1, self.state.beam)
        assert phase["parts"] != phase["added"], "others still read them"
        layer = self.layers[int(phase["weights"])]
        projected = self.product(phase, layer, self.summed(phase)).astype(np.float32)
        found = self.attention(phase, projected)
        out = self.layers[int(phase["output_weights"])]
        assert not (out["gain"] or out["bias"]) and out["outputs"] == phase["outputs"]
        weight = self.read(out["weight"], (phase["outputs"], heads * size))
        weight = weight.reshape(-1, heads, size)
        self.written[int(phase["parts"])] = np.einsum("rhd,ohd->rho", found, weight)

    def attend(self, phase):
        self.attended = phase
        x = self.read(phase["x"], (-1,)).reshape(self.rows, phase["stride"])
        self.written[int(phase["out"])] = self.attention(phase, x)

    def attention(self, phase, x):
        heads, kv_heads, room = (int(phase[name]) for name in ("heads", "kv_heads", "room"))
        size, state = self.decoder.head_dim, self.state
        np.testing.assert_allclose(
            [phase[name] for name in ("per_beam", "per_head", "per_kv_head")],
            [1 / state.beam, 1 / heads, kv_heads / heads], rtol=1e-6,
        )  # fmt: skip
        assert phase["warps"] in (1, 2, 4, 8)
        shares = 1 << phase["split"]
        if shares > 1:
            assert phase["warps"] == 8 and phase["shares"] and self.rows * shares <= 8
            assert self.rows * heads * shares <= self.decoder.blocks and heads * size <= 2048
        q = x[:, : heads * size].reshape(self.rows, heads, size)
        own = bool(phase["slots"])
        texts = self.rows if own else self.rows // state.beam
        counts = memory(phase["counts"], (texts,), np.int32)
        both = [self.read(phase[n], (texts, room, kv_heads, size)) for n in ("keys", "values")]
        if own:
            new = x[:, heads * size :].reshape(self.rows, 2, kv_heads, size)
            slots = memory(phase["slots"], (self.rows, room), np.int16)
            for name, store, kv in zip(("keys", "values"), both, (0, 1), strict=True):
                store[np.arange(texts), counts - 1] = new[:, kv]
                self.written[int(phase[name])] = store
        out = np.empty((self.rows, heads, size), np.float32)
        for row in range(self.rows):
            sentence = row // state.beam
            count, at = counts[row if own else sentence], sentence
            if own:
                at = sentence * state.beam + slots[row, :count]
            k, v = (np.repeat(store[at, np.arange(count)], heads // kv_heads, 1) for store in both)
            logits = np.einsum("hd,khd->hk", q[row], k) * phase["scale"]
            weights = np.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[row] = np.einsum("hk,khd->hd", weights, v)
        return out
