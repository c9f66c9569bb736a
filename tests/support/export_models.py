"""Save models with gpuattn, for transformers to load: see ``golden_models.py``.

    python tests/support/export_models.py FOLDER

Each golden model is loaded and saved again; others are made here. Beside each are inputs and the
results of gpuattn.
"""

import sys
from pathlib import Path

import numpy as np

import gpuattn
from gpuattn.models import GPT2, Bert, BertConfig, GPT2Config, Llama, LlamaConfig

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
    "new-llama": Llama(LlamaConfig(VOCAB, 24, 6, 2, 40, LIMIT, kv_heads=2, base=50.0), 5),
    "new-qwen3": Llama(LlamaConfig(VOCAB, 24, 5, 1, 40, LIMIT, 1, head_dim=6, qk_norm=True), 7),
    "new-qwen2": Llama(LlamaConfig(VOCAB, 24, 3, 1, 40, LIMIT, qkv_bias=True, tied=True), 6),
}


def results(model):
    """Return inputs and results as arrays."""
    rng = np.random.default_rng(0)
    given = {"tokens": rng.integers(0, VOCAB, (3, LIMIT))}
    if isinstance(model, Bert):
        given["types"] = rng.integers(0, model.config.types, (3, LIMIT))
        given["lengths"] = np.array([LIMIT, 1, 6])
    inputs = {name: values.astype(np.int32) for name, values in given.items()}
    with model.evaluating():
        if not isinstance(model, Bert) or model.config.masked:
            return given | {"logits": model.logits(**inputs).data[..., :VOCAB]}
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
