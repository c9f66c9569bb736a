"""Linear layers."""

from gpuattn.nn.module import Module, constant, generator, xavier_uniform
from gpuattn.ops.linear import linear


class Linear(Module):
    """``activation(x @ weight.T + bias)``: (..., inputs) to (..., outputs).

    ``weight``: (outputs, inputs). ``activation``: None, "relu" or "gelu" (tanh form).
    """

    def __init__(self, inputs, outputs, *, bias=True, activation=None, rng=None):
        self.weight = xavier_uniform(generator(rng), (outputs, inputs))
        self.bias = constant(0, outputs) if bias else None
        self.activation = activation

    def __call__(self, x):
        return linear(x, self.weight, self.bias, activation=self.activation)


class FeedForward(Module):
    """Two linear layers with an activation between them: (..., width) to (..., width)."""

    def __init__(self, width, hidden, *, activation="relu", bias=True, rng=None):
        rng = generator(rng)
        self.inner = Linear(width, hidden, bias=bias, activation=activation, rng=rng)
        self.out = Linear(hidden, width, bias=bias, rng=rng)

    def __call__(self, x):
        return self.out(self.inner(x))
