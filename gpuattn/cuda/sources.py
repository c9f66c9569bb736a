"""The CUDA sources in ``rawkernels/``: the text that NVRTC compiles, and what headers say.

The header of a file, its first comment, lists the constants that the file takes (``Constants:``),
how its kernels are launched (``Launch:``) and which architectures it is for (``Arch:``).
"""

import functools
import hashlib
import itertools
import re

from gpuattn.cuda.compiler import ROOT, architecture
from gpuattn.cuda.gpu import AMPERE

Constant = bool | int | str | None
SIGNATURE = re.compile(
    r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\s*\(([^)]*)\)',
    re.DOTALL,
)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
EVERYWHERE = "sm_75"  # on the Arch line of a file that runs on all devices


def files() -> list[str]:
    """Return the paths of all CUDA sources below ``rawkernels``, such as "norm/layer_norm.cu"."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.cu"))


# ---- text ----------------------------------------------------------------------------------------


def source_text(file: str, **constants: Constant) -> str:
    """Return the text given to NVRTC: typed constants, the file, a digest of its headers."""
    lines = [_declare(name, value) for name, value in sorted(constants.items()) if name != "scalar"]
    head = ['#include "common/types.cuh"']
    if "scalar" in constants:
        head.append(f"using scalar = {constants['scalar']};")
    body = [f'#line 1 "rawkernels/{file}"', (ROOT / file).read_text()]
    return "\n".join([*head, *lines, *body, f"// headers {_headers_digest(file)}\n"])


def _declare(name, value):
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {value};"


@functools.cache
def _headers_digest(file: str) -> str:
    """Return a digest of a file and of all headers that it includes, directly or by others."""
    texts, names = {}, ["common/types.cuh", file]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = (ROOT / name).read_text()
            names += INCLUDE.findall(texts[name])
    everything = "".join(text for _, text in sorted(texts.items()))
    return hashlib.sha256(everything.encode()).hexdigest()[:16]


# ---- kernels -------------------------------------------------------------------------------------


@functools.cache
def signatures(file: str) -> dict[str, list[tuple[str, str]]]:
    """Return ``{kernel: [(C type, parameter), ...]}`` for every kernel of a file."""
    found = SIGNATURE.findall(_without_comments(file))
    return {name: [_parameter(p) for p in inside.split(",")] for name, inside in found}


@functools.cache
def dependent_kernels(file: str) -> frozenset[str]:
    """Return the kernels that the header's ``Launch:`` lines list behind ``dependent:``.

    Their launches are programmatic dependent ones where the GPU has them.
    """
    return _listed(file, "dependent")


@functools.cache
def cooperative_kernels(file: str) -> frozenset[str]:
    """Return the kernels behind ``cooperative:``: all blocks of a launch run at the same time."""
    return _listed(file, "cooperative")


@functools.cache
def wide_cluster_kernels(file: str) -> frozenset[str]:
    """Return the kernels behind ``wide clusters:``, which have more than 8 blocks."""
    return _listed(file, "wide clusters")


def _listed(file, kind):
    launch = re.search(r"^// Launch:.*(?:\n//   .*)*", (ROOT / file).read_text(), re.MULTILINE)
    listed = launch and re.search(rf"\b{kind}: (.*)", launch[0])
    return frozenset(listed[1].split(", ")) if listed else frozenset()


def _without_comments(file: str) -> str:
    return re.sub(r"//[^\n]*", "", (ROOT / file).read_text())


def _parameter(declaration: str) -> tuple[str, str]:
    words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", "", declaration).split()
    return " ".join(words[:-1]), words[-1]


# ---- header --------------------------------------------------------------------------------------


@functools.cache
def architectures(file: str) -> list[str]:
    """Return the architectures on the ``Arch:`` line of a file's header."""
    return re.findall(r"^// Arch:\s*(.*)$", (ROOT / file).read_text(), re.MULTILINE)[0].split()


@functools.cache
def serves(file: str, capability: int) -> bool:
    """Return whether ``file`` runs on devices of a capability such as 90, by its ``Arch:`` line.

    A file that lists sm_75 runs on all devices from 7.0 on that NVRTC compiles for. Others run
    where an architecture of the same major version is listed, and in its "a" form on that very
    device alone.
    """
    listed = architectures(file)
    majors = {int(arch[3:]) // 10 for arch in listed if not arch.endswith("a")}
    return EVERYWHERE in listed or f"sm_{capability}a" in listed or capability // 10 in majors


def arch_for(file: str, capability: int, forced: bool = False) -> str:
    """Return what to compile ``file`` for on a device such as 90: its "a" form if listed.

    ``forced``: for a later device that stands for such a one, whose driver compiles PTX.
    """
    exact = f"sm_{capability}a"
    arch = exact if exact in architectures(file) else architecture(capability)
    return arch.replace("sm_", "compute_") if forced else arch


@functools.cache
def variants(file: str, arch: str | None = None) -> list[dict[str, Constant]]:
    """Return every combination of the constants that the header's ``Constants:`` lines list.

    ``// Constants: scalar = float, f16, bf16; BLOCK = 128, 256`` gives six; lines that begin with
    ``//   `` continue it. Each further ``// Constants:`` line adds its combinations. A file with
    lines ``// Constants below sm_80:`` has these alone there, and the others from sm_80 on.
    ``arch``: of those for an architecture such as "sm_75" only.
    """
    text = (ROOT / file).read_text()
    blocks, older = (
        re.findall(rf"^// Constants{kind}:(.*(?:\n//   .*)*)", text, re.MULTILINE)
        for kind in ("", " below sm_80")
    )
    if arch is None:
        blocks = blocks + older
    elif older and int(re.sub(r"\D", "", arch)) < AMPERE:
        blocks = older
    return [choice for block in blocks for choice in _combinations(block)] or [{}]


def _combinations(block: str) -> list[dict[str, Constant]]:
    names, choices = [], []
    for item in re.sub(r"\n//", " ", re.sub(r"\([^)]*\)", "", block)).split(";"):
        name, values = item.split("=")
        names.append(name.strip())
        choices.append([_constant(value.strip()) for value in values.split(",")])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


def _constant(word: str) -> Constant:
    if word in ("true", "false"):
        return word == "true"
    return int(word) if re.fullmatch(r"-?\d+", word) else word
