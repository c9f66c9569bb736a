"""What public ops check of their arguments before anything runs: arrays, flags, numbers, seeds."""

import math
import operator

import numpy as np

from gpuattn import rng
from gpuattn.arrays import as_array
from gpuattn.autodiff.tape import Box
from gpuattn.errors import problem

BOOLS = (bool, np.bool_)
NUMBERS = (int, float, np.integer, np.floating)


def take_arrays(function, required, optional):
    """Return {name: Box, array, or None where optional}; TypeError for what is no array.

    ``required``, ``optional``: dicts of their own, which are written to.
    """
    for name, x in required.items():
        if type(x) is not np.ndarray and not isinstance(x, Box):
            required[name] = as_array(x, function, name)
    for name, x in optional.items():
        if not (x is None or type(x) is np.ndarray or isinstance(x, Box)):
            optional[name] = as_array(x, function, name)
    return required | optional


def check_flags(function, **flags):
    """Raise TypeError unless all are True or False, of Python or NumPy."""
    for name, value in flags.items():
        if not isinstance(value, BOOLS):
            raise TypeError(problem(function, name, described(value), "True or False"))


def check_choice(function, name, value, *choices):
    """Raise unless ``value`` is one of ``choices``: strings or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(problem(function, name, described(value), _listed(choices)))
    if value not in choices:
        raise ValueError(problem(function, name, repr(value), _listed(choices)))


def _listed(choices):
    return " or ".join(map(repr, choices))


def number(function, name, value, accepted="a finite number", accepts=math.isfinite):
    """Return ``value`` as a float if ``accepts`` it; TypeError for what is no number."""
    if not isinstance(value, NUMBERS):
        raise TypeError(problem(function, name, described(value), accepted))
    if not accepts(value):
        raise ValueError(problem(function, name, value, accepted))
    return float(value)


def integer(function, name, value, accepted="an integer >= 0", least=0, most=math.inf):
    """Return ``value`` as an int from ``least`` to ``most``; TypeError for what is no integer."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(problem(function, name, described(value), accepted)) from None
    if not least <= found <= most:
        raise ValueError(problem(function, name, found, accepted))
    return found


def probability(function, name, p):
    """Return ``p`` as a float; ValueError unless 0 <= p <= 1, TypeError for what is no number."""
    return number(function, name, p, "a probability, 0 <= p <= 1", _is_share)


def _is_share(p):
    return 0 <= p <= 1


def seed_key(function, seed):
    """Return ``seed`` as a ``rng.Key``: a Key, an int, or None for a fresh one."""
    try:
        return rng.as_key(seed)
    except TypeError:
        accepted = "an int, a gpuattn.rng.Key, or None for a fresh seed"
        raise TypeError(problem(function, "seed", described(seed), accepted)) from None


def dropout_key(function, p, seed):
    """Return the ``rng.Key`` of a call that drops with probability ``p``, None where it is 0."""
    if seed is None and not p:
        return None
    key = seed_key(function, seed)
    return key if p else None


def described(value):
    """Return ``value`` in a few words: itself if it is short, or else its type."""
    if value is None or isinstance(value, str | bool | int | float | np.generic):
        return repr(value)
    return f"a {type(value).__name__}"
