"""Where the gradients of the parts of an array are written: side by side, as the parts lie.

The queries, keys and values of a layer are parts of one product. Their gradients, written where
they belong in one array, are the gradient of that product without a copy.
"""


def place_like(slot, x):
    """Return the place in a slot of ``into`` if a gradient like ``x`` may be written there."""
    place, add = slot or (None, True)
    return None if add or (place.dtype, place.shape) != (x.dtype, x.shape) else place


class Places:
    """The arrays that gradients go into, in one walk of the tape.

    A place is given away once: whoever comes second brings an array of its own, and what was added
    up is copied. ``kept``: keys (``tape.key``) of Boxes whose gradients are asked for, or where the
    walk ends: they have no place, as others work on in it.
    """

    def __init__(self, kept=()):
        self.kept = kept
        self.known = {}  # node -> arrays for its inputs, arrays for its outputs: see impls.Impl

    def take(self, x):
        """Return the array for the gradient of a Box ``x``, or None."""
        node = getattr(x, "node", None)
        if node is None or node.impl.places is None or (node, x.index) in self.kept:
            return None
        if node not in self.known:
            into = [self.take(part) for part in node.inputs]
            self.known[node] = node.impl.places(node.saved, x.data, into, **node.params)
        outs = self.known[node][1]
        place, outs[x.index] = outs[x.index], None
        return place

    def into(self, node):
        """Return the array, or None, for each input of a node that is walked now."""
        if node in self.known:
            return self.known.pop(node)[0]
        return [self.take(x) if node.impl.fills_places else None for x in node.inputs]
