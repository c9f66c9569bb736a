"""The gradient of a program, which is a program too: reverse mode over its Symbols."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import is_floating
from gpuattn.autodiff.fusion.trace import CAST, ROUND, Program, Symbol, Trace, cast
from gpuattn.autodiff.numpy.elementwise import PARTIALS
from gpuattn.errors import UnsupportedError


class Gradient:
    """The gradient of a Program for some of its inputs.

    ``program``: takes the inputs of the original with the numbers ``reads``, then a gradient for
    each output with the numbers ``grads``; gives the gradients of the inputs ``gives``, in the
    shape of the outputs. Other inputs have none: nothing depends on them by more than steps.
    """

    def __init__(self, program: Program, needs: Sequence[bool], has_grad: Sequence[bool]) -> None:
        made, copies = _copied(program)
        inputs = [copies[x] for x in program.trace.inputs]
        outputs = [copies[x] for x in program.outputs]
        self.grads = [i for i, has in enumerate(has_grad) if has]
        given = [made.input(outputs[i].dtype) for i in self.grads]
        wanted = {x for x, need in zip(inputs, needs, strict=True) if need}
        slopes = _slopes(program, copies, wanted, [outputs[i] for i in self.grads], given)
        self.gives = [i for i, x in enumerate(inputs) if x in slopes and x in wanted]
        ends = [cast(slopes[inputs[i]], inputs[i].dtype) for i in self.gives]
        self.program = Program(made, ends, single=False)
        used = set(self.program.nodes)
        self.reads = [i for i, x in enumerate(inputs) if x in used]
        made.inputs = [inputs[i] for i in self.reads] + given


def _copied(program):
    """Return (a new Trace, {Symbol: its copy in that trace})."""
    made = Trace()
    copies: dict[Symbol, Symbol] = {}
    for symbol in program.trace.inputs:
        copies[symbol] = made.input(symbol.dtype)
    for symbol in program.trace.scalars:
        copies[symbol] = made.scalar()
    for symbol in program.nodes:
        if symbol not in copies:
            inputs = tuple([copies[x] if isinstance(x, Symbol) else x for x in symbol.inputs])
            copies[symbol] = Symbol(made, symbol.function, inputs, symbol.dtype, symbol.weak)
    return made, copies


def _slopes(program, copies, wanted, ends, grads):
    """Return {Symbol: the gradient of it} for what leads from ``wanted`` to ``ends``."""
    leading = set(wanted)
    for symbol in program.nodes:
        if any(isinstance(x, Symbol) and copies[x] in leading for x in symbol.inputs):
            leading.add(copies[symbol])
    slopes: dict[Symbol, Any] = {}

    def add(symbol, grad):
        grad = cast(grad, symbol.dtype)
        slopes[symbol] = slopes[symbol] + grad if symbol in slopes else grad

    for end, grad in zip(ends, grads, strict=True):
        if end in leading and is_floating(end.dtype):
            add(end, grad)
    for original in reversed(program.nodes):
        symbol = copies[original]
        if symbol not in slopes or symbol.function is None:
            continue
        for place, x in enumerate(symbol.inputs):
            if isinstance(x, Symbol) and x in leading and is_floating(x.dtype) and not x.weak:
                grad = _partial(symbol, place, slopes[symbol])
                if grad is not None:
                    add(x, grad)
    return slopes


def _partial(symbol, place, grad):
    """Return ``grad`` times the derivative of a Symbol by its input number ``place``, or None."""
    function, inputs = symbol.function, symbol.inputs
    if function in (CAST, ROUND):
        return grad
    if function is np.where:
        sides = (None, (grad, 0.0), (0.0, grad))[place]
        return sides and np.where(inputs[0], *sides)
    if function is np.clip:
        return _clipped(grad, *inputs) if place == 0 else None
    if function in (np.maximum, np.minimum):
        a, b, out = (*inputs, symbol) if place == 0 else (*reversed(inputs), symbol)
        # one half at ties, as the tape has it
        return np.where(a == out, np.where(b != out, grad, grad * 0.5),
                        np.where(b != out, grad * 0.5, 0.0))  # fmt: skip
    if symbol.dtype == bool or function in (np.sign, np.floor, np.ceil, np.rint, np.trunc):
        return None  # constant between steps
    if function not in PARTIALS:
        raise UnsupportedError(f"np.{function.__name__} has no gradient rule")
    keep, partials = PARTIALS[function]
    named = dict(zip("ab", inputs, strict=False), o=symbol)
    return partials[place](grad, *[named[name] for name in keep])


def _clipped(grad, x, low, high):
    if low is not None:
        grad = np.where(x >= low, grad, 0.0)
    return grad if high is None else np.where(x <= high, grad, 0.0)
