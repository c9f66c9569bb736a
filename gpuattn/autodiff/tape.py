"""The tape: runs and records ops. It knows no op by name. Gradients: ``backward_pass``."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

from gpuattn.arrays import device_of
from gpuattn.autodiff import plans
from gpuattn.autodiff.hooks import with_hook
from gpuattn.autodiff.record import Box, Node, constants
from gpuattn.autodiff.signatures import kinds_of
from gpuattn.errors import KernelCompileError
from gpuattn.impls import Call, Impls, Result, choose, choose_another, choose_backward
from gpuattn.modes import mode, with_mode, without_plans

Arguments = ParamSpec("Arguments")
_witnesses: contextvars.ContextVar[dict | None] = contextvars.ContextVar(
    "gpuattn_witnesses", default=None
)


def recording(on: bool) -> contextlib.AbstractContextManager[None]:
    """Turn recording on or off for a block, in this thread and context."""
    return with_mode("recorded", on)


def no_grad() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns recording off, in this thread and context."""
    return recording(False)


def is_recording() -> bool:
    """Return whether calls are recorded in this thread and context."""
    return mode.get().recorded


def raw(x: Any) -> Any:
    """Return the array in a Box, or ``x`` itself."""
    return x.data if isinstance(x, Box) else x


@contextlib.contextmanager
def witnessing() -> Iterator[dict[int, Box]]:
    """Turn recording off for a block; yield {id: Box} of the Boxes used that require a gradient."""
    seen: dict[int, Box] = {}
    token = _witnesses.set(seen)
    try:
        with no_grad(), without_plans():
            yield seen
    finally:
        _witnesses.reset(token)


def op(
    check: Callable[Arguments, Call[Result]], operands: int | None = None
) -> Callable[Arguments, Result]:
    """Make a public op of ``check``, which checks its arguments and returns an ``impls.Call``.

    Calling the op runs the Call and returns its result. ``op.prepare`` is ``check`` itself.
    ``operands``: 1 or 2 for an operator, which takes as many by position and nothing else.
    """

    def unplanned_call(args, kwargs):
        return _run(check(*args, **kwargs))

    def planned_call(args, kwargs, found):
        if not mode.get().planned:
            return _run(check(*args, **kwargs))
        key, arrays, addresses, given, seed = found
        plan = plans.table.find(key)
        if plan.__class__ is plans.Plan:
            if plan.direct is not None:
                plans.table.direct[key] = plan.direct  # later calls do not come here
                out = plan.direct(*arrays, *addresses)
                if out is not None:
                    return out
            else:
                params = plan.params_of(seed) if plan.draws else plan.params
                done = plan.compute(arrays, addresses, params)
                if done is not None:
                    out = done[0] if given is None else _planned_boxes(plan, given, params, *done)
                    return out if plan.finish is None else plan.finish(out)
        if plan is plans.SEEN:
            return plans.table.make(lambda: check(*args, **kwargs), found, _run)
        call = check(*args, **kwargs)
        plans.table.keep(key, plan or plans.SEEN)
        return _run(call)

    def any_call(args, kwargs):
        nonlocal last
        if not mode.get().planned:
            return _run(check(*args, **kwargs))
        kinds, table = kinds_of(check, args, kwargs), plans.table
        call = table.forms.get(kinds)
        if call is None:
            call = table.form(kinds, (*args, *kwargs.values()), tuple(kwargs), how)
        if call is not unplanned_call:
            last = call
        return how.make(call, args, kwargs)

    def any_operands(*operands):
        return any_call(operands, {})

    def forget():
        nonlocal last
        last = any_call if operands is None else any_operands

    how = plans.Op(planned_call, unplanned_call, any_call, operands)
    last: Callable  # the Caller of the last form, which most calls have
    forget()
    runs: dict[int | None, Callable] = {
        None: lambda *args, **kwargs: last(args, kwargs),
        1: lambda a: last(a),
        2: lambda a, b: last(a, b),
    }
    run: Any = functools.wraps(check)(runs[operands])
    run.prepare, run.forget = check, forget
    plans.ops.add(run)
    return run


