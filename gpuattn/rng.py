"""Counter-based random numbers: the same bits in NumPy, CuPy, Numba and ``common/philox.cuh``.

Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
A number is a function of (seed, stream, step, index) alone, not of launch shape, tile or backend.
Each counter gives four 32-bit words = eight 16-bit lanes, low half of a word first.
"""

import contextlib
import contextvars
import functools
import itertools
import math
import operator
import os
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import for_each, get_xp, recorders
from gpuattn.errors import UnsupportedError, problem, type_of
from gpuattn.modes import without_plans
from gpuattn.typing import Array, Shape, Xp

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
CONSTANTS = (*MULTIPLIERS, 0xFFFFFFFF, 32)
WEYL = (0x9E3779B9, 0xBB67AE85)
LANES = 8
BLOCK = 1 << 16  # elements at a time on NumPy, whose random words fit into the cache
FEW = 1024  # NumPy: a call of up to so many counters draws those of the next streams too,
MANY = 4096  # and so many in all: each array of words has 32 kB
# None; (seed, drawn) after ``manual_seed``; (seed, drawn, step) inside ``numbered``
_counter: contextvars.ContextVar[tuple | None] = contextvars.ContextVar(
    "gpuattn_seed_counter", default=None
)


class Key(NamedTuple):
    """The key of random numbers: the seed of a run, the stream of a call, the number of the update.

    ``step`` may be a one-element uint32 CuPy array, read by kernels on the device, so that a
    replayed graph gets new numbers.
    """

    seed: int
    stream: int = 0
    step: Any = 0


def as_key(seed: Any) -> Key:
    """Return ``seed`` (a Key, an int, or None for a fresh one) as a Key; TypeError for others."""
    if seed is not None:
        return seed if isinstance(seed, Key) else Key(operator.index(seed) & 0xFFFFFFFFFFFFFFFF)
    global fresh_seeds
    fresh_seeds += 1
    state = _counter.get()
    if state is None:
        seed, numbers = _process
        number = next(numbers)
    elif len(state) == 2:
        seed, number = state
        _counter.set((seed, number + 1))
        seed = _seed_of_streams(seed)
    else:
        seed, number, step = state
        _counter.set((seed, number + 1, step))
        return Key(seed, number, step)
    if number >> 32:  # each key has a stream of its own; after 2**32 of them, another seed
        seed, number = seed + (number >> 32) & 0xFFFFFFFFFFFFFFFF, number & 0xFFFFFFFF
    return _new(Key, (seed, number, 0))  # half the time of Key(...)


_new = tuple.__new__


@functools.lru_cache(maxsize=64)
def _seed_of_streams(seed):
    """Return the seed of keys after ``manual_seed(seed)``: keys of a run with ``seed`` differ."""
    return _joined(philox(seed, 0, 0, 0xFFFFFFFE, 0))


def _joined(words):
    return int(words[0]) | int(words[1]) << 32


def _begin_process():
    """Choose the seed of the keys of this process without ``manual_seed``."""
    global _process
    _process = secrets.randbits(64), itertools.count()


_process: tuple[int, Iterator[int]]
_begin_process()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_process)


def manual_seed(seed: int) -> None:
    """Make the seeds of ops called with ``seed=None`` repeatable from here on.

    For this thread and context. Raises TypeError for a seed that is no integer.
    """
    try:
        _counter.set((operator.index(seed) & 0xFFFFFFFFFFFFFFFF, 0))
    except TypeError:
        raise TypeError(problem("manual_seed", "seed", type_of(seed), "an int")) from None


fresh_seeds = 0  # how often a fresh seed or key was drawn


def fresh_seed() -> int:
    """Return a new 64-bit seed: random, or the next one after ``manual_seed``.

    Raises UnsupportedError while a CUDA graph is captured: replays would repeat the seed.
    """
    global fresh_seeds
    fresh_seeds += 1
    state = _counter.get()
    if state is None:
        return secrets.randbits(64)
    seed, drawn, step = state if len(state) == 3 else (*state, 0)
    if not isinstance(step, int):
        raise UnsupportedError(
            "a random seed drawn on the host would be the same in every replay of a graph; "
            "draw it outside, or leave seed=None to an op"
        )
    _counter.set((seed, drawn + 1, *state[2:]))
    return _joined(philox(seed, drawn, step, 0xFFFFFFFF, len(state) - 2))


