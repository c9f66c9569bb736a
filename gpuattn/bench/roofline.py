"""One problem of every op, and its place under the roofline of the machine.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from gpuattn.bench import cases
from gpuattn.bench.cases import Attention, Cell
from gpuattn.bench.fused import cases as fused_cases
from gpuattn.bench.fused.cases import FLOPS, PARAMETERS, Fused
from gpuattn.bench.results import case_of

_ATTENTION = Attention((4, 4096, 16, 128), causal=True)
_DECODING = Attention((64, 1, 32, 128), kv_heads=8, keys=8192)
_ROWS = 32768, 1024
_FUSED = (
    Fused("softmax", _ROWS), Fused("layer_norm", _ROWS), Fused("rms_norm", _ROWS),
    Fused("dropout_add_norm", _ROWS, dropout=0.1), Fused("gelu", _ROWS),
    Fused("dropout", _ROWS, dropout=0.1),
    Fused("cross_entropy", (8192, 50304), smoothing=0.1), Fused("embedding", (8192, 32768, 512)),
    Fused("adamw", (PARAMETERS,)), Fused("beam_step", (64, 4, 32000)),
    Fused("topk_logprobs", (256, 32000)),
)  # fmt: skip
CELLS = [
    *[Cell("flash_attention", _ATTENTION, name, ()) for name in ("forward", "backward")],
    Cell("decode_attention", _DECODING, "forward", ()),
    *[Cell(case.op, case, direction, ()) for case in _FUSED for direction in FLOPS[case.op]],
]
SMALL = [*cases.SMALL[:1], *cases.SMALL[4:5], *fused_cases.SMALL]


def place(row: dict, ceilings: dict[str, float]) -> tuple[float, float]:
    """Return (FLOPs a byte, the TFLOP/s of the roofline there)."""
    case, direction = case_of(row), row["direction"]
    intensity = case.flops(direction) / case.bytes(direction)
    return intensity, min(ceilings["matmul_tflops"], intensity * ceilings["copy_tbs"])
