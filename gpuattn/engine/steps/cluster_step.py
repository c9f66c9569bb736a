"""One token of each text through the decoder of a narrow translation model, by clusters of blocks.

A cluster of thread blocks takes some sentences through all layers, in one launch. Its blocks have a
part of each state and some heads, and send what they compute into each other's shared memory,
which takes less than a barrier of the whole grid or a launch (distributed shared memory: NVIDIA,
"Hopper Architecture In-Depth", 2022). All clusters read all weights, from L2. Device code:
``rawkernels/decoder/cluster_step.cu``, ``pack_weights.cu``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.engine.steps.decoder_step import (
    ACTIVATIONS,
    DEPTH,
    LAYER,
    PACK,
    PACK_THREADS,
    SHARED_BYTES,
    TILE,
    WARP_KEYS,
    layer_refusal,
    layers_of,
    weights_refusal,
)
from gpuattn.engine.steps.records import Records
from gpuattn.nn.norm import LayerNorm

FILE = "decoder/cluster_step.cu"
WARPS, OWN = 8, 32  # of a block; columns of a block
THREADS, PIECE = 32 * WARPS, TILE * DEPTH  # PIECE: weights
MOST_LAYERS, MOST_HIDDEN = 24, WARPS * TILE  # MOST_HIDDEN: inner columns of a block
# (columns of the model, rows of a cluster) at most: with more rows, steps by ``row_linear`` were as
# fast or faster, as measured with 256 and 512 columns. Wider models would need larger clusters.
MOST_ROWS = ((256, 16), (512, 8))
PROJECTED, RESULT = 6, 2  # units of a block: queries, keys and values; a result of OWN columns
# as ``struct Layer`` of the kernel
RECORD = np.dtype([
    *((name, np.uint64) for name in ("keys", "values", "memory_keys", "memory_values")),
    ("gain", np.uint64, 3), ("shift", np.uint64, 3), ("normed", np.int32, 3), ("unused", np.int32),
])  # fmt: skip


def cluster_step_of(
    model: Any, state: Any, caches: Sequence[Any], memory: Any, lengths: Any
) -> "ClusterStep | None":
    """Return the ClusterStep of a search, or None where ``refusal`` has a reason."""
    if refusal(model, state.sentences, state.beam, state.room):
        return None
    step = ClusterStep(model, state, caches, memory, lengths)
    return step if step.runs_at_once() else None


def refusal(model: Any, sentences: int, beam: int, room: int) -> str | None:
    """Return why the steps of ``sentences`` of ``beam`` rows are not by clusters, or None.

    ``room``: keys of a row.
    """
    if not hasattr(model, "decoder"):
        return "the model does not translate"
    if reason := weights_refusal(model, FILE):
        return reason
    width, inner = model.config.d_model, model.config.ffn
    multiprocessors = gpu(model.parameters()[0].data.device.id).multiprocessors
    if width % OWN or width > MOST_ROWS[-1][0]:
        return f"the width is {width}, the kernel takes multiples of {OWN} up to {MOST_ROWS[-1][0]}"
    if inner % width or inner > MOST_HIDDEN // OWN * width:
        most = MOST_HIDDEN // OWN
        return f"the inner width is {inner}, the kernel takes up to {most} times {width}"
    rows = rows_of_cluster(sentences, beam, width, multiprocessors)
    most = next(rows for columns, rows in MOST_ROWS if width <= columns)
    if rows > most:
        return f"a cluster would have {rows} rows; up to {most} it is faster"
    if len(model.decoder) > MOST_LAYERS:
        return f"there are {len(model.decoder)} layers, the kernel takes up to {MOST_LAYERS}"
    if sentences * beam * room * width >= 1 << 31:
        return "the kernel numbers the elements of a cache by 32 bits"
    for layer in layers_of(model):
        own, wrong = layer.attention, None
        if own.head_dim not in (OWN, 2 * OWN) or own.kv_heads != own.heads:
            size = f"{own.heads} heads of {own.head_dim} with {own.kv_heads} for keys"
            wrong = f"there are {size}; the kernel takes sizes of 32 and 64, and as many for keys"
        elif not all(isinstance(norm, LayerNorm) for norm in layer.norms):
            wrong = "a norm is not LayerNorm"
        if reason := layer_refusal(layer, wrong):
            return reason
    return None


def rows_of_cluster(sentences: int, beam: int, width: int, multiprocessors: int) -> int:
    """Return the rows of a cluster: as few sentences as there are clusters for.

    Not all multiprocessors can be in a cluster: of 132, seven clusters of 16 blocks or 15 of eight
    run at a time.
    """
    clusters = max(1, multiprocessors // (width // OWN) - 1)
    return -(-sentences // clusters) * beam


def _parts_of_result(pieces):
    """Return how many warps divide the pieces of a unit of a result, as the kernel does."""
    parts = 1
    while 2 * parts * RESULT <= WARPS and pieces % (2 * parts) == 0:
        parts *= 2
    return parts


class ClusterStep:
    """The step of a translation ``model``: arguments as of DecoderStep.

    A call is launches only and returns logits (rows, padded vocabulary). Call ``pack`` before the
    first step, and after weights changed.
    """

    def __init__(
        self, model: Any, state: Any, caches: Sequence[Any], memory: Sequence[Any], lengths: Any
    ) -> None:
        self.model, self.state, self.caches, self.lengths = model, state, caches, lengths
        self.like = like = model.parameters()[0].data
        xp, layers = get_xp(like), layers_of(model)
        self.width, self.inner = model.config.d_model, model.config.ffn
        self.blocks = self.width // OWN  # of a cluster
        self.rows, beam = state.sentences * state.beam, state.beam
        sizes = beam, self.width, gpu(like.device.id).multiprocessors
        self.rows_of_cluster = rows_of_cluster(state.sentences, *sizes)
        self.clusters = -(-self.rows // self.rows_of_cluster)
        self.memory_room = memory[0][0].shape[1]
        self._records = Records()
        self._packs: list[np.ndarray] = []  # what ``pack_weights`` reads
        self._units = 0
        pieces, hidden = self.width // DEPTH, self.inner // self.blocks // TILE
        result = RESULT, _parts_of_result(pieces)
        # (units of a block, warps of a unit) of each product, and the pieces of a warp before it
        self._shapes = [(PROJECTED, 1), result, result, result, (hidden, 1)]
        self._before = np.cumsum([0, *(pieces // parts for _, parts in self._shapes)])
        self._last = self.inner // self.blocks // DEPTH
        self._stream = int(self._before[-1]) + -(-2 * self.blocks // WARPS) * self._last
        tails = 2 * TILE * (PROJECTED + 4 * RESULT + hidden)
        self._packed = arrays.zeros(like, (self.blocks, WARPS, len(layers), self._stream, PIECE))
        self._tails = arrays.zeros(like, (len(layers), self.blocks, tails), np.float32)
        self._layers = xp.asarray(self._describe(model, memory).view(np.uint8))
        packs = np.array(self._packs, LAYER)
        units = -(-packs["outputs"] // TILE)
        self._weights = xp.asarray(packs.view(np.uint8))
        self._owners = xp.asarray(np.repeat(np.arange(len(units)), units), np.int32)
        self._norm, scalar = model.decoder_norm or layers[-1].norms[2], ctype(like.dtype)
        self._run = kernel(
            FILE, "cluster_step", scalar=scalar, ROWS=-(-self.rows_of_cluster // 8) * 8,
            WIDTH=self.width, INNER=self.inner, HEAD_DIM=layers[0].attention.head_dim,
        )  # fmt: skip
        self._pack = kernel(PACK, "pack_weights", scalar=scalar)
        self.states = arrays.zeros(like, (self.rows, self.width))

    def pack(self) -> None:
        """Copy the weights, as they are now, into the order in which the step reads them."""
        self._pack((len(self._owners),), (PACK_THREADS,), self._weights, self._owners)

    def runs_at_once(self) -> bool:
        """Return whether all clusters run at the same time on this GPU."""
        most = self._run.clusters_at_once(self.blocks, THREADS, SHARED_BYTES)
        return self.clusters <= most

    def __call__(self) -> Any:
        state, model, table = self.state, self.model, self.model.target
        places, norm, room = table._positions(), self._norm, self.caches[0].k.shape[1]
        layer = layers_of(model)[0]
        self._run(
            (self.clusters * self.blocks,), (THREADS,), self._packed, self._tails, self._layers,
            state.tokens, state.positions, raw(table.weight),
            None if places is None else raw(places), state.key_counts, state.slots, self.lengths,
            raw(norm.weight), None if norm.bias is None else raw(norm.bias), self.states,
            len(layers_of(model)), self.rows, self.rows_of_cluster, state.beam,
            len(table.weight.data), 0 if places is None else len(places), room, self.memory_room,
            self._warps(room), self._warps(self.memory_room),
            ACTIVATIONS[layer.feed_forward.inner.activation], int(layer.pre_norm), table.scale,
            norm.eps, shared_bytes=SHARED_BYTES,
        )  # fmt: skip
        with model.evaluating():
            return raw(model.output(self.states))

    def _warps(self, room):
        """Return the warps of a row in attention: all rows of a block at once, or one each.

        A warp takes WARP_KEYS at a time.
        """
        sharers = layers_of(self.model)[0].attention.head_dim // OWN
        turns, warps = -(-self.rows_of_cluster // sharers), WARPS
        while warps > 1 and (turns * warps > WARPS or warps * WARP_KEYS >= 2 * room):
            warps //= 2
        return warps

    # ---- records --------------------------------------------------------------------------------

    def _describe(self, model, memory):
        """Append what ``pack_weights`` reads; return what the step reads of each layer."""
        found, before = np.zeros(len(layers_of(model)), RECORD), None
        address = self._records.address
        for n, layer in enumerate(layers_of(model)):
            own, cross, forward = layer.attention, layer.cross_attention, layer.feed_forward
            norms = list(layer.norms)
            if not layer.pre_norm:
                norms, before = [before, *norms[:2]], norms[2]
            tail = 0
            for i, (linear, norm) in enumerate([
                (own.qkv, norms[0]), (own.out, None), (cross.q, norms[1]), (cross.out, None),
                (forward.inner, norms[2]),
            ]):  # fmt: skip
                tail = self._product(n, i, linear, norm, tail)
            self._last_product(n, forward.out, tail)
            record, cache = found[n], self.caches[n]
            record["keys"], record["values"] = address(cache.k), address(cache.v)
            for name, x in zip(("memory_keys", "memory_values"), memory[n], strict=True):
                record[name] = address(x)
            for i, norm in enumerate(norms):
                record["normed"][i] = norm is not None
                if norm is not None:
                    record["gain"][i] = address(norm.weight)
                    record["shift"][i] = address(norm.bias)
        return found

    def _product(self, n, i, linear, norm, tail):
        """Append the records of product ``i`` of layer ``n``; return the units so far."""
        units, parts = self._shapes[i]
        sections = PROJECTED // RESULT if i == 0 else 1
        each = units // sections  # units of a block in a section of outputs
        outputs = len(raw(linear.weight)) // sections
        stream = self._packed[0, 0].size
        pieces = self.width // DEPTH // parts
        for section in range(sections):
            rows = slice(section * outputs, (section + 1) * outputs)
            first = self._packed[0, section * each * parts, n, self._before[i] :]
            self._add(
                linear, norm, rows, first, self._tails[n, 0, (tail + section * each) * 2 * TILE :],
                units=each, far=WARPS * stream, near=parts * stream, pieces=pieces,
                gap=stream - pieces * PIECE, tail_units=each,
            )  # fmt: skip
        return tail + units

    def _last_product(self, n, linear, tail):
        stream, count = self._packed[0, 0].size, self._last
        self._add(
            linear, None, slice(None), self._packed[0, 0, n, self._before[-1] :],
            self._tails[n, 0, tail * 2 * TILE :], units=WARPS, far=count * PIECE, near=stream,
            pieces=count, gap=WARPS * stream - count * PIECE, tail_units=RESULT,
        )  # fmt: skip

    def _add(self, linear, norm, rows, packed, tails, **strides):
        weight = raw(linear.weight)[rows]
        self._packs.append(self._records.make(
            LAYER, weight=weight, gain=norm and norm.weight, shift=norm and norm.bias,
            bias=None if linear.bias is None else raw(linear.bias)[rows], packed=packed,
            tails=tails, outputs=len(weight), inputs=weight.shape[1], first=self._units,
            tail_far=self._tails.shape[2], **strides,
        ))  # fmt: skip
        self._units += -(-len(weight) // TILE)
