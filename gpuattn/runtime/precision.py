"""The dtypes of a run, and the loss scale that keeps fp16 from underflow.

Micikevicius et al., "Mixed precision training" (ICLR 2018): float32 masters, 16-bit model,
and a loss scale that halves on overflow and doubles after a long clean stretch. Without masters:
Gupta et al., "Deep learning with limited numerical precision" (ICML 2015), stochastic rounding.
"""

import difflib
import warnings
from dataclasses import dataclass
from typing import Any

from gpuattn.arrays import import_cupy
from gpuattn.cuda.gpu import gpu
from gpuattn.errors import ConfigError, DeviceMissingError, problem
from gpuattn.ops.update.gradient_statistics import MAX_LOSS_SCALE, MIN_LOSS_SCALE
from gpuattn.runtime.workspace import Workspace

WIDER = {"float16": "--precision bf16", "bfloat16": "--precision fp32"}
MOST_SKIPPED = 10  # updates in a row, at the smallest loss scale, after which a run is stopped


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    ``dtype``: of parameters and activations. The loss scale starts at ``loss_scale`` and doubles
    after ``growth_interval`` clean updates (0: it is constant). ``masters``: whether parameters
    have float32 masters; without them, updates are rounded stochastically.
    """

    name: str
    dtype: str
    loss_scale: float = 1.0
    growth_interval: int = 0
    masters: bool = True

    def grad_dtype(self, micro_batches: int) -> str:
        """Return the dtype of gradients: float32 where several micro-batches are summed."""
        return "float32" if micro_batches > 1 else self.dtype


PRECISIONS = {
    "fp32": Precision("fp32", "float32"),
    "bf16": Precision("bf16", "bfloat16"),
    "pure-bf16": Precision("pure-bf16", "bfloat16", masters=False),
    "fp16": Precision("fp16", "float16", loss_scale=65536.0, growth_interval=2000),
}
_warned: set[str] = set()


def choose(name: str, device: str) -> Precision:
    """Return the Precision called ``name``, or the device's best for "auto".

    ``device``: "numpy" or "cuda". NumPy always computes in float32, and warns once for another
    name. A GPU before 8.0 computes in fp16 by "auto", and warns once for bf16. Raises ConfigError
    for an unknown name.
    """
    if name not in ("auto", *PRECISIONS):
        near = difflib.get_close_matches(name, PRECISIONS, 1)
        advice = f"Did you mean {near[0]!r}?" if near else ""
        accepted = ", ".join(("auto", *PRECISIONS))
        raise ConfigError(problem("precision", "the name", repr(name), accepted, advice))
    if device == "numpy":
        if name not in ("auto", "fp32") and name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"precision {name} needs a GPU; on NumPy everything is computed in fp32",
                stacklevel=2,
            )
        return PRECISIONS["fp32"]
    fast = has_fast_bfloat16()
    if not fast and PRECISIONS.get(name, PRECISIONS["fp16"]).dtype == "bfloat16":
        warn_slow_bfloat16()
    return PRECISIONS[("bf16" if fast else "fp16") if name == "auto" else name]


def has_fast_bfloat16() -> bool:
    """Return whether the current GPU computes in bfloat16; True where there is no GPU to ask."""
    try:
        cupy = import_cupy()
    except DeviceMissingError:
        return True
    return gpu(cupy.cuda.runtime.getDevice()).has_bfloat16


def warn_slow_bfloat16() -> None:
    """Warn once that this GPU does not compute in bfloat16."""
    if "slow bfloat16" not in _warned:
        _warned.add("slow bfloat16")
        warnings.warn(
            "this GPU's compute capability is below 8.0: bfloat16 is stored in 16 bits and "
            "computed in float32, without tensor cores; float16 (--precision fp16, the default "
            "here) uses them",
            stacklevel=3,
        )


def trouble(
    before: dict[str, float], now: dict[str, float], workspace: Workspace, config: Any
) -> list[str]:
    """Return warnings about skipped updates and the loss scale between two ``state.read()``.

    ``config``: the run's TrainConfig, to suggest options that differ from its own.
    Raises FloatingPointError, naming parameters with bad gradients, after MOST_SKIPPED skipped
    updates in a row with a loss scale that cannot shrink.
    """
    skipped = now["skipped"] - before["skipped"]
    if now["skipped_in_a_row"] >= MOST_SKIPPED and now["loss_scale"] <= MIN_LOSS_SCALE:
        bad = workspace.unusable_gradients()
        where = f"first in {bad[0]} ({len(bad)} of {len(workspace.slots)})" if bad else "now finite"
        raise FloatingPointError(
            f"{now['skipped_in_a_row']} updates in a row had gradients with inf or NaN, {where}; "
            f"the last good one was number {now['step']}. Start again with "
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
