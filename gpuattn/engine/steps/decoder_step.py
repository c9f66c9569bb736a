"""One token of each text through a whole decoder in one launch, for few texts.

With few rows a step of many kernels takes the time of its launches, not of its bytes. Here the
blocks of one launch go through a list of phases, a ``PHASE`` each: embedding, matmuls with norm,
bias, activation and residual sum, attention. Weights are streamed ahead of the phases. The idea of
one persistent kernel for a model: Hazy Research, "Look Ma, No Bubbles!" (2025). Device code:
``rawkernels/decoder/decoder_step.cu``, ``pack_weights.cu``.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.cuda.gpu import dotted, gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.sources import serves
from gpuattn.engine.steps.records import Records
from gpuattn.nn.norm import LayerNorm

FILE, PACK = "decoder/decoder_step.cu", "decoder/pack_weights.cu"
THREADS, PACK_THREADS, WARPS = 384, 256, 8  # WARPS: of a block, that compute
SHARED_BYTES = 232448  # of a block: all that Hopper has
PAST = 2048  # elements that the kernel may load past the last row of states: two of its stages
TILE, DEPTH = 16, 32  # outputs of a unit; widths are multiples of DEPTH
GROUPS = {32: (8, 16, 32), 64: (8, 16, 32), 128: (8, 16)}  # head size -> rows of a group
# (columns of the model, rows of a step) at most: with more rows it was faster op by op, as measured
# with 768, 1,024, 1,280 and 1,600 columns. Wider models than these have MOST_ROWS_WIDER.
MOST_ROWS, MOST_ROWS_WIDER = ((768, 64), (1024, 32)), 16
MOST_KEYS = 8192  # of all rows
SHARED_ROOM, SHARE_KEYS = 256, 64  # keys of a text from which blocks share them; of a share
MOST_SHARES, SHARED_ROWS, SHARED_WIDTH = 8, 8, 2048  # limits of the kernel
# (columns of the model, rows) up to which blocks wait for numbers, not for barriers of the grid: it
# was faster, as measured with 768 to 1,600 columns. Wider models: up to POLLED_ROWS_WIDER.
POLLED_ROWS, POLLED_ROWS_WIDER = ((1280, 4),), 8
WARP_KEYS = 32  # that a warp takes at a time, in attention
BLOCKS_MULTIPLE = 4  # so that all work of a block is of the same group of rows
EMBED, LINEAR, ATTEND = range(3)
NO_NORM, LAYER_NORM, RMS_NORM = range(3)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}
# as ``struct Phase`` and ``struct Layer`` of the kernels
PHASE = np.dtype([
    *((name, np.int32) for name in ("kind", "norm", "activation", "rotation", "outputs", "inputs")),
    *((name, np.float32) for name in ("eps", "scale")),
    *((name, np.uint64) for name in (
        "x", "weights", "residual", "statistics", "gain", "shift",
        "statistics_out", "out", "keys", "values", "counts", "slots", "shares",
    )),
    *((name, np.int32) for name in ("heads", "kv_heads", "room", "stride", "warps")),
    *((name, np.int32) for name in ("split", "split_keys")),
    *((name, np.float32) for name in ("per_beam", "per_head", "per_kv_head")),
])  # fmt: skip
LAYER = np.dtype([
    *((name, np.uint64) for name in ("weight", "gain", "shift", "bias", "packed", "tails")),
    *((name, np.int32) for name in (
        "outputs", "inputs", "first", "units", "far", "near", "pieces", "gap", "tail_units",
        "tail_far",
    )),
])  # fmt: skip


def decoder_of(
    model: Any, state: Any, caches: Sequence[Any], memory: Any = None, lengths: Any = None
) -> "DecoderStep | None":
    """Return the DecoderStep of a search, or None where ``refusal`` has a reason."""
    if refusal(model, state.sentences * state.beam, state.room):
        return None
    return DecoderStep(model, state, caches, memory, lengths)


def refusal(model: Any, rows: int, room: int) -> str | None:
    """Return why a step of ``rows`` texts of up to ``room`` keys is not one launch, or None."""
    if reason := weights_refusal(model, FILE):
        return reason
    width = model.config.d_model
    most = next((rows for columns, rows in MOST_ROWS if width <= columns), MOST_ROWS_WIDER)
    if rows > most or rows * room > MOST_KEYS:
        got = f"there are {rows} rows of up to {room} keys"
        return f"{got}; up to {most} rows and {MOST_KEYS} keys in all one launch is faster"
    for layer in layers_of(model):
        own, forward, wrong = layer.attention, layer.feed_forward, None
        if own.head_dim not in GROUPS:
            wrong = f"the head size is {own.head_dim}, the kernel takes 32, 64 or 128"
        if reason := layer_refusal(layer, wrong):
            return reason
        for linear in (own.qkv, own.out, forward.inner, forward.out):
            if linear.weight.shape[1] % DEPTH or linear.weight.shape[0] % 2:
                shape, accepted = linear.weight.shape, f"even outputs and a multiple of {DEPTH}"
                return f"a weight is {shape}, the kernel takes {accepted} inputs"
    return None


def weights_refusal(model: Any, file: str) -> str | None:
    """Return why the kernel of a step in ``file`` does not take the weights of a model, or None."""
    weight = model.parameters()[0].data
    if reason := kernel_refusal(weight, "the weight"):
        return reason
    if weight.itemsize != 2:
        return f"the weights are {weight.dtype}, the kernel takes float16 or bfloat16"
    capability = gpu(weight.device.id).capability
    if not serves(file, capability):
        return f"the GPU's compute capability is {dotted(capability)}, the kernel needs 9.0"
    return None


def layer_refusal(layer: Any, wrong: str | None) -> str | None:
    """Return why a kernel of a step does not take a layer, or None.

    ``wrong``: what that kernel alone does not take of its heads or norms, or None.
    """
    own, forward = layer.attention, layer.feed_forward
    if own.rotary or own.normalises:
        return "queries and keys are rotated or normalised"
    if wrong:
        return wrong
    if forward.unfused is not None or forward.inner.activation not in ACTIVATIONS:
        return "the activation is not ReLU or the tanh form of GELU"
    return None


def layers_of(model: Any) -> Sequence[Any]:
    """Return the layers that a step runs."""
    return model.decoder if hasattr(model, "decoder") else model.layers


class Stream(NamedTuple):
    """States (rows, width), or what ``norm`` makes of them.

    ``shares``: fields of a PHASE that say which rows are shares of the attention of a row, if any.
    """

    states: Any
    norm: Any = None
    shares: Any = None


class DecoderStep:
    """The step of ``model`` for the texts of ``state``, whose ``caches`` it continues.

    ``state``: Beams or Texts. ``memory``: keys and values for each layer, with the ``lengths`` of
    each sentence's. A call is one launch, which a CUDA graph can hold, and returns logits (rows,
    padded vocabulary); the next call overwrites them. Call ``pack`` before the first step, and
    after weights changed. ``phases``: the program, an array of PHASE. ``polled``: whether phases
    hand on numbers in arrays of their own, which hold zeros until then, without barriers.
    """

    def __init__(
        self, model: Any, state: Any, caches: Sequence[Any], memory: Sequence[Any] | None = None,
        lengths: Any = None,
    ) -> None:  # fmt: skip
        self.state, self.count = state, state.sentences * state.beam
        self.like = like = model.parameters()[0].data
        xp, first = get_xp(like), layers_of(model)[0]
        self.blocks = gpu(like.device.id).multiprocessors // BLOCKS_MULTIPLE * BLOCKS_MULTIPLE
        self.head_dim, self._pre_norm = first.attention.head_dim, first.pre_norm
        sizes = GROUPS[self.head_dim]
        self.group = next((size for size in sizes if size >= self.count), sizes[-1])
        self.shift = (-(-self.count // self.group) - 1).bit_length()  # 1 << shift groups
        self._records = Records()
        self._phases: list[np.ndarray] = []
        self._packed: list[np.ndarray] = []
        self._units = self._rotation = 0
        self.polled = self._polls(first, caches[0], memory)
        self._arrays: dict[str, Any] = {}
        self._set_size = self._new_sets(model, memory) if self.polled else 0
        self._build(model, caches, memory, lengths)
        self.phases, packed = np.stack(self._phases), np.stack(self._packed)
        self._program, self._weights = (xp.asarray(x.view(np.uint8)) for x in (self.phases, packed))
        units = -(-packed["outputs"] // TILE)
        self._owners = xp.asarray(np.repeat(np.arange(len(units)), units), np.int32)
        self._barrier = xp.zeros(2, np.int32)
        scalar = ctype(like.dtype)
        self._run = kernel(
            FILE, "decoder_step", scalar=scalar, ROWS=self.group, HEAD_DIM=self.head_dim,
            SHARES=int(self.phases["split"].any()), POLLED=int(self.polled),
        )  # fmt: skip
        self._pack = kernel(PACK, "pack_weights", scalar=scalar)

    def pack(self) -> None:
        """Copy the weights, as they are now, into the order in which the step reads them."""
        self._pack((len(self._owners),), (PACK_THREADS,), self._weights, self._owners)

    def __call__(self) -> Any:
        state = self.state
        self._run(
            (self.blocks,), (THREADS,), self._program, state.tokens, state.positions,
            self._barrier, self._set_size, len(self.phases), self.count, state.beam, self.shift,
            shared_bytes=SHARED_BYTES,
        )  # fmt: skip
        return self.logits[: self.count]

    # ---- the program ----------------------------------------------------------------------------

    def _build(self, model, caches, memory, lengths):
        translates = memory is not None
        table = model.target if translates else model.embedding
        rows, width = table.weight.shape
        places, states = table._positions(), self._handed("states", width)
        self._add(
            EMBED, outputs=rows, inputs=width, x=table.weight, weights=places,
            room=0 if places is None else len(raw(places)), scale=table.scale, out=states,
        )  # fmt: skip
        x = Stream(states)
        for i, layer in enumerate(layers_of(model)):
            x = self._layer(layer, x, caches[i], memory[i] if translates else None, lengths)
        norm = model.decoder_norm if translates else model.norm
        head = model._head_weight() if translates else model._output_weight()
        self.logits = self._new(head.shape[0])
        bias = getattr(model, "output_bias", None)
        self._linear(x if norm is None else Stream(x.states, norm), head, bias, self.logits)

    def _layer(self, layer, x, cache, memory, lengths):
        """Append the phases of a layer for the Stream x; return the Stream behind it."""
        own, forward, norms = layer.attention, layer.feed_forward, iter(layer.norms)

        def branch(inside):
            nonlocal x
            norm = next(norms)
            into, out = inside(Stream(x.states, norm) if layer.pre_norm else x)
            other = x.states is self._arrays.get("states")
            states = self._handed("other states" if other else "states", out.weight.shape[0])
            self._linear(into, out.weight, out.bias, states, residual=x)
            x = Stream(states, None if layer.pre_norm else norm)

        def attend(x):
            counts, slots = self.state.key_counts, self.state.slots
            fields = {"keys": cache.k, "values": cache.v, "counts": counts, "slots": slots}
            return self._attend(x, own, own.qkv, **fields), own.out

        def attend_memory(x):
            cross, (keys, values) = layer.cross_attention, memory
            fields = {"keys": keys, "values": values, "counts": lengths}
            return self._attend(x, cross, cross.q, **fields), cross.out

        def feed(x):
            inner = forward.inner
            hidden = self._handed("inner", inner.weight.shape[0])
            self._linear(x, inner.weight, inner.bias, hidden, inner.activation)
            return Stream(hidden), forward.out

        branch(attend)
        if memory is not None:
            branch(attend_memory)
        branch(feed)
        return x

    def _attend(self, x, attention, projection, **fields):
        """Append the attention of what ``projection`` makes of the Stream x; return its Stream."""
        projected = self._handed("projected", projection.weight.shape[0])
        self._linear(x, projection.weight, projection.bias, projected)
        heads, kv_heads, warps = attention.heads, attention.kv_heads, WARPS
        room, per_beam = fields["keys"].shape[1], 1 / self.state.beam
        split, split_keys = self._split(heads, room)
        while (
            warps > 1
            and not split
            and (self.count * heads * warps > WARPS * self.blocks or warps * WARP_KEYS >= 2 * room)
        ):
            warps //= 2
        attended = self._handed("attended", attention.out.weight.shape[1])
        shared = {
            "heads": heads, "room": room, "warps": warps, "per_beam": per_beam,
            "counts": fields["counts"], "slots": fields.get("slots"), "split": split,
            "split_keys": split_keys, "shares": self._sums if split else None,
        }  # fmt: skip
        self._add(
            ATTEND, x=projected, out=attended, kv_heads=kv_heads,
            stride=projection.weight.shape[0], scale=self.head_dim**-0.5, per_head=1 / heads,
            per_kv_head=kv_heads / heads, **fields | shared,
        )  # fmt: skip
        return Stream(attended, shares=shared if split else None)

    def _split(self, heads, room):
        """Return logarithms of the most blocks of a row and head, and of the least keys of one.

        A block has one row and head at most, and their parts are the rows of a group of 8.
        """
        split, most = 0, min(MOST_SHARES, SHARED_ROWS // self.count)
        if room > SHARED_ROOM and heads * self.head_dim <= SHARED_WIDTH:
            most = min(most, self.blocks // (self.count * heads))
            while 2 << split <= most and SHARE_KEYS << split < room:
                split += 1
        return split, SHARE_KEYS.bit_length() - 1

    def _linear(self, x, weight, bias, out, activation=None, residual=None):
        """Append ``out = activation(x weight^T + bias) + residual``; the two are Streams."""
        outputs, inputs = weight.shape
        units, norm = -(-outputs // TILE), x.norm
        size = TILE * (inputs + 4)  # of a unit with its tail
        packed = arrays.empty(self.like, (units, size))
        tails = packed.ravel()[TILE * inputs :]
        gain, shift = _parameters(norm)
        self._packed.append(self._records.make(
            LAYER, weight=weight, gain=gain, shift=shift, bias=bias, packed=packed,
            tails=tails, outputs=outputs, inputs=inputs, first=self._units, units=1, far=size,
            tail_units=1, tail_far=size // 2,
        ))  # fmt: skip
        fields = x.shares or {}
        assert not (x.shares and norm), "rows that are shares have no norm"
        if norm is not None:
            kind = LAYER_NORM if isinstance(norm, LayerNorm) else RMS_NORM
            fields = {"norm": kind, "eps": norm.eps}
            if not self._pre_norm:  # the next sum takes the row as it is normalised
                fields["statistics_out"] = self._statistics
        if residual is not None:
            fields["residual"] = residual.states
            if residual.norm is not None:
                gain, shift = _parameters(residual.norm)
                fields |= {"statistics": self._statistics, "gain": gain, "shift": shift}
        self._add(
            LINEAR, outputs=outputs, inputs=inputs, x=x.states, weights=packed,
            activation=ACTIVATIONS[activation], out=out, **fields,
        )  # fmt: skip
        self._units += units
        self._rotation = (self._rotation + (units << self.shift)) % self.blocks

    def _add(self, kind, **fields):
        record = self._records.make(PHASE, kind=kind, rotation=self._rotation, **fields)
        self._phases.append(record)

    def _polls(self, layer, cache, memory):
        """Return whether blocks wait for numbers: few rows, no shares of keys, pre-norm."""
        width, heads = layer.attention.out.weight.shape[0], layer.attention.heads
        most = next((rows for columns, rows in POLLED_ROWS if width <= columns), POLLED_ROWS_WIDER)
        rooms = [cache.k.shape[1], *(keys.shape[1] for keys, _ in (memory or ())[:1])]
        shares = any(self._split(heads, room)[0] for room in rooms)
        return self.count <= most and layer.pre_norm and not shares

    # ---- arrays ---------------------------------------------------------------------------------

    @functools.cached_property
    def _statistics(self):
        """The mean and 1 / deviation of rows whose normalised numbers are added up."""
        return arrays.zeros(self.like, (self.group << self.shift, 2), np.float32)

    @functools.cached_property
    def _sums(self):
        """The peak and sum of each share of keys."""
        sizes = SHARED_WIDTH // self.head_dim, SHARED_ROWS, 2
        return arrays.zeros(self.like, sizes, np.float32)

    def _handed(self, name, width):
        """Return an array that a phase hands on: the one of this name, if polled one of its own."""
        if self.polled:
            return next(self._own)
        if name not in self._arrays:
            self._arrays[name] = self._new(width)
        return self._arrays[name]

    def _new_sets(self, model, memory):
        """Make zeros (2, arrays, size): launches write one set, and clear the other, in turn.

        Return the elements of a set.
        """
        first, each = layers_of(model)[0], 5 if memory is None else 8  # arrays of a layer
        widest = max(first.attention.qkv.weight.shape[0], *first.feed_forward.out.weight.shape)
        count, size = each * len(layers_of(model)) + 1, self.count * widest + PAST
        sets = arrays.zeros(self.like, (2, count, size))
        self._own = iter(sets[0])
        return count * size

    def _new(self, width):
        """Return zeros (rows, width), with PAST more elements behind them."""
        rows = self.group << self.shift
        return arrays.zeros(self.like, rows * width + PAST)[: rows * width].reshape(rows, width)


def _parameters(norm):
    return (None, None) if norm is None else (norm.weight, getattr(norm, "bias", None))
