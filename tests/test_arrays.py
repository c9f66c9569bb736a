"""Which arrays are accepted, on which device they are, and what is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuattn import arrays, get_xp, to_cpu, to_gpu
from gpuattn.errors import DeviceMissingError


def test_numpy_arrays_are_returned_as_they_are():
    x = np.ones(3)
    assert arrays.as_array(x, "f", "x") is x
    assert get_xp(x) is np
    assert to_cpu(x) is x


def test_numpy_scalars_become_arrays():
    assert arrays.as_array(np.float32(2), "f", "x").shape == ()


@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, "abc"], ids=type)
def test_lists_and_numbers_are_refused(value):
    with pytest.raises(TypeError, match=r"f: x is a \w+; accepted: .*DLPack.*numpy\.asarray\(x\)"):
        arrays.as_array(value, "f", "x")


def test_none_is_refused():
    with pytest.raises(TypeError, match=r"f: x is None; accepted: .*__cuda_array_interface__$"):
        arrays.as_array(None, "f", "x")


def test_masked_arrays_and_matrices_are_refused():
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(TypeError, match=r"f: x is a MaskedArray; .*Try x\.filled\(0\)"):
        arrays.as_array(masked, "f", "x")
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0]])
    with pytest.raises(TypeError, match=r"f: x is a matrix; .*Try numpy\.asarray\(x\)"):
        arrays.as_array(matrix, "f", "x")


def test_memory_mapped_files_are_accepted(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=3)
    assert arrays.as_array(x, "f", "x") is x


class OnlyDlpack:
    """An array of another library: it has DLPack's methods alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_is_accepted_without_a_copy():
    x = np.ones(3)
    assert np.shares_memory(arrays.as_array(OnlyDlpack(x), "f", "x"), x)


def test_a_tensor_that_requires_grad_is_refused():
    tensor = OnlyDlpack(np.ones(3))
    tensor.requires_grad = True
    with pytest.raises(TypeError, match=r"OnlyDlpack that requires a gradient.*x\.detach\(\)"):
        arrays.as_array(tensor, "f", "x")


def test_an_array_that_dlpack_cannot_export_is_refused():
    with pytest.raises(TypeError, match=r"f: x is an OnlyDlpack that cannot be exported \(.+\);"):
        arrays.as_array(OnlyDlpack(np.ones(3, arrays.BFLOAT16)), "f", "x")


def test_dlpack_on_a_gpu_is_accepted_without_a_copy(gpu):
    x = gpu.ones(3)
    assert arrays.as_array(OnlyDlpack(x), "f", "x").data.ptr == x.data.ptr


class OnlyCudaInterface:
    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


def test_cuda_array_interface_is_accepted_without_a_copy(gpu):
    x = gpu.ones(3)
    assert arrays.as_array(OnlyCudaInterface(x), "f", "x").data.ptr == x.data.ptr


def test_arrays_on_two_devices_are_refused(gpu):
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


def test_for_each_calls_once_for_every_item():
    for count in (0, 1, 2, 100):
        seen = []
        arrays.for_each(seen.append, range(count))
        assert sorted(seen) == list(range(count))


def test_for_each_uses_several_threads_and_can_be_nested(monkeypatch):
    helpers = 3, ThreadPoolExecutor(3)
    monkeypatch.setattr(arrays, "_helpers", lambda: helpers)
    together = threading.Barrier(4, timeout=20)
    arrays.for_each(lambda _: together.wait(), range(4))  # hangs unless four threads run
    seen = []
    arrays.for_each(lambda i: arrays.for_each(lambda j: seen.append((i, j)), range(8)), range(8))
    assert len(set(seen)) == 64


@pytest.mark.parametrize("in_caller", [True, False], ids=["the caller's item", "a helper's item"])
def test_for_each_raises_what_an_item_raised(monkeypatch, in_caller):
    helpers = 1, ThreadPoolExecutor(1)
    monkeypatch.setattr(arrays, "_helpers", lambda: helpers)
    caller, both = threading.get_ident(), threading.Barrier(2, timeout=20)

    def fail(_):
        both.wait()
        if (threading.get_ident() == caller) is in_caller:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        arrays.for_each(fail, range(2))


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceMissingError, match=r"pip install 'gpuattn\[cuda13x\]'"):
        to_gpu(np.ones(2))


def test_to_gpu_and_back(gpu):
    x = np.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(to_cpu(to_gpu(x)), x)
