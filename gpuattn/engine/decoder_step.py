"""One token of each text through a whole decoder in one launch, for few texts.

With few rows a step of many kernels takes the time of its launches, not of its bytes. Here the
blocks of one launch go through a list of phases, a ``PHASE`` each: embedding, matmuls with norm,
bias, activation and residual sum, attention. Weights are streamed ahead of the phases. The idea of
one persistent kernel for a model: Hazy Research, "Look Ma, No Bubbles!" (2025). Device code:
``rawkernels/decoder/decoder_step.cu``, ``pack_weights.cu``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.cuda.kernels import kernel
from gpuattn.engine.decoder_limits import (
    DEPTH,
    FILE,
    SHARED_ROOM,
    blocks_of,
    groups_of,
    heads_refusal,
    layers_of,
    refusal,
)
from gpuattn.engine.decoder_phases import (
    ACTIVATIONS,
    ATTEND,
    EMBED,
    HEAD,
    LAYER,
    LAYER_NORM,
    LINEAR,
    PHASE,
    RMS_NORM,
    SUM,
    WIDE,
    Added,
    Stream,
)
from gpuattn.nn.norm import LayerNorm

PACK = "decoder/pack_weights.cu"
THREADS, PACK_THREADS, WARPS = 384, 256, 8  # WARPS: of a block, that compute
SHARED_BYTES = 232448  # of a block: all that Hopper has
TILE = 16  # outputs of a unit
SHARE_KEYS = 64  # keys of a share, at least
MOST_SHARES, SHARED_ROWS, SHARED_WIDTH = 8, 8, 2048  # limits of the kernel
MOST_SLICING = 2  # logarithm of the slices of the feed-forward's output
SUMS = 128  # columns that a block adds in SUM


def decoder_of(
    model: Any, state: Any, caches: Sequence[Any], memory: Any = None, lengths: Any = None
) -> "DecoderStep | None":
    """Return the DecoderStep of a search, or None where ``refusal`` has a reason."""
    if refusal(model, state.sentences * state.beam, state.room):
        return None
    return DecoderStep(model, state, caches, memory, lengths)


class DecoderStep:
    """The step of ``model`` for the texts of ``state``, whose ``caches`` it continues.

    ``state``: Beams or Texts. ``memory``: keys and values for each layer, with the ``lengths`` of
    each sentence's. A call is one launch, which a CUDA graph can hold, and returns logits (rows,
    padded vocabulary); the next call overwrites them. Call ``pack`` before the first step, and
    after weights changed. ``phases``: the program, an array of PHASE.
    """

    def __init__(
        self, model: Any, state: Any, caches: Sequence[Any], memory: Sequence[Any] | None = None,
        lengths: Any = None,
    ) -> None:  # fmt: skip
        self.state, self.count = state, state.sentences * state.beam
        self.like = like = model.parameters()[0].data
        xp, first = get_xp(like), layers_of(model)[0]
        self.blocks = blocks_of(model)
        self.head_dim = first.attention.head_dim
        self.group, self.shift = groups_of(self.count, self.head_dim)
        self.by_heads = heads_refusal(model, state, memory) is None
        self._held: list[Any] = []  # arrays whose addresses the program has
        self._phases: list[np.ndarray] = []
        self._packed: list[np.ndarray] = []
        self._units = self._rotation = 0
        self._build(model, caches, memory, lengths)
        self.phases, packed = np.stack(self._phases), np.stack(self._packed)
        self._program, self._weights = (xp.asarray(x.view(np.uint8)) for x in (self.phases, packed))
        units = -(-packed["outputs"] // TILE)
        self._owners = xp.asarray(np.repeat(np.arange(len(units)), units), np.int32)
        self._barrier = xp.zeros(2, np.int32)
        scalar = ctype(like.dtype)
        self._run = kernel(
            FILE, "decoder_step", scalar=scalar, ROWS=self.group, HEAD_DIM=self.head_dim,
            SHARES=int(self.phases["split"].any()), HEADS=int(self.by_heads),
        )  # fmt: skip
        self._pack = kernel(PACK, "pack_weights", scalar=scalar)

    def pack(self) -> None:
        """Copy the weights, as they are now, into the order in which the step reads them."""
        self._pack((len(self._owners),), (PACK_THREADS,), self._weights, self._owners)

    def between(self) -> list[Any]:
        """Return the arrays that a step writes before it reads them, for tests."""
        parts = self._parts if self.by_heads else []
        states = [*self._states, self._projected, self._attended, self._inner]
        return [*states, self._statistics, self._others, *parts]

    def __call__(self) -> Any:
        state = self.state
        self._run(
            (self.blocks,), (THREADS,), self._program, state.tokens, state.positions,
            self._barrier, len(self.phases), self.count, state.beam, self.shift,
            shared_bytes=SHARED_BYTES,
        )  # fmt: skip
        return self.logits[: self.count]

    # ---- the program ----------------------------------------------------------------------------

    def _build(self, model, caches, memory, lengths):
        translates, first = memory is not None, layers_of(model)[0]
        table = model.target if translates else model.embedding
        rows, width = table.weight.shape
        self._states = [self._new(width) for _ in range(2)]
        # two, as some blocks write those of a sum while others read those of its parts
        shape = self.group << self.shift, 2
        self._statistics, self._others = (
            arrays.zeros(self.like, shape, np.float32) for _ in range(2)
        )
        if self.by_heads:
            heads = max(first.attention.heads, first.cross_attention.heads)
            shape = self.group << self.shift, heads, width
            self._parts = [arrays.zeros(self.like, shape, np.float32) for _ in range(2)]
            shape = shape[0], 1 << MOST_SLICING, width
            self._parts.append(arrays.zeros(self.like, shape, np.float32))
        self._projected = self._new(first.attention.qkv.weight.shape[0])
        self._attended = self._new(first.attention.out.weight.shape[1])
        sums = SHARED_WIDTH // self.head_dim, SHARED_ROWS, 2  # the peak and sum of each share
        self._sums = arrays.zeros(self.like, sums, np.float32)
        self._inner = self._new(first.feed_forward.out.weight.shape[1])
        places = table._positions()
        self._add(
            EMBED, outputs=rows, inputs=width, x=table.weight, weights=places,
            room=0 if places is None else len(raw(places)), scale=table.scale, out=self._states[0],
        )  # fmt: skip
        x = Stream(self._states[0])
        for i, layer in enumerate(layers_of(model)):
            self._is_last = i == len(caches) - 1
            x = self._layer(layer, x, caches[i], memory[i] if translates else None, lengths)
        norm = model.decoder_norm if translates else model.norm
        head = model._head_weight() if translates else model._output_weight()
        self.logits = self._new(head.shape[0])
        bias = getattr(model, "output_bias", None)
        x = x if norm is None else Stream(x.states, norm)
        if self.by_heads and not self.shift:
            self._wide(x, head, bias, self.logits)
        else:
            self._linear(x, head, bias, self.logits)

    def _layer(self, layer, x, cache, memory, lengths):
        """Append the phases of a layer for the Stream x; return the Stream behind it."""
        if self.by_heads:
            return self._layer_by_heads(layer, x, cache, memory, lengths)
        own, forward, norms = layer.attention, layer.feed_forward, iter(layer.norms)

        def branch(inside):
            nonlocal x
            norm = next(norms)
            into, out = inside(Stream(x.states, norm) if layer.pre_norm else x)
            states = self._states[x.states is self._states[0]]
            self._linear(into, out.weight, out.bias, states, residual=x)
            x = Stream(states, None if layer.pre_norm else norm)

        def attend(x):
            self._linear(x, own.qkv.weight, own.qkv.bias, self._projected)
            counts, slots = self.state.key_counts, self.state.slots
            fields = {"keys": cache.k, "values": cache.v, "counts": counts, "slots": slots}
            return self._attend(own, own.qkv, **fields), own.out

        def attend_memory(x):
            cross, (keys, values) = layer.cross_attention, memory
            self._linear(x, cross.q.weight, cross.q.bias, self._projected)
            fields = {"keys": keys, "values": values, "counts": lengths}
            return self._attend(cross, cross.q, **fields), cross.out

        def feed(x):
            inner = forward.inner
            self._linear(x, inner.weight, inner.bias, self._inner, inner.activation)
            return Stream(self._inner), forward.out

        branch(attend)
        if memory is not None:
            branch(attend_memory)
        branch(feed)
        return x

    def _layer_by_heads(self, layer, x, cache, memory, lengths):
        """Append the same in fewer phases: see ``rawkernels/decoder/heads.cuh``."""
        own, cross, norms = layer.attention, layer.cross_attention, iter(layer.norms)
        forward, pre, state = layer.feed_forward, layer.pre_norm, self.state
        of_text = {
            "keys": cache.k, "values": cache.v, "counts": state.key_counts, "slots": state.slots,
        }  # fmt: skip
        of_source = {"keys": memory[0], "values": memory[1], "counts": lengths}
        for attention, projection, fields in (
            (own, own.qkv, of_text), (cross, cross.q, of_source),
        ):  # fmt: skip
            norm = next(norms)
            states, inside = self._head(x, norm if pre else x.norm, attention, projection, fields)
            parts = self._parts[fields is of_source]
            bias, heads = attention.out.bias, attention.heads
            added = Added(parts, bias, None if pre else inside, heads)
            x = Stream(states, None if pre else norm, added=added)
        states = self._other(x.states)
        self._add(
            SUM, inputs=states.shape[1], x=x.states, out=states, **self._sum_fields(x.added),
        )  # fmt: skip
        self._rotate(-(-self.count * states.shape[1] // SUMS))
        x, norm, inner = Stream(states, x.norm), next(norms), forward.inner
        into = Stream(x.states, norm) if pre else x
        self._linear(into, inner.weight, inner.bias, self._inner, inner.activation)
        out, slicing = forward.out, self._slicing(*forward.out.weight.shape)
        if slicing and not self._is_last:
            return Stream(x.states, None if pre else norm, added=self._sliced(out, slicing, x.norm))
        states = self._other(x.states)
        self._linear(Stream(self._inner), out.weight, out.bias, states, residual=x)
        return Stream(states, None if pre else norm)

    def _slicing(self, outputs, inputs):
        """Return the logarithm of the slices of the inputs of a product, a block's unit each."""
        slicing, units = 0, -(-outputs // TILE) << self.shift
        while slicing < MOST_SLICING and not inputs % (2 * DEPTH << slicing):
            if units * (2 << slicing) > self.blocks:
                break
            slicing += 1
        return slicing

    def _sliced(self, linear, slicing, norm):
        """Append the product of the inner states as shares of slices; return what is Added."""
        outputs, inputs = linear.weight.shape
        packed, _ = self._packed_weights(linear.weight, None, None)
        self._add(
            LINEAR, outputs=outputs, inputs=inputs, x=self._inner, weights=packed, slicing=slicing,
            parts=self._parts[2],
        )  # fmt: skip
        self._rotate(-(-outputs // TILE) << self.shift + slicing)
        return Added(self._parts[2], linear.bias, norm, 1 << slicing)

    def _head(self, x, norm, attention, projection, fields):
        """Append the HEAD phase of ``attention`` to norm(x); return the states of x, and ``norm``.

        Its result is in ``_parts``, the second ones for a memory.
        """
        (outputs, inputs), heads = attention.out.weight.shape, attention.heads
        each = self._rows_of_a_block(heads)
        units, states, sums = self.count // each * heads, x.states, {}
        if x.added:
            states = self._other(x.states)
            sums = self._sum_fields(x.added) | {"out": states}
        packed, norms = self._packed_weights(projection.weight, projection.bias, norm)
        columns, _ = self._packed_weights(attention.out.weight, None, None)
        self._add(
            HEAD, x=x.states, inputs=inputs, outputs=outputs, weights=packed, units=units,
            output_weights=columns, parts=self._parts["slots" not in fields], heads=heads,
            kv_heads=heads, room=fields["keys"].shape[1], scale=self.head_dim**-0.5, each=each,
            warps=WARPS >> (each - 1).bit_length(), per_beam=1 / self.state.beam,
            per_head=1 / heads, per_kv_head=1, **fields, **sums, **norms,
        )  # fmt: skip
        self._rotate(units)
        return states, norm

    def _rows_of_a_block(self, heads):
        """Return 1 where there are blocks for each row and head, else the beams of a sentence."""
        return 1 if self.count * heads <= self.blocks else self.state.beam

    def _other(self, states):
        return self._states[states is self._states[0]]

    def _sum_fields(self, added):
        """Return the fields of a PHASE that say what is added to its x."""
        fields = {"added": added.parts, "bias": added.bias, "adds": added.adds}
        if added.norm is not None:
            gain, shift = _parameters(added.norm)
            fields |= {"statistics": self._statistics, "gain": gain, "shift": shift}
        return fields

    def _attend(self, attention, projection, **fields):
        """Append the attention of what ``projection`` made; return its Stream."""
        heads, kv_heads, warps = attention.heads, attention.kv_heads, WARPS
        while warps > 1 and self.count * heads * warps > WARPS * self.blocks:
            warps //= 2
        room, per_beam = fields["keys"].shape[1], 1 / self.state.beam
        split, split_keys = self._split(heads, room)
        shared = {
            "heads": heads, "room": room, "warps": warps, "per_beam": per_beam,
            "counts": fields["counts"], "slots": fields.get("slots"), "split": split,
            "split_keys": split_keys, "shares": self._sums if split else None,
        }  # fmt: skip
        self._add(
            ATTEND, x=self._projected, out=self._attended, kv_heads=kv_heads,
            stride=projection.weight.shape[0], scale=self.head_dim**-0.5, per_head=1 / heads,
            per_kv_head=kv_heads / heads, **fields | shared,
        )  # fmt: skip
        return Stream(self._attended, shares=shared if split else None)

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
        assert not (x.shares and x.norm), "rows that are shares have no norm"
        outputs, inputs = weight.shape
        packed, norms = self._packed_weights(weight, bias, x.norm)
        fields = (x.shares or {}) | norms
        if residual is not None:
            fields["residual"] = residual.states
            if residual.norm is not None:
                gain, shift = _parameters(residual.norm)
                fields |= {"statistics": self._statistics, "gain": gain, "shift": shift}
        self._add(
            LINEAR, outputs=outputs, inputs=inputs, x=x.states, weights=packed,
            activation=ACTIVATIONS[activation], out=out, **fields,
        )  # fmt: skip
        self._rotate(-(-outputs // TILE) << self.shift)

    def _wide(self, x, weight, bias, out):
        """Append a product of many outputs for all rows: a warp has a tile of them."""
        packed, norms = self._packed_weights(weight, bias, x.norm)
        outputs, inputs = weight.shape
        self._add(
            WIDE, outputs=outputs, inputs=inputs, x=x.states, weights=packed, out=out, **norms
        )  # fmt: skip

    def _packed_weights(self, weight, bias, norm):
        """Return the packed weights with ``norm`` folded in, and the fields of a PHASE for it.

        The statistics of that phase are ``_statistics`` then.
        """
        outputs, inputs = weight.shape
        units = -(-outputs // TILE)
        packed = arrays.empty(self.like, (units, TILE * (inputs + 4)))  # see pack_weights.cu
        gain, shift = _parameters(norm)
        self._packed.append(self._record(
            LAYER, weight=weight, gain=gain, shift=shift, bias=bias, packed=packed,
            outputs=outputs, inputs=inputs, first=self._units,
        ))  # fmt: skip
        self._units += units
        if norm is None:
            return packed, {}
        self._statistics, self._others = self._others, self._statistics
        kind = LAYER_NORM if isinstance(norm, LayerNorm) else RMS_NORM
        return packed, {"norm": kind, "eps": norm.eps, "statistics_out": self._statistics}

    def _rotate(self, units):
        """Let the next phase begin behind the blocks that have the units of the last one."""
        units = -(-units >> self.shift) << self.shift
        self._rotation = (self._rotation + units) % self.blocks

    def _add(self, kind, **fields):
        self._phases.append(self._record(PHASE, kind=kind, rotation=self._rotation, **fields))

    def _record(self, struct, **fields):
        """Return one element of ``struct``; arrays are given by their addresses."""
        record = np.zeros((), struct)
        for name, value in fields.items():
            record[name] = self._address(value) if struct[name] == np.uint64 else value
        return record

    def _address(self, x):
        if x is None:
            return 0
        x = raw(x)
        assert x.flags.c_contiguous, x.shape
        self._held.append(x)
        return x.data.ptr

    def _new(self, width):
        return arrays.zeros(self.like, (self.group << self.shift, width))


def _parameters(norm):
    return (None, None) if norm is None else (norm.weight, getattr(norm, "bias", None))
