"""Plans: what a call of an op finds out about its arguments is found out once for a signature.

The signature of a call is the op, the shapes, strides, dtypes and alignments of its arrays, its
other arguments by value, and what the choice of an implementation depends on besides. The second
call of a signature makes a ``Plan``; later ones neither check nor choose. On a GPU the plan holds a
``cuda.program.Program`` too, so that they only allocate and launch; so do their gradients.

A call has no plan if it warns of a slow path, takes objects that are neither arrays nor numbers nor
strings, draws random numbers but by its parameter "key", or checks the values of an array
(``Call.values_checked``).
"""

import weakref
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from gpuattn import errors, rng
from gpuattn.arrays import is_array, on_gpu, recorders
from gpuattn.autodiff import side_stream
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.record import Box, write_constant
from gpuattn.autodiff.signatures import ALIGNMENT, PLAIN, Caller, Form, Found, Op, Unsigned
from gpuattn.cuda.generated import Code
from gpuattn.cuda.program import Program, program_of
from gpuattn.cuda.recorder import recorded
from gpuattn.impls import NOT_RAW, Call, Impl
from gpuattn.modes import mode, with_mode
from gpuattn.typing import Array

MOST = 2048  # plans in each of two generations; a backward pass has at most MOST_GRADIENTS a plan
MOST_GRADIENTS = 16
MOST_FORMS = 4096  # then forget all: some program makes classes or names of arguments as it runs


