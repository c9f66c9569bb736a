"""How an op chooses one of its implementations, and how it explains the choice."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gpuattn.arrays import device_of, is_floating, on_gpu
from gpuattn.cuda.gpu import FORCED, forced_capability
from gpuattn.errors import (
    HardwareRefusal,
    KernelCompileError,
    SlowerRefusal,
    UnsupportedError,
    problem,
    type_of,
    warn_slow_path,
)
from gpuattn.modes import Names, mode, with_mode

Result = TypeVar("Result")

# (op, implementation) -> why its kernel does not compile here, once that was seen
_broken: dict[tuple[str, str], str] = {}
NOT_RAW = "numba", "unfused", "reference"  # the implementations that impl="raw" passes over
# op name -> Impls of every op with a choice, filled as op modules are imported
OPS: dict[str, "Impls"] = {}


@dataclass(frozen=True)
class Fusion:
    """How the gradient of an op meets the gradients of its neighbours: see ``autodiff``.

    ``layout(saved, out, into, **params)``, of an op whose outputs are parts of one array: returns
    the arrays that the gradients of its inputs and those of its outputs are written to, so that the
    latter lie together without a copy. ``out`` is an output; ``into`` are such arrays for the
    inputs, or None. ``writes_into_layout``: the backward writes there and returns what it wrote.
    ``offers_matmul``: the backward takes ``fold`` too, which may be None. ``fold(matmul)``, of an
    ``autodiff.pending_matmul.PendingMatmul``, the gradient of the first input, returns whether the
    op that made that input consumed it; then the backward returns None for it.
    ``takes_matmul(saved, matmul, index, needs, **params)`` returns whether the backward takes a
    PendingMatmul in place of the gradient of output ``index``.
    ``takes_second``, of an op without second derivatives: the backward takes one more gradient
    after those of the outputs, or None, and adds it to that of the first output.
    """

    layout: Callable | None = None
    writes_into_layout: bool = False
    offers_matmul: bool = False
    takes_matmul: Callable | None = None
    takes_second: bool = False


@dataclass(frozen=True)
class Impl:
    """One way to compute an op and its gradient, on raw arrays.

    ``forward(*arrays, needs, **params)`` returns ``(out or tuple of outs, saved)``;
    ``backward(saved, *grads, needs, into, **params)`` returns one gradient (or None) per array;
    ``refuse(*arrays, needs, **params)`` returns None, or a sentence: why the forward cannot run.
    ``refuse_backward``, of an op whose implementations all save the same arrays: the same for the
    backward. The gradient then goes to the first implementation that accepts it, whichever one ran
    the forward.
    ``compile_backward(*arrays, needs, **params)`` starts to compile the gradient's kernel; it is
    called before the forward, so that both compile at the same time.
    ``describe(*arrays, **params)`` returns what a call uses of the GPU, a dict with keys of
    ``WORDS``; it may compile the kernel, and is called only where ``refuse`` returned None.
    ``specialized``: made for some shapes; nobody is warned where it does not run.
    ``differentiable_twice``: the backward works on Tensors too, so it can record itself.
    """

    name: str
    forward: Callable
    backward: Callable | None = None
    refuse: Callable | None = None
    describe: Callable | None = None
    refuse_backward: Callable | None = None
    compile_backward: Callable | None = None
    specialized: bool = False
    differentiable_twice: bool = False
    fusion: Fusion = Fusion()


class Impls(tuple):
    """The implementations of one op, best first. ``Impls("softmax", Impl(...), ...)``."""

    op: str
    share_saved: bool  # every implementation saves the same arrays, so any may run the backward

    def __new__(cls, op: str, *impls: Impl) -> "Impls":
        self = super().__new__(cls, impls)
        self.op = op
        self.share_saved = any(impl.refuse_backward for impl in impls)
        if len(impls) > 1:
            OPS[op] = self
        return self


class Call(Generic[Result]):
    """A call of an op with checked arguments: what the tape runs, and what ``explain`` reads.

    ``Result``, for type checkers: what the op returns.

    ``inputs``: arrays, Tensors or None. ``impl``: the name asked for, or None. ``params``: keyword
    arguments of the implementations. ``donated``: Tensors whose memory the call overwrites.
    ``finish(out)`` makes the op's result of the implementation's. ``values_checked``: the values of
    arrays were checked, so each call has to be.
    """

    __slots__ = ("donated", "finish", "impl", "impls", "inputs", "params", "values_checked")

    def __init__(
        self,
        impls: Impls,
        inputs: Iterable,
        impl: str | None = None,
        *,
        donated: tuple = (),
        finish: Callable | None = None,
        values_checked: bool = False,
        **params: Any,
    ) -> None:
        self.impls, self.inputs, self.impl, self.params = impls, tuple(inputs), impl, params
        self.donated, self.finish, self.values_checked = donated, finish, values_checked

    @property
    def arrays(self) -> list:
        """The inputs as raw arrays or None."""
        return [x.data if hasattr(x, "requires_grad") else x for x in self.inputs]

    @property
    def needs(self) -> tuple[bool, ...]:
        """For each input, whether it wants a gradient."""
        return tuple([getattr(x, "requires_grad", False) for x in self.inputs])

    def choose(self) -> Impl:
        """Return the implementation that runs the forward. Raises UnsupportedError if none does."""
        return choose(self.impls, self.arrays, self.impl, needs=self.needs, **self.params)

    def choose_backward(self, chosen: Impl, needs: tuple[bool, ...]) -> Impl:
        """Return the implementation that computes the gradient after ``chosen`` ran the forward."""
        return choose_backward(
            self.impls, chosen, self.arrays, self.impl, needs=needs, **self.params
        )


def prepare(op: Callable, *args: Any, **kwargs: Any) -> Call:
    """Return the checked ``Call`` of ``op(*args, **kwargs)``, which has not run.

    ``op``: a public op such as ``gpuattn.softmax``. Draws no random seed of the caller's. Raises
    what the op raises for bad arguments, TypeError where ``op`` is no op with implementations.
    """
    check = getattr(op, "prepare", None)
    if check is None:
        name = getattr(op, "__name__", op)
        raise TypeError(f"{name} does not choose between implementations")
    return contextvars.copy_context().run(check, *args, **kwargs)


# ---- choosing ------------------------------------------------------------------------------------


def choose(
    impls: Impls, arrays: list, impl: str | None = None, *, needs: tuple = (), **params: Any
) -> Impl:
    """Return the first of ``impls`` that accepts the arguments, or the one asked for.

    ``impl``: an implementation's name, "raw" (the first that accepts and is neither Numba nor the
    reference: CUDA sources and libraries), or None, which means what ``use_impl`` says, and else
    the first. A GPU array that passes over a faster one warns once per place and reason. Raises
    UnsupportedError with every refusal; ConfigError where GPUATTN_ARCH names no GPU, also on NumPy.
    """
    if FORCED in os.environ:
        forced_capability()
    if impl is not None and not isinstance(impl, str):
        names = ", ".join(candidate.name for candidate in impls)
        raise TypeError(problem(impls.op, "impl", type_of(impl), f"{names}, raw"))
    asked = impl or mode.get().impls.get(impls.op)
    refusals: list[tuple[Impl, str]] = []
    for candidate in impls:
        if not _matches(candidate.name, asked):
            continue
        reason = _refusal(impls, candidate, candidate.refuse, asked, arrays, needs, params)
        if reason is None:
            if refusals and any(map(on_gpu, arrays)):
                _warn_of_slow_path(impls, candidate, refusals)
            return candidate
        refusals.append((candidate, reason))
    if not refusals:
        names = ", ".join(candidate.name for candidate in impls)
        raise UnsupportedError(f"{impls.op}: impl={asked!r} is not one of: {names}, raw")
    text = f"{impls.op}: no implementation accepts these arguments:\n" + _listed(refusals)
    raise UnsupportedError(text)


def choose_backward(
    impls: Impls,
    chosen: Impl,
    arrays: list,
    impl: str | None = None,
    *,
    needs: tuple,
    **params: Any,
) -> Impl:
    """Return the implementation whose backward follows the forward of ``chosen``.

    That is ``chosen`` itself, unless all of ``impls`` save the same arrays; then it is the first
    that accepts, from the one on that was asked for by name.
    """
    if not impls.share_saved:
        return chosen
    asked = impl or mode.get().impls.get(impls.op)
    for candidate in _backward_candidates(impls, chosen, asked):
        refuse = candidate.refuse_backward
        if _refusal(impls, candidate, refuse, asked, arrays, needs, params) is None:
            return candidate
    return chosen


def _backward_candidates(impls, chosen, asked):
    return impls[impls.index(chosen) :] if chosen.name == asked else impls


def _warn_of_slow_path(impls, chosen, refusals):
    """Warn of refusals that other arguments would avoid."""
    avoidable = [
        (candidate, reason)
        for candidate, reason in refusals
        if not (candidate.specialized or isinstance(reason, SlowerRefusal))
    ]
    if not all(isinstance(reason, HardwareRefusal) for _, reason in avoidable):
        warn_slow_path(f"{impls.op} uses {chosen.name} because:\n{_listed(avoidable)}")


def _listed(refusals):
    return "\n".join(f"  {candidate.name}: {reason}" for candidate, reason in refusals)


def choose_another(
    impls: Impls,
    broken: Impl,
    error: KernelCompileError,
    arrays: list,
    impl: str | None = None,
    *,
    needs: tuple = (),
    **params: Any,
) -> Impl:
    """Return what runs from now on instead of ``broken``, whose kernel does not compile.

    Raises ``error`` where nothing else accepts.
    """
    _note_broken(impls, broken, error)
    try:
        return choose(impls, arrays, impl, needs=needs, **params)
    except UnsupportedError:
        raise error from None


def _note_broken(impls, broken, error):
    _broken[impls.op, broken.name] = "; ".join(str(error).splitlines())


def _refusal(impls, candidate, refuse, asked, arrays, needs, params):
    """Return why a candidate cannot run, or None. One asked for by name may be a slower one."""
    if _broken and (impls.op, candidate.name) in _broken:
        return _broken[impls.op, candidate.name]
    reason = refuse(*arrays, needs=needs, **params) if refuse else None
    return None if isinstance(reason, SlowerRefusal) and candidate.name == asked else reason


def _matches(name, asked):
    return asked is None or name == asked or (asked == "raw" and name not in NOT_RAW)


# ---- explaining ----------------------------------------------------------------------------------

WORDS = {  # what describe returns, in words
    "tile": lambda sides: f"tile {' x '.join(map(str, sides))}",
    "threads": lambda n: f"{n} threads",
    "registers": lambda n: f"{n} registers each",
    "shared_bytes": lambda n: f"{n / 1024:.1f} KiB of shared memory",
    "blocks": lambda n: f"{n:,} blocks",
    "tiles": lambda n: f"{n:,} tiles",
    "waves": lambda n: f"{n:.2f} waves",
    "limit": lambda text: f"limit: {text}",
    "library": lambda text: f"matmul by {text}",
}


@dataclass(frozen=True)
class Explanation:
    """Which implementation an op would run, and why not the others. Printing it shows a table.

    ``reasons``: (implementation, refusal or None), best first. ``details``: what the chosen one
    uses of the GPU, by the names in WORDS, or None: the sides of a tile, threads of a block,
    registers of a thread, shared memory of a block, blocks (tiles where blocks process several),
    how often they fill the GPU (waves), what bounds the speed (limit), and which library computes
    a matmul. ``gradient``, ``gradient_reasons``: the same of the gradient, where it is chosen
    separately; else None.
    """

    op: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]
    details: dict[str, Any] | None = None
    gradient: str | None = None
    gradient_reasons: tuple[tuple[str, str | None], ...] | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no implementation accepts these arguments'}"]
        lines += _table(self.chosen, self.reasons, self.details)
        if self.gradient_reasons == self.reasons:
            lines.append(f"its gradient: {self.gradient}, for the same reasons")
        elif self.gradient_reasons is not None:
            lines.append(f"its gradient: {self.gradient}")
            lines += _table(self.gradient, self.gradient_reasons, None)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        found = {
            "op": self.op, "chosen": self.chosen, "details": self.details,
            "implementations": _as_dicts(self.reasons),
        }  # fmt: skip
        if self.gradient_reasons is not None:
            found |= {"gradient": self.gradient, "gradients": _as_dicts(self.gradient_reasons)}
        return found


def _table(chosen, reasons, details):
    width = max(len(name) for name, _ in reasons)
    for name, reason in reasons:
        verdict = "runs" if name == chosen else (reason or "would run, but comes later")
        yield f"  {name:{width}}  {verdict}"
        if name == chosen and details:
            found = [f"{WORDS[name](value)}" for name, value in details.items()]
            for i in range(0, len(found), 4):
                yield f"  {'':{width}}  {', '.join(found[i : i + 4])}"


def _as_dicts(reasons):
    return [{"impl": name, "refusal": reason} for name, reason in reasons]


def explain(op: Callable, *args: Any, **kwargs: Any) -> Explanation:
    """Return which implementation ``op(*args, **kwargs)`` would run, with every refusal, as data.

    ``op``: a public op such as ``gpuattn.softmax``. Nothing is computed, though a kernel may be
    compiled to say what it uses. Bad arguments raise what the op itself raises; TypeError where
    ``op`` does not choose between implementations.
    """
    call = prepare(op, *args, **kwargs)
    impls, arrays, params = call.impls, call.arrays, call.params
    asked = call.impl or mode.get().impls.get(impls.op)
    reasons, chosen = _reasons(impls, impls, "refuse", asked, arrays, call.needs, params)
    if chosen is None:
        return Explanation(impls.op, None, reasons)
    details = None
    if chosen.describe:
        try:
            with device_of(*arrays):
                details = chosen.describe(*arrays, **params)
        except KernelCompileError as error:
            _note_broken(impls, chosen, error)
            return explain(op, *args, **kwargs)
    found = Explanation(impls.op, chosen.name, reasons, details)
    if not impls.share_saved:
        return found
    needs = call.needs if any(call.needs) else tuple(map(_may_need, arrays))
    candidates = _backward_candidates(impls, chosen, asked)
    reasons, best = _reasons(impls, candidates, "refuse_backward", asked, arrays, needs, params)
    gradient = (best or chosen).name
    return replace(found, gradient=gradient, gradient_reasons=reasons)


def _reasons(impls, candidates, which, asked, arrays, needs, params):
    """Return ((name, refusal or None) of each candidate, the first that accepts or None)."""
    found, best = [], None
    for candidate in candidates:
        refuse = getattr(candidate, which)
        reason = _refusal(impls, candidate, refuse, asked, arrays, needs, params)
        found.append((candidate.name, reason))
        fits = which == "refuse_backward" or _matches(candidate.name, asked)
        if best is None and reason is None and fits:
            best = candidate
    return tuple(found), best


def _may_need(x):
    return x is not None and is_floating(x.dtype)


# ---- overriding ----------------------------------------------------------------------------------


@contextlib.contextmanager
def use_impl(**names: str) -> Iterator[None]:
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
    with with_mode("impls", Names({**mode.get().impls, **asked})):
        yield
