"""The training step of transformers' BERT with our weights, for hidden tokens like ours."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from gpuattn.bench.train.cases import Step
from gpuattn.data.batching import IGNORED
from gpuattn.models import Bert
from gpuattn.pretrained import save_pretrained


class HiddenTokens(nn.Module):
    """The loss of a BertForMaskedLM with our first weights, {name: float32 array}.

    As the class is: all tokens have logits, and labels of those that are not hidden are ignored.
    """

    def __init__(self, case: Step, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.smoothing = case.smoothing
        transformers.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            model = Bert(case.config())
            model.load_state(weights)
            save_pretrained(model, Path(folder) / "bert")
            self.model = transformers.BertForMaskedLM.from_pretrained(
                Path(folder) / "bert", attn_implementation="sdpa"
            ).train()

    def forward(self, tokens: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        every = labels.new_full((tokens.numel(),), IGNORED).index_copy(0, rows, labels)
        logits = self.model(input_ids=tokens).logits.flatten(0, 1)
        return F.cross_entropy(logits.float(), every, label_smoothing=self.smoothing)
