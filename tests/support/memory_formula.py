"""The formula of attention over a memory of each sentence."""

import numpy as np


def attention(queries, keys, values, lengths):
    """Return the attention of queries (N, K, H, D) over the first ``lengths`` of each memory."""
    out = np.empty(queries.shape)
    for n, length in enumerate(lengths):
        logits = np.einsum("khd,shd->hks", queries[n], keys[n, :length]) * keys.shape[-1] ** -0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[n] = np.einsum("hks,shd->khd", weights, values[n, :length])
    return out
