"""One token of each text through a decoder, for up to some hundred texts, by fewer launches.

A linear layer takes the norm before it, its activation and the residual sum into its launch, so a
layer of a language model is five launches and one of a translation model eight, or seven where
``projected_attention`` takes its memory; the weights of a launch are loaded beside the launch
before. Norms are folded into copies of the weights. Device code: ``rawkernels/row_embedding.cu``,
``linear/row_linear.cu``, ``linear/fold_norm.cu``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.tensor_maps import tensor_map
from gpuattn.engine.steps import decoder_step
from gpuattn.engine.steps.cluster_step import ClusterStep, cluster_step_of
from gpuattn.engine.steps.decoder_step import (
    ACTIVATIONS,
    layer_refusal,
    layers_of,
    weights_refusal,
)
from gpuattn.engine.steps.projected_attention import blocks_of, projected_attention
from gpuattn.engine.steps.records import Records
from gpuattn.nn.attention import split_heads
from gpuattn.nn.norm import LayerNorm
from gpuattn.ops.attention.step_attention import LISTED_BEAMS, memory_attention

FILE, FOLD, EMBED = "linear/row_linear.cu", "linear/fold_norm.cu", "row_embedding.cu"
THREADS, FOLD_THREADS, FOLD_WARPS = 320, 256, 8
EMBED_WARPS, EMBED_COLUMNS = 4, 256  # rows of a block, columns of a row in one pass of its warp
ROWS, DEPTH = 64, 64  # rows of a block; widths are multiples of DEPTH
EAGER = 128  # rows up to which row_linear lets the next launch start before it has waited itself
LEAST_ROWS = 16  # of a language model's step; below, one launch for all of it is faster
MOST_ROWS = 512  # beyond, kernels of an op each are faster
MOST_OF_WIDTH = ((512, MOST_ROWS), (768, 128))  # (width at most, rows at most): wider: unmeasured
FOLDING = np.dtype([
    *((name, np.uint64) for name in ("weight", "gain", "shift", "bias", "product", "folded")),
    *((name, np.int32) for name in ("inputs", "first")),
])  # fmt: skip


class Tile(NamedTuple):
    """Outputs of a block, blocks that share the depth of a product, and stages of its pipeline.

    ``share``: blocks of rows that load weights for each other; 1 with splits.
    """

    outputs: int
    splits: int
    stages: int
    share: int = 1


# (rows at most, Tile for more outputs than inputs, as many, fewer), as measured for d512 and d768
TILES = (
    (64, Tile(64, 2, 6), Tile(64, 4, 3), Tile(64, 8, 6)),
    (128, Tile(64, 2, 6), Tile(32, 1, 12), Tile(64, 4, 8)),
    (MOST_ROWS, Tile(128, 1, 4, 2), Tile(32, 1, 8), Tile(64, 2, 10)),
)
NARROW = Tile(64, 1, 4)  # fits all products; faster than 128 outputs where its blocks run at once


def tile_of(rows: int, outputs: int, inputs: int, multiprocessors: int) -> Tile:
    """Return the Tile of a product (rows, inputs) x (inputs, outputs)."""
    *_, chosen = (tiles for most, *tiles in reversed(TILES) if rows <= most)
    tile = chosen[0 if outputs > inputs else 1 if outputs == inputs else 2]
    wave = -(-rows // ROWS) * (outputs // NARROW.outputs) <= multiprocessors
    if tile.outputs > NARROW.outputs and wave:
        return NARROW
    if outputs % tile.outputs or inputs % (DEPTH * tile.splits):
        return NARROW
    return tile


def shared_bytes(tile: Tile) -> int:
    """Return the bytes of shared memory of a block, as the kernel divides them."""
    outputs, splits, stages, _ = tile
    own = 2048 + stages * 128 * (ROWS + outputs) + 16 * outputs + 8 * (ROWS // splits)
    sums = (2 if outputs == 32 else 1) * outputs * 272
    return own + (sums if splits > 1 else 0)


def step_of(
    model: Any, state: Any, caches: Sequence[Any], memory: Any = None, lengths: Any = None, *,
    paged: bool = False, batch_invariant: bool = False,
) -> "ClusterStep | decoder_step.DecoderStep | RowStep | None":  # fmt: skip
    """Return the step of a search that was measured to be the fastest; None: op by op.

    ``paged``: the caches have pages. ``batch_invariant``: see ``Engine``; the tiles of a RowStep
    depend on the number of rows.
    """
    rows, own = state.sentences * state.beam, (model, state, caches, memory, lengths)
    if memory is not None and (by_clusters := cluster_step_of(*own)):
        return by_clusters
    by_rows = not batch_invariant and refusal(model, rows) is None
    if by_rows and (memory is not None or rows >= LEAST_ROWS):
        return RowStep(*own)
    whole = None if paged else decoder_step.decoder_of(*own)
    return whole or (RowStep(*own) if by_rows else None)


def is_one_launch(model: Any, rows: int, room: int) -> bool:
    """Return whether a step of ``rows`` texts of up to ``room`` keys is to be one launch."""
    if decoder_step.refusal(model, rows, room):
        return False
    return rows < LEAST_ROWS or refusal(model, rows) is not None


def refusal(model: Any, rows: int) -> str | None:
    """Return why ``row_linear`` does not take the steps of ``rows`` texts, or None."""
    if reason := weights_refusal(model, FILE):
        return reason
    width = model.config.d_model
    most = next((most for widest, most in MOST_OF_WIDTH if width <= widest), 0)
    if rows > most:
        got = f"there are {rows} rows of width {width}"
        return f"{got}; beyond {most} kernels of an op each are faster, or it was not measured"
    for layer in layers_of(model):
        normed = all(isinstance(norm, LayerNorm) for norm in layer.norms)
        if reason := layer_refusal(layer, None if normed else "a norm is not LayerNorm"):
            return reason
        for linear in _linears(layer):
            if any(n % DEPTH for n in linear.weight.shape):
                return f"a weight is {linear.weight.shape}, the kernel takes multiples of {DEPTH}"
    return None


def _linears(layer):
    cross = getattr(layer, "cross_attention", None)
    own, forward = layer.attention, layer.feed_forward
    of_cross = (cross.q, cross.out) if cross else ()
    return (own.qkv, own.out, *of_cross, forward.inner, forward.out)


class Stream(NamedTuple):
    """States (rows, width), or what ``norm`` makes of them; ``statistics``: of their parts."""

    states: Any
    norm: Any = None
    statistics: Any = None


class RowStep:
    """The step of ``model`` for the texts of ``state``: arguments as of DecoderStep.

    A call is launches only and returns logits (rows, padded vocabulary). Call ``pack`` before the
    first step, and after weights changed.
    """

    def __init__(
        self, model: Any, state: Any, caches: Sequence[Any], memory: Sequence[Any] | None = None,
        lengths: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.state, self.caches = model, state, caches
        self.memory, self.lengths = memory, lengths
        self.like = like = model.parameters()[0].data
        self.rows = state.sentences * state.beam
        self.listed = _listed(state, model, like)
        self._scalar = ctype(like.dtype)
        self._folded: dict[int, tuple[Any, Any]] = {}  # by the id of a Linear
        self._records = Records()
        folds: list[np.ndarray] = []
        sizes: list[int] = []
        before = None  # the norm whose result the next layer reads
        for layer in layers_of(model):
            heads, norms = _linears(layer)[::2], list(layer.norms)
            if not layer.pre_norm:
                norms = [before, *layer.norms[:-1]]
                before = layer.norms[-1]
            for linear, norm in zip(heads, norms, strict=True):
                if norm is not None:
                    folds.append(self._fold(linear, norm, sum(sizes)))
                    sizes.append(len(linear.weight.data))
        xp, self._outputs = get_xp(like), sum(sizes)
        self._folds = xp.asarray(np.array(folds, FOLDING).view(np.uint8))
        self._owners = xp.asarray(np.repeat(np.arange(len(sizes)), sizes), np.int32)

    def _fold(self, linear, norm, first):
        """Return the record of a layer into which a norm is folded."""
        weight = raw(linear.weight)
        product = arrays.empty(self.like, weight.shape)
        folded = arrays.empty(self.like, (len(weight), 2), np.float32)
        self._folded[id(linear)] = product, folded
        return self._records.make(
            FOLDING, weight=weight, gain=norm.weight, shift=norm.bias, bias=linear.bias,
            product=product, folded=folded, inputs=weight.shape[1], first=first,
        )  # fmt: skip

    def pack(self) -> None:
        """Fold the norms into the weights as they are now."""
        blocks = -(-self._outputs // FOLD_WARPS)
        kernel(FOLD, "fold_norm", scalar=self._scalar)(
            (blocks,), (FOLD_THREADS,), self._folds, self._owners, self._outputs
        )

    def __call__(self) -> Any:
        model, translates = self.model, self.memory is not None
        with model.evaluating():
            x = self._begin(model.target if translates else model.embedding)
            for i, layer in enumerate(layers_of(model)):
                memory = None if self.memory is None else self.memory[i]
                x = self._layer(layer, x, self.caches[i], memory)
            norm = x.norm or (model.decoder_norm if translates else model.norm)
            states = x.states if norm is None else norm(x.states)
            return raw(model.output(states) if translates else model.head(states))

    def _begin(self, table):
        """Return the Stream of the last token of each text; ``table``: an Embedding."""
        state, places = self.state, table._positions()
        states, statistics = row_embedding(
            state.tokens.ravel(), state.positions.ravel(), raw(table.weight),
            None if places is None else raw(places), scale=table.scale, used=table.used,
            measured=layers_of(self.model)[0].pre_norm, beams=state, listed=self.listed,
        )  # fmt: skip
        return Stream(states, None, statistics)

    def _layer(self, layer, x, cache, memory):
        """Return the Stream behind a layer for the Stream x."""
        own, forward = layer.attention, layer.feed_forward
        norms = iter(layer.norms)
        heads, kv_heads, size = own.heads, own.kv_heads, own.head_dim

        def entering():
            """Return x with the norm that the next linear layer has before it."""
            return Stream(x.states, next(norms), x.statistics) if layer.pre_norm else x

        def enter(linear):
            return self._linear(entering(), linear)

        def leave(inside, linear):
            inside = Stream(inside.reshape(self.rows, -1))
            states, statistics = self._linear(inside, linear, residual=x)
            return Stream(states, None if layer.pre_norm else next(norms), statistics)

        counts = heads, kv_heads, kv_heads
        q, k, v = map(raw, split_heads(enter(own.qkv).reshape(self.rows, 1, -1), counts, size))
        attended = cache.attend(q, k, v, settled=True, listed=self.listed)  # behind row_linear
        x = leave(raw(attended), own.out)
        if memory is not None:
            cross = layer.cross_attention
            x = leave(self._remember(entering(), cross, *memory), cross.out)
        return leave(enter(forward.inner), forward.out)

    def _remember(self, x, cross, keys, values):
        """Return the attention of a layer's queries over the memory of each sentence."""
        sentences, room = keys.shape[:2]
        if blocks := blocks_of(x.states, sentences, cross, keys):
            return projected_attention(
                x.states, *self._folded_into(cross.q, x), keys, values, self.lengths,
                eps=_eps(x.norm), blocks=blocks,
            )  # fmt: skip
        q = self._linear(x, cross.q).reshape(sentences, -1, cross.heads, cross.head_dim)
        return raw(memory_attention(q, keys, values, self.lengths))

    def _folded_into(self, linear, x):
        """Return weight, bias, ``folded`` and statistics for ``linear`` of the Stream x."""
        if x.norm is None:
            return raw(linear.weight), None if linear.bias is None else raw(linear.bias), None, None
        product, folded = self._folded[id(linear)]
        return product, None, folded, x.statistics

    def _linear(self, x, linear, residual=None):
        """Return ``activation(x weight^T + bias)``; with a residual the sum, and its statistics."""
        weight, bias, folded, known = self._folded_into(linear, x)
        norm, gain, shift = x.norm, None, None
        if residual is not None and residual.norm is not None:
            norm, known = residual.norm, residual.statistics
            gain, shift = norm.weight, norm.bias
        gain, shift = (None if a is None else raw(a) for a in (gain, shift))
        out, found = row_linear(
            x.states, weight, bias, folded=folded, statistics=known, gain=gain, shift=shift,
            residual=None if residual is None else residual.states, activation=linear.activation,
            eps=_eps(norm),
        )  # fmt: skip
        return out if residual is None else (out, found)


