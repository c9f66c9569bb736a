"""What a run computes in, and how fp16 is kept from underflow.

Micikevicius et al., "Mixed precision training" (ICLR 2018): float32 masters, 16-bit model,
and a loss scale that halves on overflow and doubles after a long clean stretch. Without masters:
Gupta et al., "Deep learning with limited numerical precision" (ICML 2015), stochastic rounding.
"""

import difflib
import warnings
from dataclasses import dataclass

from gpuattn.errors import ConfigError, problem
from gpuattn.ops.update.gradient_statistics import MAX_LOSS_SCALE, MIN_LOSS_SCALE

WIDER = {"float16": "--precision bf16", "bfloat16": "--precision fp32"}
STUCK = 10  # skipped updates in a row, with nothing left to halve, after which a run is stopped


@dataclass(frozen=True)
class Precision:
    """``dtype``: what the model computes in. The loss scale starts at ``loss_scale`` and doubles
    after ``growth_interval`` clean updates (0: it never moves). ``masters``: whether parameters
    are kept in float32 too; without, new ones are rounded at random."""

    name: str
    dtype: str
    loss_scale: float = 1.0
    growth_interval: int = 0
    masters: bool = True

    def grad_dtype(self, micro_batches):
        """Return the dtype of gradients: float32 where several micro-batches are summed."""
        return "float32" if micro_batches > 1 else self.dtype

    def root_gradient(self, state):
        """Return what ``backward`` starts from: the loss scale, on the device, read by nobody."""
        return state.field("loss_scale")


PRECISIONS = {
    "fp32": Precision("fp32", "float32"),
    "bf16": Precision("bf16", "bfloat16"),
    "pure-bf16": Precision("pure-bf16", "bfloat16", masters=False),
    "fp16": Precision("fp16", "float16", loss_scale=65536.0, growth_interval=2000),
}
_said = set()


def choose(name, device):
    """Return the Precision called ``name``, or the device's best for "auto".

    ``device``: "numpy" or "cuda". NumPy computes in float32 whatever is asked: it says so once.
    Raises ConfigError for an unknown name.
    """
    if name not in ("auto", *PRECISIONS):
        near = difflib.get_close_matches(name, PRECISIONS, 1)
        advice = f"Did you mean {near[0]!r}?" if near else ""
        accepted = ", ".join(("auto", *PRECISIONS))
        raise ConfigError(problem("precision", "the name", repr(name), accepted, advice))
    if device == "numpy":
        if name not in ("auto", "fp32") and name not in _said:
            _said.add(name)
            warnings.warn(
                f"precision {name} needs a GPU; on NumPy everything is computed in fp32",
                stacklevel=2,
            )
        return PRECISIONS["fp32"]
    return PRECISIONS["bf16" if name == "auto" else name]


def trouble(before, now, workspace, config):
    """Return sentences about what went wrong between two ``state.read()``, to be shown.

    ``config``: the run's TrainConfig, so that what to try is something else than it has.
    Raises FloatingPointError, naming parameters with bad gradients, when updates are skipped
    without end: ten in a row with a loss scale that cannot shrink any more.
    """
    skipped = now["skipped"] - before["skipped"]
    if now["skipped_in_a_row"] >= STUCK and now["loss_scale"] <= MIN_LOSS_SCALE:
        bad = workspace.unusable_gradients()
        where = (
            f"first in {bad[0]} ({len(bad)} of {len(workspace.slots)})" if bad else "by now gone"
        )
        raise FloatingPointError(
            f"{now['skipped_in_a_row']} updates in a row had gradients with inf or NaN, {where}; "
            f"the last good one was number {now['step']}. Begin anew with "
            f"{', or '.join(_remedies(workspace, config))}"
        )
    sentences = []
    if skipped:
        scale = f"; the loss scale is {now['loss_scale']:g}" if _moves(before, now) else ""
        updates = "1 update was" if skipped == 1 else f"{skipped} updates were"
        sentences.append(f"{updates} skipped: inf or NaN in their gradients{scale}")
    if now["clamped"] > before["clamped"]:
        end = "smallest" if now["loss_scale"] < MAX_LOSS_SCALE else "largest"
        sentences.append(f"the loss scale is at its {end}, {now['loss_scale']:g}, and stays there")
    return sentences


def _remedies(workspace, config):
    yield f"a smaller --lr than {config.lr:g}"
    yield "a longer --warmup"
    if not 0 < config.clip <= 1:
        yield "--clip 1"
    if str(workspace.params.dtype) in WIDER:
        yield WIDER[str(workspace.params.dtype)]


def _moves(before, now):
    return before["loss_scale"] != now["loss_scale"] or now["loss_scale"] != 1
