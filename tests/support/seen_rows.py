"""The rows of a cache that beams see, as row_embedding.cu lists them, by NumPy."""

import numpy as np


def list_rows(slots, old_keys):
    """Return ``listed`` of ``step_attention`` for ``slots``, of whose keys the first ``old_keys``
    count. Entries past their number are undefined."""
    sentences, beam, room = slots.shape
    each = np.arange(beam)
    same = slots[:, :, None] == slots[:, None]  # (S, K, K, room)
    earlier = (same & (each[:, None] > each)[:, :, None]).any(2)
    listed = ~earlier & (np.arange(room) < old_keys[:, None, None])  # by the first that sees it
    bits = (same << each[:, None]).sum(2)
    entries = (bits << 24) + slots * np.int64(room) + np.arange(room)
    listed, entries = (x.swapaxes(1, 2).reshape(sentences, -1) for x in (listed, entries))
    order = np.argsort(~listed * (beam * room) + np.arange(beam * room), axis=-1)
    found = np.take_along_axis(entries, order, -1)
    return found.astype(np.uint32), listed.sum(1).astype(np.int32)
