"""The program ``gpuattn``. Each command is imported only when it is used."""

import contextlib
import importlib
import os
import sys
import warnings
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpuattn.cli.shared.streams import replace_closed
from gpuattn.cuda.gpu import forced_capability
from gpuattn.errors import exit_code
from gpuattn.units import nearest

COMMANDS = {
    "train": "Train a translator, or GPT-2 on a text; without arguments a toy, in about a minute.",
    "prepare": "Turn text of any size into tokens on the disk, for training.",
    "translate": "Translate standard input, a line for each line.",
    "sample": "Continue a text with a language model.",
    "score": "Print how probable given translations, or lines of text, are.",
    "embed": "Turn lines into vectors with a BERT of Hugging Face.",
    "classify": "Label texts with a BERT, or images with a ViT.",
    "evaluate": "Score a run: exact match, BLEU, chrF; perplexity; share of labels that are right.",
    "info": "Show what a run is and how it went, or what a token store holds.",
    "export": "Write a run as a folder of Hugging Face.",
    "recover": "Write the manifests that a run's checkpoints have lost.",
    "average": "Average the weights of runs, or of one run's last checkpoints.",
    "report": "Write a run's page: curves, samples, attention, profile.",
    "plot": "Draw loss and BLEU curves and attention maps as PNG.",
    "doctor": "Say what works on this machine, with remedies.",
    "kernels": "List, compile and explain the CUDA kernels.",
    "profile": "Time every op of one training step, beside the roofline.",
    "lecture": "Show 120 claims about fast attention on this machine, as a page.",
    "bench": "Time ops and training steps, also beside other libraries.",
}
EXPECTED = ("gpuattn.errors", "builtins")  # modules of errors that users cause
LESS_MEMORY = {  # advice when a command runs out of memory
    "train": "a smaller --batch, with --accumulate for as much an update, or a smaller --dim",
    "profile": "a smaller --batch or --dim", "bench": "a smaller --shape",
    "translate": "a smaller --beam or --batch-tokens", "score": "a smaller --batch-tokens",
    "evaluate": "a smaller --beam", "sample": "a smaller --count",
}  # fmt: skip
EPILOG = """\b
gpuattn train                                            a toy translator, until it is right
echo "half past four" | gpuattn translate runs/toy
gpuattn train train.en train.de --valid val.en val.de --out runs/de
gpuattn train --lm book.txt && gpuattn sample runs/book

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such device, 130/143 stopped after saving.
"""


class Commands(click.Group):
    """Imports commands on use; turns errors into messages and exit codes."""

    debug = False  # whether errors show their traceback
    used = None  # the name of the command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"gpuattn.cli.{name}").command
        for each in (command, *getattr(command, "commands", {}).values()):
            if not any(parameter.name == "debug" for parameter in each.params):
                each.params.append(_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], COMMANDS) or '.'}")
        self.used = args[0] if args else None
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name]) for name in names]  # imports no command
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        forced_capability()  # refuses nonsense where no GPU would read it, too
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader closed the pipe; Python would complain at exit
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    def main(self, *args: Any, **kwargs: Any) -> Any:
        replace_closed()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(*args, **kwargs | {"standalone_mode": False})
            except click.ClickException as error:
                code = _explain_usage(error)
            except click.Abort:  # Ctrl-C, after which click has begun a new line
                code = 130
            except Exception as error:  # noqa: BLE001 the one place where errors become messages
                if self.debug:
                    raise
                code = _explain(error, self.used)
        sys.exit(code)


def _explain_usage(error):
    """Print a usage error and the --help command to run, and return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    where = getattr(error, "ctx", None)
    help = f"  (see: {where.command_path} --help)" if where else ""
    _tell(error, f"{error.format_message().rstrip('.')}{help}")
    return error.exit_code


def _explain(error, command):
    """Print what went wrong in a command and return the exit code."""
    text = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        advice = f". Try {LESS_MEMORY[command]}" if command in LESS_MEMORY else ""
        text = f"out of memory: {error}{advice}"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, TypeError | KeyError | AttributeError):
        text = f"{type(error).__name__}: {text}. This should not happen: see it with --debug"
    elif type(error).__module__ not in EXPECTED:
        text = f"{type(error).__name__}: {text}"
    _tell(error, text)
    return exit_code(error)


def _tell(error, text):
    """Print an error, unless another rank of the command does."""
    from gpuattn.parallel.agreement import is_silent
    from gpuattn.parallel.world import is_first

    usage = isinstance(error, click.ClickException)  # that of the command line which all ranks have
    if not is_silent(error) and (is_first() or not usage):
        click.echo(f"gpuattn: error: {getattr(error, 'where', '')}{text}", err=True)


def _show_warning(message, category, filename, lineno, file=None, line=None):
    click.echo(f"gpuattn: warning: {message}", err=True)


def _debug_option():
    def note(ctx, parameter, value):
        ctx.find_root().command.debug = value

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, callback=note, envvar="GPUATTN_DEBUG",
        help="Show the traceback of an error.",
    )  # fmt: skip


def _version(ctx, parameter, value):
    if value and not ctx.resilient_parsing:
        from gpuattn.runtime.device import installed_version

        click.echo(f"gpuattn {installed_version()}")
        ctx.exit()


@click.command(
    cls=Commands,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "GPUATTN",
        "max_content_width": 100,
    },
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
              help="Show the version and exit.")  # fmt: skip
def main() -> None:
    """Train small translators and language models and use them, on NumPy or on a GPU."""
