"""gpuattn kernels: list, compile offline, and explain which kernel would run."""

import re
import time

import click
import numpy as np

from gpuattn.bench.samples import DTYPES, SAMPLES, sample
from gpuattn.cli.shared.options import NearChoice
from gpuattn.cuda import disk_cache, kernels, sources
from gpuattn.impls import explain
from gpuattn.runtime.device import array_module, choose_device
from gpuattn.units import nearest


@click.command("kernels")
@click.option("--warm", is_flag=True, help="Compile every kernel into the disk cache now.")
@click.option("--arch", help="Architecture for --warm, such as sm_90a; default: this GPU's.")
@click.option(
    "--why",
    metavar="OP",
    type=NearChoice(SAMPLES),
    help="Explain which implementation of OP runs.",
)
@click.option("--shape", help="Shape for --why, such as 8192x1024.")
@click.option("--dtype", type=NearChoice(DTYPES), default="bfloat16", show_default=True)
@click.option("--file", "only", metavar="NAME", help="Only this source, such as softmax.cu.")
def command(
    warm: bool, arch: str | None, why: str | None, shape: str | None, dtype: str, only: str | None
) -> None:
    """List the CUDA kernels, compile them ahead of time, or explain a choice.

    \b
    gpuattn kernels                                  list them
    gpuattn kernels --warm --arch sm_90a             compile offline, no GPU needed
    gpuattn kernels --why softmax --shape 8192x1024  which one would run, and why
    """
    if arch and not warm:
        raise click.UsageError("--arch is for --warm: --why and the list are of this machine")
    if why and warm:
        raise click.UsageError("--why and --warm; accepted: one of them")
    if why:
        _why(why, parse_shape(shape), dtype)
    elif warm:
        _warm(_files(only), arch or _this_gpu())
    else:
        _list(_files(only))


def _why(op, shape, dtype):
    xp = array_module(choose_device("auto")[0])
    fun, args, kwargs = sample(op, shape, dtype, xp)
    where = "on this GPU" if xp is not np else "on NumPy, without a GPU"
    click.echo(f"{where}, {dtype}:")
    click.echo(str(explain(fun, *args, **kwargs)))


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Return (8192, 1024) for "8192x1024" and None for None."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise click.BadParameter(f"{text!r} is no shape; write 8192x1024", param_hint="--shape")
    shape = tuple(int(n) for n in text.split("x"))
    if 0 in shape:
        raise click.BadParameter(f"{text} is empty; accepted: sizes from 1", param_hint="--shape")
    return shape


def _files(only):
    if only is None:
        return sources.files()
    if only not in sources.files():
        advice = nearest(only, sources.files()) or f"; accepted: {', '.join(sources.files())}"
        raise click.BadParameter(f"there is no {only!r}{advice}", param_hint="--file")
    return [only]


def _this_gpu():
    from gpuattn.arrays import import_cupy
    from gpuattn.errors import DeviceMissingError

    cupy = import_cupy()
    if not cupy.cuda.is_available():
        raise DeviceMissingError("no GPU here to compile for: name one with --arch sm_90a")
    return f"sm_{cupy.cuda.Device().compute_capability}"


def _list(files):
    for file in files:
        first = (sources.ROOT / file).read_text().splitlines()[0].removeprefix("// ")
        names = ", ".join(sources.signatures(file))
        click.echo(f"{file:52} {len(sources.variants(file)):3} variants  {names}\n    {first}")
    click.echo(f"cubins are kept in {disk_cache.folder()}")


def _warm(files, arch):
    """Compile what a GPU of ``arch`` loads: the form with "a" only of sources that list it."""
    if not re.fullmatch(r"sm_(7|8|9|1\d)\da?", arch):
        accepted = "sm_70 or newer, such as sm_90a"
        raise click.BadParameter(f"{arch!r}; accepted: {accepted}", param_hint="--arch")
    capability, begin, count = int(arch[3:].rstrip("a")), time.perf_counter(), 0
    files = [file for file in files if sources.serves(file, capability)]
    total = sum(len(sources.variants(file, arch)) for file in files)
    with click.progressbar(length=total, label=f"compiling for {arch}", file=_stderr()) as bar:
        for file in files:
            target = sources.arch_for(file, capability)
            for constants in sources.variants(file, arch):
                kernels.cubin(file, target, **constants)
                count += 1
                bar.update(1)
    spent = time.perf_counter() - begin
    click.echo(f"{count} kernels for {arch} in {spent:.1f} s, kept in {disk_cache.folder()}")


def _stderr():
    return click.get_text_stream("stderr")
