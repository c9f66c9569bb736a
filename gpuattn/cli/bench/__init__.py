"""gpuattn bench: a group with one command for each benchmark."""

import faulthandler
import os
import sys

import click

from gpuattn.bench.fused.cases import TABLES
from gpuattn.bench.samples import SAMPLES
from gpuattn.cli.bench import (
    attention,
    calls,
    data,
    decode,
    fused,
    machine,
    ops,
    roofline,
    scale,
    train,
)
from gpuattn.cuda.gpu import FORCED, forced_capability
from gpuattn.units import nearest


class Benchmarks(click.Group):
    """Explains what replaced ``gpuattn bench OP`` and ``gpuattn bench --roofline``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else "-"
        if not ctx.resilient_parsing:
            if first in SAMPLES or first in TABLES:
                calls = [f"gpuattn bench ops {first}"] * (first in SAMPLES)
                calls += [f"gpuattn bench fused {first}"] * (first in TABLES)
                ctx.fail(f"{first} is an op, not a benchmark; write: {' or '.join(calls)}")
            if first == "--roofline":
                ctx.fail("the roofline is a command; write: gpuattn bench roofline")
            if not first.startswith("-") and first not in self.commands:
                accepted = (
                    nearest(first, self.commands) or f"; accepted: {', '.join(self.commands)}"
                )
                ctx.fail(f"no benchmark {first!r}{accepted}")
        return super().parse_args(ctx, args)


@click.group("bench", cls=Benchmarks, no_args_is_help=True)
def command() -> None:
    """Time ops, training steps, generation, the same in other libraries, and the loading of data.

    \b
    gpuattn bench ops linear --shape 8192x512x2048
    gpuattn bench calls --peers
    gpuattn bench attention --peers --json attention.json --plot attention.png
    gpuattn bench fused softmax layer_norm --peers
    gpuattn bench train --model base --peers
    gpuattn bench decode --model gpt2-124m --peers
    gpuattn bench roofline --plot roofline.png
    gpuattn bench machine
    gpuattn bench data
    gpuattn bench scale --parameters 124M --step 18.4

    A result is compared with the reference before it is timed. attention, fused, train and roofline
    run in CUDA graphs; ops, calls and decode include the host.
    """
    if sys.__stderr__ and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a library that crashes says where it was called


def _force(ctx, param, arch):
    if arch is not None:
        os.environ[FORCED] = arch
        forced_capability()  # refuses nonsense


for _module in (ops, calls, attention, fused, train, decode, roofline, machine, data, scale):
    command.add_command(_module.command)
    if _module not in (machine, data, scale):
        arch_option = click.Option(
            ["--arch"], metavar="75", expose_value=False, is_eager=True, callback=_force,
            help="Run kernels as on a GPU of this compute capability (GPUATTN_ARCH).",
        )  # fmt: skip
        _module.command.params.append(arch_option)
