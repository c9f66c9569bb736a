"""Gradient descent with momentum over flat buffers, in one launch after ``gradient_statistics``.

Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013),
in the form of PyTorch: the velocity sums gradients, without the learning rate.
Device code: ``rawkernels/update/sgd.cu``.
"""

from typing import Any

import numpy as np

from gpuattn.autodiff.tape import op
from gpuattn.errors import problem
from gpuattn.impls import Call
from gpuattn.ops.arguments import check_flags, number, seed_key
from gpuattn.ops.update.flat_update import check, check_numbers, scale_rows, update_impls
from gpuattn.ops.update.gradient_statistics import OptimizerState
from gpuattn.typing import Array


@op
def sgd(
    params: Array,
    grads: Array,
    velocity: Array | None,
    state: OptimizerState,
    *,
    model: Array | None = None,
    decay: Array | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    seed: Any = 0,
    impl: str | None = None,
) -> Call[None]:
    """Update ``params`` and ``velocity`` in place, by the scalars of ``state``.

    With g = ``state.coefficient`` * grads + weight_decay p: u = momentum u + g;
    p -= learning_rate u, or with ``nesterov`` p -= learning_rate (g + momentum u).
    ``velocity``: u, flat (n,) float32; None where ``momentum`` is 0. Other arguments and
    errors are as in ``gpuattn.adamw``.
    """
    moments = {} if velocity is None else {"velocity": velocity}
    check("sgd", params, grads, moments, state, model, decay)
    check_numbers("sgd", weight_decay)
    check_flags("sgd", nesterov=nesterov)
    number("sgd", "momentum", momentum, "0 <= momentum < 1", lambda m: 0 <= m < 1)
    seed = seed_key("sgd", seed).seed
    if nesterov and not momentum:
        raise ValueError(problem("sgd", "momentum", momentum, "above 0 with nesterov"))
    if (velocity is None) != (momentum == 0):
        got = "None" if velocity is None else "an array"
        accepted = "an array, or None where momentum is 0"
        raise ValueError(problem("sgd", "velocity", f"{got} for momentum {momentum}", accepted))
    inputs = (params, grads, velocity, state.array, model, decay)
    numbers: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
    }
    return Call(IMPLS, inputs, impl, **numbers, seed=seed)


def _rule(p, g, moments, learning_rate, step, decays, *, momentum, nesterov, weight_decay):
    if weight_decay:
        penalty = p.copy()
        scale_rows(penalty, weight_decay * decays)
        g += penalty
    if momentum:
        (velocity,) = moments
        velocity *= np.float32(momentum)
        velocity += g
        g = g + np.float32(momentum) * velocity if nesterov else velocity
    p -= learning_rate * g


def _numbers(*, momentum, nesterov, weight_decay):
    return momentum, weight_decay, nesterov


IMPLS = update_impls("sgd", _rule, _numbers)
