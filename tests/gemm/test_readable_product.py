"""The matrix product to read: the same numbers, and fewer reads with shared tiles."""

import numpy as np
import pytest

from gpuattn.arrays import to_cpu


def check(xp, M, K, N):
    from gpuattn.numbakernels.matmul import TILE, product

    rng = np.random.default_rng(0)
    a, b = (xp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((M, K), (K, N)))
    want, counts = to_cpu(a) @ to_cpu(b), {}
    for shared in (False, True):
        out, counts[shared] = product(a, b, shared=shared)
        np.testing.assert_allclose(to_cpu(out), want, atol=1e-4)
    blocks = -(-N // TILE), -(-M // TILE)
    assert counts[False] == 2 * M * N * K
    assert counts[True] == M * K * blocks[0] + K * N * blocks[1]
    with pytest.raises(ValueError, match="accepted"):
        product(a, b[1:])


@pytest.mark.simulator
@pytest.mark.parametrize("M, K, N", [(16, 16, 16), (5, 20, 18)])
def test_in_the_simulator(M, K, N):
    check(np, M, K, N)


def test_on_the_gpu(gpu):
    pytest.importorskip("numba")
    check(gpu, 100, 200, 300)
