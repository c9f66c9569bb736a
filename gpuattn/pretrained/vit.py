"""ViT of transformers (``ViTForImageClassification``, ``ViTModel``) as ``models.vit.ViT``.

A patch is (channels, patch, patch) there, and (patch, patch, channels) here.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuattn.data.class_names import ClassNames
from gpuattn.models.vit import ViT, ViTConfig
from gpuattn.pretrained import files
from gpuattn.pretrained.architecture import Architecture, in_one, register, rule
from gpuattn.pretrained.files import PREPROCESSOR
from gpuattn.pretrained.labels import count_labels, numbered_labels, read_labels
from gpuattn.pretrained.settings import Settings
from gpuattn.pretrained.tokens import OWN, load_tokenizer
from gpuattn.typing import StrPath

ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
               "relu": "relu"}  # fmt: skip
HEAD = (r"classifier\..*",)
SCALE = 1 / 255  # of pixels, before they are normalised


def configure(settings: Settings, names: set[str], task: str | None) -> ViTConfig:
    """Return the ViTConfig of a config.json, with the head that is among the tensors."""
    channels = settings.size("num_channels", 3)
    scale = settings.preprocessor.get("rescale_factor", SCALE)
    if (
        settings.preprocessor.get("do_rescale") is False
        or type(scale) is not float
        or not math.isclose(scale, SCALE, rel_tol=1e-6)
    ):
        settings.faults.append(f"{PREPROCESSOR}: pixels are not scaled by 1 / 255; accepted: that")
    labels = count_labels(settings)
    for unused in ("encoder_stride", "pooler_act", "pooler_output_size"):
        settings.get(unused, None)
    return ViTConfig(
        classes=labels if any(name.startswith("classifier.") for name in names) else 0,
        image=settings.size("image_size", 224), patch=settings.size("patch_size", 16),
        channels=channels, d_model=settings.size("hidden_size", 768),
        heads=settings.size("num_attention_heads", 12),
        layers=settings.layers("num_hidden_layers", 12),
        ffn=settings.size("intermediate_size", 3072),
        dropout=settings.dropout("hidden_dropout_prob", 0.0),
        attention_dropout=settings.dropout("attention_probs_dropout_prob", 0.0),
        activation=settings.choice("hidden_act", "gelu", ACTIVATIONS),
        eps=settings.eps("layer_norm_eps", 1e-12), qkv_bias=settings.flag("qkv_bias", True),
        mean=_by_channel(settings, "image_mean", channels),
        std=_by_channel(settings, "image_std", channels),
    )  # fmt: skip


def _by_channel(settings, key, channels):
    """Return the numbers of preprocessor_config.json by which channels are normalised, or None."""
    found = settings.preprocessor.get(key)
    if settings.preprocessor.get("do_normalize") is False:
        return (float(key == "image_std"),) * channels
    if found is None:
        return None
    least = 0 if key == "image_std" else -math.inf
    fits = isinstance(found, list) and len(found) == channels
    if fits and all(type(x) in (int, float) and least < x < math.inf for x in found):
        return tuple(map(float, found))
    settings.faults.append(f"{PREPROCESSOR}: {key} is {found!r}; accepted: {channels} numbers")
    return None


def describe(config: ViTConfig) -> dict[str, Any]:
    """Return the keys of config.json."""
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    attention = config.dropout if config.attention_dropout is None else config.attention_dropout
    return {
        "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
        "model_type": "vit", "image_size": config.image, "patch_size": config.patch,
        "num_channels": config.channels, "hidden_size": config.d_model,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "intermediate_size": config.ffn, "hidden_act": names[config.activation],
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": attention,
        "layer_norm_eps": config.eps, "qkv_bias": config.qkv_bias,
        **numbered_labels(config.classes),
    }  # fmt: skip


def beside(config: ViTConfig) -> dict[str, bytes]:
    """Return preprocessor_config.json: how transformers makes arrays of images."""
    half = (0.5,) * config.channels
    values = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True,
        "do_normalize": True, "rescale_factor": SCALE, "resample": 2,
        "size": {"height": config.image, "width": config.image},
        "image_mean": list(config.mean or half), "image_std": list(config.std or half),
    }  # fmt: skip
    return {PREPROCESSOR: files.to_json(values)}


def class_names(folder: StrPath) -> ClassNames:
    """Return the names of the classes: of the run that was exported, or those in config.json.

    Raises PretrainedError for a folder with damaged ones.
    """
    return load_tokenizer(folder) if (Path(folder) / OWN).exists() else read_labels(folder)


def resized(model: ViT, image: int) -> ViT:
    """Return ``model.with_image``, which is saved as a folder for images of that side.

    ``model``: of ``load_pretrained``.
    """
    new, origin = model.with_image(image), model.origin  # type: ignore[attr-defined]
    values = json.loads(origin.files.get(PREPROCESSOR, "{}"))
    sides = {"height": image, "width": image}
    values |= {key: sides for key in ("size", "crop_size") if key in values}
    beside = origin.files | ({PREPROCESSOR: files.to_json(values)} if values else {})
    config = origin.config | {"image_size": image}
    new.origin = replace(origin, config=config, files=beside)  # type: ignore[attr-defined]
    return new


def _one_row(row, config):
    return row.reshape(1, 1, -1)


def _channels_first(rows, config):
    shape = (len(rows), config.patch, config.patch, config.channels)
    return rows.reshape(shape).transpose(0, 3, 1, 2)


register(Architecture(
    model_type="vit", model=ViT, tasks={"images": (r"pooler\..*",), "features": HEAD},
    classes=("ViTForImageClassification", "ViTModel"), configure=configure, describe=describe,
    beside=beside, tokenizer=class_names, prefix="vit.", bare=HEAD,
    rules=(
        rule("embeddings.cls_token", "class_token", shaped=_one_row),
        rule("embeddings.position_embeddings", "positions", shaped=in_one),
        rule("embeddings.patch_embeddings.projection.weight", "patch.weight",
             shaped=_channels_first),
        rule("embeddings.patch_embeddings.projection.bias", "patch.bias"),
        rule("encoder.layer.{i}.attention.attention.[query|key|value].{p}",
             "layers.{i}.attention.qkv.{p}"),
        rule("encoder.layer.{i}.attention.output.dense.{p}", "layers.{i}.attention.out.{p}"),
        rule("encoder.layer.{i}.layernorm_before.{p}", "layers.{i}.norms.0.{p}"),
        rule("encoder.layer.{i}.layernorm_after.{p}", "layers.{i}.norms.1.{p}"),
        rule("encoder.layer.{i}.intermediate.dense.{p}", "layers.{i}.feed_forward.inner.{p}"),
        rule("encoder.layer.{i}.output.dense.{p}", "layers.{i}.feed_forward.out.{p}"),
        rule("layernorm.{p}", "norm.{p}"),
        rule("classifier.{p}", "head.{p}"),
    ),
    kept={r"pooler\.dense\.(weight|bias)": "the classifier reads the class token itself"},
))  # fmt: skip
