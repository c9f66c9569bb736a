"""The tape: what ran, in order, and how to walk it backwards. It knows no op by name."""

import contextlib
import contextvars
import itertools
from collections import Counter

from gpuattn.arrays import device_of, get_xp, is_array
from gpuattn.autodiff.frozen import editable, fingerprint, freeze, is_debugging, thaw
from gpuattn.autodiff.gradient_layout import Places
from gpuattn.autodiff.hooks import watched
from gpuattn.autodiff.pending_matmul import Folds
from gpuattn.autodiff.side_stream import settle
from gpuattn.errors import GradientError, KernelCompileError, UnsupportedError
from gpuattn.impls import choose, choose_another

_order = itertools.count()
_recording = contextvars.ContextVar("gpuattn_recording", default=True)
_witnesses = contextvars.ContextVar("gpuattn_witnesses", default=None)
_RELEASED = object()  # what a node holds as `saved` once it has been walked


class Box:
    """An array that remembers the node that made it.

    ``grad_slot``: a slice of a flat gradient buffer, or None. With one, gradients are written
    there; ``grad_started`` says whether the next one adds (True) or overwrites (False).
    """

    __slots__ = (
        "__weakref__", "data", "grad", "grad_slot", "grad_started", "index", "node",
        "requires_grad", "version",
    )  # fmt: skip

    def __init__(self, data, node=None, index=0, requires_grad=False):
        self.data, self.node, self.index = data, node, index
        self.requires_grad = requires_grad or node is not None
        self.grad, self.grad_slot, self.grad_started = None, None, False
        self.version = [0]  # shared with views of the same memory

    def link(self):
        """Return itself without data, but for leaves and parts of an array, which have theirs."""
        if self.node is None or self.node.impl.places is not None:
            return self
        link = object.__new__(type(self))
        Box.__init__(link, None, self.node, self.index)
        link.requires_grad = self.requires_grad
        return link


class Node:
    """One recorded call."""

    __slots__ = (
        "frozen", "impl", "inputs", "links", "needs", "op", "order", "outputs", "params", "saved",
        "watched",
    )  # fmt: skip

    def __init__(self, op, impl, inputs, needs, params, saved, outs):
        self.op, self.impl, self.needs, self.params, self.saved = op, impl, needs, params, saved
        self.order, self.outputs, self.frozen, self.watched = next(_order), len(outs), [], []
        # saved[i] is input links[i] (>= 0), output ~links[i] (< 0), or something else (None)
        self.links = [_find(s, inputs, outs) for s in saved] if type(saved) is tuple else []
        # of a result that is not saved only who made it, so that its memory is free again
        self.inputs = tuple([
            x.link() if isinstance(x, Box) and i not in self.links else x
            for i, x in enumerate(inputs)
        ])  # fmt: skip

    def watch(self, boxes):
        """Notice later edits of what was saved: by version, and on NumPy by making it read-only."""
        for link in self.links:
            if link is None:
                continue
            box = self.inputs[link] if link >= 0 else boxes[~link]
            data = box.data if isinstance(box, Box) else box
            freeze(data, self.frozen)
            if isinstance(box, Box):
                trace = fingerprint(data) if is_debugging() else None
                self.watched.append((box.version, box.version[0], data if trace else None, trace))

    def check_unedited(self):
        for version, then, data, trace in self.watched:
            if version[0] != then or (trace is not None and fingerprint(data) != trace):
                raise GradientError(
                    f"an array that {self.op} saved for its gradient was edited in place since. "
                    "Edit a copy, or call backward() first."
                )

    def release(self):
        """Drop what was saved. Chains of any length are freed node by node, without recursion."""
        thaw(self.frozen)
        self.saved = _RELEASED
        self.inputs, self.links, self.watched = (), [], []

    def __del__(self):
        thaw(self.frozen)


def key(box):
    """Return what is the same for a result and for a node's link to it: who made it."""
    return id(box) if getattr(box, "node", None) is None else (box.node, box.index)


def _find(saved, inputs, outs):
    if not is_array(saved):
        return None
    for i, x in enumerate(inputs):
        if (x.data if isinstance(x, Box) else x) is saved:
            return i
    for i, out in enumerate(outs):
        if out is saved:
            return ~i
    return None


