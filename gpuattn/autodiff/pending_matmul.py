"""Gradients that are still products: the kernel of one op goes on from the product of another.

The input of a linear layer often comes from one op alone, which would read its gradient as soon as
it is written: a norm, or an activation. ``impls.Impl`` says how two such ops meet.
"""

from collections import Counter
from typing import Any, NamedTuple

from gpuattn.autodiff.hooks import is_watched
from gpuattn.gemm.matmul import matmul


class Product(NamedTuple):
    """``dz @ weight`` in ``shape`` (..., in). ``dz``: (rows, out). ``weight``: (out, in)."""

    dz: Any
    weight: Any
    shape: tuple[int, ...]

    @property
    def dtype(self):
        return self.dz.dtype

    def finish(self):
        """Return the array."""
        return matmul(self.dz, self.weight).reshape(self.shape)


class Folds:
    """Who may go on from a product, in one walk of the tape: who is owed no other gradient.

    ``kept``: as of ``Places``.
    """

    def __init__(self, nodes, kept):
        self.owing = Counter(maker for node in nodes for maker in _takers(node))
        self.kept = kept

    def walked(self, node):
        """Note that ``node`` owes nothing any more."""
        self.owing.subtract(_takers(node))

    def offer(self, node, pending, pass_on):
        """Return {"fold": what ``impls.Impl`` says} if the rule of ``node`` wants it, else {}.

        ``pending``: node -> [gradient of each output]; ``pass_on(node, grads)`` walks a node. What
        is timed by itself runs by itself: there is no fold while ops are watched.
        """
        if not node.impl.offers_product:
            return {}
        box = node.inputs[0]
        maker = getattr(box, "node", None)
        closed = self.owing[maker] != 1 or (maker, box.index) in self.kept
        if closed or is_watched():
            return {"fold": None}

        def fold(product):
            grads = pending.get(maker, [None] * maker.outputs)
            takes, params = maker.impl.takes_product, {"needs": maker.needs, **maker.params}
            if grads[box.index] is not None or not takes(maker.saved, product, box.index, **params):
                return False
            pending.pop(maker, None)
            grads[box.index] = product
            pass_on(maker, grads)
            return True

        return {"fold": fold}


def _takers(node):
    """Return the makers of a node's inputs that take products, one for each such input."""
    makers = [getattr(x, "node", None) for x in node.inputs]
    return [maker for maker in makers if maker is not None and maker.impl.takes_product]
