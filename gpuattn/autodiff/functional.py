"""Gradients of functions: grad, value_and_grad, gradcheck, checkpoint, stop_gradient."""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp, is_array, is_floating, to_cpu, zeros
from gpuattn.autodiff import frozen, tape
from gpuattn.autodiff.backward_pass import depends, gradients
from gpuattn.autodiff.numpy.shapes import copy_of
from gpuattn.autodiff.record import key
from gpuattn.autodiff.side_stream import wait_for_all
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import GradientError
from gpuattn.impls import Impl, Impls

# keys of the Tensors that the enclosing calls of grad differentiate with respect to
_variables: contextvars.ContextVar[frozenset] = contextvars.ContextVar(
    "gpuattn_variables", default=frozenset()
)

no_grad = tape.no_grad
debug = frozen.debug


def stop_gradient(x: Any) -> Any:
    """Return ``x`` as a constant: no gradient flows through it."""
    return x.detach() if isinstance(x, Tensor) else x


def grad(fun: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
    """Return a function that computes the gradient of ``fun``, whose result is one number.

    ``argnums``: the position, or a tuple of positions, to differentiate. Arguments may be arrays,
    Tensors, or dicts, lists and tuples of them; the gradient has the same structure, and is zero
    for what ``fun`` does not use. For higher order nest calls: ``grad(grad(f))``. The gradient at a
    Tensor that requires a gradient is recorded too, for which fused ops raise UnsupportedError.
    Raises GradientError if the result is not one number and TypeError for integer arguments.
    """
    both = value_and_grad(fun, argnums)

    @functools.wraps(fun)
    def gradient(*args, **kwargs):
        return both(*args, **kwargs)[1]

    return gradient


def value_and_grad(fun: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
    """Return a function that computes ``(fun(...), gradient)``; see ``grad``."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def both(*args, **kwargs):
        leaves, args = [], list(args)
        for i in positions:
            args[i] = _map(lambda x: _leaf(x, leaves), args[i])
        outside = _variables.get()
        token = _variables.set(outside | {key(leaf) for leaf in leaves})
        try:
            with tape.recording(True):
                value = fun(*args, **kwargs)
        finally:
            _variables.reset(token)
        if np.size(raw(value)) != 1:
            raise GradientError(
                f"grad: the function returned shape {raw(value).shape}, not one number"
            )
        nested = any(leaf.node is not None for leaf in leaves)
        found = [None] * len(leaves)
        if isinstance(value, Tensor) and value.requires_grad:
            nested = nested or depends(value, outside)
            seed = np.ones_like(value.data)
            found = gradients([value], [seed], leaves, create_graph=nested)
        found = [_zeros(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
        if not nested:
            found = [raw(g) for g in found]
            value = raw(value)
        remaining = iter(found)
        results = tuple([_map(lambda _: next(remaining), args[i]) for i in positions])
        return value, results[0] if isinstance(argnums, int) else results

    return both


def _leaf(x, leaves):
    """Return the Tensor to differentiate at: a new leaf, or a copy of one of an outer gradient."""
    nested = isinstance(x, Tensor) and x.requires_grad and tape.is_recording()
    data = np.asarray(x) if isinstance(x, int | float) else raw(x)
    if not is_array(data) or not is_floating(data.dtype):
        kind = data.dtype if is_array(data) else type(data).__name__
        raise TypeError(f"grad: no gradient with respect to {kind}; cast the argument to float32")
    leaves.append(copy_of(x) if nested else Tensor(data, requires_grad=True))
    return leaves[-1]


def _zeros(leaf):
    return zeros(leaf.data, leaf.shape)


def _map(fun, tree):
    if isinstance(tree, dict):
        return {key: _map(fun, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [_map(fun, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return fun(tree)


def gradcheck(
    fun: Callable, *inputs: Any, eps: float = 1e-6, tol: float = 1e-6, order: int = 1, seed: int = 0
) -> float:
    """Compare gradients with central differences along random directions; return the largest error.

    ``inputs``: float64 arrays. ``order=2`` also checks the gradient of the gradient. The error is
    |numeric - exact| / max(1, |exact|). Raises GradientError above ``tol``, TypeError for other
    dtypes: float32 has too few digits for differences.
    """
    for x in inputs:
        if raw(x).dtype != np.float64:
            raise TypeError(f"gradcheck: inputs must be float64, got {raw(x).dtype}")
    random = np.random.default_rng(seed)
    arrays = [raw(x) for x in inputs]

    def projected(*xs):
        outs = _tuple(fun(*xs))
        weights = np.random.default_rng(seed + 1)
        parts = [(o * _like(weights.standard_normal(o.shape), raw(o))).sum() for o in outs]
        return functools.reduce(lambda a, b: a + b, parts)

    steps = [_like(random.standard_normal(x.shape), x) for x in arrays]
    error = _directional_error(projected, arrays, steps, eps, tol)
    if order > 1:
        positions = tuple(range(len(arrays)))

        def slope(*xs):
            with_grads = grad(projected, positions)(*xs)
            return functools.reduce(
                lambda a, b: a + b, [(g * s).sum() for g, s in zip(with_grads, steps, strict=True)]
            )

        others = [_like(random.standard_normal(x.shape), x) for x in arrays]
        error = max(error, _directional_error(slope, arrays, others, eps, tol))
    return error


def _like(values, array):
    return get_xp(array).asarray(values)


def _directional_error(fun, arrays, steps, eps, tol):
    found = grad(fun, tuple(range(len(arrays))))(*arrays)
    exact = sum(float((g * s).sum()) for g, s in zip(found, steps, strict=True))
    sides = []
    for sign in (1, -1):
        moved = [x + sign * eps * s for x, s in zip(arrays, steps, strict=True)]
        sides.append(float(to_cpu(raw(fun(*moved)))))
    numeric = (sides[0] - sides[1]) / (2 * eps)
    error = abs(numeric - exact) / max(1.0, abs(exact))
    if not error <= tol:
        raise GradientError(
            f"gradcheck: along a random direction the gradient gives {exact!r}, "
            f"differences give {numeric!r}: relative error {error:.2e}, allowed {tol:.0e}"
        )
    return error


def checkpoint(fun: Callable, *args: Any) -> Any:
    """Return ``fun(*args)``, saving no intermediate results: ``fun`` runs again in backward.

    Trades a second forward pass for memory: Chen et al., "Training Deep Nets with Sublinear Memory
    Cost" (2016). Seeds that ops draw (``seed=None``) are the same both times, so dropout is too.
    Gradients reach ``args`` and every Tensor used inside.
    """
    state = rng.remember()
    args = tuple([x if isinstance(x, Tensor) or not is_array(x) else Tensor(x) for x in args])
    with tape.witnessing() as seen:
        outs = fun(*[x.detach() if isinstance(x, Tensor) else x for x in args])
        seen.update((id(o), o) for o in _tuple(outs) if isinstance(o, Tensor) and o.requires_grad)
    inputs, results = (*args, *seen.values()), [outs]

    def forward(*arrays, needs):
        outs = results.pop()  # popped, so that this closure does not keep them alive
        return tuple([raw(o) for o in outs]) if isinstance(outs, tuple) else raw(outs), arrays

    def backward(saved, *grads, needs, into):
        wait_for_all()  # the second run reuses memory that the side stream still reads
        boxes = [
            Tensor(x, requires_grad=need) if is_array(x) else x
            for x, need in zip(saved, needs, strict=True)
        ][: len(args)]
        with tape.recording(True), rng.replay(state):
            again = _tuple(fun(*boxes))
        made = [o if isinstance(o, Tensor) else Tensor(o) for o in again]
        sources = [*boxes, *inputs[len(args) :]]
        targets = [x for x, need in zip(sources, needs, strict=True) if need]
        found = iter(gradients(made, grads, targets, independent=True))
        results = [next(found) if need else None for need in needs]
        # None means "written to its slot", which is wrong for an input without a gradient
        return tuple(
            zeros(x.data, x.shape) if g is None and slot and not x.grad_started else g
            for x, g, slot in zip(inputs, results, into, strict=True)
        )

    return tape.apply(Impls("checkpoint", Impl("array", forward, backward)), inputs)


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)