def edit(box, key, value):
    """Set ``box.data[key] = value`` and let every node that saved it notice."""
    with editable(box.data):
        box.data[key] = value
    box.version[0] += 1


# ---- forward ------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording(on):
    """Switch recording on or off in this thread and context for a block."""
    token = _recording.set(on)
    try:
        yield
    finally:
        _recording.reset(token)


def no_grad():
    """Return a context manager in which nothing is recorded. Per thread, may be nested."""
    return recording(False)


def is_recording():
    """Return whether calls are being recorded here."""
    return _recording.get()


def raw(x):
    """Return the array in a Box, or ``x`` itself."""
    return x.data if isinstance(x, Box) else x


@contextlib.contextmanager
def witnessing():
    """Record nothing in a block; yield {id: Box} of those used in it that want a gradient."""
    seen = {}
    token = _witnesses.set(seen)
    try:
        with no_grad():
            yield seen
    finally:
        _witnesses.reset(token)


def apply(impls, inputs, impl=None, **params):
    """Run one of ``impls`` on ``inputs``: arrays in, arrays out; any Box in, recorded Boxes out.

    Inputs that are None are passed on as None.
    """
    inputs = tuple(inputs)
    arrays = [x.data if isinstance(x, Box) else x for x in inputs]
    chosen = choose(impls, arrays, impl, **params)
    boxed = next((x for x in inputs if isinstance(x, Box)), None)
    needs = (False,) * len(inputs)
    if boxed is not None:
        wanted = tuple([isinstance(x, Box) and x.requires_grad for x in inputs])
        if _recording.get():
            needs = wanted
        elif (seen := _witnesses.get()) is not None:
            seen.update((id(x), x) for x, want in zip(inputs, wanted, strict=True) if want)
    with device_of(*arrays):
        try:
            forward = watched(impls.op, "forward", chosen.forward)
            out, saved = forward(*arrays, needs=needs, **params)
        except KernelCompileError as error:
            chosen = choose_another(impls, chosen, error, arrays, impl, **params)
            forward = watched(impls.op, "forward", chosen.forward)
            out, saved = forward(*arrays, needs=needs, **params)
    if boxed is None:
        return out
    outs = out if isinstance(out, tuple) else (out,)
    node = Node(impls.op, chosen, inputs, needs, params, saved, outs) if any(needs) else None
    boxes = [type(boxed)(data, node, i) for i, data in enumerate(outs)]
    for box in boxes:
        _share_version(box, inputs)
    if node is not None:
        node.watch(boxes)
    return tuple(boxes) if isinstance(out, tuple) else boxes[0]


def _share_version(box, inputs):
    """A view counts edits together with what it is a view of."""
    owner = getattr(box.data, "base", None)
    if owner is None:
        return
    for x in inputs:
        if isinstance(x, Box) and (owner is x.data or owner is getattr(x.data, "base", None)):
            box.version = x.version
            return


# ---- backward -----------------------------------------------------------------------------------


def backward(box, grad, *, retain_graph=False, create_graph=False, on_ready=None):
    """Add d(box)/d(leaf) * grad into ``leaf.grad`` of every leaf that asked for one.

    ``on_ready(leaf)`` is called once no later node can add to that leaf's gradient.
    """
    _walk([box], [grad], (), True, retain_graph, create_graph, on_ready)


def gradients(
    outputs, grads, targets, *, independent=False, retain_graph=False, create_graph=False
):
    """Return the gradient of ``outputs`` (weighted by ``grads``) for each target, or None.

    ``independent``: take the targets as given, and look at nothing that they were made from.
    """
    ends = {key(t) for t in targets} if independent else ()
    return _walk(outputs, grads, targets, False, retain_graph, create_graph, None, ends)


