"""Modules: attributes that are parameters, modules, or collections of them, found by looking."""

import contextlib

import numpy as np

from gpuattn import rng as random
from gpuattn.arrays import get_xp, is_floating, to_cpu
from gpuattn.autodiff import tape
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import CheckpointError


class Module:
    """A callable with parameters.

    A Tensor attribute with ``requires_grad`` is a parameter, a Module is a child; so are those in
    lists, tuples and dicts. ``training``: whether dropout drops. ``deterministic``: whether
    gradients have the same bits every time, which takes longer on a GPU.
    """

    training, deterministic = True, False

    def named_parameters(self):
        """Yield (path, Tensor) in order of construction; a shared one once, by its first path."""
        seen = set()
        for path, parameter in self._find("", Tensor):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, parameter

    def parameters(self):
        """Return the parameters as a list, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def modules(self):
        """Yield (path, module) of this module and of every one inside."""
        yield "", self
        yield from self._find("", Module)

    def train(self, mode=True):
        """Switch dropout on (or off) here and inside; return self."""
        for _, module in self.modules():
            module.training = mode
        return self

    def eval(self):
        """Switch dropout off here and inside; return self."""
        return self.train(False)

    @contextlib.contextmanager
    def evaluating(self):
        """Neither drop nor record in a block; afterwards train on if it was training."""
        training = self.training
        if training:
            self.eval()
        try:
            with tape.no_grad():
                yield
        finally:
            if training:
                self.train()

    def zero_grad(self):
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad, parameter.grad_started = None, False

    def state(self):
        """Return {path: copy of the parameter as a NumPy array}."""
        return {path: np.array(to_cpu(p.data)) for path, p in self.named_parameters()}

    def load_state(self, arrays):
        """Copy ``{path: array}`` into the parameters, in their dtype; all of them or none.

        Raises CheckpointError that lists the paths that are missing, unknown or of another shape.
        """
        parameters = dict(self.named_parameters())
        faults = [f"missing: {path}" for path in parameters if path not in arrays]
        for path, array in arrays.items():
            if path not in parameters:
                faults.append(f"unknown: {path}")
            elif array.shape != parameters[path].shape:
                faults.append(f"{path} has shape {array.shape}, want {parameters[path].shape}")
            elif not is_floating(array.dtype):
                faults.append(f"{path} is {array.dtype}, want a float dtype")
        if faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" * (len(faults) > 8))
            raise CheckpointError(f"load_state: the parameters are of another model: {shown}")
        for path, parameter in parameters.items():
            xp = get_xp(parameter.data)
            tape.edit(parameter, ..., xp.asarray(arrays[path]))

    def _find(self, prefix, kind):
        """Yield (path, value) of every ``kind`` behind this module, depth first."""
        for name, value in vars(self).items():
            children = [(None, value)]
            if isinstance(value, list | tuple):
                children = enumerate(value)
            elif isinstance(value, dict):
                children = value.items()
            for i, child in children:
                path = f"{prefix}{name}" if i is None else f"{prefix}{name}.{i}"
                if isinstance(child, kind):
                    yield path, child
                if isinstance(child, Module):
                    yield from child._find(f"{path}.", kind)


def generator(rng=None):
    """Return ``rng``, or a new generator seeded as ``manual_seed`` says."""
    return rng or np.random.Generator(np.random.Philox(random.fresh_seed()))


def parameter(values):
    """Return values as a float32 parameter."""
    return Tensor(np.asarray(values, np.float32), requires_grad=True)


def xavier_uniform(rng, shape):
    """Return a (out, in) weight that keeps variances.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks" (2010).
    """
    bound = (6 / sum(shape)) ** 0.5
    return parameter(rng.uniform(-bound, bound, shape))


def normal(rng, shape, std):
    """Return a normally distributed parameter."""
    return parameter(rng.standard_normal(shape, np.float32) * np.float32(std))


def constant(value, width):
    """Return a (width,) parameter of one value."""
    return parameter(np.full(width, value))
