"""A linear layer: y = f(x @ weight.T + bias).

"cublaslt": the library's matmul (``gpuattn/gemm/matmul.py``), which adds the bias and applies the
activation in its epilogue; where it cannot, one more kernel does, ``bias_activation.cu``.
"raw-hopper": GELU whose gradient is wanted (``gelu_hopper.py``). The gradient of
both is in ``gradients.py``.
"""

from gpuattn import arrays
from gpuattn.arrays import as_rows, check_floats, check_together, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel_refusal
from gpuattn.gemm.cublaslt import Reason
from gpuattn.gemm.matmul import capture_refusal, matmul, matmul_activated
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.ops.arguments import check_choice, check_matrix, check_shapes, take_arrays
from gpuattn.ops.linear import gelu_hopper, gradients
from gpuattn.ops.linear.activations import activate
from gpuattn.ops.linear.bias_activation import launch_forward
from gpuattn.typing import Array


@op
def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    impl: str | None = None,
) -> Call[Array]:
    """Return ``f(x @ weight.T + bias)``: (..., out), in the dtype of ``x``.

    ``x``: (..., in). ``weight``: (out, in). ``bias``: (out,) or None. All of one float dtype.
    ``activation``: None, "relu", "gelu" (the tanh form, see ``gelu``) or "gelu_exact". 16-bit
    results of the matmul are summed up in float32. ``impl``: "raw-hopper", "cublaslt", "reference",
    or None for the first that accepts. Raises TypeError for other or mixed dtypes, ValueError for
    shapes that do not fit and for another activation.
    """
    inputs = tuple(take_arrays("linear", {"x": x, "weight": weight}, {"bias": bias}).values())
    x, weight, bias = map(raw, inputs)
    check_together("linear", x=x, weight=weight, bias=bias)
    check_floats("linear", x=x, weight=weight, bias=bias)
    check_matrix("linear", x, weight)
    check_shapes("linear", weight.shape[:1], bias=bias)
    check_choice("linear", "activation", activation, None, "relu", *gelu_hopper.FORMS)
    return Call(IMPLS, inputs, impl, activation=activation)


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(x, weight, bias, *, needs, activation):
    dtype = wide(x.dtype)
    rows, matrix = (as_rows(x).astype(dtype, copy=False), weight.astype(dtype, copy=False))
    y = matmul(rows, matrix, transpose_b=True)
    if bias is not None:
        y += bias.astype(dtype, copy=False)
    kind, slope = "none", None
    if activation is not None:
        kind, (y, slope) = "slope", activate(y, activation, any(needs))
    out = y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], len(weight))
    return out, gradients.save(kind, x, weight, needs, slope) if any(needs) else None


def _backward_reference(saved, dy, *, needs, into, activation):
    kind, x, weight, slope, _ = saved
    dz = as_rows(dy).astype(wide(dy.dtype), copy=False)
    if kind == "slope":
        dz = dz * slope
    dx = dweight = dbias = None
    if needs[0]:
        shape = *dy.shape[:-1], weight.shape[1]
        dx = gradients.input_gradient(dz, weight, shape, dy.dtype)
    if needs[1]:
        dweight = gradients.weight_gradient(x, dz, into[1], dy.dtype)
    if needs[2]:
        dbias = dz.sum(0).astype(dy.dtype, copy=False)
    return dx, dweight, dbias


# ---- raw-hopper: rawkernels/linear/linear_gelu_hopper.cu -------------------------------------


def _forward_hopper(x, weight, bias, *, needs, activation):
    y, codes = gelu_hopper.forward(as_rows(x), weight, bias, activation, slopes=any(needs))
    saved = gradients.save("codes", x, weight, needs, codes) if any(needs) else None
    return y.reshape(*x.shape[:-1], len(weight)), saved


# ---- cublaslt: the library, and rawkernels/linear/bias_activation.cu where it has no epilogue


def _refuse_cublaslt(x, *_, **__):
    return kernel_refusal(x)


def _describe_cublaslt(*_, **__):
    missing = capture_refusal()
    why = f"CuPy's cuBLAS, as cuBLASLt cannot be loaded: {missing}"
    return {"library": why if missing else "cuBLASLt"}


def _forward_cublaslt(x, weight, bias, *, needs, activation):
    rows, shape, z = as_rows(x), (*x.shape[:-1], len(weight)), None
    if activation in gelu_hopper.FORMS and any(needs):
        z = arrays.empty(x, (len(rows), len(weight)))
    y, bias = _matmul_activated(rows, weight, bias, activation, z)
    out = y.reshape(shape)
    if not any(needs):
        return out, None
    kept = {None: ("none",), "relu": ("y", y)}.get(activation, ("z", z, bias))
    return out, gradients.save(kept[0], x, weight, needs, *kept[1:])


def _matmul_activated(x, weight, bias, activation, z):
    """Return (f(x @ weight.T + bias), the bias that ``z`` lacks, or None).

    ``z``: None, or where to write the input of the activation.
    """
    if bias is None and activation is None:
        return matmul(x, weight, transpose_b=True), None
    y = matmul_activated(x, weight, bias, activation, z)
    if type(y) is not Reason:
        return y, None
    y = product = matmul(x, weight, transpose_b=True, out=z)
    if z is not None:
        y = arrays.empty(x, product.shape)
    return launch_forward(product, bias, y, activation), bias


_FUSION = Fusion(offers_matmul=True, takes_matmul=gradients.takes_matmul)
IMPLS = Impls(
    "linear",
    Impl(
        "raw-hopper", _forward_hopper, gradients.backward, gelu_hopper.refuse, specialized=True,
        fusion=_FUSION,
    ),
    Impl(
        "cublaslt", _forward_cublaslt, gradients.backward, _refuse_cublaslt, _describe_cublaslt,
        fusion=_FUSION,
    ),
    Impl("reference", _forward_reference, _backward_reference),
)  # fmt: skip
