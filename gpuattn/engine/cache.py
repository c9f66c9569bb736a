"""Keys and values of the tokens so far, where the device alone knows how many there are."""

from typing import Any, NamedTuple

from gpuattn import arrays
from gpuattn.autodiff.tape import raw
from gpuattn.ops.attention.step_attention import memory_attention, step_attention
from gpuattn.ops.attention.store_rows import store_rows
from gpuattn.ops.sampling.beam_update import Beams
from gpuattn.ops.sampling.text_update import Texts


class DeviceCache:
    """The cache of one layer for ``nn.MultiHeadAttention``: row b * K + i is beam i of sentence b.

    Rows stay where they are; ``beams.slots`` says whose keys a beam reads. Positions and lengths
    are read from ``beams``, so that a captured step is the same launches at every position.
    """

    def __init__(self, like: Any, beams: Beams | Texts, kv_heads: int, head_dim: int) -> None:
        shape = (beams.sentences * beams.beam, beams.room, kv_heads, head_dim)
        self.k, self.v = arrays.zeros(like, shape), arrays.zeros(like, shape)
        self.beams = beams

    def decodes(self, q: Any) -> bool:
        """Return True: ``attend`` takes the queries of a step."""
        return True

    def attend(self, q: Any, k: Any, v: Any, **known: Any) -> Any:
        """Store k and v (rows, 1, Hk, D) behind the others; return the attention of ``q``.

        ``known``: ``settled`` and ``listed`` of ``step_attention``.
        """
        counts = self.beams.key_counts.ravel()
        return step_attention(q, k, v, self.k, self.v, counts, self.beams.slots, **known)


class DeviceMemory(NamedTuple):
    """Keys and values (N, S, Hk, D) of the memories of N sentences, and how many count, int32 (N,).

    For cross-attention in a step, whose projection of queries is a launch behind all that wrote
    them.
    """

    k: Any
    v: Any
    lengths: Any

    def attend(self, q: Any) -> Any:
        """Return the attention of queries (N * K, 1, H, D), K for each sentence, in their shape."""
        grouped = raw(q).reshape(len(self.k), -1, *q.shape[2:])
        return raw(memory_attention(grouped, *self)).reshape(q.shape)


class PromptCache:
    """A cache while the keys of prompts are computed, whose texts begin in some rows.

    ``starts``: their first tokens among those of all prompts, int32 (n,), and ``places``: the rows,
    int32 (n,), both where kernels read them; the same entry may come twice.
    """

    def __init__(self, cache: Any, starts: Any, places: Any) -> None:
        self.cache, self.starts, self.places = cache, starts, places

    def decodes(self, q: Any) -> bool:
        """Return False: queries see the tokens of their own call alone."""
        return False

    def extend(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Store k and v (prompts, T, Hk, D) as the first ones; return them."""
        self.store(k, v)
        return k, v

    def store(self, k: Any, v: Any) -> None:
        """Store k and v (prompts, T, Hk, D) as the first ones."""
        packed = [raw(x).reshape(-1, *x.shape[2:]) for x in (k, v)]
        tables = self.cache.k, self.cache.v
        store_rows(list(zip(tables, packed, strict=True)), self.starts, self.places, k.shape[1])
