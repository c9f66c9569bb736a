"""Lines of the commands that treat each line by itself: one bad line harms no other."""

from collections.abc import Callable, Iterator
from typing import Any

import click

from gpuattn.errors import DataError

AT_ONCE = 1 << 16  # bytes of lines that are computed together, and then written


class LineErrors:
    """Prints what is wrong with lines on standard error; ``count`` says how many were wrong."""

    def __init__(self) -> None:
        self.count = 0

    def checked(self, number: int, raws: tuple[bytes, ...], check: Callable[..., Any]) -> Any:
        """Return (texts, None) of a line, or (None, message) where it cannot be used.

        ``raws``: line ``number``, from 1, of each file. ``check``: called with the texts; raises
        DataError for those that a model does not take.
        """
        try:
            texts = [text_of(number, raw) for raw in raws]
            check(*texts)
        except (UnicodeDecodeError, DataError) as error:
            message = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            self.add(number, message)
            return None, message
        return texts, None

    def add(self, number: int, message: str) -> None:
        """Print what is wrong with a line."""
        click.echo(f"gpuattn: error: line {number}: {message}", err=True)
        self.count += 1


def text_of(number: int, raw: bytes) -> str:
    """Return the text of a line without its end; the first may have a byte order mark."""
    return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")


def arriving(stream: Any, prompt: bool = False, ranks: int = 1) -> Iterator[list[bytes]]:
    """Yield lists of complete lines: all that have arrived, or at a prompt one at a time.

    ``ranks``: how many share them, and get as many more at once.
    """
    rest = b""
    while True:
        if prompt:
            click.echo("> ", nl=False, err=True)
        data = stream.readline() if prompt else stream.read1(AT_ONCE * ranks)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]
