"""How an op picks one of its implementations, and how it says why."""

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from gpuattn.arrays import device_of, on_gpu
from gpuattn.errors import KernelCompileError, SlowPathWarning, UnsupportedError, problem

_overrides = contextvars.ContextVar("gpuattn_overrides", default={})  # noqa: B039  never mutated
_explaining = contextvars.ContextVar("gpuattn_explaining", default=False)
_broken = {}  # (op, implementation) -> why its kernel does not compile here, once that was seen
OPS = {}  # op name -> Impls of every op with a choice, filled as op modules are imported


class Elsewhere(str):
    """A refusal for want of another GPU: no argument could change it, so nobody is warned."""


@dataclass(frozen=True)
class Impl:
    """One way to compute an op and its gradient, on raw arrays.

    ``forward(*arrays, needs, **params)`` returns ``(out or tuple of outs, saved)``;
    ``backward(saved, *grads, needs, into, **params)`` returns one gradient (or None) per array;
    ``refuse(*arrays, **params)`` returns None, or a sentence: why this way cannot run.
    ``describe(*arrays, **params)`` returns what a call takes of the GPU, a dict with keys of
    ``WORDS``; it may compile the kernel, and is called only where ``refuse`` returned None.
    ``differentiable_twice``: the backward works on Tensors too, so it can record itself.
    ``places(saved, out, into, **params)``, of an op whose outputs are parts of one array: returns
    the arrays that the gradients of its inputs and those of its outputs go into, so that the
    latter come together without a copy. ``out`` is an output; ``into`` are such arrays for the
    inputs, or None. ``fills_places``: the backward writes there, and returns what it wrote.
    ``offers_product``: the backward is given ``fold`` too, which may be None. ``fold(product)``, of
    an ``autodiff.pending_matmul.Product``, the gradient of the first input, returns whether the op
    that made that input has gone on from it; then there is none to return.
    ``takes_product(saved, product, index, needs, **params)`` returns whether the backward takes a
    Product in the place of the gradient of output ``index``.
    """

    name: str
    forward: Callable
    backward: Callable | None = None
    refuse: Callable | None = None
    describe: Callable | None = None
    differentiable_twice: bool = False
    places: Callable | None = None
    fills_places: bool = False
    offers_product: bool = False
    takes_product: Callable | None = None


class Impls(tuple):
    """The implementations of one op, best first. ``Impls("softmax", Impl(...), ...)``."""

    def __new__(cls, op, *impls):
        self = super().__new__(cls, impls)
        self.op = op
        if len(impls) > 1:
            OPS[op] = self
        return self


WORDS = {  # what describe returns, as a person reads it
    "tile": lambda sides: f"tile {' x '.join(map(str, sides))}",
    "threads": lambda n: f"{n} threads",
    "registers": lambda n: f"{n} registers each",
    "shared_bytes": lambda n: f"{n / 1024:.1f} KiB of shared memory",
    "blocks": lambda n: f"{n:,} blocks",
    "tiles": lambda n: f"{n:,} tiles",
    "waves": lambda n: f"{n:.2f} waves",
    "limit": lambda text: f"limit: {text}",
    "gradient": lambda text: f"gradient: {text}",
}


@dataclass(frozen=True)
class Explanation:
    """Which implementation an op would run, and why not the others. Printing it shows a table.

    ``details``: what the chosen one takes of the GPU, by the names in WORDS, or None: the sides of
    a tile, threads of a block, registers of a thread, shared memory of a block, blocks (tiles where
    blocks take several), how often they fill the GPU (waves), what stands in the way (limit), and
    whose gradient follows where it is another one's, with the reason (gradient).
    """

    op: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]  # (implementation, refusal or None), best first
    details: dict | None = None

    def __str__(self):
        width = max(len(name) for name, _ in self.reasons)
        lines = [f"{self.op}: {self.chosen or 'no implementation accepts these arguments'}"]
        for name, reason in self.reasons:
            verdict = "runs" if name == self.chosen else (reason or "would run, but comes later")
            lines.append(f"  {name:{width}}  {verdict}")
            if name == self.chosen and self.details:
                found = [f"{WORDS[name](value)}" for name, value in self.details.items()]
                parts = [found[i : i + 4] for i in range(0, len(found), 4)]
                lines += [f"  {'':{width}}  {', '.join(part)}" for part in parts]
        return "\n".join(lines)

    def as_dict(self):
        reasons = [{"impl": name, "refusal": reason} for name, reason in self.reasons]
        shared = {"op": self.op, "chosen": self.chosen, "details": self.details}
        return shared | {"implementations": reasons}


class _Explained(BaseException):
    """Carries the answer out of an op that `explain` called; never seen by users."""


