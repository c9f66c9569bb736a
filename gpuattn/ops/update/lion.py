"""Lion over flat buffers, in one launch after ``gradient_statistics``.

Chen et al., "Symbolic discovery of optimization algorithms" (NeurIPS 2023).
Device code: ``rawkernels/update/lion.cu``.
"""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import op
from gpuattn.impls import Call
from gpuattn.ops.arguments import seed_key
from gpuattn.ops.update.flat_update import (
    check,
    check_betas,
    check_numbers,
    scale_rows,
    update_impls,
)
from gpuattn.ops.update.gradient_statistics import OptimizerState
from gpuattn.typing import Array


@op
def lion(
    params: Array,
    grads: Array,
    exp_avg: Array,
    state: OptimizerState,
    *,
    model: Array | None = None,
    decay: Array | None = None,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    seed: Any = 0,
    impl: str | None = None,
) -> Call[None]:
    """Update ``params`` and ``exp_avg`` in place, by the scalars of ``state``.

    With g = ``state.coefficient`` * grads:
    p -= learning_rate (weight_decay p + sign(b1 m + (1 - b1) g)), then m += (1 - b2) (g - m).
    Other arguments and errors are as in ``gpuattn.adamw``.
    """
    check("lion", params, grads, {"exp_avg": exp_avg}, state, model, decay)
    check_betas("lion", betas)
    check_numbers("lion", weight_decay)
    inputs = (params, grads, exp_avg, state.array, model, decay)
    seed = seed_key("lion", seed).seed
    return Call(IMPLS, inputs, impl, betas=tuple(betas), weight_decay=weight_decay, seed=seed)


def _rule(p, g, moments, learning_rate, step, decays, *, betas, weight_decay):
    (m,) = moments
    g -= m
    sign = g * np.float32(1 - betas[0])
    sign += m
    get_xp(g).sign(sign, out=sign)
    sign *= learning_rate
    if weight_decay:
        scale_rows(p, 1 - learning_rate * weight_decay * decays)
    p -= sign
    g *= np.float32(1 - betas[1])
    m += g


def _numbers(*, betas, weight_decay):
    return *(1 - beta for beta in betas), weight_decay


IMPLS = update_impls("lion", _rule, _numbers)
