"""CuPy for captured functions, or a stand-in."""

import fake_graphs
import pytest

from gpuattn import rng as numbers


@pytest.fixture(params=["fake", pytest.param("cupy", marks=pytest.mark.gpu)])
def cp(request):
    """CuPy, or a stand-in whose graphs compute with NumPy; without a manual seed."""
    with numbers.replay(None):
        if request.param == "cupy":
            yield request.getfixturevalue("gpu")
            return
        with fake_graphs.graphs_on("9.0") as cupy:
            yield cupy