def _walk(roots, root_grads, targets, leaves, retain_graph, create_graph, on_ready, ends=()):
    wanted = {key(t): i for i, t in enumerate(targets)}
    found = [None] * len(targets)
    nodes = _reachable(roots, ends)
    useful = None if leaves else _leading_to(nodes, wanted)
    places = Places({*ends, *wanted})
    folds = Folds(nodes, places.kept)
    waiting = _count_uses(nodes) if on_ready else None
    pending = {}  # node -> [gradient of each output]

    def deliver(box, grad):
        if grad is None or not box.requires_grad:
            return
        who = key(box)
        if who in wanted:
            i = wanted[who]
            found[i] = grad if found[i] is None else found[i] + grad
        if box.node is not None and who not in ends:
            slots = pending.setdefault(box.node, [None] * box.node.outputs)
            old = slots[box.index]
            slots[box.index] = grad if old is None else old + grad
        elif leaves and who not in wanted:
            _accumulate(box, grad)

    def pass_on(node, grads):
        slots = [leaves or key(x) in ends for x in node.inputs]
        params = node.params | folds.offer(node, pending, pass_on)
        results = _call_backward(node, grads, create_graph, slots, places, params)
        for x, grad in zip(node.inputs, results, strict=True):
            if isinstance(x, Box):
                deliver(x, grad)

    for box, grad in zip(roots, root_grads, strict=True):
        deliver(box, grad)
    with recording(create_graph):
        while nodes:  # popped, so that with the last link to a node goes what its rule holds
            node = nodes.pop()
            grads = pending.pop(node, None)
            if useful is not None and node not in useful:
                continue
            if grads is not None:
                pass_on(node, grads)
            folds.walked(node)
            if waiting:
                _report_ready(node, waiting, on_ready)
            if not (retain_graph or create_graph):
                node.release()
    return found


def _reachable(roots, ends=()):
    """Return every node behind ``roots``, in the order they were recorded; none behind ``ends``."""
    seen, stack = set(), _makers(roots, ends)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if node.saved is _RELEASED:
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


def depends(box, keys):
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


def _call_backward(node, grads, create_graph, slots, places, params):
    """Return the gradients of a node's inputs; ``slots``: which may be written to their place."""
    node.check_unedited()
    if node.impl.backward is None:
        raise UnsupportedError(f"{node.op}: {node.impl.name} has no gradient")
    if create_graph:
        return _call_backward_recorded(node, grads)
    with device_of(*grads):
        placed = places.into(node)
        into = tuple([
            (place, False) if place is not None else _slot(x) if need and slot else None
            for x, need, slot, place in zip(node.inputs, node.needs, slots, placed, strict=True)
        ])  # fmt: skip
        for slot in into:
            if slot is not None and slot[1]:
                settle(slot[0])
        backward = watched(node.op, "backward", node.impl.backward)
        results = backward(node.saved, *grads, needs=node.needs, into=into, **params)
    for x, slot, result in zip(node.inputs, into, results, strict=True):
        if slot is not None and result is None:
            x.grad, x.grad_started = x.grad_slot, True
    return results


def _slot(x):
    """Return (flat slice, add to it?) for a leaf whose gradient has a place, else None."""
    if x.node is None and x.grad_slot is not None:
        return x.grad_slot, x.grad_started
    return None


def _call_backward_recorded(node, grads):
    """Hand the rule Tensors instead of arrays, so that it records itself (higher order)."""
    if not node.impl.differentiable_twice:
        raise UnsupportedError(
            f"{node.op}: {node.impl.name} is fused and has no second derivative; "
            "write it in basic ops (np.exp, np.matmul, ...) where you need one. Where you do not: "
            "give gpuattn.grad arrays, not Tensors that want a gradient themselves"
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


def _accumulate(leaf, grad):
    if isinstance(grad, Box):
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    elif leaf.grad_slot is not None:
        if leaf.grad_started:
            settle(leaf.grad_slot)
            leaf.grad_slot += grad.astype(leaf.grad_slot.dtype, copy=False)
        else:
            leaf.grad_slot[...] = grad
        leaf.grad, leaf.grad_started = leaf.grad_slot, True
    elif leaf.grad is None:
        leaf.grad = get_xp(grad).array(grad, leaf.data.dtype)  # a copy: rules may share arrays
    else:
        leaf.grad = leaf.grad + grad.astype(leaf.data.dtype, copy=False)
