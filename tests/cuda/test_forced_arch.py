"""GPUATTN_ARCH: a GPU stands for one of an earlier compute capability."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from fake_gpu import GPUS, KIB
from fake_launches import as_array, fake_cupy, launches_on

import gpuattn
from gpuattn.arrays import BFLOAT16
from gpuattn.bench import doctor
from gpuattn.cli.main import main
from gpuattn.cuda import gpu as module
from gpuattn.cuda import kernels, sources
from gpuattn.cuda.compiler import architecture, compile_text
from gpuattn.cuda.gpu import LIMITS, gpu, kernels_refusal, tensor_core_refusal
from gpuattn.errors import ConfigError, HardwareRefusal, KernelCompileError, UnsupportedError
from gpuattn.impls import prepare
from gpuattn.modes import without_plans
from gpuattn.runtime.device import choose_device


@pytest.fixture
def card(monkeypatch):
    """card(own, arch): device 0 is a GPU of a compute capability, and GPUATTN_ARCH is set."""

    def make(own, arch=None):
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(GPUS.get(own, own)))
        monkeypatch.delenv(module.FORCED, raising=False)
        if arch is not None:
            monkeypatch.setenv(module.FORCED, arch)
        gpu.cache_clear()
        return gpu(0)

    yield make
    gpu.cache_clear()


@pytest.mark.parametrize("arch", ["75", "7.5", " 75 "])
def test_a_hopper_gpu_stands_for_a_turing_gpu(card, arch):
    found = card("9.0", arch)
    assert found.forced and found.capability == 75
    assert found.shared_bytes == found.shared_bytes_per_multiprocessor == 64 * KIB
    assert found.threads_per_multiprocessor == 1024
    assert found.multiprocessors == GPUS["9.0"].multiprocessors
    assert found.has_mma and not (found.has_bfloat16 or found.has_tma or found.has_wgmma)
    assert not found.has_dependent_launch


def test_the_limits_are_those_of_the_cards(card):
    for name, record in GPUS.items():
        shared, of_multiprocessor, threads = LIMITS[record.capability]
        assert record.shared_bytes == shared * KIB, name
        assert record.shared_bytes_per_multiprocessor == of_multiprocessor * KIB, name
        assert record.threads_per_multiprocessor == threads, name


@pytest.mark.parametrize("arch", [None, "", "  ", "90", "9.0"])
def test_its_own_capability_changes_nothing(card, arch):
    assert card("9.0", arch) == GPUS["9.0"]


@pytest.mark.parametrize("arch", ["turing", "sm_75", "76", "-75", "7", "750", "60"])
def test_nonsense_is_refused_with_what_is_accepted(card, arch):
    with pytest.raises(ConfigError, match=r"GPUATTN_ARCH is '.*'; accepted: 75, 80, .*or unset"):
        card("9.0", arch)


def test_nonsense_is_refused_on_numpy_too(monkeypatch):
    x = np.ones((2, 8), np.float32)
    monkeypatch.setenv(module.FORCED, "turing")
    with without_plans(), pytest.raises(ConfigError, match="GPUATTN_ARCH is 'turing'; accepted: 7"):
        gpuattn.softmax(x)
    monkeypatch.setenv(module.FORCED, " ")
    with without_plans():
        gpuattn.softmax(x)


@pytest.mark.parametrize("arguments", [["info", "x"], ["kernels"], ["doctor"]])
def test_every_command_refuses_nonsense(monkeypatch, arguments):
    monkeypatch.setenv(module.FORCED, "turing")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpuattn: error: gpuattn: GPUATTN_ARCH is 'turing'; accepted: 75, 80, ")
    monkeypatch.setenv(module.FORCED, "")
    assert CliRunner().invoke(main, ["kernels"]).exit_code == 0


def test_a_later_capability_than_the_cards_is_refused(card):
    with pytest.raises(ConfigError, match="GPUATTN_ARCH is 100; accepted: at most 90"):
        card("9.0", "100")


def test_kernels_are_compiled_to_ptx_of_it(nvrtc):
    assert sources.arch_for("update/sgd.cu", 75, forced=True) == "compute_75"
    assert sources.arch_for("update/sgd.cu", 75) == "sm_75"
    hopper = "attention/flash_attention_forward_hopper.cu"
    assert sources.arch_for(hopper, 90, forced=True) == "compute_90a"
    text = 'extern "C" __global__ void f(int* x) { x[0] = __CUDA_ARCH__; }'
    code, _ = compile_text(text, "compute_75", "f.cu")
    assert b".target sm_75" in code and b"750" in code and code.endswith(b"\0")


def test_tensor_cores_before_8_0_take_float16_alone(card):
    card("7.5")
    assert tensor_core_refusal(0, np.dtype("float16")) is None
    for dtype in (BFLOAT16, np.dtype("float32")):
        reason = tensor_core_refusal(0, dtype, "k")
        assert isinstance(reason, HardwareRefusal)
        assert str(reason) == (
            f"k is {dtype}; the GPU's compute capability is 7.5, whose tensor cores take float16 "
            "alone by mma.sync"
        )
    card("8.0")
    assert tensor_core_refusal(0, BFLOAT16) is None


def test_a_card_before_7_0_has_no_kernels(card):
    card(replace(GPUS["8.0"], capability=61))
    reason = "the GPU's compute capability is 6.1, kernels need 7.0 or newer: NumPy's forms run"
    assert str(kernels_refusal(0)).startswith(reason)
    assert str(kernels.kernel_refusal(as_array(np.ones(3, np.float32)))).startswith(reason)
    card("7.5")
    assert kernels_refusal(0) is None


@pytest.fixture
def machine(card):
    """machine(own, arch): as ``card``, with what commands and the doctor ask of its driver."""

    def make(own, arch=None):
        record = GPUS[own] if own in GPUS else replace(GPUS["7.5"], capability=own)
        try:
            card(record, arch)
        except ConfigError:
            assert arch is not None
        runtime = sys.modules["cupy"].cuda.runtime
        properties = {
            "name": b"A card", "totalGlobalMem": 16 << 30, "major": record.capability // 10,
            "minor": record.capability % 10,
        }  # fmt: skip
        runtime.getDeviceProperties = lambda number: properties
        runtime.memGetInfo = lambda: (15 << 30, 16 << 30)
        runtime.CUDARuntimeError = RuntimeError

    return make


@pytest.mark.parametrize("own, arch, said", [
    ("7.5", None, "float16 on tensor cores, which is the default; bfloat16 is computed in float32"),
    (70, None, "attention on CUDA cores; on 7.5 (Turing) and newer float16 uses tensor cores"),
    ("8.6", None, "tensor cores by mma.sync; attention and fused products are faster on 9.0"),
    ("12.0", None, "faster on 9.0"), ("9.0", None, "all forms run"),
    ("9.0", "75", "GPUATTN_ARCH makes kernels run as on 7.5; float16 on tensor cores"),
])  # fmt: skip
def test_the_doctor_says_what_runs_how_and_what_would_be_faster(machine, own, arch, said):
    machine(own, arch)
    check = doctor._device()
    assert check.state == "ok" and said in check.detail
    assert "A card, compute capability" in check.detail and "15.0 of 16.0 GiB free" in check.detail
    assert choose_device("auto") == ("cuda", "A card, 16 GiB")


def test_a_card_before_7_0_is_told_by_the_doctor_and_by_every_command(machine):
    machine(61)
    check = doctor._device()
    assert check.state == "broken" and "kernels need compute capability 7.0" in check.remedy
    reason = "the GPU's compute capability is 6.1, kernels need 7.0 or newer: NumPy's forms run on"
    assert choose_device("cuda") == ("cuda", f"A card, 16 GiB; {reason} CuPy")


def test_a_later_capability_is_told_by_the_doctor_and_by_every_command(machine):
    machine("8.6", "90")
    check = doctor._device()
    assert check.state == "broken" and "GPUATTN_ARCH is 90; accepted: at most 86" in check.remedy
    with pytest.raises(ConfigError, match="GPUATTN_ARCH is 90; accepted: at most 86"):
        choose_device("auto")


@pytest.mark.parametrize("impl, dtype, said", [
    ("raw-ampere", BFLOAT16, "raw-ampere: q is bfloat16; the GPU's compute capability is 7.5, who"),
    ("raw-short", BFLOAT16, "raw-short: q is bfloat16; the GPU's compute capability is 7.5, whose"),
    ("raw-hopper", np.float16, "raw-hopper: .*compute capability is 7.5, the kernel needs 9.0"),
])  # fmt: skip
def test_what_a_form_lacks_on_7_5_is_a_sentence(impl, dtype, said):
    with launches_on(GPUS["7.5"]):
        q = as_array(np.zeros((2, 300 if impl != "raw-short" else 64, 4, 64), dtype))
        with pytest.raises(UnsupportedError, match=said):
            gpuattn.flash_attention(q, q, q, impl=impl)
        chosen = prepare(gpuattn.flash_attention, q, q, q).choose().name
        assert chosen == ("raw-ampere" if dtype == np.float16 else "raw-simt")


def test_an_nvrtc_without_the_cards_architecture_says_which_has_it(nvrtc, monkeypatch):
    monkeypatch.setattr("gpuattn.cuda.compiler.nvrtc_architectures", lambda: [75, 80, 90])
    message = r"compiles for compute capability 7\.5 and newer, this GPU's is 7\.0\. .*cuda12x"
    with pytest.raises(KernelCompileError, match=message):
        architecture(70)


def test_older_variants_of_a_file_are_its_own():
    file = "attention/cache/decode_attention.cu"
    older = sources.variants(file, "sm_75")
    assert {constants["scalar"] for constants in older} == {"f16"}
    assert all(constants not in sources.variants(file, "sm_80") for constants in older[:1])
    assert len(sources.variants(file)) == len(older) + len(sources.variants(file, "sm_90"))
    assert sources.variants("dropout.cu", "sm_75") == sources.variants("dropout.cu", "sm_80")
