"""Plans: what a call of an op finds out about its arguments is found out once for a signature.

The signature of a call is the op, the shapes, strides, dtypes and alignments of its arrays, its
other arguments by value, and what the choice of an implementation depends on besides. The second
call of a signature makes a ``Plan``; later ones neither check nor choose. On a GPU the plan holds a
``cuda.program.Program`` too, so that they only allocate and launch; so do their gradients.

A call has no plan if it warns of a slow path, takes objects that are neither arrays nor numbers nor
strings, draws random numbers but by its parameter "key", or checks the values of an array
(``Call.values_checked``).
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn import errors, rng
from gpuattn.arrays import batch_invariant, import_cupy, on_gpu, unplanned
from gpuattn.autodiff.record import Box
from gpuattn.cuda.program import Program, recorded
from gpuattn.impls import NOT_RAW, Call, Impl, overrides
from gpuattn.typing import Array

MOST = 2048  # plans in each of two generations; a backward pass has at most MOST_GRADIENTS a plan
MOST_GRADIENTS = 16
NUMBERS = bool, int, float
PLAIN = type(None), bool, int, float, str
ALIGNMENT = 15  # address & ALIGNMENT: kernels read 16 bytes at a time


Found = tuple[tuple, list[Array], list[int], list | None, Any]


@functools.cache
def _several_gpus() -> bool:
    return import_cupy().cuda.runtime.getDeviceCount() > 1


def signature(
    check: Callable, args: tuple, kwargs: dict[str, Any], recording: bool
) -> Found | None:
    """Return the signature of ``check(*args, **kwargs)``, or None if such calls have no plans.

    That is (key, arrays, addresses, given, seed). ``arrays``: those of the arguments, in their
    order. ``addresses``: of those on a GPU. ``given``: ``arrays`` with their Boxes, None if there
    is none. ``seed``: the argument of that name; its value is no part of the key.
    """
    cupy = sys.modules.get("cupy")
    gpu_array = None if cupy is None else cupy.ndarray
    key: list = [check]
    arrays: list = []
    addresses: list = []
    boxes: list | None = None
    values: Any = args
    seed = None
    if kwargs:
        key += kwargs
        values = (*args, *kwargs.values())
        if "seed" in kwargs:
            seed = kwargs["seed"]
            values = (*args, *[x for name, x in kwargs.items() if name != "seed"])
            if type(seed) is rng.Key:
                if type(seed.step) is not int:
                    return None
            elif type(seed) is not int and seed is not None:
                return None
    for x in values:
        kind = type(x)
        if kind is gpu_array:
            address = x.data.ptr
            key += kind, x.shape, x.strides, x.dtype, address & ALIGNMENT
            addresses.append(address)
            arrays.append(x)
        elif x is None or kind is str:
            key.append(x)
        elif kind in NUMBERS:
            key += kind, x or str(x)  # 0.0 and -0.0 are equal
        elif kind is np.ndarray:
            key += kind, x.shape, x.strides, x.dtype
            arrays.append(x)
        elif isinstance(x, Box):
            boxes = boxes or []
            boxes.append((len(arrays), x))
            data = x.data
            key += kind, recording and x.requires_grad, type(data)
            key += data.shape, data.strides, data.dtype
            arrays.append(data)
            if type(data) is gpu_array:
                address = data.data.ptr
                key.append(address & ALIGNMENT)
                addresses.append(address)
            elif type(data) is not np.ndarray:
                return None
        elif kind is tuple and all(type(one) in PLAIN for one in x):
            key += kind, repr(x)
        else:
            return None
    if len(arrays) > 1 and len(set(map(id, arrays))) < len(arrays):
        return None  # one array in two arguments: it does not tell which of both a launch reads
    if addresses:
        if len(addresses) > 1 and len(set(addresses)) < len(addresses):
            return None  # two arrays at one address: nor does that address
        if _several_gpus():
            assert cupy is not None
            here = cupy.cuda.runtime.getDevice()
            if any(x.data.device_id != here for x in arrays if on_gpu(x)):
                return None
            key.append(here)
    if names := overrides.get():
        key.append(names)
    if batch_invariant.get():
        key.append("batch_invariant")
    if boxes is None:
        return tuple(key), arrays, addresses, None, seed
    given = arrays.copy()
    for i, x in boxes:
        given[i] = x
    return tuple(key), arrays, addresses, given, seed


class Plan:
    """What calls of one signature share.

    ``inputs``: the place among the arrays of a signature of each input of the op, or None.
    ``rule``: the implementation that computes the gradient, or None. ``box``: the class of recorded
    results, or None where no input is a Box. ``donated``: places of Boxes. ``draws``: whether the
    parameter "key" is the ``rng.Key`` of the argument "seed".
    With a program also: ``links``, as in ``record.Node``; ``arrays_saved``, the places of arrays in
    what is saved; and ``gradients``: signature of the gradients of the results -> Program, SEEN or
    NEVER.
    """

    __slots__ = (
        "arrays_saved", "box", "donated", "draws", "finish", "forward", "gradients", "inputs",
        "links", "needs", "op", "params", "program", "rule",
    )  # fmt: skip

    def __init__(self, call: Call, inputs: tuple[int | None, ...], donated: list[int]) -> None:
        self.op, self.inputs, self.params = call.impls.op, inputs, call.params
        self.donated, self.finish = donated, call.finish
        self.draws = call.params.get("key") is not None
        self.box = next((type(x) for x in call.inputs if isinstance(x, Box)), None)
        self.forward: Callable = _not_drafted
        self.rule: Impl | None = None
        self.needs: tuple[bool, ...] = ()
        self.program: Program | None = None
        self.gradients: dict[tuple, Any] = {}
        self.links: list[int | None] | None = None
        self.arrays_saved: list[tuple[int, ...]] | None = None

    def compute(
        self, arrays: list[Array], addresses: list[int], params: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Return (out, saved) of the implementation, or None where the call has to be chosen anew.

        ``params``: of this call. Extends both lists.
        """
        program = self.program
        if program is not None:
            drawn = rng.device_arguments(params["key"]) if self.draws else None
            done = program.run(arrays, addresses, drawn)
            return program.make(arrays) if done else None
        inputs = [None if i is None else arrays[i] for i in self.inputs]
        return self.forward(*inputs, needs=self.needs, **params)

    def params_of(self, seed: Any) -> dict[str, Any]:
        """Return the parameters of a call with the argument ``seed``."""
        return {**self.params, "key": rng.as_key(seed)} if self.draws else self.params


