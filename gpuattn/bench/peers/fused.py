"""The peers of the fused ops: PyTorch, torch.compile, quack and Liger; see ``timing.py``.

torch.compile compiles the same formulas as PyTorch's, for the shapes of one cell at a time.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from gpuattn.bench.fused.cases import Fused
from gpuattn.bench.fused.measure import LEARNING_RATE, MAX_NORM, OP_SPECS, OPTIMIZER, STEPS, listed
from gpuattn.bench.peers.timing import array, tensor, torch_here
from gpuattn.errors import UnsupportedError

LAYER_EPS, RMS_EPS = 1e-5, 1e-6  # the defaults of our ops


# ---- formulas -----------------------------------------------------------------------------------


def _softmax(case):
    from torch.nn.functional import softmax

    return lambda x: softmax(x, -1)


def _dropout(case):
    from torch.nn.functional import dropout

    return lambda x: dropout(x, case.dropout)


def _layer_norm(case):
    from torch.nn.functional import layer_norm

    return lambda x, weight, bias: layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS)


def _rms_norm(case):
    from torch.nn.functional import rms_norm

    return lambda x, weight: rms_norm(x, x.shape[-1:], weight, RMS_EPS)


def _dropout_add_norm(case):
    from torch.nn.functional import dropout, layer_norm, rms_norm

    def both(x, residual, weight, bias=None):
        h = residual + (dropout(x, case.dropout) if case.dropout else x)
        if case.rms:
            return rms_norm(h, h.shape[-1:], weight, LAYER_EPS), h
        return layer_norm(h, h.shape[-1:], weight, bias, LAYER_EPS), h

    return both


def _cross_entropy(case):
    from torch.nn.functional import cross_entropy

    return lambda x, labels: cross_entropy(x, labels, label_smoothing=case.smoothing)


def _cross_entropy_wide(case):
    mean = _cross_entropy(case)
    return lambda x, labels: mean(x.float(), labels)


def _embedding(case):
    from torch.nn.functional import embedding

    return lambda tokens, weight, *order: embedding(tokens, weight)


def _beam_step(case):
    from torch import topk
    from torch.nn.functional import log_softmax

    sentences, beams, _ = case.shape

    def best(logits, scores):
        totals = log_softmax(logits.float(), -1) + scores.reshape(-1, 1)
        return topk(totals.reshape(sentences, -1), 2 * beams)[0]

    return best


def _update(params, grads, momentum, squares, model):
    """AdamW with the gradient norm, clipping and the check for inf and NaN, for torch.compile."""
    (beta1, beta2), step = OPTIMIZER["betas"], STEPS + 1
    g = grads.float()
    norm = g.square().sum().sqrt()
    good = norm.isfinite()
    g = g * (MAX_NORM / (norm + 1e-6)).clamp(max=1)
    m = momentum + (1 - beta1) * (g - momentum)
    v = squares + (1 - beta2) * (g * g - squares)
    root = (v / (1 - beta2**step)).sqrt() + OPTIMIZER["eps"]
    p = params * (1 - LEARNING_RATE * OPTIMIZER["weight_decay"])
    p = p - LEARNING_RATE / (1 - beta1**step) * m / root
    for old, new in ((momentum, m), (squares, v), (params, p)):
        old.copy_(old.where(~good, new))
    model.copy_(params)


FORMULAS = {
    "softmax": _softmax, "layer_norm": _layer_norm, "rms_norm": _rms_norm,
    "dropout_add_norm": _dropout_add_norm, "cross_entropy": _cross_entropy,
    "embedding": _embedding, "beam_step": _beam_step, "dropout": _dropout,
}  # fmt: skip


def _compiled(function):
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._functorch.config.donated_buffer = False  # a backward pass is repeated
    with contextlib.suppress(AttributeError):  # its timings were taken while other processes ran
        torch._inductor.config.autotune_local_cache = False
    torch._dynamo.reset()  # otherwise sizes become dynamic after other cells
    return torch.compile(function, dynamic=False)


# ---- libraries ----------------------------------------------------------------------------------


def _quack(case):
    import quack

    if case.op == "softmax":
        return quack.softmax
    if case.op == "rms_norm":
        return lambda x, weight: quack.rmsnorm(x, weight, eps=RMS_EPS)
    return lambda x, residual, weight: quack.rmsnorm(
        x, weight, residual=residual, eps=LAYER_EPS, prenorm=True
    )


def _liger(case):
    from liger_kernel import ops

    how = 0.0, "llama", False  # the last: do not overwrite the output gradient
    if case.op == "softmax":
        return ops.LigerSoftmaxFunction.apply
    if case.op == "layer_norm":
        return lambda x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, LAYER_EPS)
    if case.op == "rms_norm":
        return lambda x, weight: ops.LigerRMSNormFunction.apply(x, weight, RMS_EPS, *how)
    return lambda x, residual, weight: ops.LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, LAYER_EPS, *how
    )


@functools.lru_cache(maxsize=4)
def _function(name, case):
    """Return the peer ``name`` as a differentiable function of tensors."""
    if name == "quack":
        return _quack(case)
    if name == "liger":
        return _liger(case)
    if name == "torch":
        return FORMULAS[case.op](case)
    if name == "torch-compile":
        formula = _cross_entropy_wide if case.op == "cross_entropy" else FORMULAS[case.op]
        return _compiled(formula(case))
    raise UnsupportedError(f"{name} is not a peer of {case.op}")


# ---- a peer on given arrays ---------------------------------------------------------------------


class Call:
    """A peer, by ``name``, on our arrays; ``__new__`` chooses one of the classes in SPECIAL."""

    is_captured = True

    def __new__(cls, name, case, *_):
        return super().__new__(SPECIAL.get((case.op, name), cls))

    def __init__(
        self, name: str, case: Fused, direction: str, inputs: tuple, douts: list | None
    ) -> None:
        self.torch, self.name, self.case = torch_here(), name, case
        self.direction = direction
        self.inputs = [self._tensor(x) for x in inputs]
        self.douts = [self._tensor(x) for x in douts or ()]
        self.prepare()

    @staticmethod
    def _tensor(x):
        return tensor(x, x.dtype.name) if hasattr(x, "dtype") else None

    def prepare(self) -> None:
        """Set ``run``."""
        function = _function(self.name, self.case)
        trains, leaves = bool(self.douts), []
        for place in OP_SPECS[self.case.op].grads[: len(self.inputs)] if trains else ():
            self.inputs[place] = self.inputs[place].detach().requires_grad_()
            leaves.append(self.inputs[place])

        def forward():
            return listed(function(*self.inputs))

        def backward(outs):
            return self.torch.autograd.grad(outs, leaves, self.douts, retain_graph=True)

        if not trains:
            self.run = self.torch.no_grad()(forward)
        elif self.direction == "backward":
            outs = forward()
            self.run = lambda: backward(outs)
        else:
            self.run = lambda: [*(outs := forward()), *backward(outs)]

    def restart(self) -> None:
        """Do nothing: inputs are not changed."""

    def results(self, parts: Sequence) -> list:
        """Return CuPy arrays in our order."""
        return [array(x, str(x.dtype).removeprefix("torch.")) for x in parts]


class QuackLayerNorm(Call):
    """quack's LayerNorm, which has no autograd and takes float32 weights only."""

    def prepare(self) -> None:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        x, weight, bias = self.inputs
        weight, bias = weight.float(), bias.float()
        if not self.douts:
            self.run = lambda: [layernorm_fwd(x, weight, bias, LAYER_EPS)]
            return
        _, rstd, mean = layernorm_fwd(x, weight, bias, LAYER_EPS, True, True)
        self.run = lambda: layernorm_bwd(x, weight, self.douts[0], rstd, mean)