class Plan:
    """What calls of one signature share.

    ``inputs``: the place among the arrays of a signature of each input of the op, or None.
    ``rule``: the implementation that computes the gradient, or None. ``box``: the class of recorded
    results, or None where no input is a Box. ``donated``: places of Boxes. ``draws``: whether the
    parameter "key" is the ``rng.Key`` of the argument "seed".
    ``direct``: None, or what makes whole calls: of the arrays of a signature and their addresses,
    it returns the op's result, or None where the call has to be chosen anew.
    With a program also: ``links``, as in ``record.Node``; ``arrays_saved``, the places of arrays in
    what is saved; and ``gradients``: signature of the gradients of the results -> Program, SEEN or
    NEVER.
    """

    __slots__ = (
        "arrays_saved", "box", "direct", "donated", "draws", "finish", "forward", "gradients",
        "inputs", "links", "needs", "op", "params", "program", "rule",
    )  # fmt: skip

    def __init__(self, call: Call, inputs: tuple[int | None, ...], donated: list[int]) -> None:
        self.op, self.inputs, self.params = call.impls.op, inputs, call.params
        self.donated, self.finish = donated, call.finish
        self.draws = call.params.get("key") is not None
        self.box = next((type(x) for x in call.inputs if isinstance(x, Box)), None)
        self.forward: Callable = _not_drafted
        self.direct: Callable | None = None
        self.rule: Impl | None = None
        self.needs: tuple[bool, ...] = ()
        self.program: Program | None = None
        self.gradients: dict[tuple, Any] = {}
        self.links: list[int | None] | None = None
        self.arrays_saved: list[tuple[int, ...]] | None = None

    def compute(
        self, arrays: tuple[Array, ...], addresses: tuple[int, ...], params: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Return (out, saved) of the implementation, or None where the call has to be chosen anew.

        ``params``: of this call.
        """
        program = self.program
        if program is not None:
            if not self.draws:
                return program.run(*arrays, *addresses)
            drawn = rng.device_arguments(params["key"])
            if drawn[-1] is not None:
                arrays, addresses = (*arrays, drawn[-1]), (*addresses, drawn[-1].data.ptr)
            return program.run(*arrays, *addresses, drawn)
        inputs = [None if i is None else arrays[i] for i in self.inputs]
        return self.forward(*inputs, needs=self.needs, **params)

    def is_direct(self, out: Any) -> bool:
        """Return whether calls without a gradient need nothing but a program and ``last``.

        ``out``: what the implementation returned.
        """
        if self.draws or self.donated or out is None:  # None says that a program did not run
            return False
        return self.box is None or type(out) is not tuple

    def last(self, out: Any) -> tuple[Any, Callable[[Code, str], str]]:
        """Return (x, write): ``write(code, text of x)`` writes what makes the op's result without
        a gradient of x, and returns its text.

        ``out``: what the implementation returned.
        """
        finish, kind = self.finish, self.box
        if kind is None and type(finish) is itemgetter:  # what it leaves out becomes no array
            out, finish = finish(out), None

        def write(code, x):
            found = x if kind is None else write_constant(code, kind, x)
            return found if finish is None else f"{code.name('finish', finish)}({found})"

        return out, write

    def params_of(self, seed: Any) -> dict[str, Any]:
        """Return the parameters of a call with the argument ``seed``."""
        return {**self.params, "key": rng.as_key(seed)} if self.draws else self.params


def _not_drafted(*arrays: Any, **params: Any) -> Any:
    raise NotImplementedError


class Draft:
    """A Plan in the making: ``forward`` runs the call that is recorded."""

    def __init__(self, plan: Plan, arrays: tuple[Array, ...], addresses: tuple[int, ...]) -> None:
        self.plan, self.arrays, self.done = plan, arrays, False
        self.on_gpu = bool(arrays) and len(addresses) == len(arrays)

    def forward(self, chosen: Impl, rule: Impl | None, needs: tuple, run: Callable) -> Any:
        """Return ``run()``, the forward of ``chosen``."""
        self.plan.forward, self.plan.rule, self.plan.needs = chosen.forward, rule, needs
        if chosen.name in NOT_RAW or not self.on_gpu:
            result = run()
        else:
            key = self.plan.params.get("key")
            with recorded((*self.arrays, *_device_step(key)), key) as recorder:
                result = run()
            out, saved = result
            kept = None if rule is None else saved  # for the gradient alone
            plan = self.plan
            if rule is None and plan.is_direct(out):
                out, last = plan.last(out)
                plan.program = program_of(recorder, out, owned=out, last=last)
                plan.direct = plan.program.run if plan.program is not None else None
            else:
                plan.program = program_of(recorder, (out, kept), owned=out)
        if self.plan.draws:  # it may hold an array; each call has its own
            self.plan.params = {**self.plan.params, "key": None}
        self.done = True
        return result


def draft(call: Call, found: Found, drawn: bool) -> Draft | None:
    """Return the Draft of a call, or None if calls like it have no plan.

    ``drawn``: whether a fresh seed was drawn.
    """
    params = call.params.copy()
    _, arrays, addresses, given, seed = found
    if (drawn or seed is not None) and "key" not in params:
        return None
    key = params.pop("key", None)
    if key is not None and type(key.step) is not int and not is_array(key.step):
        return None
    if call.values_checked or not all(map(_is_plain, params.values())):
        return None
    places = {id(x): i for i, x in enumerate(given or arrays)}
    inputs = [None if x is None else places.get(id(x), -1) for x in call.inputs]
    donated = [places.get(id(x), -1) for x in call.donated]
    if -1 in inputs or -1 in donated:
        return None
    return Draft(Plan(call, tuple(inputs), donated), arrays, addresses)


def _device_step(key):
    """Return the array of a ``rng.Key`` that holds its step, if one on a GPU does, in a list."""
    return [key.step] if key is not None and on_gpu(key.step) else []


def _is_plain(value):
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, np.dtype))


# ---- gradients -----------------------------------------------------------------------------------


def gradients(
    plan: Plan, saved: Any, grads: tuple, into: tuple, key: Any, fold: Callable | None,
    run: Callable,
) -> tuple[tuple, frozenset[int]]:  # fmt: skip
    """Return (the gradients of an op's inputs, ``run(fold)``; the places of those nobody else
    holds).

    ``saved``: what the plan's program saved. ``grads``: of the results. ``into``: as in ``Impl``.
    ``key``: the call's ``rng.Key``, or None. ``fold``: as in ``impls.Fusion``, or None.
    """
    if not mode.get().planned:
        return run(fold), frozenset()
    found = _gradient_signature(plan, saved, grads, into, fold)
    if found is None:
        return run(fold), frozenset()
    signed, arrays, addresses = found
    for step in _device_step(key):
        arrays.append(step)
        addresses.append(step.data.ptr)
    known = plan.gradients.get(signed)
    if type(known) is Program:
        drawn = None if key is None else rng.device_arguments(key)
        results = known.run(*arrays, *addresses, drawn, fold)
        if results is not None:
            return results, known.fresh
    elif known is SEEN:
        before = errors.slow_paths
        with recorded(arrays, key) as recorder:
            results = run(None if fold is None else partial(_fold_apart, fold, recorder))
        program = None if errors.slow_paths > before else program_of(recorder, results)
        plan.gradients[signed] = program or NEVER
        return results, frozenset()
    elif known is None:
        if len(plan.gradients) >= MOST_GRADIENTS:
            plan.gradients.clear()
        plan.gradients[signed] = SEEN
    return run(fold), frozenset()


def _fold_apart(fold, recorder, product):
    """Return ``fold(product)``, a call that ``recorder`` notes and not what is done in it."""
    token = recorders.set(None)
    try:
        with with_mode("planned", True):
            taken = fold(product)
    finally:
        recorders.reset(token)
    recorder.offered(product)
    return taken


def _gradient_signature(plan, saved, grads, into, fold):
    """Return (key, arrays, addresses), or None if the gradient is not to be recorded."""
    key, arrays = [side_stream.current() is not None, fold is not None], []
    for x in grads:
        if x is None:
            key.append(None)
            continue
        if type(x) is PendingMatmul:
            key.append(x.shape)
            for one in (x.dz, x.weight):
                key += one.shape, one.strides, one.dtype, one.data.ptr & ALIGNMENT
                arrays.append(one)
            continue
        if not on_gpu(x):
            return None
        key += x.shape, x.strides, x.dtype, x.data.ptr & ALIGNMENT
        arrays.append(x)
    for slot in into:
        if slot is None:
            key.append(None)
            continue
        x, adds = slot
        key += x.shape, x.strides, x.dtype, x.data.ptr & ALIGNMENT, adds
        arrays.append(x)
    if plan.arrays_saved is None:
        plan.arrays_saved = list(_places(saved, set()))
    for first, *rest in plan.arrays_saved:
        x = saved[first]
        for i in rest:
            x = x[i]
        arrays.append(x)
    addresses = [x.data.ptr for x in arrays]
    if len(set(addresses)) < len(addresses):
        return None
    return tuple(key), arrays, addresses


def _places(saved, seen):
    """Yield the place of each array in nested tuples, once: where it is in each of them."""
    for i, x in enumerate(saved):
        if isinstance(x, tuple):
            yield from ((i, *rest) for rest in _places(x, seen))
        elif on_gpu(x) and id(x) not in seen:
            seen.add(id(x))
            yield (i,)


# ---- the table -----------------------------------------------------------------------------------


class Table:
    """{signature: Plan, SEEN or NEVER} of at least the MOST signatures that were used last."""

    def __init__(self) -> None:
        self.young: dict[tuple, Any] = {}
        self.old: dict[tuple, Any] = {}
        self.direct: dict[tuple, Callable] = {}  # of signatures in ``young``: ``Plan.direct``
        self.forms: dict[tuple, Caller] = {}
        self.starts: dict[tuple, object] = {}  # what the keys of a form begin with

    def form(self, kinds: tuple, values: tuple, names: tuple[str, ...], op: Op) -> Caller:
        """Return the Caller of calls of an op whose ``values`` are of these ``kinds``.

        ``kinds``: the function that checks the arguments, ``names``, the types of ``values``.
        ``names``: of the last of them.
        """
        if len(self.forms) >= MOST_FORMS:
            self.forms.clear()
            self.starts.clear()
        plain = [type(x) for x in values if is_array(x)]
        boxed = [type(x.data) for x in values if isinstance(x, Box)]
        array = next(iter(plain + boxed), None)
        found = kinds if kinds not in self.forms else (kinds, array)
        if found not in self.forms:
            other = op.unplanned if found is not kinds else partial(self._other, kinds, names, op)
            try:
                # an int and a Key as seeds share plans
                places = len(values) - len(names)
                types = [
                    None if i >= places and names[i - places] == "seed" else type(x)
                    for i, x in enumerate(values)
                ]
                start = self.starts.setdefault((kinds[0], names, *types, array), object())
                form = Form(start, values, names, array, op, self.direct.get, other)
                self.forms[found] = form.function()
            except Unsigned:
                self.forms[found] = op.unplanned
        return self.forms[found]

    def _other(
        self, kinds: tuple, names: tuple[str, ...], op: Op, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Make a call of the ``kinds`` of another one whose Boxes held arrays of another class."""
        return op.make(self.form(kinds, (*args, *kwargs.values()), names, op), args, kwargs)

    def find(self, key: tuple) -> Any:
        plan = self.young.get(key)
        if plan is None and (plan := self.old.get(key)) is not None:
            self.keep(key, plan)
        return plan

    def keep(self, key: tuple, plan: Any) -> None:
        if len(self.young) >= MOST:
            self.old, self.young = self.young, {}
            self.direct.clear()  # what is used goes on through ``find``
        self.young[key] = plan

    def make(self, check: Callable[[], Call], found: Found, run: Callable) -> Any:
        """Return ``run(check(), draft)``, and keep the Plan of such calls if they have one."""
        before, seeds = errors.slow_paths, rng.fresh_seeds
        call = check()
        attempt = draft(call, found, rng.fresh_seeds > seeds)
        out = run(call, attempt)
        ready = attempt is not None and attempt.done and errors.slow_paths == before
        self.keep(found[0], attempt.plan if attempt is not None and ready else NEVER)
        return out


SEEN, NEVER = object(), object()  # of a signature met once; of one without plan or program
table = Table()
ops: weakref.WeakSet = weakref.WeakSet()  # what ``tape.op`` made; ``forget()``: its last form
