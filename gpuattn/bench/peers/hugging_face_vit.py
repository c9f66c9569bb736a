"""The training step of transformers' ViT with our weights, for images like ours."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from gpuattn.bench.train.cases import Step
from gpuattn.models import ViT
from gpuattn.pretrained import save_pretrained


class Classifier(nn.Module):
    """The loss of a ViTForImageClassification with our first weights, {name: float32 array}."""

    def __init__(self, case: Step, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.smoothing = case.smoothing
        transformers.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            model = ViT(case.config())
            model.load_state(weights)
            save_pretrained(model, Path(folder) / "vit")
            self.model = transformers.ViTForImageClassification.from_pretrained(
                Path(folder) / "vit", attn_implementation="sdpa"
            ).train()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2) / 127.5 - 1
        logits = self.model(pixel_values=pixels).logits
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
