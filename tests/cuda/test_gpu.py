"""The Gpu record: attributes read from the driver, and features per GPU."""

import sys
from dataclasses import replace

import pytest
from fake_gpu import GPUS
from fake_launches import fake_cupy

from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.cuda.gpu import hopper_refusal
from gpuattn.errors import HardwareRefusal


@pytest.fixture(params=GPUS)
def name(request, monkeypatch):
    """A compute capability, which device 0 gets."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(GPUS[request.param]))
    gpu_of.cache_clear()
    yield request.param
    gpu_of.cache_clear()


def test_the_record_equals_the_drivers_attributes(name):
    assert gpu_of(0) == GPUS[name]


def test_features_of_each_gpu(name):
    is_hopper, later = name == "9.0", gpu_of(0).capability >= 90
    assert (
        gpu_of(0).has_wgmma
        == gpu_of(0).has_dependent_launch
        == gpu_of(0).has_l2_prefetch
        == is_hopper
    )
    assert gpu_of(0).has_tma == gpu_of(0).has_clusters == later


def test_an_older_driver_has_no_dependent_launch(monkeypatch):
    old = replace(GPUS["9.0"], driver_version=12020)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(old))
    gpu_of.cache_clear()
    assert gpu_of(0).has_wgmma and not gpu_of(0).has_dependent_launch
    gpu_of.cache_clear()


def test_refusal_of_hopper_kernels_elsewhere(name):
    reason = hopper_refusal(0)
    if name == "9.0":
        assert reason is None
    else:
        assert isinstance(reason, HardwareRefusal)
        assert reason == (f"the GPU's compute capability is {name}, the kernel needs 9.0 (Hopper)")


def test_the_record_of_a_real_gpu(gpu):
    if gpu_of(0).forced:
        pytest.skip("GPUATTN_ARCH makes it stand for another one")
    runtime = gpu.cuda.runtime
    properties, found = runtime.getDeviceProperties(0), gpu_of(0)
    assert found.capability == 10 * properties["major"] + properties["minor"]
    assert found.multiprocessors == properties["multiProcessorCount"]
    assert found.registers_per_multiprocessor == properties["regsPerMultiprocessor"]
    assert found.threads_per_multiprocessor == properties["maxThreadsPerMultiProcessor"]
    assert found.shared_bytes_per_multiprocessor == properties["sharedMemPerMultiprocessor"]
    assert found.l2_bytes == properties["l2CacheSize"]
    assert found.shared_bytes <= found.shared_bytes_per_multiprocessor
