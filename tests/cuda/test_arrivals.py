"""No arrival at an mbarrier frees shared memory before what was loaded from it is there.

See "An arrival can overtake a load" in ``rawkernels/notes/decoder-step.md``. No GPU is needed.
"""

import shutil

import arrivals
import compiled
import pytest

from gpuattn.cuda import compiler, sources

FORWARD = "attention/flash_attention_forward_hopper.cu"
BACKWARD = "attention/flash_attention_backward_hopper.cu"
WIDE = "attention/flash_attention_backward_hopper_wide.cu"
GRADIENTS, STEP = "linear/weight_gradients_hopper.cu", "decoder/decoder_step.cu"
ARRIVING = {  # the files with arrivals; all others have none
    FORWARD, BACKWARD, WIDE, GRADIENTS, STEP,
    "attention/flash_attention_backward_hopper_head.cu",
    "attention/flash_attention_forward_hopper_head.cu",
    "linear/bias_activation_hopper.cu",
    "linear/linear_dropout_add_norm.cu",
    "linear/linear_gelu_hopper.cu",
    "linear/row_linear.cu",
}  # fmt: skip
PROTECTIONS = {  # what a test takes away -> (file of it, what remains)
    " + (loaded & zero)": ("common/barrier.cuh", ""),
    '"r"(bar), "r"(loaded)': ("common/barrier.cuh", '"r"(bar), "r"(0)'),
}


def variants():
    """Yield each variant; without --all those of other tests, and the first with bias or extras."""
    lacking = {(file, name) for file in ARRIVING for name in ("BIAS", "EXTRAS")}
    for number, (file, arch, constants, default) in enumerate(compiled.cases()):
        if file not in ARRIVING or arch != "sm_90a":
            continue
        first = {(file, name) for name in constants if constants[name] is True} & lacking
        lacking -= first
        marks = () if default or first else pytest.mark.exhaustive
        yield pytest.param(file, arch, constants, marks=marks, id=f"{file}-{number}")


@pytest.mark.background(run=arrivals.of_variant)
@pytest.mark.parametrize("file, arch, constants", list(variants()))
def test_what_is_loaded_is_there_before_its_memory_is_free(
    nvrtc, nvdisasm, file, arch, constants, result_of_background
):
    ((count, overtaken),) = result_of_background().values()
    assert count
    assert not overtaken


@pytest.mark.background(run=compiled.hopper_instructions)
@pytest.mark.parametrize("file", sources.files())
def test_the_files_with_arrivals_are_known(nvrtc, nvdisasm, file, result_of_background):
    found = any(arrivals.of(code)[0] for code in result_of_background().values())
    assert found == (file in ARRIVING)


@pytest.mark.parametrize("there, files, wanted", [
    (" + (loaded & zero)", [FORWARD, BACKWARD, GRADIENTS, STEP], {}),
    ('"r"(bar), "r"(loaded)', [BACKWARD], {"EXTRAS": True}),
])  # fmt: skip
def test_without_the_protection_loads_are_overtaken(
    nvrtc, nvdisasm, tmp_path, monkeypatch, there, files, wanted
):
    file, instead = PROTECTIONS[there]
    shutil.copytree(sources.ROOT, tmp_path / "rawkernels")
    text = (sources.ROOT / file).read_text()
    assert text.count(there) == 1
    (tmp_path / "rawkernels" / file).write_text(text.replace(there, instead))
    monkeypatch.setattr(sources, "ROOT", tmp_path / "rawkernels")
    monkeypatch.setattr(compiler, "ROOT", tmp_path / "rawkernels")
    monkeypatch.setattr(sources, "_headers_digest", sources._headers_digest.__wrapped__)
    for file in files:
        variant = next(c for c in sources.variants(file) if wanted.items() <= c.items())
        ((_, overtaken),) = arrivals.of_variant(file, "sm_90a", variant).values()
        assert overtaken, file


ARRIVE = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x10], RZ"


@pytest.mark.parametrize("lines, overtaken", [
    (["LDS R4, [UR7]", ARRIVE], 1),
    (["LDS.64 R4, [R4]", "@P1 LDS.128 R8, [R5+0x10]", ARRIVE], 1),  # R5: of the first
    (["LDS.U16 R4, [R2]", "FADD R9, R5, R6", ARRIVE], 1),
    (["LDS.64 R4, [R2]", "FADD R9, R5, R6", ARRIVE], 0),
    (["LDSM.16.MT88.4 R4, [R2]", "FADD R9, R7, R6", ARRIVE], 0),
    (["LDSM.16.M88.2 R4, [R2]", "FADD R9, R7, R6", ARRIVE], 1),
    (["LDS R4, [R2]", "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ"], 0),
    (["LDS R4, [R2]", "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R5+URZ], RZ"], 1),
    (["LDS R4, [R2]", "SYNCS.ARRIVE.TRANS64 RZ, [R9+URZ+0x20], R3"], 0),  # awaits bytes
    (["LDS R4, [R2]", "@P0 BRA `(.L_x_1)", ARRIVE], 1),
    (["LDS R4, [R2]", "BRA `(.L_x_1)", ARRIVE], 0),
    ([ARRIVE, "LDS R4, [R2]"], 0),
])  # fmt: skip
def test_overtaken_loads_of_listings(lines, overtaken):
    assert len(arrivals.of(lines)[1]) == overtaken