class QuackCrossEntropy(Call):
    """Loss and gradient of each row by one kernel; the mean is not timed."""

    def prepare(self) -> None:
        from quack.cross_entropy import cross_entropy_fwd

        if self.case.smoothing:
            raise UnsupportedError("quack does not support label smoothing")
        logits, labels = self.inputs
        self.run = lambda: cross_entropy_fwd(logits, labels, return_dx=True)

    def results(self, parts: Sequence) -> list:
        loss, grad = parts
        return super().results([loss.mean(), grad / len(loss)])


class LigerCrossEntropy(Call):
    """In place, on a copy made before timing. It reads the number of valid labels on the host."""

    is_captured = False

    def prepare(self) -> None:
        from liger_kernel.ops import LigerCrossEntropyFunction

        logits, labels = self.inputs
        self.own = logits.clone().requires_grad_()
        settings = None, -100, 0.0, self.case.smoothing, "mean", None, False, False, False

        def run():
            loss = LigerCrossEntropyFunction.apply(self.own, labels, *settings)[0]
            return loss, *self.torch.autograd.grad(loss, self.own)

        self.run = run

    def restart(self) -> None:
        self.own.data.copy_(self.inputs[0])


class Optimizer(Call):
    """AdamW in place, on copies of our arrays."""

    def prepare(self) -> None:
        self.own: list[Any] = [None if x is None else x.clone() for x in self.inputs[:5]]
        params, grads, momentum, squares, model = self.own
        if self.name == "torch-compile":
            update = _compiled(_update)
            self.run = lambda: update(*self.own)
            return
        torch = self.torch
        params.grad = self.own[1] = grads.float()
        settings = {"lr": LEARNING_RATE, "fused": True, "capturable": True, **OPTIMIZER}
        optimizer = torch.optim.AdamW([params], **settings)
        self.step = torch.tensor(float(STEPS), device=params.device)
        optimizer.state[params] = {"step": self.step, "exp_avg": momentum, "exp_avg_sq": squares}

        def run():
            torch.nn.utils.clip_grad_norm_([params], MAX_NORM)
            optimizer.step()
            model.copy_(params)

        self.run = optimizer.step if self.name == "torch-fused" else run

    def restart(self) -> None:
        for own, first in zip(self.own, self.inputs, strict=False):
            if own is not None:
                own.copy_(first)
        if self.name != "torch-compile":
            self.step.fill_(STEPS)

    def results(self, parts: Sequence) -> list:
        if self.name == "torch-fused":  # not comparable: it does not clip
            return []
        return super().results([self.own[0], self.own[2], self.own[3]])


SPECIAL = {
    ("layer_norm", "quack"): QuackLayerNorm,
    ("cross_entropy", "quack"): QuackCrossEntropy,
    ("cross_entropy", "liger"): LigerCrossEntropy,
    **{("adamw", name): Optimizer for name in ("torch", "torch-compile", "torch-fused")},
}
