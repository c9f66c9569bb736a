"""Writes tests/decode/hf_golden.json: what Hugging Face generate finds with hashed logits.

    python tests/support/hf_golden.py

It needs torch and transformers, which the tests do not: they compare gpuattn.decode with the file.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

HERE = Path(__file__).parents[1] / "decode"
sys.path.insert(0, str(HERE))
from hashed import extended, logits_of  # noqa: E402

VOCAB, BOS, EOS, LENGTH = 24, [2, 3, 4], 1, 10
FEATURES = {
    "plain": {}, "nbest": {"nbest": 4}, "min_length": {"min_length": 6},
    "bigrams": {"no_repeat_ngram": 2}, "trigrams": {"no_repeat_ngram": 3},
    "unigrams": {"no_repeat_ngram": 1},
    "repetition": {"repetition_penalty": 1.2}, "banned": {"banned": [6, 7, 11]},
    "two ends": {"eos": [1, 9]}, "three ends": {"eos": [1, 9, 10], "nbest": 2},
    "all": {"eos": [1, 9], "no_repeat_ngram": 2, "repetition_penalty": 1.3, "banned": [6],
            "min_length": 3, "nbest": 2},
    # there the end of the prompt, which has no score: the same order without a length penalty
    "prefix": {"prefix": [[5, 6], [7, 8], [11, 5]], "no_repeat_ngram": 1,
               "repetition_penalty": 1.2, "nbest": 2},
}  # fmt: skip
STOPPING = {"hf": False, "hf-early": True, "hf-never": "never"}
PENALTIES = [0.0, 0.6, 1.0, 2.0, -1.0]


class Hashed(PreTrainedModel, GenerationMixin):
    """The model of tests/decode/hashed.py, as one of transformers."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, ends):
        super().__init__(PretrainedConfig(vocab_size=VOCAB))
        self.ends, self.unused = ends, torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **_):
        states = np.zeros(len(input_ids), np.uint64)
        for tokens in input_ids.numpy().T:
            states = extended(states, tokens)
        logits = logits_of(states, VOCAB, self.ends, input_ids.shape[1] - 1)
        return CausalLMOutput(logits=torch.from_numpy(logits)[:, None])

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}


def cases():
    """Yield the settings of each case, in the names of gpuattn.decode."""
    for name, feature in FEATURES.items():
        if feature.get("nbest", 1) == 1:
            yield {"beam": 1, **feature}
        for i, stopping in enumerate(STOPPING):
            for j, beam in enumerate((2, 4, 5, 8)):
                if feature.get("nbest", 1) <= beam:
                    few = [PENALTIES[(i + j + n) % 5] for n in (0, 2)]
                    few = [0.0] if "prefix" in feature else few
                    for penalty in PENALTIES if name == "plain" else few:
                        settings = {"beam": beam, "stopping": stopping, "length_penalty": penalty}
                        yield settings | feature


def generated(case):
    """Return [[tokens, score, ended] of each hypothesis] for each sentence."""
    ends, nbest = case.get("eos", [EOS]), case.get("nbest", 1)
    prefixes = case.get("prefix", [[]] * len(BOS))
    prompts = torch.tensor([[bos, *more] for bos, more in zip(BOS, prefixes, strict=True)])
    begun = prompts.shape[1] - 1
    config = GenerationConfig(
        num_beams=case["beam"], num_return_sequences=nbest, do_sample=False, use_cache=False,
        max_new_tokens=LENGTH - begun, min_new_tokens=case.get("min_length"), eos_token_id=ends,
        pad_token_id=ends[0], no_repeat_ngram_size=case.get("no_repeat_ngram"),
        repetition_penalty=case.get("repetition_penalty"), return_dict_in_generate=True,
        bad_words_ids=[[token] for token in case.get("banned", [])] or None, output_scores=True,
        **({"early_stopping": STOPPING[case["stopping"]], "length_penalty": case["length_penalty"]}
           if "stopping" in case else {}),
    )  # fmt: skip
    model = Hashed(tuple(ends))
    found = model.generate(prompts, generation_config=config)
    if case["beam"] > 1:
        scores = found.sequences_scores.tolist()
    else:
        scores = model.compute_transition_scores(
            found.sequences, found.scores, normalize_logits=True
        )  # fmt: skip
    texts: list = [[] for _ in BOS]
    for row, sequence in enumerate(found.sequences[:, begun + 1 :].tolist()):
        end = next((i for i, token in enumerate(sequence) if token in ends), None)
        tokens = sequence[:end]
        score = scores[row]
        if case["beam"] == 1:
            score = score[: len(tokens) + (end is not None)].sum().item()
        if score > -1e8:  # else no text: a beam that was never alive
            texts[row // nbest].append([tokens, round(score, 6), end is not None])
    return texts


if __name__ == "__main__":
    rows = [{"settings": case, "texts": generated(case)} for case in cases()]
    about = {
        "transformers": transformers.__version__, "torch": torch.__version__,
        "command": "python tests/support/hf_golden.py", "vocab": VOCAB, "bos": BOS, "eos": EOS,
        "max_length": LENGTH,
    }  # fmt: skip
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    text = json.dumps(about)[:-1] + f', "cases": [\n{lines}\n]}}\n'
    (HERE / "hf_golden.json").write_text(text)
    print(f"{len(rows)} cases, {len(text):,} bytes")
