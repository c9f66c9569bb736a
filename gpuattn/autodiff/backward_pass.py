"""Computes gradients: from results to leaves, through what the tape recorded."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gpuattn.arrays import copied, device_of
from gpuattn.autodiff import plans
from gpuattn.autodiff.arithmetic import added
from gpuattn.autodiff.gradient_layout import GradientLayout
from gpuattn.autodiff.hooks import with_hook
from gpuattn.autodiff.pending_matmul import Consumers
from gpuattn.autodiff.record import RELEASED, Box, key
from gpuattn.autodiff.side_stream import wait_for
from gpuattn.autodiff.tape import recording
from gpuattn.errors import GradientError, UnsupportedError


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
    try:
        with recording(create_graph):
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
