"""Writes tests/decode/ct2_golden.json: what CTranslate2 finds with a model of hashed bigrams.

    python tests/support/ct2_golden.py

It needs ctranslate2, which the tests do not: they compare gpuattn.decode with the file. The model
is a Transformer decoder whose only layer adds nothing. Embeddings of tokens and of positions are
one-hot, so the logits are a column for the last token plus one for the position.
"""

import json
import sys
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerDecoderModelSpec

HERE = Path(__file__).parents[1] / "decode"
sys.path.insert(0, str(HERE))
from hashed import bigram_logits  # noqa: E402

VOCAB, BOS, EOS, LENGTH, RAMP = 24, [2, 3, 4, 5, 8, 9], 1, 10, 0.3
BANNED = BOS  # begin marks never come: CTranslate2 does not count them among the tokens so far
FEATURES = {
    "plain": {}, "nbest": {"nbest": 2}, "all of four": {"nbest": 4},
    "min_length": {"min_length": 6},
    "bigrams": {"no_repeat_ngram": 2}, "trigrams": {"no_repeat_ngram": 3},
    "repetition": {"repetition_penalty": 1.2}, "banned": {"banned": [*BANNED, 6, 7, 11]},
    "patience": {"patience": 2.0, "nbest": 2},
    "all": {"no_repeat_ngram": 2, "repetition_penalty": 1.3, "min_length": 3, "nbest": 2},
}  # fmt: skip
PENALTIES = [0.0, 0.6, 1.0, 2.0, -1.0]


def generator(folder):
    """Return a ctranslate2.Generator of the model, saved to ``folder``."""
    spec = TransformerDecoderModelSpec.from_config(1, 1, pre_norm=True, no_final_norm=True)
    wide, decoder = VOCAB + LENGTH, spec.decoder
    head = np.zeros((VOCAB, wide), np.float32)
    head[:, :VOCAB] = bigram_logits(VOCAB).T
    head[EOS, VOCAB:] = RAMP * np.arange(LENGTH)
    eye, layer = np.eye(wide, dtype=np.float32), decoder.layer[0]
    decoder.embeddings.weight, decoder.position_encodings.encodings = eye[:VOCAB], eye[VOCAB:]
    decoder.scale_embeddings = False
    decoder.projection.weight, decoder.projection.bias = head, np.zeros(VOCAB, np.float32)
    for linear, rows in (
        (layer.self_attention.linear[0], 3 * wide), (layer.self_attention.linear[1], wide),
        (layer.ffn.linear_0, wide), (layer.ffn.linear_1, wide),
    ):  # fmt: skip
        linear.weight, linear.bias = np.zeros((rows, wide), np.float32), np.zeros(rows, np.float32)
    for norm in (layer.self_attention.layer_norm, layer.ffn.layer_norm):
        norm.gamma, norm.beta = np.ones(wide, np.float32), np.zeros(wide, np.float32)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = "t0", "t2", f"t{EOS}"
    spec.register_vocabulary([f"t{i}" for i in range(VOCAB)])
    spec.validate()
    spec.save(folder)
    return ctranslate2.Generator(folder, compute_type="float32", inter_threads=1)


def cases():
    """Yield the settings of each case, in the names of gpuattn.decode."""
    for name, feature in FEATURES.items():
        for j, beam in enumerate((2, 4, 5, 8)):
            few = PENALTIES if name in ("plain", "nbest") else [0.0, PENALTIES[1 + j]]
            for penalty in few if feature.get("nbest", 1) <= beam else []:
                settings = {"beam": beam, "length_penalty": penalty, "banned": BANNED}
                yield settings | feature


def generated(model, case):
    """Return [[tokens, score] of each hypothesis] for each sentence."""
    found = model.generate_batch(
        [[f"t{token}"] for token in BOS], beam_size=case["beam"], max_length=LENGTH,
        num_hypotheses=case.get("nbest", 1), length_penalty=case["length_penalty"],
        patience=case.get("patience", 1.0), min_length=case.get("min_length", 0),
        no_repeat_ngram_size=case.get("no_repeat_ngram", 0),
        repetition_penalty=case.get("repetition_penalty", 1.0), return_scores=True,
        suppress_sequences=[[f"t{token}"] for token in case["banned"]],
        include_prompt_in_result=False,
    )  # fmt: skip
    return [
        [
            [tokens, round(score, 6)]
            for tokens, score in zip(each.sequences_ids, each.scores, strict=True)
            if score > -1e8  # else no text: a beam that was never alive
        ]
        for each in found
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = generator(folder)
        rows = [{"settings": case, "texts": generated(model, case)} for case in cases()]
    about = {
        "ctranslate2": ctranslate2.__version__, "command": "python tests/support/ct2_golden.py",
        "vocab": VOCAB, "bos": BOS, "eos": EOS, "max_length": LENGTH, "ramp": RAMP,
    }  # fmt: skip
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    text = json.dumps(about)[:-1] + f', "cases": [\n{lines}\n]}}\n'
    (HERE / "ct2_golden.json").write_text(text)
    print(f"{len(rows)} cases, {len(text):,} bytes")
