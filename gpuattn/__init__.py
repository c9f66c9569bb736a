"""Flash attention, fused Transformer ops and autodiff for NumPy and CuPy arrays.

Arrays in, arrays out:

>>> import numpy as np
>>> import gpuattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = rng.standard_normal((3, 2, 16, 4, 8), dtype="float32")  # each (B, T, H, D)
>>> gpuattn.flash_attention(q, k, v, causal=True).shape
(2, 16, 4, 8)

``gpuattn.explain`` names the implementation that runs for given arguments, and for every other one
the reason why it does not. A ``Tensor`` records what NumPy's functions and these ops compute:

>>> x = gpuattn.Tensor([0.5, -1.0], requires_grad=True)
>>> loss = np.sum(gpuattn.gelu(x) ** 2)
>>> loss.backward()
>>> x.grad.shape
(2,)

- Attention: `flash_attention`, `scaled_dot_product_attention`, `decode_attention`, `append_kv`,
  `rotary`, `softmax`.
- Layers: `linear`, `linear_dropout_add_norm`, `dropout_add_norm`, `layer_norm`, `rms_norm`,
  `dropout`, `embedding`, `gelu`, `relu`, `silu`, `swiglu`.
- Loss: `cross_entropy`, `linear_cross_entropy`.
- Sampling: `topk_logprobs`, `beam_step`, `sample_tokens`.
- Updates of flat buffers: `adamw`, `lamb`, `lion`, `sgd`, `gradient_statistics`.
- Autodiff: `Tensor`, `grad`, `value_and_grad`, `gradcheck`, `checkpoint`, `no_grad`,
  `stop_gradient`.
- Choice of implementation: `explain`, `use_impl`; `traffic`, the bytes that one moves.
- Functions of your own, faster on a GPU: `capture` makes one a CUDA graph, `fuse` one kernel.

Layers as modules are in `gpuattn.nn`, models in `gpuattn.models`, optimizers in `gpuattn.optim`;
`training_step` makes one call of a model, its loss and an optimizer: an update at full speed.
`Engine` translates, generates and scores with a model, many texts at a time.
`load_run` opens a model that ``gpuattn train`` has trained; `load_pretrained`, `load_tokenizer` and
`save_pretrained` read and write folders of Hugging Face.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import gpuattn.environment  # noqa: F401  before what imports NumPy
from gpuattn.arrays import get_xp, to_cpu, to_gpu
from gpuattn.autodiff.functional import (
    checkpoint,
    debug,
    grad,
    gradcheck,
    no_grad,
    stop_gradient,
    value_and_grad,
)
from gpuattn.autodiff.fusion.fuse import fuse
from gpuattn.autodiff.tensor import Tensor
from gpuattn.impls import explain, use_impl
from gpuattn.ops.attention.append_kv import append_kv
from gpuattn.ops.attention.decode_attention import decode_attention
from gpuattn.ops.attention.flash_attention import flash_attention
from gpuattn.ops.attention.scaled_dot_product_attention import scaled_dot_product_attention
from gpuattn.ops.dropout import dropout
from gpuattn.ops.embedding import embedding
from gpuattn.ops.linear.bias_activation import gelu, relu, silu, swiglu
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.linear.linear_dropout_add_norm import linear_dropout_add_norm
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.ops.loss.linear_cross_entropy import linear_cross_entropy
from gpuattn.ops.norm.dropout_add_norm import dropout_add_norm
from gpuattn.ops.norm.layer_norm import layer_norm
from gpuattn.ops.norm.rms_norm import rms_norm
from gpuattn.ops.rotary import rotary
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.sample_tokens import sample_tokens
from gpuattn.ops.sampling.topk_logprobs import topk_logprobs
from gpuattn.ops.softmax import softmax
from gpuattn.ops.update.adamw import adamw
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics
from gpuattn.ops.update.lamb import TensorTable, lamb
from gpuattn.ops.update.lion import lion
from gpuattn.ops.update.sgd import sgd
from gpuattn.rng import manual_seed
from gpuattn.typing import DType, StrPath

MODULES = ("models", "nn", "optim", "runtime")  # imported on first use
CLASSES = {
    "Engine": "gpuattn.engine",
    "Speculation": "gpuattn.engine",
    "traffic": "gpuattn.bench.traffic",
}  # likewise, and where they are

__all__ = [
    "OptimizerState",
    "Tensor",
    "TensorTable",
    "adamw",
    "append_kv",
    "beam_step",
    "capture",
    "checkpoint",
    "cross_entropy",
    "debug",
    "decode_attention",
    "dropout",
    "dropout_add_norm",
    "embedding",
    "explain",
    "flash_attention",
    "fuse",
    "gelu",
    "get_xp",
    "grad",
    "gradcheck",
    "gradient_statistics",
    "lamb",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_dropout_add_norm",
    "lion",
    "load_pretrained",
    "load_run",
    "load_tokenizer",
    "manual_seed",
    "models",
    "nn",
    "no_grad",
    "optim",
    "relu",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "save_pretrained",
    "scaled_dot_product_attention",
    "sgd",
    "silu",
    "softmax",
    "stop_gradient",
    "swiglu",
    "to_cpu",
    "to_gpu",
    "topk_logprobs",
    "training_step",
    "use_impl",
    "value_and_grad",
]


def load_run(
    path: StrPath, *, device: str = "auto", dtype: str = "auto", which: str = "best",
    task: str | None = None,
) -> Any:  # fmt: skip
    """Return the Translator of a run folder, the Sampler of a language model's, the Embedder of a
    BERT's, the Classifier of one of images, the TextClassifier of one of labelled texts; of a
    folder of Hugging Face the same by its model.

    ``device``: "auto", "cuda" or "numpy". ``dtype``: of parameters and activations: of a run on a
    GPU "bfloat16" by default, or "float32"; NumPy always computes a run in float32. Of a folder of
    Hugging Face by default that of its weights. ``which``: "best" or "last" weights; a run that has
    no best weights yet gives its last ones. ``task``: "translation", "language", "images",
    "labels" or "embedding", to refuse runs of another task; None accepts any.
    Raises CheckpointError for a folder that is no run, or is damaged or of another model;
    ConfigError for a run of another task; DeviceMissingError for "cuda" without a GPU.
    """
    from gpuattn.runs import loading  # imports what training needs

    return loading.load_run(path, device=device, dtype=dtype, which=which, task=task)


def load_pretrained(
    folder: StrPath, *, dtype: DType | None = None, device: str = "auto", task: str | None = None
) -> Any:
    """Return the model in a local folder of Hugging Face, in evaluation mode.

    The folder has config.json and model.safetensors, or its shards. GPT-2 becomes a
    ``models.GPT2``, BERT a ``models.Bert``, Llama, SmolLM, Qwen2 and Qwen3 a
    ``models.Llama``, Marian (OPUS-MT) a ``models.TranslationModel``, ViT a ``models.ViT``.
    ``dtype``: of the weights, by default the widest in the folder.
    ``device``: "auto", "cuda" or "numpy". ``task``: which heads are kept: None, all; for BERT
    "embedding", none but the pooler, "masked", or "labels", a classifier of texts; for Marian
    "translation"; for ViT "images" or, without its head, "features"; for others "language".
    Nothing is downloaded, unpickled, or run; one tensor at a time is in memory.
    Raises PretrainedError, whose ``faults`` are all that is wrong with the folder, a sentence each;
    ConfigError for another task or dtype; DeviceMissingError for "cuda" without a GPU.
    """
    from gpuattn import pretrained

    return pretrained.load_pretrained(folder, dtype=dtype, device=device, task=task)


def save_pretrained(model: Any, folder: StrPath, tokenizer: Any = None) -> None:
    """Write a GPT2, Bert, Llama, TranslationModel or ViT as a new folder of Hugging Face, which
    transformers can load.

    A model of ``load_pretrained`` gives the tensors of its folder again, bit for bit and by the
    same names, in one file; but for GPT-2's causal masks, which old files hold.
    ``tokenizer``: of ``load_tokenizer``, or of a run. The folder appears when all is written.
    Raises ConfigError for a model that transformers lacks, DataError for a tokenizer with more
    tokens than the model, CheckpointError for a folder that has files, weights with inf or NaN, or
    a full disk.
    """
    from gpuattn import pretrained

    pretrained.save_pretrained(model, folder, tokenizer)


def load_tokenizer(folder: StrPath) -> Any:
    """Return the tokenizer in a local folder of Hugging Face: ``encode(text)``, ``decode(ids)``.

    It is read by the library tokenizers: ``pip install 'gpuattn[pretrained]'``; UnsupportedError
    without it. What tokenizer.json says of padding and of cutting long texts is not done.
    Marian's pair of SentencePiece models needs no extra; its ``target`` encodes translations.
    A folder of ``gpuattn export`` has the tokenizer of the run.
    Raises PretrainedError for a folder without a tokenizer, or with a damaged one.
    """
    from gpuattn import pretrained

    return pretrained.load_tokenizer(folder)


def training_step(
    model: Any, loss: Callable[..., Tensor], optimizer: Any, *, accumulate: int = 1
) -> Callable[..., Any]:
    """Return ``step(*arrays)``, which updates the model once and returns the loss.

    It is the step that ``gpuattn train`` runs. On a GPU the arrays are copied while the step before
    runs, forward, backward and update are replayed as CUDA graphs from the third call with the same
    shapes and dtypes on (others are further graphs), and nothing synchronizes. On NumPy, and where
    a GPU cannot capture the model, which warns, the same runs op by op.

    ``loss(model, *arrays)``: returns the mean loss of a batch, a Tensor of shape (). It is called
    with the arrays on the model's device, in their own dtypes; it may not read values on the host,
    nor depend on what changes in Python between calls, other than shapes and ``model.training``.
    ``optimizer``: one of ``gpuattn.optim`` over the model; learning rate, clipping, precision and
    loss scale are its own.
    ``accumulate``: cut each array along its first axis into so many equal parts, and update by the
    mean of their gradients, with the memory that one part needs.

    ``step`` takes NumPy arrays and returns () float32 on the device, before the update, without
    waiting for it; ``float(...)`` waits. The dropout of each batch is numbered by the update.
    Raises TypeError or ValueError for what does not fit together, GradientError for a parameter
    that no gradient reaches, before anything is updated.

    >>> import numpy as np
    >>> import gpuattn
    >>> from gpuattn import nn, optim
    >>> line = nn.Linear(1, 1)
    >>> def loss(model, x, y):
    ...     return np.mean((model(x) - y) ** 2)
    >>> step = gpuattn.training_step(line, loss, optim.AdamW(line, lr=0.1))
    >>> x = np.linspace(0, 1, 16, dtype="float32").reshape(-1, 1)
    >>> losses = [step(x, 3 * x) for _ in range(200)]
    >>> float(losses[-1]) < 1e-3
    True
    """
    from gpuattn.train import own_model

    return own_model.training_step(model, loss, optimizer, accumulate=accumulate)


def capture(
    function: Callable | None = None, *, donate: int | str | Iterable[int | str] = ()
) -> Callable:
    """Return ``function`` as CUDA graphs: a call launches one graph instead of every kernel.

    ``function``: any function of arrays, such as a forward pass, a loss and its gradients, or an
    update; ops of this package, NumPy's functions on Tensors and CuPy's on arrays can be inside.
    Arguments and results are arrays or Tensors, also in tuples, lists and dicts, and of arguments
    hashable values. Each signature (structure, shapes, strides, dtypes, device, values, options
    such as ``no_grad`` and ``use_impl``) is a graph, captured at its second call; the last 32 are
    kept. A number that changes from call to call has to be an array.

    ``donate``: positions or names of arguments whose arrays the graph uses where they are. They are
    not copied, the function may write to them, and their addresses are part of the signature: for
    weights and the state of an optimizer. All other arrays are copied for the graph, in each call;
    results are new arrays. What the function finds elsewhere, such as globals and a module's
    parameters, is used where it is; when one of them is replaced, the graph is made anew. For that,
    set attributes of modules; do not write to ``vars(module)``.

    Ops without a seed draw new random numbers in each call. They follow from ``manual_seed``, the
    number of the call and the op's place in it, and so does ``nn.Dropout`` from its ``step``.

    A function that cannot be a graph runs op by op, and a SlowPathWarning says why, once: if it
    reads values on the host, copies from there, raises, returns a recorded Tensor, changes Python
    variables in each call, or writes to an argument that is not donated. ``reason`` of what is
    returned is that sentence, or None. Files and sockets are not noticed: a graph does not repeat
    what is done in Python.

    On NumPy arrays, inside another captured function and inside ``debug`` the function is called.
    Threads may share the result: calls wait for each other, on any stream. It can decorate:

    >>> import gpuattn
    >>> @gpuattn.capture
    ... def layer(x, weight):
    ...     return gpuattn.gelu(gpuattn.linear(x, weight))
    >>> @gpuattn.capture(donate="weights")
    ... def descend(weights, gradients):
    ...     for w, g in zip(weights, gradients):
    ...         w -= 0.1 * g

    Raises TypeError for what is no function, and for a ``donate`` that names no arguments.
    """
    from gpuattn.runtime.capture import Captured  # imports what training needs

    if function is None:
        return lambda function: Captured(function, donate)
    return Captured(function, donate)


def __getattr__(name: str) -> Any:
    """Import on first use what most programs do not need."""
    if name in MODULES:
        return importlib.import_module(f"gpuattn.{name}")
    if name in CLASSES:
        return getattr(importlib.import_module(CLASSES[name]), name)
    if name == "__version__":
        return importlib.import_module("gpuattn.version").version()
    raise AttributeError(f"module 'gpuattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, without the modules that they come from."""
    return sorted({*__all__, *MODULES, *CLASSES, "__version__"})
