"""What runs of tests learn from."""

import numpy as np
import pytest


@pytest.fixture
def reversed_text(tmp_path):
    """Return the options of 80 lines of single letters, and the same lines from right to left."""
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(1, 9))) for _ in range(80)]
    (tmp_path / "src").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "tgt").write_text("".join(f"{line[::-1]}\n" for line in lines))
    return {"source": str(tmp_path / "src"), "target": str(tmp_path / "tgt")}
