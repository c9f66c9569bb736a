from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.arrays import rows_refusal
from gpuattn.cuda.tensor_maps import refusal


def on_a_gpu(x, at=0):
    """Return an object with the attributes of a CuPy array that are read, at an address."""
    names = "shape", "strides", "size", "itemsize", "dtype"
    return SimpleNamespace(
        data=SimpleNamespace(ptr=at), **{name: getattr(x, name) for name in names}
    )


BASE = np.zeros((2, 5, 4, 64), np.float16)
TAKEN = {
    "contiguous": BASE, "head first": BASE.transpose(0, 2, 1, 3), "half": BASE[..., :32],
    "packed": BASE[0], "one token": BASE[:, :1], "empty": BASE[:0],
    "empty, odd": BASE[:0, ..., ::2],
}  # fmt: skip
PASSED_OVER = {
    "head size": (BASE[..., :12], "the head size of q is 12, the kernel takes multiples of 8"),
    "columns apart": (BASE[..., ::2], "the head axis of q is not contiguous"),
    "odd rows": (np.zeros((2, 5, 4, 68), "e")[..., :64], "rows of q do not start at multiples of"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_rows_of_16_bytes(name):
    x = on_a_gpu(TAKEN[name])
    assert rows_refusal(x, "q") is None
    assert refusal(x, "q") is None


@pytest.mark.parametrize("name", PASSED_OVER)
def test_rows_that_cannot_be_read_16_bytes_at_a_time(name):
    x, sentence = PASSED_OVER[name]
    assert sentence in rows_refusal(on_a_gpu(x), "q")
    assert sentence in refusal(on_a_gpu(x), "q")
    assert "multiples of 16 bytes" in rows_refusal(on_a_gpu(BASE, at=8), "q")


def test_a_row_of_float32_is_a_multiple_of_four():
    assert rows_refusal(on_a_gpu(np.zeros((2, 3, 1, 12), "f")), "q") is None
    assert "10, the kernel takes multiples of 4" in rows_refusal(
        on_a_gpu(np.zeros((3, 10), "f")), "q"
    )


def test_tensor_maps_need_positive_strides_and_16_bits():
    for x in (BASE[:, ::-1], np.broadcast_to(BASE[:1], BASE.shape)):
        assert rows_refusal(on_a_gpu(x), "q") is None
        assert "repeats rows or goes backwards" in refusal(on_a_gpu(x), "q")
    assert "q is float32" in refusal(on_a_gpu(BASE.astype("f")), "q")