def choose(impls, arrays, impl=None, **params):
    """Return the first of ``impls`` that accepts the arguments, or the one asked for.

    ``impl``: an implementation's name, "raw" (the first ``raw-*`` that accepts), or None, which
    means what ``use_impl`` says, and else the first. Passing over a faster one for a GPU array
    is said aloud, once per place and reason. Raises UnsupportedError with every refusal.
    """
    if impl is not None and not isinstance(impl, str):
        names = ", ".join(candidate.name for candidate in impls)
        raise TypeError(problem(impls.op, "impl", f"a {type(impl).__name__}", f"{names}, raw"))
    asked = impl or _overrides.get().get(impls.op)
    if _explaining.get() and len(impls) > 1:
        raise _Explained(_explanation(impls, arrays, asked, params))
    refusals = []
    for candidate in impls:
        if not _matches(candidate.name, asked):
            continue
        reason = _refusal(impls, candidate, arrays, params)
        if reason is None:
            if any(map(on_gpu, arrays)) and not all(isinstance(r, Elsewhere) for _, r in refusals):
                text = f"{impls.op} uses {candidate.name} because:\n" + _listed(refusals)
                warnings.warn(text, SlowPathWarning, stacklevel=_frames_to_the_user())
            return candidate
        refusals.append((candidate.name, reason))
    if not refusals:
        names = ", ".join(candidate.name for candidate in impls)
        raise UnsupportedError(f"{impls.op}: impl={asked!r} is not one of: {names}, raw")
    text = f"{impls.op}: no implementation accepts these arguments:\n" + _listed(refusals)
    raise UnsupportedError(text)


def _listed(refusals):
    return "\n".join(f"  {name}: {reason}" for name, reason in refusals)


def choose_another(impls, broken, error, arrays, impl=None, **params):
    """Return what runs now and in future instead of ``broken``, whose kernel does not compile.

    Raises ``error``, a KernelCompileError, where there is nothing else.
    """
    _note_broken(impls, broken, error)
    try:
        return choose(impls, arrays, impl, **params)
    except UnsupportedError:
        raise error from None


def _note_broken(impls, broken, error):
    _broken[impls.op, broken.name] = "; ".join(str(error).splitlines())


def _refusal(impls, candidate, arrays, params):
    if (impls.op, candidate.name) in _broken:
        return _broken[impls.op, candidate.name]
    return candidate.refuse(*arrays, **params) if candidate.refuse else None


def _frames_to_the_user():
    """Return the stacklevel for ``choose`` to warn at the line that called into this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] == "gpuattn":
        level, frame = level + 1, frame.f_back
    return level


def _matches(name, asked):
    return asked is None or name == asked or (asked == "raw" and name.startswith("raw-"))


def _explanation(impls, arrays, asked, params):
    reasons = tuple((i.name, _refusal(impls, i, arrays, params)) for i in impls)
    pairs = zip(impls, reasons, strict=True)
    accepted = [i for i, (name, reason) in pairs if reason is None and _matches(name, asked)]
    if not accepted:
        return Explanation(impls.op, None, reasons)
    chosen, details = accepted[0], None
    if chosen.describe:
        try:
            with device_of(*arrays):
                details = chosen.describe(*arrays, **params)
        except KernelCompileError as error:
            _note_broken(impls, chosen, error)
            return _explanation(impls, arrays, asked, params)
    return Explanation(impls.op, chosen.name, reasons, details)


def explain(op, *args, **kwargs):
    """Return which implementation ``op(*args, **kwargs)`` would run, with every refusal, as data.

    ``op``: a public op such as ``gpuattn.softmax``. Nothing is computed, though a kernel may be
    compiled to say what it takes. Bad arguments raise what the op itself raises.
    """
    # in a copy of the context, so that the op draws no seed of the caller's
    answer = contextvars.copy_context().run(_ask, op, args, kwargs)
    if answer is not None:
        return answer
    name = getattr(op, "__name__", op)
    raise TypeError(f"explain: {name} does not choose between implementations")


def _ask(op, args, kwargs):
    _explaining.set(True)
    try:
        op(*args, **kwargs)
    except _Explained as answer:
        return answer.args[0]
    return None


@contextlib.contextmanager
def use_impl(**names):
    """Run ops by the named implementation inside a block: ``use_impl(softmax="reference")``.

    Holds for this thread and context. ``scaled_dot_product_attention`` is ``flash_attention``.
    Raises ValueError for an op or an implementation that does not exist.
    """
    for op, name in names.items():
        if op not in OPS:
            raise ValueError(f"use_impl: no op {op!r}; ops: {', '.join(sorted(OPS))}")
        if name != "raw" and name not in [impl.name for impl in OPS[op]]:
            known = ", ".join(impl.name for impl in OPS[op])
            raise ValueError(f"use_impl: {op} has no {name!r}; it has {known}, raw")
    asked = {OPS[op].op: name for op, name in names.items()}
    token = _overrides.set({**_overrides.get(), **asked})
    try:
        yield
    finally:
        _overrides.reset(token)
