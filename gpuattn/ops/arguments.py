"""What public ops check of their arguments before anything runs: arrays, flags, numbers, seeds."""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import as_array
from gpuattn.autodiff.tape import Box
from gpuattn.errors import problem, type_of
from gpuattn.typing import Array, Shape

BOOLS = (bool, np.bool_)
NUMBERS = (int, float, np.integer, np.floating)


def take_arrays(
    function: str, required: dict[str, Any], optional: dict[str, Any]
) -> dict[str, Any]:
    """Return {name: Box, array, or None where optional}. Raises TypeError for anything else.

    Overwrites the dicts ``required`` and ``optional``.
    """
    for name, x in required.items():
        if type(x) is not np.ndarray and not isinstance(x, Box):
            required[name] = as_array(x, function, name)
    for name, x in optional.items():
        if not (x is None or type(x) is np.ndarray or isinstance(x, Box)):
            optional[name] = as_array(x, function, name)
    return required | optional


def check_matrix(
    function: str, x: Array, weight: Array, name: str = "weight", shape: str = "(out, in)"
) -> None:
    """Raise ValueError unless the array ``weight`` is a matrix that fits ``x`` (..., in).

    ``name``: of the argument ``weight``. ``shape``: what is accepted, in words.
    """
    if weight.ndim != 2:
        raise ValueError(problem(function, f"{name}.shape", weight.shape, shape))
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        accepted = f"(..., {weight.shape[1]}), for {name}.shape {weight.shape}"
        raise ValueError(problem(function, "x.shape", x.shape, accepted))


def check_shapes(function: str, shape: Shape, **arrays: Array | None) -> None:
    """Raise ValueError unless all arrays that are not None have this shape."""
    for name, x in arrays.items():
        if x is not None and x.shape != shape:
            raise ValueError(problem(function, f"{name}.shape", x.shape, shape))


def check_flags(function: str, **flags: Any) -> None:
    """Raise TypeError unless all are True or False, of Python or NumPy."""
    for name, value in flags.items():
        if not isinstance(value, BOOLS):
            raise TypeError(problem(function, name, described(value), "True or False"))


def check_choice(function: str, name: str, value: Any, *choices: str | None) -> None:
    """Raise unless ``value`` is one of ``choices``: strings or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(problem(function, name, described(value), _listed(choices)))
    if value not in choices:
        raise ValueError(problem(function, name, repr(value), _listed(choices)))


def _listed(choices):
    return " or ".join(map(repr, choices))


def number(
    function: str,
    name: str,
    value: Any,
    accepted: str = "a finite number",
    accepts: Callable[[Any], bool] = math.isfinite,
) -> float:
    """Return ``value`` as a float.

    Raises ValueError unless ``accepts(value)``, TypeError for what is no number.
    """
    if not isinstance(value, NUMBERS):
        raise TypeError(problem(function, name, described(value), accepted))
    if not accepts(value):
        raise ValueError(problem(function, name, value, accepted))
    return float(value)


def integer(
    function: str,
    name: str,
    value: Any,
    accepted: str = "an integer >= 0",
    least: float = 0,
    most: float = math.inf,
) -> int:
    """Return ``value`` as an int.

    Raises ValueError outside ``least`` to ``most``, TypeError for what is no integer.
    """
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(problem(function, name, described(value), accepted)) from None
    if not least <= found <= most:
        raise ValueError(problem(function, name, found, accepted))
    return found


def probability(function: str, name: str, p: Any) -> float:
    """Return ``p`` as a float. Raises ValueError unless 0 <= p <= 1, TypeError for others."""
    return number(function, name, p, "a probability, 0 <= p <= 1", _is_share)


def _is_share(p):
    return 0 <= p <= 1


def seed_key(function: str, seed: Any) -> rng.Key:
    """Return ``seed`` as a ``rng.Key``: a Key, an int, or None for a fresh one."""
    try:
        return rng.as_key(seed)
    except TypeError:
        accepted = "an int, a gpuattn.rng.Key, or None for a fresh seed"
        raise TypeError(problem(function, "seed", described(seed), accepted)) from None


def dropout_key(function: str, p: float, seed: Any) -> rng.Key | None:
    """Return the ``rng.Key`` of a call with dropout probability ``p``, or None if that is 0."""
    if seed is None and not p:
        return None
    key = seed_key(function, seed)
    return key if p else None


def described(value: Any) -> str:
    """Return ``value`` for a message: itself if it is short, else its type."""
    if value is None or isinstance(value, str | bool | int | float | np.generic):
        return repr(value)
    return type_of(value)
