"""Save models with gpuattn, for transformers to load: see ``golden_models.py``.

    python tests/support/export_models.py FOLDER

Each golden model is loaded and saved again; others are made here. Beside each are inputs and the
results of gpuattn.
"""

import sys
from pathlib import Path

import numpy as np

import gpuattn
from gpuattn.models import (
    GPT2,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    RotaryScaling,
    TranslationConfig,
    TranslationModel,
    ViT,
    ViTConfig,
)

GOLDEN = Path(__file__).parents[1] / "pretrained" / "golden"
VOCAB, LIMIT = 67, 11  # of the golden models
NEW = {
    "new-gpt2": GPT2(GPT2Config(VOCAB, 24, 3, 2, LIMIT, eps=1e-3), 1),
    "new-gpt2-untied": GPT2(
        GPT2Config(VOCAB, 24, 4, 1, LIMIT, inner=20, activation="gelu_exact", tied=False), 2
    ),
    "new-bert": Bert(BertConfig(VOCAB, 24, 3, 2, 40, max_length=LIMIT), 3),
    "new-bert-masked": Bert(
        BertConfig(VOCAB, 24, 3, 2, 40, max_length=LIMIT, masked=True, pooler=False), 4
    ),
    "new-bert-classes": Bert(
        BertConfig(VOCAB, 24, 4, 2, 40, max_length=LIMIT, classes=3, classifier_dropout=0.4), 9
    ),
    "new-llama": Llama(LlamaConfig(VOCAB, 24, 6, 2, 40, LIMIT, kv_heads=2, base=50.0), 5),
    "new-qwen3": Llama(LlamaConfig(VOCAB, 24, 5, 1, 40, LIMIT, 1, head_dim=6, qk_norm=True), 7),
    "new-marian": TranslationModel(
        TranslationConfig(
            VOCAB,
            24,
            3,
            (1, 2),
            40,
            norm="post",
            positions="sinusoidal_halves",
            max_length=2 * LIMIT,
        ),
        8,
    ),
    "new-vit": ViT(ViTConfig(7, 10, 5, 3, 24, 4, 2, 40, activation="gelu", eps=1e-3), 8),
    "new-llama3": Llama(
        LlamaConfig(
            VOCAB, 24, 2, 1, 40, LIMIT, base=50.0, scaling=RotaryScaling("llama3", 8.0, 7, 0.5, 2.0)
        ),
        9,
    ),
    "new-yarn": Llama(
        LlamaConfig(
            VOCAB, 24, 2, 1, 40, LIMIT, scaling=RotaryScaling("yarn", 4.0, 7, 0.5, 2.0, False, 1.3)
        ),
        10,
    ),
    "new-qwen2": Llama(LlamaConfig(VOCAB, 24, 3, 1, 40, LIMIT, qkv_bias=True, tied=True), 6),
}


def results(model):
    """Return inputs and results as arrays."""
    rng = np.random.default_rng(0)
    if isinstance(model, ViT):
        c = model.config
        images = rng.standard_normal((3, c.image, c.image, c.channels), np.float32)
        with model.evaluating():
            if c.classes:
                return {"images": images, "logits": model.logits(images).data}
            return {"images": images, "states": model.states(images).data}
    given = {"tokens": rng.integers(0, VOCAB, (3, LIMIT))}
    if isinstance(model, TranslationModel):
        given["target"] = rng.integers(0, VOCAB, (3, LIMIT))
        given["lengths"] = np.array([LIMIT, 1, 6])
    if isinstance(model, Bert):
        given["types"] = rng.integers(0, model.config.types, (3, LIMIT))
        given["lengths"] = np.array([LIMIT, 1, 6])
    inputs = {name: values.astype(np.int32) for name, values in given.items()}
    with model.evaluating():
        if not isinstance(model, Bert) or model.config.masked or model.config.classes:
            return given | {"logits": model.logits(*inputs.values()).data[..., :VOCAB]}
        states = model.states(**inputs)
        return given | {"states": states.data, "pooled": model.pooled(states).data}


def main(folder):
    models = {path.name: gpuattn.load_pretrained(path, device="numpy")
              for path in sorted(GOLDEN.iterdir())}  # fmt: skip
    for name, model in (models | NEW).items():
        gpuattn.save_pretrained(model, folder / name)
        np.savez(folder / name / "expected.npz", **results(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
