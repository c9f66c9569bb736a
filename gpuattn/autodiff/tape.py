"""The tape: runs and records ops, and computes gradients. It knows no op by name."""

import contextlib
import contextvars
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ParamSpec

from gpuattn.arrays import copied, device_of, unplanned, without_plans
from gpuattn.autodiff import plans
from gpuattn.autodiff.arithmetic import added
from gpuattn.autodiff.frozen import is_debugging  # noqa: F401  part of this module's interface
from gpuattn.autodiff.gradient_layout import GradientLayout
from gpuattn.autodiff.hooks import with_hook
from gpuattn.autodiff.pending_matmul import Consumers
from gpuattn.autodiff.record import RELEASED, Box, Node, constants, edit, key  # noqa: F401
from gpuattn.autodiff.side_stream import wait_for
from gpuattn.autodiff.signatures import kinds_of
from gpuattn.errors import GradientError, KernelCompileError, UnsupportedError
from gpuattn.impls import Call, Impls, Result, choose, choose_another, choose_backward

Arguments = ParamSpec("Arguments")
_recording = contextvars.ContextVar("gpuattn_recording", default=True)
_witnesses: contextvars.ContextVar[dict | None] = contextvars.ContextVar(
    "gpuattn_witnesses", default=None
)


# ---- forward ------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording(on: bool) -> Iterator[None]:
    """Turn recording on or off for a block, in this thread and context."""
    token = _recording.set(on)
    try:
        yield
    finally:
        _recording.reset(token)


