"""Ask each op which implementation it would run, and why not the others.

Claim: every implementation that is refused has a reason, written as a sentence.
"""

import argparse

import numpy as np

import gpuattn
from gpuattn.bench.samples import SAMPLES, sample

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="the same: nothing is computed")
parser.add_argument("--cuda", action="store_true", help="explain for CuPy arrays")
options = parser.parse_args()
xp = gpuattn.get_xp(gpuattn.to_gpu(np.ones(1))) if options.cuda else np
print(__doc__)

answers = []
for name, entry in SAMPLES.items():
    shape = tuple(min(n, 64) for n in entry.shape)
    op, args, kwargs = sample(name, shape, "float32", xp)
    answers.append(gpuattn.explain(op, *args, **kwargs))

print(answers[0], end="\n\n")
for answer in answers[1:]:
    refused = sum(reason is not None for _, reason in answer.reasons)
    print(f"{answer.op:18} runs {answer.chosen}, {refused} refused")
reasons = [reason for answer in answers for _, reason in answer.reasons if reason is not None]
print(f"\n{len(answers)} ops explained, {len(reasons)} refusals, each with its reason")
