"""Which steps are one launch, a ``DecoderStep``, and of what form."""

from collections.abc import Sequence
from typing import Any

from gpuattn.cuda.gpu import dotted, gpu
from gpuattn.cuda.kernels import kernel_refusal, serves
from gpuattn.engine.decoder_phases import ACTIVATIONS

FILE = "decoder/decoder_step.cu"
DEPTH = 32  # widths are multiples of it
GROUPS = {32: (8, 16, 32), 64: (8, 16, 32), 128: (8, 16)}  # head size -> rows of a group
MOST_ROWS, MOST_KEYS = 64, 8192  # of a step; beyond, kernels of an op each are faster
SHARED_ROOM = 256  # keys of a text from which blocks share them
HEAD_BEAMS, HEAD_WIDTH, HEAD_SIZES = 8, 512, (32, 64)  # limits of HEAD in the kernel
HEAD_ROWS = 32  # of a step with HEAD that is taken where RowStep could be; predicted, see the notes
BLOCKS_MULTIPLE = 4  # so that all work of a block is of the same group of rows


def refusal(model: Any, rows: int, room: int) -> str | None:
    """Return why a step of ``rows`` texts of up to ``room`` keys is not one launch, or None."""
    if reason := weights_refusal(model, FILE):
        return reason
    if rows > MOST_ROWS or rows * room > MOST_KEYS:
        got = f"there are {rows} rows of up to {room} keys"
        return f"{got}; up to {MOST_ROWS} rows and {MOST_KEYS} keys in all one launch is faster"
    for layer in layers_of(model):
        own, forward = layer.attention, layer.feed_forward
        if own.rotary or own.normalises:
            return "queries and keys are rotated or normalised"
        if own.head_dim not in GROUPS:
            return f"the head size is {own.head_dim}, the kernel takes 32, 64 or 128"
        if forward.unfused is not None or forward.inner.activation not in ACTIVATIONS:
            return "the activation is not ReLU or the tanh form of GELU"
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


def layers_of(model: Any) -> Sequence[Any]:
    """Return the layers that a step runs."""
    return model.decoder if hasattr(model, "decoder") else model.layers


def heads_refusal(model: Any, state: Any, memory: Sequence[Any] | None) -> str | None:
    """Return why a step that is one launch has no HEAD phases, where a block has a head, or None.

    Without them a layer of a translation model has eight phases, not five.
    """
    if memory is None:
        return "it is a language model, whose layers would have four phases, not five"
    first, sentences, beam = layers_of(model)[0], state.sentences, state.beam
    rooms, blocks = (state.room, memory[0][0].shape[1]), blocks_of(model)
    inputs, head_dim = first.attention.qkv.weight.shape[1], first.attention.head_dim
    if inputs > HEAD_WIDTH:
        return f"heads of width {inputs} have too many weights for a block each"
    if head_dim not in HEAD_SIZES:
        return f"the head size is {head_dim}, a block has room for 32 or 64"
    if max(rooms) > SHARED_ROOM:
        return f"{max(rooms)} keys are too many for a block"
    if beam > HEAD_BEAMS:
        return f"there are {beam} beams, a block takes up to {HEAD_BEAMS}"
    for layer in layers_of(model):
        for attention in (layer.attention, layer.cross_attention):
            if attention.kv_heads != attention.heads:
                return "heads share keys"
            if attention.heads * sentences > blocks:
                return f"there are {attention.heads * sentences} heads of sentences"
    return None


def blocks_of(model: Any) -> int:
    """Return how many blocks a step of ``model`` has."""
    device = model.parameters()[0].data.device.id
    return gpu(device).multiprocessors // BLOCKS_MULTIPLE * BLOCKS_MULTIPLE


def groups_of(rows: int, head_dim: int) -> tuple[int, int]:
    """Return the rows of a group, and the logarithm of the number of groups."""
    sizes = GROUPS[head_dim]
    group = next((size for size in sizes if size >= rows), sizes[-1])
    return group, (-(-rows // group) - 1).bit_length()
