"""Attention over the memories of sentences, and when the weights of a step are packed."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.engine.cache import DeviceMemory
from gpuattn.engine.steps.packed import Packed
from gpuattn.ops.attention.flash_attention import flash_attention


def check_memory(xp, dtype, tolerance, sentences, beam, room):
    """Compare with float32; what lies past the end of a memory is not read."""
    rng = np.random.default_rng(sentences)
    q = rng.standard_normal((sentences * beam, 1, 4, 64)).astype(dtype)
    k, v = rng.standard_normal((2, sentences, room, 2, 64)).astype(dtype)
    lengths = rng.integers(1, room + 1, sentences).astype(np.int32)
    grouped, *wide = (x.astype(np.float32) for x in (q.reshape(sentences, beam, 4, 64), k, v))
    want = flash_attention(grouped, *wide, key_lengths=lengths).reshape(q.shape)
    for x in k, v:
        x[np.arange(room) >= lengths[:, None]] = np.nan
    found = DeviceMemory(*map(xp.asarray, (k, v, lengths))).attend(xp.asarray(q))
    found = to_cpu(found).astype(np.float32)
    np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("beam", [1, 3])
def test_memory(beam):
    check_memory(np, np.float32, 1e-5, sentences=4, beam=beam, room=9)


@pytest.mark.parametrize("room", [24, 100])
@pytest.mark.parametrize("sentences", [3, 900, 1700])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_memory_on_a_gpu(gpu, dtype, sentences, room):
    """With four, two and one warps of a sentence and head."""
    dtype, tolerance = {
        "float16": (np.float16, 2e-3), "bfloat16": (BFLOAT16, 2e-2), "float32": (np.float32, 1e-4),
    }[dtype]  # fmt: skip
    check_memory(gpu, dtype, tolerance, sentences, 4, room)


def test_weights_are_packed_once_after_each_change():
    Packed().prepare()  # a search whose step is op by op
    search, packed = Packed(), []
    search.decoder = SimpleNamespace(pack=lambda: packed.append(1))
    for changed, expected in ((True, 1), (True, 2), (False, 2), (True, 3)):
        search.refresh(changed=changed)
        search.prepare()
        search.prepare()
        assert len(packed) == expected
    search.refresh(changed=True)
    search.refresh(changed=False)  # of the call before nothing was packed
    search.prepare()
    assert len(packed) == 4
