"""Keys and values of the tokens so far, where the device alone knows how many there are."""

from typing import Any

from gpuattn import arrays
from gpuattn.autodiff.tape import raw
from gpuattn.ops.attention.step_attention import step_attention
from gpuattn.ops.sampling.beam_update import Beams
from gpuattn.ops.sampling.text_update import Texts


class DeviceCache:
    """The cache of one layer for ``nn.MultiHeadAttention``: row b * K + i is beam i of sentence b.

    Rows stay where they are; ``beams.slots`` says whose keys a beam reads. Positions and lengths
    are read from ``beams``, so that a captured step is the same launches at every position.
    Several tokens at a time begin the texts.
    """

    def __init__(self, like: Any, beams: Beams | Texts, kv_heads: int, head_dim: int) -> None:
        shape = (beams.sentences * beams.beam, beams.room, kv_heads, head_dim)
        self.k, self.v = arrays.zeros(like, shape), arrays.zeros(like, shape)
        self.beams = beams

    def decodes(self, q: Any) -> bool:
        """Return whether ``attend`` accepts the queries (rows, T, H, D): those of a step."""
        return q.shape[1] == 1

    def extend(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Store k and v (rows, T, Hk, D) as the first ones; return them."""
        for store, new in ((self.k, k), (self.v, v)):
            store[:, : new.shape[1]] = raw(new)
        return k, v

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Store k and v (rows, 1, Hk, D) behind the others; return the attention of ``q``."""
        counts = self.beams.key_counts.ravel()
        return step_attention(q, k, v, self.k, self.v, counts, self.beams.slots)