def _listed(state, model, like):
    """Return new arrays for what ``row_embedding`` lists, or None.

    Attention reads it beside the row_linear before it, which has waited with more than EAGER rows.
    """
    grouped = any(x.attention.heads != x.attention.kv_heads for x in layers_of(model))
    if grouped or not 1 < state.beam <= LISTED_BEAMS or state.sentences * state.beam <= EAGER:
        return None
    rows = arrays.zeros(like, (state.sentences, state.beam * state.room), np.uint32)
    return rows, arrays.zeros(like, state.sentences, np.int32)


def _eps(norm):
    return 0.0 if norm is None else norm.eps


def row_embedding(
    tokens: Any, positions: Any, weight: Any, position_weight: Any = None, *, scale: float = 1.0,
    used: int | None = None, measured: bool = True, beams: Any = None, listed: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return ``scale * weight[tokens] + position_weight[positions]`` and its statistics, or None.

    ``tokens``, ``positions``: int32 (rows,); the tables have rows of the same width, a multiple of
    DEPTH up to 768; ``used``: how many of ``weight`` are tokens. ``measured``: whether to return
    statistics, as ``row_linear`` has them; of one part. ``listed``: None, or where to list the rows
    of caches that ``beams``, a Beams, see in this step: (rows, counts) as ``step_attention`` takes
    them.
    """
    rows, width = len(tokens), weight.shape[1]
    out = arrays.empty(weight, (rows, width))
    found = arrays.empty(weight, (rows, 1, 2), np.float32) if measured else None
    tables = [table for table in (weight, position_weight) if table is not None]
    assert all(x.strides[1] == x.itemsize and (x.strides[0] | x.data.ptr) % 16 == 0 for x in tables)
    steps = [table.strides[0] // table.itemsize for table in tables]
    flags = [arrays.index_flag(weight, f"embedding: {name}") for name in ("tokens", "positions")]
    constants = {"scalar": ctype(weight.dtype), "PACKS": -(-width // EMBED_COLUMNS)}
    constants |= {"POSITIONS": position_weight is not None, "BEAMS": listed is not None}
    blocks, lists = -(-rows // EMBED_WARPS), (None, None, None, None, 0, 0)
    if listed is not None:
        blocks += beams.sentences
        lists = beams.key_counts, beams.slots, *listed, beams.beam, beams.room
    kernel(EMBED, "row_embedding", **constants)(
        (blocks,), (32 * EMBED_WARPS,), tokens, positions, weight,
        position_weight, out, found, *lists, rows, width, len(weight) if used is None else used,
        0 if position_weight is None else len(position_weight), steps[0], steps[-1], scale, *flags,
    )  # fmt: skip
    return out, found


def row_linear(
    x: Any, weight: Any, bias: Any = None, *, folded: Any = None, statistics: Any = None,
    residual: Any = None, gain: Any = None, shift: Any = None, activation: str | None = None,
    eps: float = 1e-5,
) -> tuple[Any, Any]:  # fmt: skip
    """Return ``residual + activation(norm(x) weight^T + bias)`` and its statistics, or None.

    ``x``: (rows, inputs); ``weight``: (outputs, inputs), widths multiples of DEPTH; ``residual``:
    (rows, outputs). ``statistics``: float32 (rows, parts, 2), mean and sum of squared distances
    from it of equal parts of a row; of x with ``folded``, as ``fold_norm`` makes it, else of the
    residual, whose norm has ``gain`` and ``shift``. Statistics come with a residual.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    tile = tile_of(rows, outputs, inputs, gpu(x.device.id).multiprocessors)
    out, found = arrays.empty(x, (rows, outputs)), None
    if residual is not None:
        found = arrays.empty(x, (rows, outputs // tile.outputs, 2), np.float32)
    boxes = (x, ROWS), (weight, tile.outputs // tile.share)
    maps = [tensor_map(a[None, :, None], box) for a, box in boxes]
    constants = {"OUTPUTS": tile.outputs, "SPLITS": tile.splits, "STAGES": tile.stages}
    direct = residual is None and tile.splits == 1 and tile.outputs > 32
    constants |= {"SHARE": tile.share, "DIRECT": direct}
    tiles, down = outputs // tile.outputs, -(-rows // (ROWS * tile.share))
    kernel(FILE, "row_linear", scalar=ctype(x.dtype), **constants)(
        (tile.splits * tile.share * tiles, down), (THREADS,), *maps, bias, folded,
        statistics, residual, gain, shift, out, found, rows, outputs, inputs // tile.splits,
        1 if statistics is None else statistics.shape[1], outputs if folded is None else inputs,
        ACTIVATIONS[activation], eps, shared_bytes=shared_bytes(tile),
    )  # fmt: skip
    return out, found
