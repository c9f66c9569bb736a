"""Gradients of the parts of an array, written side by side as the parts lie in it.

The queries, keys and values of a layer are parts of one matmul's result. Their gradients, written
to their parts of one array, are the gradient of that matmul without a copy.
"""

from collections.abc import Collection
from typing import Any

from gpuattn.typing import Array


def target_like(slot: tuple[Array, bool] | None, x: Array) -> Array | None:
    """Return the array of a slot of ``into`` if a gradient like ``x`` can be written to it."""
    if slot is None or slot[1]:
        return None
    target = slot[0]
    return target if (target.dtype, target.shape) == (x.dtype, x.shape) else None


class GradientLayout:
    """The arrays that gradients are written to, in one backward pass.

    An array is handed out once: a second gradient of the same part gets its own array, and the sum
    is copied. ``kept``: keys (``record.key``) of Boxes whose gradients the caller asked for, or
    where the backward pass ends: they are never written in place, as others use them.
    """

    def __init__(self, kept: Collection = ()) -> None:
        self.kept = kept
        # node -> arrays for its inputs, arrays for its outputs: see impls.Fusion
        self.known: dict[Any, tuple[list, list]] = {}

    def take(self, x: Any) -> Array | None:
        """Return the array for the gradient of a Box ``x``, or None."""
        node: Any = getattr(x, "node", None)
        layout = node and node.impl.fusion.layout
        if not layout or (node, x.index) in self.kept:
            return None
        if node not in self.known:
            into = [self.take(part) for part in node.inputs]
            self.known[node] = layout(node.saved, x.data, into, **node.params)
        outs = self.known[node][1]
        target, outs[x.index] = outs[x.index], None
        return target

    def into(self, node: Any) -> list[Array | None]:
        """Return the array, or None, for each input of the node whose backward runs next."""
        if node in self.known:
            return self.known.pop(node)[0]
        writes = node.impl.fusion.writes_into_layout
        return [self.take(x) if writes else None for x in node.inputs]