def is_numbered() -> bool:
    """Return whether this is inside ``numbered``."""
    state = _counter.get()
    return state is not None and len(state) == 3


def manual_state() -> tuple[int, int] | None:
    """Return (seed of ``manual_seed``, how many were drawn since), or None without one."""
    return _counter.get()  # callers are outside of ``numbered``


def skip_one() -> None:
    """Count one more as drawn since ``manual_seed``; nothing without one."""
    state = _counter.get()
    if state is not None:
        _counter.set((state[0], state[1] + 1))


@contextlib.contextmanager
def numbered(seed: int, step: Any) -> Iterator[list[int]]:
    """Inside a block, ops with ``seed=None`` take the keys (seed, 0, step), (seed, 1, step), ...

    ``step``: an int, or () or (1,) uint32 on the device. Yields a list, to which the end of the
    block appends how many keys were drawn; -1 if ``manual_seed`` was called, which stays in force.
    """
    drawn: list[int] = []
    token = _counter.set((seed, 0, step))
    try:  # plans hold steps as numbers
        with contextlib.nullcontext() if isinstance(step, int) else without_plans():
            yield drawn
    finally:
        state: Any = _counter.get()
        _counter.reset(token)
        drawn.append(state[1] if len(state) == 3 else -1)
        if len(state) == 2:
            _counter.set(state)


@contextlib.contextmanager
def replay(state: Any) -> Iterator[None]:
    """Inside a block, draw the same fresh seeds as after ``state = remember()``."""
    token = _counter.set(state)
    try:
        yield
    finally:
        _counter.reset(token)


def remember() -> tuple:
    """Return a state for ``replay``. Without ``manual_seed``, starts from a random seed."""
    state = _counter.get()
    if state is None:
        state = secrets.randbits(64), 0
        _counter.set(state)
    return state


def philox(seed: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple:
    """Return four uint32-valued numbers for counters (c0, c1, c2, c3) under a 64-bit seed.

    The counters are ints, or uint64 scalars or arrays (NumPy or CuPy), below 2**32 that broadcast;
    so are the numbers. ``seed``: an int, or a uint64 array that broadcasts with them.
    """
    on_numpy = get_xp(seed, c0, c1, c2, c3) is np
    m0, m1, low, shift = _NUMPY_CONSTANTS if on_numpy else CONSTANTS
    for k0, k1 in _numpy_keys(seed) if on_numpy and isinstance(seed, int) else _keys(seed):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> shift) ^ (c1 ^ k0), p1 & low, (p0 >> shift) ^ (c3 ^ k1), p0 & low
    return c0, c1, c2, c3


def _keys(seed):
    """Return the two keys of each round."""
    k0, k1, keys = seed & 0xFFFFFFFF, seed >> 32, []
    for _ in range(ROUNDS):
        keys.append((k0, k1))
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return keys


def _as_array(number):
    """Return an int as a 0-d array, which NumPy's operations take faster than a scalar."""
    return np.array(number, np.uint64)


_NUMPY_CONSTANTS = tuple(map(_as_array, CONSTANTS))


@functools.lru_cache(maxsize=64)  # all updates of a run share a seed
def _numpy_keys(seed):
    return [(_as_array(k0), _as_array(k1)) for k0, k1 in _keys(seed)]


def threshold(p: float) -> int:
    """Return the 16-bit bound below which a lane is kept: round((1 - p) * 65536)."""
    return round((1.0 - p) * 65536)


