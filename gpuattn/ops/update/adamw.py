"""AdamW and Adam over flat buffers, in one launch after ``gradient_statistics``.

Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019), with the bias
correction of Kingma and Ba, "Adam" (ICLR 2015).
Device code: ``rawkernels/update/adamw.cu``.
"""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import op
from gpuattn.impls import Call
from gpuattn.ops.arguments import check_flags, seed_key
from gpuattn.ops.update.flat_update import (
    check,
    check_betas,
    check_numbers,
    log,
    scale_rows,
    update_impls,
)
from gpuattn.ops.update.gradient_statistics import OptimizerState
from gpuattn.typing import Array


@op
def adamw(
    params: Array,
    grads: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    state: OptimizerState,
    *,
    model: Array | None = None,
    decay: Array | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    seed: Any = 0,
    impl: str | None = None,
) -> Call[None]:
    """Update ``params``, ``exp_avg`` and ``exp_avg_sq`` in place, by the scalars of ``state``.

    With g = ``state.coefficient`` * grads: m += (1 - b1) (g - m); v += (1 - b2) (g^2 - v);
    p -= learning_rate (weight_decay p + m' / (sqrt(v') + eps)), where m' = m / (1 - b1^step) and
    v' = v / (1 - b2^step). Nothing is written if ``state.skip`` is set.
    Call ``gradient_statistics`` first. ``decoupled=False`` is Adam with an L2 penalty: the decay
    becomes part of the gradient, g += weight_decay p (after clipping).

    ``params``: flat (n,) float32, n a multiple of 128. Or bfloat16, without float32 masters: new
    weights are then rounded stochastically, by ``seed`` and ``state.step``.
    ``exp_avg``, ``exp_avg_sq``: (n,) float32. ``grads``: (n,) float32, or the 16-bit dtype of the
    model. ``model``: (n,) float16 or bfloat16, gets a copy of float32 params. ``decay``: uint8
    (n / 128,), not 0 where the weights of a block of 128 decay; None: everywhere.
    Raises TypeError for other dtypes, ValueError for other shapes, strides or parameters out of
    range.
    """
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check("adamw", params, grads, moments, state, model, decay)
    check_betas("adamw", betas)
    check_numbers("adamw", weight_decay, eps)
    check_flags("adamw", decoupled=decoupled)
    seed = seed_key("adamw", seed).seed
    inputs = (params, grads, exp_avg, exp_avg_sq, state.array, model, decay)
    numbers: dict[str, Any] = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return Call(IMPLS, inputs, impl, **numbers, decoupled=decoupled, seed=seed)


def _rule(p, g, moments, learning_rate, step, decays, *, betas, eps, weight_decay, decoupled):
    if weight_decay and not decoupled:
        penalty = p.copy()
        scale_rows(penalty, weight_decay * decays)
        g += penalty
    change = adam_direction(g, *moments, step, betas, eps, learning_rate)
    if weight_decay and decoupled:
        scale_rows(p, 1 - learning_rate * weight_decay * decays)
    p -= change


def adam_direction(
    g: Array,
    m: Array,
    v: Array,
    step: Array,
    betas: tuple[float, float],
    eps: float,
    scale: Any = 1,
) -> Array:
    """Update the moments by ``g``; return scale * m' / (sqrt(v') + eps). Overwrites ``g``."""
    xp = get_xp(g)
    rates = [np.float32(1 - beta) for beta in betas]
    unbias1, unbias2 = (-xp.expm1(step * log(beta)) for beta in betas)
    root2 = xp.sqrt(unbias2)
    change = g - m
    change *= rates[0]
    m += change
    g *= g
    g -= v
    g *= rates[1]
    v += g
    xp.sqrt(v, out=g)
    g += (root2 * eps).astype(np.float32)
    xp.divide(m, g, out=g)
    g *= scale * root2 / unbias1
    return g


def _numbers(*, betas, eps, weight_decay, decoupled):
    return *moment_numbers(betas, eps), weight_decay, decoupled


def moment_numbers(betas: tuple[float, float], eps: float) -> tuple:
    """Return the fields of the struct Moments of the kernels: log(beta), 1 - beta of each; eps."""
    return *[number for beta in betas for number in (log(beta), 1 - beta)], eps


IMPLS = update_impls("adamw", _rule, _numbers)
