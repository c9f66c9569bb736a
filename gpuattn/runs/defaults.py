"""Defaults of a training run: by model, device and built-in task, and presets of model sizes."""

from gpuattn.units import AUTO

TRANSLATION, GPT2 = "translation", "gpt2"

# GPT-2's suit a text of a million characters: those of nanoGPT's train_shakespeare_char.py. Many
# evaluations, to keep the best of a model that begins to know its text by heart.
MODEL_DEFAULTS = {
    TRANSLATION: {"positions": "sinusoidal", "activation": "relu"},
    GPT2: {
        "positions": "learned", "activation": "gelu",
        "length": "5000u", "dim": 384, "heads": 6, "layers": (6, 6), "block": 256, "dropout": 0.2,
        "bias": False, "batch": 64 * 256, "beta2": 0.99, "lr": 1e-3, "lr_floor": 0.1, "warmup": 100,
        "weight_decay": 0.1, "label_smoothing": 0.0, "eval_every": "250u", "ema": 0.0,
    },
}  # fmt: skip
# Where an update of the default size takes seconds, smaller ones and fewer translations at an
# evaluation let a run learn, and show it, within minutes.
DEVICE_DEFAULTS = {
    TRANSLATION: {"numpy": {"batch": 2000, "warmup": 400, "score_pairs": 200}},
    GPT2: {"numpy": {
        "length": "2000u", "dim": 128, "heads": 4, "layers": (4, 4), "block": 64, "dropout": 0.0,
        "batch": 12 * 64, "eval_every": AUTO,
    }},
}  # fmt: skip

# What suits a built-in task on two CPU cores: many small updates, until it is right. After 800
# updates the learning rate is low enough for that; on a slow machine they take longer.
_QUICK = {
    "heads": 4, "layers": (2, 2), "dropout": 0.0, "batch": 640, "lr": 4e-3, "schedule": "linear",
    "lr_decay": 800, "lr_floor": 0.1, "warmup": 0.1, "label_smoothing": 0.1, "clip": 1.0,
    "ema": 0.99, "length": "6m", "until": 99.0, "eval_every": "100u", "score_pairs": 1000,
    "beam": 1,
}  # fmt: skip
_SMALL = _QUICK | {"dim": 64, "ffn": 128, "max_len": 64}
TASK_DEFAULTS = {
    "toy": _QUICK | {"dim": 96, "ffn": 256, "max_len": 96},
    "dates": _SMALL, "reverse": _SMALL,
}  # fmt: skip

# "tiny": as Wu et al., "Good for Misconceived Reasons" (ACL 2021), train on Multi30k.
PRESETS = {
    "tiny": {
        "dim": 128, "heads": 4, "layers": (4, 4), "ffn": 256, "norm": "post", "dropout": 0.3,
        "lr": 5e-3, "schedule": "invsqrt", "warmup": 2000, "clip": 25.0, "ema": 0.999,
    },
    "small": {"dim": 256, "heads": 4, "layers": (4, 4), "ffn": 1024, "lr": 2e-3},
    "base": {"dim": 512, "heads": 8, "layers": (6, 6), "ffn": 2048, "lr": 7e-4, "warmup": 4000},
}  # fmt: skip
