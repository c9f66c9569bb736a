"""Which arrays are taken, where they live, and what is refused."""

import numpy as np
import pytest

from gpuattn import arrays, get_xp, to_cpu, to_gpu
from gpuattn.errors import DeviceMissingError


def test_numpy_arrays_pass_untouched():
    x = np.ones(3)
    assert arrays.as_array(x, "f", "x") is x
    assert get_xp(x) is np
    assert to_cpu(x) is x


def test_numpy_scalars_become_arrays():
    assert arrays.as_array(np.float32(2), "f", "x").shape == ()


@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, "abc", None], ids=type)
def test_lists_and_numbers_are_refused(value):
    with pytest.raises(TypeError, match=r"f: x is a \w+; accepted: .*DLPack.*numpy\.asarray\(x\)"):
        arrays.as_array(value, "f", "x")


class OnlyDlpack:
    """An array of another library, as far as we can see."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_is_taken_without_a_copy():
    x = np.ones(3)
    assert np.shares_memory(arrays.as_array(OnlyDlpack(x), "f", "x"), x)


def test_dlpack_on_a_gpu_is_taken_without_a_copy(gpu):
    x = gpu.ones(3)
    assert arrays.as_array(OnlyDlpack(x), "f", "x").data.ptr == x.data.ptr


class OnlyCudaInterface:
    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


def test_cuda_array_interface_is_taken_without_a_copy(gpu):
    x = gpu.ones(3)
    assert arrays.as_array(OnlyCudaInterface(x), "f", "x").data.ptr == x.data.ptr


def test_backends_do_not_mix(gpu):
    with pytest.raises(TypeError, match="b on the GPU but a in host memory"):
        arrays.check_together("f", a=np.ones(2), b=gpu.ones(2), c=None)


def test_float_dtypes_must_agree():
    half, single = np.ones(2, np.float16), np.ones(2, np.float32)
    with pytest.raises(TypeError, match="a is float16 but b is float32"):
        arrays.check_floats("f", a=half, b=single)
    for dtype in (np.int32, bool, np.complex64, object):
        with pytest.raises(TypeError, match=r"a\.dtype is .*; accepted: float32"):
            arrays.check_floats("f", a=np.ones(2).astype(dtype))


def test_accumulation_dtypes():
    assert arrays.wide(np.float64) == np.float64
    for dtype in (np.float32, np.float16, arrays.BFLOAT16):
        assert arrays.wide(dtype) == np.float32


def test_no_gpu_is_said_with_a_remedy(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceMissingError, match=r"pip install 'gpuattn\[cuda13x\]'"):
        to_gpu(np.ones(2))


def test_round_trip(gpu):
    x = np.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(to_cpu(to_gpu(x)), x)
