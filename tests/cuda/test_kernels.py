"""Every CUDA source compiles for every architecture it names, without spills. Needs no GPU."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import compiled
import numpy as np
import pytest
from fake_gpu import GPUS

from gpuattn.cuda import compiler, disk_cache, kernels, sources
from gpuattn.errors import KernelCompileError

REQUIRED = "nvrtc" in os.environ.get("GPUATTN_REQUIRE", "")
EVERYWHERE = {
    "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121",
}  # fmt: skip
IN_PARTS = {  # fused op: the op whose kernels compute its parts on other GPUs
    "linear_dropout_add_norm": "dropout_add_norm",
    "linear_gelu": "bias_activation",
    "gelu_slopes": "bias_activation",
}
LIBRARY = {
    "weight_gradients",
    "cluster_step",
    "decoder_step",
    "pack_weights",
    "row_linear",
    "projected_attention",
    "fold_norm",
}  # other ops do it on other GPUs

# kernels that may load before they wait, see the headers, and how often their text waits
AHEAD = {"row_linear": 3, "step_attention": 2, "step_attention_hopper": 2, "beam_update": 2,
         "projected_attention": 1, "text_update": 2, "beam_step_block": 2}  # fmt: skip

SPILLED = {
    "attention/flash_attention_forward_ampere.cu": {
        "sm_75": 32, "sm_80": 20, "sm_90": 48, "sm_103": 28,
    },
    "attention/flash_attention_short.cu": {
        "sm_80": 16, "sm_86": 16, "sm_87": 16, "sm_89": 16, "sm_90": 4, "sm_100": 4, "sm_103": 4,
        "sm_120": 4, "sm_121": 4,
    },
    "attention/flash_attention_backward_ampere_extras.cu": {
        "sm_75": 20, "sm_80": 20, "sm_90": 20, "sm_100": 20, "sm_103": 20, "sm_120": 4,
        "sm_121": 4,
    },
    "attention/cache/decode_attention.cu": {"sm_75": 12, "sm_120": 4, "sm_121": 4},
    "attention/cache/projected_attention.cu": {"sm_90a": 4},
    "attention/cache/step_attention.cu": {
        "sm_75": 36, "sm_80": 56, "sm_86": 4, "sm_87": 4, "sm_89": 4, "sm_90": 60,
    },
    "decoder/decoder_step.cu": {"sm_90a": 64},
}  # fmt: skip
"""Bytes that a thread may spill, by architecture: at head size 128, dropout's random words need
more registers; so do some numbers of the decoder step, used once in a phase, with 16 rows of head
size 128 or 32 rows, one or two numbers of decoding at head size 256, the list of rows that beams
see, and one number of the queries of 16 rows with 512 inputs, beside the weights of a head."""


def variants():
    for number, (file, arch, constants, default) in enumerate(compiled.cases()):
        marks = () if default else pytest.mark.exhaustive
        yield pytest.param(file, arch, constants, marks=marks, id=f"{file}-{arch}-{number}")


@pytest.mark.background(run=compiled.compile_variant)
@pytest.mark.parametrize("file, arch, constants", list(variants()))
def test_compiles_without_spills(nvrtc, file, arch, constants, result_of_background):
    log = result_of_background()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills, f"no resource report for {constants}: {log}"
    most = max(int(count) for pair in spills for count in pair)
    assert most <= SPILLED.get(file, {}).get(arch, 0), f"{constants} spills on {arch}:\n{log}"


@pytest.mark.background(run=compiled.check_variants)
@pytest.mark.parametrize("file", sources.files())
def test_the_front_end_accepts_every_variant(nvrtc, file, result_of_background):
    result_of_background()


def test_the_default_tier_compiles_every_file_and_for_every_architecture():
    chosen = [(file, arch) for file, arch, _, default in compiled.cases() if default]
    for file in sources.files():
        made_for, listed = compiled.main_architecture(file), sources.architectures(file)
        variants = len(sources.variants(file, made_for))
        assert min(2, variants) <= chosen.count((file, made_for)) <= compiled.MOST
        assert all(arch not in listed or (file, arch) in chosen for arch in ("sm_75", "sm_90"))
    assert all(sum(arch == other for _, arch in chosen) >= 5 for other in compiled.OTHERS)


@pytest.mark.background(run=compiled.hopper_instructions)
@pytest.mark.parametrize("file", sources.files())
def test_no_double_precision_instructions(nvrtc, nvdisasm, file, result_of_background):
    """Checks machine code, because a float literal without f makes a kernel 30 times slower."""
    code = result_of_background()
    assert set(code) == set(sources.signatures(file))
    for name, instructions in code.items():
        text = "\n".join(instructions)
        assert "EXIT" in text
        assert not re.findall(r"\b(?:DFMA|DADD|DMUL)\b", text), f"double arithmetic in {name}"


@pytest.mark.background(run=compiled.hopper_instructions)
@pytest.mark.parametrize("file", sources.files())
def test_dependent_kernels_wait_before_anything_else(nvrtc, nvdisasm, file, result_of_background):
    """Every dependent kernel waits before memory accesses in machine code; no other one waits."""
    for name, instructions in result_of_background().items():
        waits = [text for text in instructions if "ACQBULK" in text]
        if name in sources.dependent_kernels(file):
            early = name in AHEAD
            assert waits if early else waits == ["ACQBULK"], name
            assert early or not harm_before_wait(instructions), name
            assert not [text for text in instructions if ".CONSTANT" in text], name
        else:
            assert not waits, f"{name} waits, but its header does not say so"


def waits_first(text, name):
    """Return whether the first statement of a kernel waits for the kernels before it."""
    begin = rf"\b{name}\([^)]*\) {{\s*grid_dependency_wait\(\);"
    return bool(re.search(begin, re.sub(r"//[^\n]*", "", text)))


def test_only_a_first_statement_counts():
    text = (
        'extern "C" __global__ void first(\n    int n) {  // (so)\n    grid_dependency_wait();\n}\n'
        'extern "C" __global__ void later(int n) {\n    n += 1;\n    grid_dependency_wait();\n}\n'
    )
    assert [waits_first(text, name) for name in ("first", "later")] == [True, False]


@pytest.mark.parametrize("file", sources.files())
def test_the_header_lists_the_kernels_whose_first_statement_waits(file):
    text = (sources.ROOT / file).read_text()
    waiting = {name for name in sources.signatures(file) if waits_first(text, name)}
    ahead = AHEAD.keys() & set(sources.signatures(file))
    assert sources.dependent_kernels(file) == waiting | ahead
    calls = sources._without_comments(file).count("grid_dependency_wait()")
    wanted = len(waiting) + sum(AHEAD[name] for name in ahead)
    assert calls == wanted, "a wait that is not a kernel's first statement"


def test_dependent_kernels_are_read_from_the_launch_lines_alone(tmp_path, monkeypatch):
    (tmp_path / "one.cu").write_text("// Launch: grid\n//    dependent: a, b\n// Arch: sm_80\n")
    (tmp_path / "none.cu").write_text("// Launch: grid\n// Arch: sm_80\n//   dependent: a\n")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    assert sources.dependent_kernels("one.cu") == {"a", "b"}
    assert sources.dependent_kernels("none.cu") == frozenset()
    sources.dependent_kernels.cache_clear()


@pytest.mark.parametrize("file", sources.files())
def test_dependent_kernels_have_no_constant_input(file):
    """In some variants, ptxas moves loads through const __restrict__ above the wait."""
    text = sources._without_comments(file)
    for name, parameters in sources.SIGNATURE.findall(text):
        if name in sources.dependent_kernels(file):
            assert not re.findall(r"const \w[\w ]*\*\s*__restrict__ \w+", parameters), name


def harm_before_wait(instructions):
    """Return the instructions before the wait that touch memory or branch."""
    before = instructions[: next(i for i, text in enumerate(instructions) if "ACQBULK" in text)]
    harm = r"(@\S+ )?(LD(?!C)|ST|AT|RED|CCTL|MEMBAR|SU|TEX|TLD|U?BLK|UTMA|BR|JMP|CALL|RET|EXIT|BAR)"
    return [text for text in before if re.match(harm, text)]


@pytest.mark.parametrize("early", ["", "if (y[1] > 0.f) ", "y[2] = 1.f; ", "if (n < 0) return; "])
def test_accesses_before_a_wait_are_detected(nvrtc, nvdisasm, early):
    text = f"""
        #include "common/grid_dependency.cuh"
        extern "C" __global__ void k(const float* x, float* y, int n) {{
            {early}grid_dependency_wait();
            y[0] = x[n];
        }}"""
    harm = harm_before_wait(compiled.instructions(text, "sm_90", "k.cu")["k"])
    assert bool(harm) == bool(early)


def test_sources_are_found():
    assert len(sources.files()) >= 10


@pytest.mark.parametrize("file", sources.files())
def test_headers_match_their_sources(file):
    text = (sources.ROOT / file).read_text()
    assert text.isascii()
    assert "// Launch:" in text
    assert sources.signatures(file), "no kernel was found in the file"
    names = re.findall(r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)', text)
    assert set(sources.signatures(file)) == set(names)
    headers = "".join(path.read_text() for path in sources.ROOT.rglob("*.cuh"))
    # structs are passed by value, as their bytes
    structs = re.findall(r"^struct (?:alignas\(\d+\) )?(\w+) {", headers + text, re.MULTILINE)
    for name, parameters in sources.signatures(file).items():
        for ctype, parameter in parameters:
            known = ctype.endswith("*") or ctype in kernels.SCALARS or ctype in structs
            assert known, f"{name}: the launcher cannot cast {ctype} {parameter}"


def test_every_op_has_a_form_for_every_architecture():
    forms = {}
    for file in sources.files():
        op = re.sub(r"_(hopper|ampere|simt|cluster|block).*", "", Path(file).stem)
        forms.setdefault(op, set()).update(sources.architectures(file))
    for op, part in IN_PARTS.items():
        forms[op] |= forms[part]
    assert {"flash_attention_forward", "flash_attention_backward"} <= set(forms)
    lacking = {op: EVERYWHERE - archs for op, archs in forms.items() if EVERYWHERE - archs}
    assert set(lacking) == LIBRARY


def test_inline_ptx_is_in_the_wrappers_of_common():
    outside = set(sources.ROOT.rglob("*.cu*")) - set(sources.ROOT.glob("common/*"))
    assert [path.name for path in outside if re.search(r"\basm\b", path.read_text())] == []


def test_every_file_has_a_row_in_the_catalogue():
    catalogue = (sources.ROOT / "README.md").read_text()
    names = [path.name for path in sources.ROOT.rglob("*.cu*")]
    assert [name for name in names if f"`{name}`" not in catalogue] == []


def test_scalars_are_cast_to_the_declared_types():
    seen = []
    fake = kernels.Kernel(
        lambda grid, block, args, shared_mem: seen.extend(args),
        "k",
        [("float", "eps"), ("int", "cols"), ("long long", "stride"), ("float*", "x")],
    )
    fake((1,), (32,), 1e-5, 7, 2**40, "pointer")
    assert [type(x) for x in seen] == [np.float32, np.int32, np.int64, str]


def test_an_empty_grid_launches_nothing():
    def fail(*args, **kwargs):
        raise AssertionError("launched")

    kernels.Kernel(fail, "k", [])((4, 0), (32,))


def test_resources_name_the_limit_of_occupancy(monkeypatch):
    """On a fake GPU: 4 multiprocessors of 64 Ki registers and 200 KiB of shared memory."""
    record = replace(GPUS["9.0"], multiprocessors=4, shared_bytes_per_multiprocessor=200 << 10)
    allowed = []
    driver = SimpleNamespace(
        funcGetAttribute=lambda attribute, function: {kernels.REGISTERS: 128}.get(attribute, 1024),
        funcSetAttribute=lambda function, attribute, value: allowed.append(value),
        occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: 2,
    )
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), driver=driver)
    monkeypatch.setattr(kernels, "gpu", lambda device: record)
    monkeypatch.setattr(kernels, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    kernel = kernels.Kernel(SimpleNamespace(ptr=1), "k", [])
    assert kernel.resources((10, 2), (256,), 40 << 10) == {
        "threads": 256, "registers": 128, "shared_bytes": 41 << 10, "blocks": 20, "waves": 2.5,
        "limit": "registers, 2 at a time on a multiprocessor",
    }  # fmt: skip
    assert not allowed
    told = kernel.resources((3,), (64,), 90 << 10)
    assert told["limit"] == "3 blocks for 8 places on 4 multiprocessors" and told["waves"] == 3 / 8
    assert allowed == [90 << 10]
    assert kernel.resources((9,), (64,), 90 << 10)["limit"].startswith("shared memory, ")


def test_wrong_argument_count_shows_the_signature():
    with pytest.raises(TypeError, match=r"k takes \(float eps, int cols\), got 1 arguments"):
        kernels.Kernel(None, "k", [("float", "eps"), ("int", "cols")])((1,), (32,), 1)


def test_a_compile_error_names_our_file_and_line(nvrtc):
    with pytest.raises(KernelCompileError, match=r'broken\.cu\(1\): error: .*"nothing"') as info:
        compiler.compile_text(
            '#line 1 "rawkernels/broken.cu"\n__device__ int x = nothing;', "sm_90", "broken.cu"
        )
    copy = Path(str(info.value).rsplit(" ", 1)[1])
    assert "int x = nothing" in copy.read_text()
    copy.unlink()


def test_the_cubin_cache(nvrtc, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "cache"))
    file = sources.files()[0]
    constants = sources.variants(file)[0]
    code = kernels.cubin(file, "sm_90", **constants)
    (path,) = (tmp_path / "cache").iterdir()
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    calls = []
    compile_text = kernels.compile_text
    monkeypatch.setattr(
        kernels, "compile_text", lambda *a, **k: calls.append(1) or compile_text(*a, **k)
    )
    assert kernels.cubin(file, "sm_90", **constants) == code
    assert not calls, "the second call compiled instead of reading the disk"
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    assert kernels.cubin(file, "sm_90", **constants) == code
    assert calls, "a cubin with a flipped bit was used"


def test_a_cache_that_cannot_be_written_is_no_error(nvrtc, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    file = sources.files()[0]
    assert kernels.cubin(file, "sm_90", **sources.variants(file)[0])


def test_a_user_without_a_home_has_no_cache(nvrtc, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("GPUATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk_cache.Path, "home", homeless)
    constants = {"scalar": "float", "BLOCK": 256}
    assert kernels.cubin("dropout.cu", "sm_80", **constants).startswith(b"\x7fELF")
    assert not disk_cache.folder().exists()


@pytest.mark.parametrize(
    "header, norm, attention, update",
    [
        ("norm/norm.cuh", True, False, False),
        ("common/barrier.cuh", True, True, False),
        ("common/types.cuh", True, True, True),
    ],
)
def test_an_edited_header_changes_the_keys_of_the_files_that_include_it(
    tmp_path, monkeypatch, header, norm, attention, update
):
    def texts():
        sources._headers_digest.cache_clear()
        return {file: sources.source_text(file) for file in sources.files()}

    before = texts()
    shutil.copytree(sources.ROOT, tmp_path / "rawkernels")
    monkeypatch.setattr(sources, "ROOT", tmp_path / "rawkernels")
    assert texts() == before
    with (sources.ROOT / header).open("a") as edited:
        edited.write("// edited\n")
    changed = {file for file, text in texts().items() if text != before[file]}
    sources._headers_digest.cache_clear()
    assert ("norm/dropout_add_norm_backward.cu" in changed) == norm
    assert ("attention/flash_attention_short.cu" in changed) == attention
    assert ("update/sgd.cu" in changed) == update