def no_grad() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns recording off, in this thread and context."""
    return recording(False)


def is_recording() -> bool:
    """Return whether calls are recorded in this thread and context."""
    return _recording.get()


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


def op(check: Callable[Arguments, Call[Result]]) -> Callable[Arguments, Result]:
    """Make a public op of ``check``, which checks its arguments and returns an ``impls.Call``.

    Calling the op runs the Call and returns its result. ``op.prepare`` is ``check`` itself.
    """

    def unplanned_call(args, kwargs):
        return _run(check(*args, **kwargs))

    def planned_call(args, kwargs, found):
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
        if unplanned.get():
            return _run(check(*args, **kwargs))
        kinds, table = kinds_of(check, args, kwargs), plans.table
        try:
            call = table.forms[kinds]
        except KeyError:
            values = (*args, *kwargs.values())
            return table.form(kinds, values, tuple(kwargs), how)(args, kwargs)
        if call is not unplanned_call:
            last[0] = call
        return call(args, kwargs)

    def forget():
        last[0] = any_call

    how = plans.Op(_recording.get, planned_call, unplanned_call, any_call)
    last = [any_call]  # the Caller of the last form, which most calls have

    @functools.wraps(check)
    def run(*args, **kwargs):
        return last[0](args, kwargs)

    run.prepare, run.forget = check, forget  # type: ignore[attr-defined]
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
        if _recording.get():
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


# ---- backward -----------------------------------------------------------------------------------


def backward(
    box: Box,
    grad: Any,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    on_ready: Callable[[Box], None] | None = None,
) -> None:
    """Add d(box)/d(leaf) * grad into ``leaf.grad`` of every leaf that asked for one.

    ``on_ready(leaf)`` is called once no later node can add to that leaf's gradient.
    """
    _walk([box], [grad], (), True, retain_graph, create_graph, on_ready)


def gradients(
    outputs: Sequence[Box],
    grads: Sequence,
    targets: Sequence[Box],
    *,
    independent: bool = False,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> list:
    """Return the gradient of ``outputs`` (weighted by ``grads``) for each target, or None.

    ``independent``: treat the targets as leaves, whatever they were computed from.
    """
    ends = {key(t) for t in targets} if independent else ()
    return _walk(outputs, grads, targets, False, retain_graph, create_graph, None, ends)


def _walk(roots, root_grads, targets, leaves, retain_graph, create_graph, on_ready, ends=()):
    wanted = {key(t): i for i, t in enumerate(targets)}
    found = [None] * len(targets)
    nodes = _reachable(roots, ends)
    useful = None if leaves else _leading_to(nodes, wanted)
    layout = GradientLayout({*ends, *wanted})
    consumers = Consumers(nodes, layout.kept)
    waiting = _count_uses(nodes) if on_ready else None
    pending = {}  # node -> [gradients that its backward takes]

    def deliver(box, grad, fresh=False):
        if not box.requires_grad:
            return
        who = key(box)
        if who in wanted:
            i = wanted[who]
            found[i] = grad if found[i] is None else added(found[i], grad)
        if box.node is not None and who not in ends:
            _put(grad, pending.setdefault(box.node, box.node.no_grads()), box)
        elif leaves and who not in wanted:
            _accumulate(box, grad, fresh)

    def propagate(node, grads):
        params = node.params
        if node.impl.fusion.offers_matmul:
            params = params | consumers.offer(node, pending, propagate)
        slots = None if leaves else ends
        results, fresh = _call_backward(node, grads, create_graph, slots, layout, params)
        for i, (x, grad) in enumerate(zip(node.inputs, results, strict=True)):
            if grad is not None and isinstance(x, Box):
                deliver(x, grad, i in fresh)

    for box, grad in zip(roots, root_grads, strict=True):
        if grad is not None:
            deliver(box, grad)
    token = _recording.set(create_graph)
    try:
        while nodes:  # popped, so that what a node saved is freed with the last link to it
            node = nodes.pop()
            grads = pending.pop(node, None)
            if useful is not None and node not in useful:
                continue
            if grads is not None:
                propagate(node, grads)
            consumers.done(node)
            if waiting:
                _report_ready(node, waiting, on_ready)
            if not (retain_graph or create_graph):
                node.release()
    finally:
        _recording.reset(token)
        propagate = None  # it names itself: only a collection of garbage would free it
    return found


def _put(grad, grads, box):
    """Put a gradient of ``box`` among those that the backward of its node takes."""
    place = box.index
    if place == 0 and grads[0] is not None and box.node.impl.fusion.takes_second:
        place = -1 if grads[-1] is None else 0
    grads[place] = grad if grads[place] is None else added(grads[place], grad)


def _reachable(roots, ends=()):
    """Return the nodes that ``roots`` depend on, in recorded order, but not through ``ends``."""
    seen, stack = set(), _makers(roots, ends)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if node.saved is RELEASED:
            raise GradientError(
                f"backward a second time: the record of {node.op} is gone. "
                "Pass retain_graph=True the first time, or compute the result again."
            )
        seen.add(node)
        stack += _makers(node.inputs, ends)
    return sorted(seen, key=lambda node: node.order)


def _makers(values, ends):
    boxes = [x for x in values if isinstance(x, Box) and x.node is not None]
    return [x.node for x in boxes if key(x) not in ends]


def depends(box: Box, keys: Collection) -> bool:
    """Return whether ``box`` was made from any of the Boxes with these keys."""
    return bool(keys) and any(key(x) in keys for node in _reachable([box]) for x in node.inputs)


def _leading_to(nodes, wanted):
    useful = set()
    for node in nodes:
        if any(isinstance(x, Box) and (key(x) in wanted or x.node in useful) for x in node.inputs):
            useful.add(node)
    return useful


def _count_uses(nodes):
    boxes = (x for node in nodes for x in node.inputs if isinstance(x, Box))
    return Counter(id(x) for x in boxes if x.node is None and x.requires_grad)


def _report_ready(node, waiting, on_ready):
    for x in node.inputs:
        if id(x) in waiting:
            waiting[id(x)] -= 1
            if waiting[id(x)] == 0:
                on_ready(x)


def _call_backward(node, grads, create_graph, ends, layout, params):
    """Return (the gradients of a node's inputs, the places of those that nobody else holds).

    ``ends``: keys of the inputs whose gradients can be written to ``grad_slot``; None: all.
    """
    node.check_unedited()
    if node.impl.backward is None:
        raise UnsupportedError(f"{node.op}: {node.impl.name} has no gradient")
    if create_graph:
        return _call_backward_recorded(node, grads), ()
    with device_of(*grads):
        into = _into(node, ends, layout)

        def run(fold):
            backward = with_hook(node.op, "backward", node.impl.backward)
            given = params if fold is None else {**params, "fold": fold}
            return backward(node.saved, *grads, needs=node.needs, into=into, **given)

        fold, fresh = params.get("fold"), frozenset[int]()
        if node.plan is None:
            results = run(fold)
        else:
            drawn = params["key"] if node.plan.draws else None
            results, fresh = plans.gradients(node.plan, node.saved, grads, into, drawn, fold, run)
    for x, slot, result in zip(node.inputs, into, results, strict=True):
        if slot is not None and result is None:
            x.grad, x.grad_started = x.grad_slot, True
    return results, fresh


def _into(node, ends, layout):
    """Return, for each input of a node, where its gradient is written: see ``impls.Impl``."""
    into = list(layout.into(node))
    for i, (x, need) in enumerate(zip(node.inputs, node.needs, strict=True)):
        if into[i] is not None:
            into[i] = into[i], False
        elif (
            need and x.node is None and x.grad_slot is not None and (ends is None or key(x) in ends)
        ):
            if x.grad_started:
                wait_for(x.grad_slot)
            into[i] = x.grad_slot, x.grad_started
    return tuple(into)


def _call_backward_recorded(node, grads):
    """Call the backward with Tensors instead of arrays, so that it is recorded (higher order)."""
    if not node.impl.differentiable_twice:
        raise UnsupportedError(
            f"{node.op}: {node.impl.name} is fused and has no second derivative; "
            "write it in basic ops (np.exp, np.matmul, ...) where you need one. Where you do not: "
            "pass arrays to gpuattn.grad, not Tensors that require a gradient"
        )
    boxed = next(x for x in node.inputs if isinstance(x, Box))
    grads = [g if isinstance(g, Box) or g is None else type(boxed)(g) for g in grads]
    saved = node.saved
    if node.links:
        saved = tuple(
            s if link is None
            else node.inputs[link] if link >= 0
            else type(boxed)(s, node, ~link)
            for s, link in zip(node.saved, node.links, strict=True)
        )  # fmt: skip
    into = (None,) * len(node.inputs)
    return node.impl.backward(saved, *grads, needs=node.needs, into=into, **node.params)


def _accumulate(leaf, grad, fresh):
    """Add to the gradient of a leaf. ``fresh``: nobody else holds the array ``grad``."""
    if isinstance(grad, Box):
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    elif leaf.grad_slot is not None:
        if leaf.grad_started:
            wait_for(leaf.grad_slot)
            leaf.grad_slot += grad.astype(leaf.grad_slot.dtype, copy=False)
        else:
            leaf.grad_slot[...] = grad
        leaf.grad, leaf.grad_started = leaf.grad_slot, True
    elif leaf.grad is None:
        kept = fresh and grad.dtype == leaf.data.dtype
        leaf.grad = grad if kept else copied(grad, leaf.data.dtype)
    else:
        leaf.grad = added(leaf.grad, grad.astype(leaf.data.dtype, copy=False))