def _not_drafted(*arrays: Any, **params: Any) -> Any:
    raise NotImplementedError


class Draft:
    """A Plan in the making: ``forward`` runs the call that is recorded."""

    def __init__(self, plan: Plan, arrays: list[Array], addresses: list[int]) -> None:
        self.plan, self.arrays, self.done = plan, arrays, False
        self.on_gpu = bool(arrays) and len(addresses) == len(arrays)

    def forward(self, chosen: Impl, rule: Impl | None, needs: tuple, run: Callable) -> Any:
        """Return ``run()``, the forward of ``chosen``."""
        self.plan.forward, self.plan.rule, self.plan.needs = chosen.forward, rule, needs
        if chosen.name in NOT_RAW or not self.on_gpu:
            result = run()
        else:
            with recorded(self.arrays, self.plan.params.get("key")) as recorder:
                result = run()
            self.plan.program = recorder.program(result, owned=result[0])
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
    if key is not None and type(key.step) is not int:
        return None
    if call.values_checked or not all(map(_is_plain, params.values())):
        return None
    places = {id(x): i for i, x in enumerate(given or arrays)}
    inputs = [None if x is None else places.get(id(x), -1) for x in call.inputs]
    donated = [places.get(id(x), -1) for x in call.donated]
    if -1 in inputs or -1 in donated:
        return None
    return Draft(Plan(call, tuple(inputs), donated), arrays, addresses)


def _is_plain(value):
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, np.dtype))


# ---- gradients -----------------------------------------------------------------------------------


def gradients(
    plan: Plan, saved: Any, grads: tuple, into: tuple, key: Any, run: Callable
) -> tuple[tuple, frozenset[int]]:
    """Return (``run()``, the gradients of an op's inputs; the places of those nobody else holds).

    ``saved``: what the plan's program saved. ``grads``: of the results. ``into``: as in ``Impl``.
    ``key``: the call's ``rng.Key``, or None.
    """
    found = _gradient_signature(plan, saved, grads, into)
    if found is None or unplanned.get():
        return run(), frozenset()
    signed, arrays, addresses = found
    known = plan.gradients.get(signed)
    if type(known) is Program:
        drawn = None if key is None else rng.device_arguments(key)
        if known.run(arrays, addresses, drawn):
            return known.make(arrays), known.fresh
    elif known is SEEN:
        before = errors.slow_paths
        with recorded(arrays, key) as recorder:
            results = run()
        program = None if errors.slow_paths > before else recorder.program(results)
        plan.gradients[signed] = program or NEVER
        return results, frozenset()
    elif known is None:
        if len(plan.gradients) >= MOST_GRADIENTS:
            plan.gradients.clear()
        plan.gradients[signed] = SEEN
    return run(), frozenset()


def _gradient_signature(plan, saved, grads, into):
    """Return (key, arrays, addresses), or None if the gradient is not to be recorded."""
    key, arrays = [], []
    for x in grads:
        if x is None:
            key.append(None)
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

    def find(self, key: tuple) -> Any:
        plan = self.young.get(key)
        if plan is None and (plan := self.old.get(key)) is not None:
            self.keep(key, plan)
        return plan

    def keep(self, key: tuple, plan: Any) -> None:
        if len(self.young) >= MOST:
            self.old, self.young = self.young, {}
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
