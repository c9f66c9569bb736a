"""Gradients that are matmuls not yet computed, and the ops that can fuse with one.

The input of a linear layer often comes from one op alone, such as a norm or an activation, which
would read its gradient as soon as it is written. A kernel that computes both saves that round trip
through memory. ``impls.Fusion`` says how two such ops meet.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from gpuattn.autodiff.hooks import is_hooked
from gpuattn.gemm.matmul import matmul
from gpuattn.typing import Array, DType


class PendingMatmul(NamedTuple):
    """``dz @ weight`` in ``shape`` (..., in). ``dz``: (rows, out). ``weight``: (out, in)."""

    dz: Array
    weight: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        return self.dz.dtype

    def compute(self) -> Array:
        """Return the array."""
        return matmul(self.dz, self.weight).reshape(self.shape)


class Consumers:
    """The ops that can fuse with a pending matmul, in one backward pass.

    Only an op that gets no other gradient can: ``owing`` counts the gradients still to come.
    ``kept``: as in ``GradientLayout``.
    """

    def __init__(self, nodes: Iterable, kept: Collection) -> None:
        self.owing: dict[Any, int] = {}
        for node in nodes:
            for maker in _takers(node):
                self.owing[maker] = self.owing.get(maker, 0) + 1
        self.kept = kept

    def done(self, node: Any) -> None:
        """Note that the backward of ``node`` ran, or that it gives no gradient."""
        if self.owing:
            for maker in _takers(node):
                self.owing[maker] -= 1

    def offer(self, node: Any, pending: dict[Any, list], propagate: Callable) -> dict[str, Any]:
        """Return {"fold": function of ``impls.Fusion``} if the backward of ``node`` takes it.

        ``pending``: node -> [gradients that its backward takes]; ``propagate(node, grads)`` runs a
        backward. Nothing is fused while a hook observes ops: each is then timed by itself.
        """
        if not node.impl.fusion.offers_matmul:
            return {}
        box = node.inputs[0]
        maker = getattr(box, "node", None)
        closed = self.owing.get(maker) != 1 or (maker, box.index) in self.kept
        if closed or is_hooked():
            return {"fold": None}

        def fold(matmul):
            grads = pending.get(maker, maker.no_grads())
            takes, params = maker.impl.fusion.takes_matmul, {"needs": maker.needs, **maker.params}
            if grads[box.index] is not None or not takes(maker.saved, matmul, box.index, **params):
                return False
            pending.pop(maker, None)
            grads[box.index] = matmul
            propagate(maker, grads)
            return True

        return {"fold": fold}


def _takers(node):
    """Return the makers of a node's inputs that take pending matmuls, one for each such input."""
    makers = [getattr(x, "node", None) for x in node.inputs]
    return [maker for maker in makers if maker is not None and maker.impl.fusion.takes_matmul]