def lanes(xp: Xp, key: Key, first: Any, count: int) -> Array:
    """Return the 16-bit numbers of elements ``first .. first + count - 1``.

    uint16 (count,), which may be read-only.
    """
    begin, end = first // LANES, -(-(first + count) // LANES)
    if xp is np and end <= FEW and isinstance(key.step, int):
        return _few_lanes(key, end)[first : first + count]
    c0, c1 = xp.arange(begin, end, dtype=np.uint64), 0
    if end > 1 << 32:
        c0, c1 = c0 & np.uint64(0xFFFFFFFF), c0 >> np.uint64(32)
    words = philox(key.seed, c0, c1, *counters(xp, key))
    return _split(xp, words, c0.shape)[first - begin * LANES :][:count]


def _split(xp, words, shape):
    """Return the lanes of counters of this shape, those of the last axis joined."""
    w0, w1, w2, w3 = words
    pairs, shift = xp.empty((*shape, 2), np.uint64), np.uint64(32)
    # all supported platforms are little-endian: the low half comes first
    xp.bitwise_or(w0, w1 << shift, out=pairs[..., 0])
    xp.bitwise_or(w2, w3 << shift, out=pairs[..., 1])
    return pairs.view(np.uint16).reshape(*shape[:-1], -1)


def _few_lanes(key, count):
    """Return the lanes of a stream's first ``count`` counters at least.

    For few numbers NumPy's calls take longer than the arithmetic. So where streams are drawn one
    after the other, those that follow are drawn too, twice as many each time.
    """
    global _table
    (seed, stream, step), (held, lanes) = key, _table
    row, ahead = stream - held.stream, 1
    if seed == held.seed and step == held.step and 0 <= row <= len(lanes):
        if row < len(lanes) and count * LANES <= lanes.shape[1]:
            return lanes[row]
        count = max(count, lanes.shape[1] // LANES)
        ahead = max(min(2 * row, MANY // count), 1)
    streams = np.arange(stream, stream + ahead, dtype=np.uint64)[:, None]
    words = philox(seed, np.arange(count, dtype=np.uint64), 0, streams, step)
    lanes = _split(np, words, (ahead, count))
    lanes.flags.writeable = False
    _table = key, lanes  # one assignment: threads see this table or another one
    return lanes[0]


# a key, and the lanes of its stream and of the next ones, (streams, counters * LANES), read-only
_table = Key(0), np.empty((0, 0), np.uint16)


def counters(xp: Xp, key: Key) -> tuple:
    """Return the last two counters of a key: ints, or a () array where the step is on a GPU."""
    step = key.step if isinstance(key.step, int) else xp.asarray(key.step, np.uint64).reshape(())
    return key.stream, step


def keep_mask(xp: Xp, shape: Shape, p: float, key: Key) -> Array:
    """Return the boolean dropout mask of an array whose logical index is row-major in ``shape``."""
    count, bound = math.prod(shape), threshold(p)
    if bound == 0:
        return xp.zeros(shape, bool)

    def draw(first, size):
        return lanes(xp, key, first, size) <= np.uint16(bound - 1)  # 65536 does not fit

    if xp is not np or count <= BLOCK:
        return draw(0, count).reshape(shape)
    # threads hand over the interpreter's lock at every operation: only long operations gain
    many = count > 16 * BLOCK
    kept, step = np.empty(count, bool), 4 * BLOCK if many else BLOCK

    def fill(first):
        kept[first : first + step] = draw(first, min(step, count - first))

    if many:
        for_each(fill, range(0, count, step))
    else:
        for first in range(0, count, step):
            fill(first)
    return kept.reshape(shape)


def device_arguments(key: Key) -> tuple:
    """Return (seed low, seed high, stream, step, device step or None) for ``philox_key``."""
    on_device = not isinstance(key.step, int | np.integer)
    step, pointer = (0, key.step) if on_device else (int(key.step), None)
    numbers: tuple = (key.seed & 0xFFFFFFFF, key.seed >> 32, key.stream, step)
    recorder = recorders.get()
    # a kernel that draws nothing gets the numbers of another Key(0)
    if recorder is not None and (key is recorder.key or on_device or key != Key(0)):
        numbers = recorder.drawn(key, numbers)
    return *numbers, pointer