def _run(call, draft=None):
    for x in call.donated:
        x.version[0] += 1  # nodes that saved x for a gradient notice that it is overwritten
    out = _apply(call.impls, call.inputs, call.impl, call.params, draft)
    return out if call.finish is None else call.finish(out)


def _planned_boxes(plan, given, params, out, saved):
    """Return the recorded result of a planned call of the Boxes and arrays ``given``."""
    for i in plan.donated:
        given[i].version[0] += 1
    if plan.box is None:
        return out
    if plan.program is not None and plan.rule is None and type(out) is not tuple:
        return constants(plan.box)(out)  # an array, and no view of an input: nothing to check
    inputs = tuple([None if i is None else given[i] for i in plan.inputs])
    return _boxed(plan.box, plan.op, plan.rule, inputs, plan.needs, params, out, saved, plan)


def apply(impls: Impls, inputs: Iterable, impl: str | None = None, **params: Any) -> Any:
    """Run one of ``impls`` on ``inputs``: arrays in, arrays out; any Box in, recorded Boxes out.

    Inputs that are None are passed on as None.
    """
    return _apply(impls, tuple(inputs), impl, params)


def _apply(impls, inputs, impl, params, draft=None):
    """``draft``: the ``plans.Draft`` of this call, or None."""
    arrays = [x.data if isinstance(x, Box) else x for x in inputs]
    boxed = next((x for x in inputs if isinstance(x, Box)), None)
    needs = (False,) * len(inputs)
    if boxed is not None:
        wanted = tuple([isinstance(x, Box) and x.requires_grad for x in inputs])
        if mode.get().recorded:
            needs = wanted
        elif (seen := _witnesses.get()) is not None:
            seen.update((id(x), x) for x, want in zip(inputs, wanted, strict=True) if want)
    chosen = choose(impls, arrays, impl, needs=needs, **params)
    rule = _backward_rule(impls, chosen, arrays, impl, needs, params)
    with device_of(*arrays):
        try:
            forward = functools.partial(_forward, impls, chosen, rule, arrays, needs, params)
            out, saved = forward() if draft is None else draft.forward(chosen, rule, needs, forward)
        except KernelCompileError as error:
            chosen = choose_another(impls, chosen, error, arrays, impl, needs=needs, **params)
            rule = _backward_rule(impls, chosen, arrays, impl, needs, params)
            out, saved = _forward(impls, chosen, rule, arrays, needs, params)
    if boxed is None:
        return out
    plan = None if draft is None else draft.plan
    return _boxed(type(boxed), impls.op, rule, inputs, needs, params, out, saved, plan)


def _boxed(kind, op, rule, inputs, needs, params, out, saved, plan=None):
    """Return the recorded Boxes, of the class ``kind``, of what an implementation returned."""
    outs = out if isinstance(out, tuple) else (out,)
    node = Node(op, rule, inputs, needs, params, saved, outs, plan) if rule else None
    boxes = [kind(data, node, i) for i, data in enumerate(outs)]
    for box in boxes:
        _share_version(box, inputs)
    if node is not None:
        node.watch(boxes)
    return tuple(boxes) if isinstance(out, tuple) else boxes[0]


def _backward_rule(impls, chosen, arrays, impl, needs, params):
    """Return the implementation that will compute the gradient, or None where none is needed."""
    if True not in needs:
        return None
    return choose_backward(impls, chosen, arrays, impl, needs=needs, **params)


def _forward(impls, chosen, rule, arrays, needs, params):
    if rule is not None and rule.compile_backward is not None:
        rule.compile_backward(*arrays, needs=needs, **params)
    forward = with_hook(impls.op, "forward", chosen.forward)
    return forward(*arrays, needs=needs, **params)


def _share_version(box, inputs):
    """Let a view of an input share its edit counter."""
    owner = getattr(box.data, "base", None)
    if owner is None:
        return
    for x in inputs:
        if isinstance(x, Box) and (owner is x.data or owner is getattr(x.data, "base", None)):
            box.version = x.version
            return
