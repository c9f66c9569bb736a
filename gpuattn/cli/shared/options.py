"""Shared by the commands: types of parameters, options under headings, and common options."""

from collections.abc import Callable
from typing import Any, NoReturn

import click

from gpuattn.errors import ConfigError
from gpuattn.runtime.device import DEVICES
from gpuattn.tasks.task import MOST_BEAMS
from gpuattn.units import nearest, whole


class NearChoice(click.Choice):
    """A choice whose error names the nearest accepted value."""

    def fail(
        self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None
    ) -> NoReturn:
        value = message.split("'")[1] if "'" in message else ""
        super().fail(message.rstrip(".") + (nearest(value, self.choices) or "."), param, ctx)


class Parsed(click.ParamType):
    """A value that ``parse``, a parser of ``gpuattn.units``, accepts."""

    def __init__(self, parse: Callable[[Any], Any], metavar: str) -> None:
        self.parse = parse
        self.name = metavar

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PathName(click.Path):
    """A path whose name is not empty: the empty path would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


COUNT = Parsed(whole(1), "N")
BEAMS = Parsed(whole(1, MOST_BEAMS), "N")


class GroupedCommand(click.Command):
    """Shows options under the headings given by ``GroupedOption``; remembers its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list] = {}
        for parameter in sorted(self.get_params(ctx), key=_is_other):
            if isinstance(parameter, click.Argument):
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _is_other(parameter):
    return not hasattr(parameter, "group")


class GroupedOption(click.Option):
    """An option with a heading."""

    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def device_option(function: Callable) -> Callable:
    """Add ``--device``."""
    return click.option(
        "--device", type=NearChoice(DEVICES), default="auto", show_default=True, cls=GroupedOption,
        group="Machine", help="auto: a GPU if one works; cuda without one is an error.",
    )(function)  # fmt: skip


def run_argument(function: Callable) -> Callable:
    """Add the argument DIR, the folder of a run."""
    return click.argument("folder", metavar="DIR", type=PathName(file_okay=False))(function)
