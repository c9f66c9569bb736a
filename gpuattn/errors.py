"""Errors, whose messages say what was given, what is accepted, and what to try."""

import sys
import warnings
from collections.abc import Iterable
from typing import Any

MOST_FAULTS = 20  # that the message of one error lists


class UnsupportedError(ValueError):
    """No implementation of an op accepts these arguments."""


class GradientError(RuntimeError):
    """A gradient cannot be computed: tape used twice, array edited, no scalar, not recorded."""


class KernelCompileError(RuntimeError):
    """A CUDA source did not compile. Names the first error, the constants and the architecture."""


class DeviceMissingError(RuntimeError):
    """A GPU was requested and none works."""


class ConfigError(ValueError):
    """A setting is unknown, has the wrong type, or contradicts another."""


class DataError(ValueError):
    """A text file, a corpus or a batch cannot be used."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class PretrainedError(CheckpointError):
    """A Hugging Face folder cannot be used; nothing of it is. ``faults``: all that was found, a
    sentence each."""

    def __init__(self, where: Any, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        shown = self.faults[:MOST_FAULTS]
        more = len(self.faults) - len(shown)
        lines = [*shown, f"and {more} faults more"] if more else shown
        super().__init__(f"{where} cannot be used:" + "".join(f"\n- {line}" for line in lines))


class MemoryLimitError(RuntimeError):
    """A model, or its smallest batch, does not fit into memory."""


class SlowPathWarning(UserWarning):
    """A GPU array took a slower implementation than the fastest one."""


class HardwareRefusal(str):
    """A refusal because of the GPU model: no argument can change it, so nobody is warned."""


class SlowerRefusal(str):
    """A refusal because another implementation was measured faster. Asked for by name, it runs."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends."""
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, DeviceMissingError):
        return 3
    return getattr(error, "exit_code", 1)  # which the errors of click have


def problem(function: str, argument: str, got: Any, accepted: Any, advice: str = "") -> str:
    """Return the sentence of a message: where, what was given, what is accepted, what to try."""
    text = f"{function}: {argument} is {got}; accepted: {accepted}"
    return f"{text}. {advice}" if advice else text


def type_of(value: Any) -> str:
    """Return the type of a value for a message: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


slow_paths = 0  # how often ``warn_slow_path`` was called


def warn_slow_path(text: str) -> None:
    """Warn at the line that called into this package: once per line and text, unless filtered."""
    global slow_paths
    slow_paths += 1
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] == "gpuattn":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SlowPathWarning, stacklevel=level)
