"""The program of a DecoderStep, run with NumPy in float32 on the memory of fake GPU arrays."""

import ctypes

import numpy as np

from gpuattn.engine.steps.decoder_step import ATTEND, EMBED, LAYER_NORM, LINEAR, NO_NORM

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
            {EMBED: self.embed, LINEAR: self.multiply, ATTEND: self.attend}[int(phase["kind"])](
                phase
            )
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
        assert bool(layer["gain"]) == (phase["norm"] != NO_NORM)
        if phase["norm"] != NO_NORM:
            mean = x.mean(1, keepdims=True) if phase["norm"] == LAYER_NORM else np.zeros((1, 1))
            rstd = 1 / np.sqrt((x**2).mean(1, keepdims=True) - mean**2 + phase["eps"])
            self.written[int(phase["statistics_out"])] = mean, rstd
            gain, shift = layer["gain"], layer["shift"]
            x = (x - mean) * rstd * self.vector(gain, inputs, 1) + self.vector(shift, inputs, 0)
        y = x @ self.read(layer["weight"], (outputs, inputs)).T
        y += self.vector(layer["bias"], outputs, 0)
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

    def attend(self, phase):
        self.attended = phase
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
        x = self.read(phase["x"], (-1,)).reshape(self.rows, phase["stride"])
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
        self.written[int(phase["out"])] = out
