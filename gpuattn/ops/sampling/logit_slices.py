"""How rows of logits are split into slices, one for each thread block.

They depend on the row alone, so that a row gives the same bits in any batch. See
``rawkernels/sampling/logit_slice.cuh``.
"""

BLOCK = 256  # threads
SLICE = 2048  # 16-byte vectors of a block, at most


def slices(vocab_size: int, itemsize: int) -> tuple[int, int]:
    """Return (slices of a row, 16-byte vectors of a slice)."""
    vectors = -(-vocab_size * itemsize // 16)
    parts = -(-vectors // SLICE)
    return parts, -(-vectors // parts)
