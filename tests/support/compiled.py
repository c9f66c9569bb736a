"""Compile CUDA sources by NVRTC for tests; results are cached on disk for later runs.

The key is a hash of the source text (with a digest of its headers), the architecture and NVRTC's
version. The folder lies beside the cubins of ``gpuattn.cuda.kernels``.
"""

import ctypes
import hashlib
import itertools
import os
import pickle
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from gpuattn.cuda import compiler, disk_cache, sources
from gpuattn.errors import KernelCompileError

MOST = 4  # variants of a file that are compiled to machine code without --all
OTHERS = (  # architectures that no kernel is written for
    "sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_120", "sm_121",
)  # fmt: skip
OLDER = "sm_75"
SHARE = 12  # one variant in so many is compiled for each of OTHERS


def cases():
    """Yield (file, architecture, constants, whether it is compiled to machine code without --all).

    All variants for the architectures of a file; for each of ``OTHERS`` one in ``SHARE``, others
    for each.
    Without --all, machine code is made of at most ``MOST`` variants, evenly spread, for sm_80 or
    the only architecture of the file, of one for ``OLDER`` (bfloat16 if listed, which only later
    tensor cores multiply), of one for Hopper, and of one for one of ``OTHERS``, which alternate.
    """
    turns = itertools.count()
    for file in sources.files():
        listed_architectures = sources.architectures(file)
        others = [arch for arch in OTHERS if arch in listed_architectures]
        chosen = others[next(turns) % len(others)] if others else None
        made_for = main_architecture(file)
        for arch in listed_architectures:
            every = listed = sources.variants(file, arch)
            step, start = -(-len(every) // MOST) if arch == made_for else len(every), 0
            if arch == OLDER:
                bfloat16 = (n for n, c in enumerate(every) if c.get("scalar") == "bf16")
                start = next(bfloat16, 0)
            if arch in OTHERS:
                listed = every[OTHERS.index(arch) % min(SHARE, len(every)) :: SHARE]
                step = len(listed) if arch == chosen else None
            for number, constants in enumerate(listed):
                yield file, arch, constants, step is not None and number % step == start


def main_architecture(file):
    """Return the first architecture of a file that is not ``OLDER``."""
    return next(arch for arch in sources.architectures(file) if arch != OLDER)


def machine_code(text, arch, file):
    """Return (cubin, NVRTC's log) of a source text, as ``compiler.compile_text`` does."""
    return _cached(compiler.compile_text, text, arch, file)


def check_front_end(text, arch, file):
    """Raise KernelCompileError if syntax, types or a ``static_assert`` are wrong.

    Takes a twentieth of the time, as no machine code is made.
    """
    _cached(_front_end, text, arch, file)


def compile_variant(file, arch, constants):
    """Return NVRTC's log for a variant of a file in ``rawkernels``."""
    return machine_code(sources.source_text(file, **constants), arch, file)[1]


def check_variants(file):
    """Check every variant of a file by the front end, and one in ``SHARE`` for ``OLDER``."""
    main, first = main_architecture(file), sources.architectures(file)[0]
    for arch in dict.fromkeys([main, first]):
        for constants in sources.variants(file, arch)[:: 1 if arch == main else SHARE]:
            check_front_end(sources.source_text(file, **constants), arch, file)


def hopper_instructions(file):
    """Return {kernel: its instructions, in order} of a file's first variant on a Hopper GPU."""
    text = sources.source_text(file, **sources.variants(file)[0])
    return instructions(text, sources.arch_for(file, 90), file)


def instructions(text, arch, file):
    """Return {kernel: its instructions, in order} of a source text, by nvdisasm."""
    code, _ = machine_code(text, arch, file)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        command = [disassembler(), "-c", cubin.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *sections = re.split(r"^\s*\.section\s+\.text\.(\w+).*$", sass, flags=re.MULTILINE)
    instruction = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
    pairs = zip(sections[::2], sections[1::2], strict=True)
    return {name: instruction.findall(section) for name, section in pairs}


def disassembler():
    """Return the path of nvdisasm, or None."""
    places = [Path(p, "nvidia", c, "bin", "nvdisasm") for p in sys.path for c in ("cu13", "cu12")]
    return next((path for path in places if path.exists()), None)


def _cached(compile_text, text, arch, file):
    key = "\0".join([compile_text.__name__, text, arch, compiler.nvrtc_version()])
    folder = disk_cache.folder().parent / "compiled"
    path = folder / hashlib.sha256(key.encode()).hexdigest()[:32]
    if path.exists():
        return pickle.loads(zlib.decompress(path.read_bytes()))
    found = compile_text(text, arch, file)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as temporary:
        temporary.write(zlib.compress(pickle.dumps(found), 1))
    os.replace(temporary.name, path)
    return found


def _front_end(text, arch, file):
    """Compile to link-time intermediate code, which is not optimized."""
    lib, program = compiler.nvrtc(), ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", "-std=c++17", f"-I{sources.ROOT}", "-dlto"]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        if lib.nvrtcCompileProgram(program, len(options), array):
            log = compiler._nvrtc_bytes(program, "ProgramLog").rstrip(b"\0").decode()
            raise KernelCompileError(compiler._compile_message(text, arch, file, log))
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
