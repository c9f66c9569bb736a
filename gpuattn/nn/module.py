"""Modules, whose parameters and children are found among their attributes."""

import contextlib
import contextvars
import fnmatch
import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from gpuattn import rng as random
from gpuattn.arrays import FLOATS, get_xp, is_floating, to_cpu, to_gpu
from gpuattn.autodiff.record import Counted, edit
from gpuattn.autodiff.tape import no_grad
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import CheckpointError, problem
from gpuattn.files import write_bytes
from gpuattn.ops.arguments import integer
from gpuattn.tensor_file import decode, pieces
from gpuattn.typing import Array, Shape, StrPath

MOVES = {"numpy": to_cpu, "cuda": to_gpu}
SETTINGS = frozenset({int, float, bool, str, type(None)})  # types of values without Tensors


class Module(Counted):
    """A callable with parameters.

    A Tensor attribute with ``requires_grad`` is a parameter, one without is frozen: it is saved and
    moved, and gets no gradient. A Module is a child; so are those in lists, tuples and dicts.
    ``training``: whether dropout is active. ``deterministic``: whether gradients have the same bits
    every time, which takes longer on a GPU.

    >>> from gpuattn import nn
    >>> class Network(nn.Module):
    ...     def __init__(self):
    ...         self.hidden = nn.Linear(1, 64, activation="gelu")
    ...         self.out = nn.Linear(64, 1)
    ...
    ...     def __call__(self, x):
    ...         return self.out(self.hidden(x))
    >>> Network()
    Network, 193 parameters
      hidden: Linear(activation='gelu'), 128 parameters: weight (64, 1), bias (64,)
      out: Linear, 65 parameters: weight (1, 64), bias (1,)
    """

    training, deterministic = True, False

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, Tensor) of parameters and frozen Tensors in order of construction; a shared
        one once, under its first path."""
        seen = set()
        for path, tensor in self._find("", Tensor):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, tensor

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, Tensor) as ``named_tensors`` does, without those that are frozen."""
        return ((path, tensor) for path, tensor in self.named_tensors() if tensor.requires_grad)

    def parameters(self) -> list[Tensor]:
        """Return the parameters as a list, each once."""
        found: dict[int, Tensor] = {}
        self._collect(found, [], [])
        return [tensor for tensor in found.values() if tensor.requires_grad]

    def modules(self) -> Iterator[tuple[str, "Module"]]:
        """Yield (path, module) of this module and of all modules inside."""
        yield "", self
        yield from self._find("", Module)

    def train(self, mode: bool = True) -> Self:
        """Switch to training (or evaluation) mode, here and inside; return self."""
        for _, module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode, here and inside; return self."""
        return self.train(False)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context in evaluation mode without recording; the mode before is restored."""
        training = self.training
        if training:
            self.eval()
        try:
            with no_grad():
                yield
        finally:
            if training:
                self.train()

    def freeze(self, *patterns: str) -> Self:
        """Freeze the parameters whose paths the patterns describe; return self.

        A frozen Tensor has no ``requires_grad``: no gradient is computed for it, and an optimizer
        that is made later neither changes it nor keeps state for it. ``patterns``: paths with
        ``*``, ``?`` and ``[...]`` as in a shell; a path also means all inside: ``layers.0``.
        Raises ValueError for a pattern that describes no parameter, and freezes nothing then.

        >>> from gpuattn import nn
        >>> [path for path, _ in nn.FeedForward(2, 4).freeze("inner", "*.bias").named_parameters()]
        ['out.weight']
        """
        named, chosen = dict(self.named_parameters()), set[str]()
        for pattern in patterns:
            found = {path for path in named if _describes(pattern, path)}
            if not found:
                accepted = f"paths of parameters, such as {', '.join(list(named)[:3])}"
                raise ValueError(problem("freeze", "a pattern", repr(pattern), accepted))
            chosen |= found
        for path in chosen:
            named[path].requires_grad = False
        return self

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad, parameter.grad_started = None, False

    def to(self, dtype: Any = None, device: str | None = None) -> Self:
        """Move the Tensors here and inside, parameters or not, and return self.

        ``dtype``: of those that hold floats: float32, float16, bfloat16 or float64. ``device``:
        "numpy" or "cuda". None leaves it as it is. Gradients are dropped. Plain arrays stay: a
        constant that moves along is a Tensor without ``requires_grad``.
        Raises ValueError for others, and once the parameters are in an optimizer's buffers;
        DeviceMissingError for "cuda" without a GPU.
        """
        wanted = None if dtype is None else _float_dtype(dtype)
        if device not in (None, *MOVES):
            raise ValueError(problem("Module.to", "device", repr(device), "'numpy' or 'cuda'"))
        for path, tensor in self._find("", Tensor):
            data = tensor.data if device is None else MOVES[device](tensor.data)
            if wanted is not None and is_floating(data.dtype):
                data = data.astype(wanted, copy=False)
            if data is tensor.data:
                continue
            if tensor.grad_slot is not None:
                got = f"{path}, which is in the buffers of an optimizer"
                accepted = "parameters without one"
                advice = "Move the model first, then make the optimizer."
                raise ValueError(problem("Module.to", "a parameter", got, accepted, advice))
            tensor.data, tensor.grad = data, None
        return self

    def save(self, file: StrPath) -> None:
        """Write all Tensors to a safetensors file, by path and in their dtype.

        The file has its whole content or stays as it was. Raises CheckpointError when writing
        fails.
        """
        write_bytes(file, b"".join(map(bytes, pieces(self.state()))))

    def load(self, file: StrPath) -> Self:
        """Take the parameters of a file that ``save`` wrote, in their own dtype; return self.

        Raises CheckpointError for another file, or one of another model: with all that is missing,
        unknown or misshapen.
        """
        path = Path(file)
        try:
            tensors, _ = decode(path.read_bytes(), path.name)
            self.load_state(tensors)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        return self

    def state(self) -> dict[str, np.ndarray]:
        """Return {path: copy of the Tensor as a NumPy array}, frozen ones too."""
        return {path: np.array(to_cpu(p.data)) for path, p in self.named_tensors()}

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Copy ``{path: array}`` into the Tensors, in their dtype; all of them, or none after an
        error.

        Raises CheckpointError that lists the paths that are missing, unknown or of another shape,
        and where an optimizer keeps float32 masters, which its next update would put back.
        """
        parameters = dict(self.named_tensors())
        if any(p.grad_slot is not None and p.dtype != np.float32 for p in parameters.values()):
            raise CheckpointError(
                "load_state: an optimizer keeps float32 masters of these 16-bit parameters. Load "
                "before it is made, or use its load_state_dict"
            )
        faults = [f"missing: {path}" for path in parameters if path not in arrays]
        for path, array in arrays.items():
            if path not in parameters:
                faults.append(f"unknown: {path}")
            elif array.shape != parameters[path].shape:
                faults.append(f"{path} has shape {array.shape}, want {parameters[path].shape}")
            elif is_floating(array.dtype) != is_floating(parameters[path].dtype):
                want = "a float dtype" if is_floating(parameters[path].dtype) else "integers"
                faults.append(f"{path} is {array.dtype}, want {want}")
        if faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" * (len(faults) > 8))
            raise CheckpointError(f"load_state: the parameters are of another model: {shown}")
        for path, parameter in parameters.items():
            xp = get_xp(parameter.data)
            edit(parameter, ..., xp.asarray(arrays[path]))

    def summary(self) -> str:
        """Return a table of all Tensors: path, shape, dtype, count, and their sums."""
        named = list(self.named_tensors())
        rows = [("parameter", "shape", "dtype", "count")]
        for path, p in named:
            shown = path if p.requires_grad else f"{path} (frozen)"
            rows.append((shown, str(tuple(p.shape)), str(p.dtype), f"{p.size:,}"))
        size, count = sum(p.data.nbytes for _, p in named), sum(p.size for _, p in named)
        rows.append((f"{len(named)} in all", "", f"{size:,} bytes", f"{count:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{a:{widths[0]}}  {b:{widths[1]}}  {c:{widths[2]}}  {d:>{widths[3]}}"
            for a, b, c, d in rows
        ]
        return "\n".join(lines)

    def _count(self):
        return sum(parameter.size for parameter in self.parameters())

    def __repr__(self):
        """Return a line for every module inside: settings, how many parameters, their shapes."""
        return "\n".join(self._lines())

    def _lines(self):
        held, lines = list(self._held()), []
        own = [
            f"{n} {tuple(v.shape)}" for n, v in held if isinstance(v, Tensor) and v.requires_grad
        ]
        count = self._count()
        counted = f", {count:,} parameters" if count else ""
        lines = [f"{self._title()}{counted}" + (f": {', '.join(own)}" if own else "")]
        inside = [(n, v._lines()) for n, v in held if isinstance(v, Module)]
        for (_, (head, *rest)), same in itertools.groupby(inside, _alike):
            names = [name for name, _ in same]
            several = f" to {names[-1]}, {len(names)} alike" if len(names) > 1 else ""
            lines += [f"  {names[0]}{several}: {head}", *(f"  {line}" for line in rest)]
        return lines

    def _title(self):
        """Return the class name with those constructor arguments that are kept as attributes."""
        kept = vars(self)
        names = [n for n in inspect.signature(type(self)).parameters if n in kept]
        settings = [f"{n}={kept[n]!r}" for n in names if isinstance(kept[n], int | float | str)]
        return type(self).__name__ + (f"({', '.join(settings)})" if settings else "")

    def _held(self):
        """Yield (path, value) of every attribute, and of what is in lists, tuples and dicts."""
        for name, value in vars(self).items():
            if isinstance(value, list | tuple):
                yield from ((f"{name}.{i}", child) for i, child in enumerate(value))
            elif isinstance(value, dict):
                yield from ((f"{name}.{i}", child) for i, child in value.items())
            else:
                yield name, value

    def _collect(self, found, attributes, containers):
        """Put every Tensor inside this module into ``found``, by id, in the order of ``_find``.

        ``attributes``, ``containers``: get what was looked through, those of modules and there.
        """
        values = vars(self).values()
        attributes.append(values)
        for value in values:
            if type(value) in SETTINGS:
                continue
            if isinstance(value, dict | list | tuple):
                inside = value.values() if isinstance(value, dict) else value
                containers.append(inside)
            else:
                inside = (value,)
            for one in inside:
                if isinstance(one, Tensor):
                    found.setdefault(id(one), one)
                elif isinstance(one, Module):
                    one._collect(found, attributes, containers)

    def _find(self, prefix, kind):
        """Yield (path, value) of every ``kind`` inside this module, depth first."""
        for name, value in self._held():
            if isinstance(value, kind):
                yield f"{prefix}{name}", value
            if isinstance(value, Module):
                yield from value._find(f"{prefix}{name}.", kind)


def _float_dtype(dtype):
    """Return one of ``FLOATS``. Raises ValueError for another dtype."""
    for known in FLOATS:
        if dtype in (known, str(known)):
            return known
    accepted = ", ".join(map(str, FLOATS))
    advice = f"Try device={dtype!r}." if dtype in MOVES else ""
    raise ValueError(problem("Module.to", "dtype", repr(dtype), accepted, advice))


def _describes(pattern, path):
    """Return whether a pattern describes a path, or a module around it."""
    parts = path.split(".")
    inside = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(one, pattern) for one in inside)


def _alike(named_lines):
    """Return a key that equal neighbours in a list of modules share."""
    name, lines = named_lines
    return name.rpartition(".")[0] or name, lines


_EMPTY: contextvars.ContextVar[bool] = contextvars.ContextVar("uninitialised", default=False)


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Return a context in which modules are made with arbitrary weights, which takes no time and no
    memory until they are written. For weights that are about to be loaded."""
    before = _EMPTY.set(True)
    try:
        yield
    finally:
        _EMPTY.reset(before)


def generator(rng: np.random.Generator | None = None) -> np.random.Generator:
    """Return ``rng``, or a new generator seeded as ``manual_seed`` says."""
    return rng or np.random.Generator(np.random.Philox(random.fresh_seed()))


def check_sizes(layer: str, **sizes: Any) -> None:
    """Raise TypeError for a size that is no integer, ValueError for one below 1."""
    for name, size in sizes.items():
        integer(layer, name, size, "an integer from 1 on", 1)


def parameter(values: Any) -> Tensor:
    """Return values as a float32 parameter."""
    return Tensor(np.asarray(values, np.float32), requires_grad=True)


def xavier_uniform(rng: np.random.Generator, shape: Shape) -> Tensor:
    """Return a (out, in) weight whose scale preserves variances.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks" (2010).
    """
    if _EMPTY.get():
        return parameter(np.empty(shape, np.float32))
    bound = (6 / sum(shape)) ** 0.5
    return parameter(rng.uniform(-bound, bound, shape))


def normal(rng: np.random.Generator, shape: Shape, std: float) -> Tensor:
    """Return a normally distributed parameter."""
    if _EMPTY.get():
        return parameter(np.empty(shape, np.float32))
    return parameter(rng.standard_normal(shape, np.float32) * np.float32(std))


def truncated_normal(rng: np.random.Generator, shape: Shape, std: float) -> Tensor:
    """Return a normally distributed parameter without values beyond two deviations."""
    found = normal(rng, shape, 1.0)
    if _EMPTY.get():
        return found
    while (far := np.abs(found.data) > 2).any():
        found.data[far] = rng.standard_normal(int(far.sum()), np.float32)
    found.data *= np.float32(std)
    return found


def constant(value: float, width: int) -> Tensor:
    """Return a (width,) parameter filled with one value."""
    return parameter(np.full(width, value))
