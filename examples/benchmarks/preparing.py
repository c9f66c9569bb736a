"""Preparing a text on all cores, beside Hugging Face's ``tokenizers`` with the same vocabulary.

    python examples/benchmarks/preparing.py --mb 100 --rounds 2      # pip install tokenizers

The text is generated: sentences of made-up words whose frequencies follow Zipf's law and, beyond
the first 8,000, fall faster, as English ones do. Both read the file and write uint16 ids; the ids
must be equal. Prints MB/s and seconds of CPU time, in turns.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gpuattn.data.store import TokenStore
from gpuattn.data.tokenizer import SPECIALS, Tokenizer

TYPES = 1_000_000
ONSETS = [*"bcdfghjklmnprstvwz", "th", "st", "ch", "sh", "br", "tr", "pl", ""]
VOWELS = ["a", "e", "i", "o", "u", "ea", "ou", "ai"]
CODAS = ["", "", "", "n", "r", "s", "t", "l", "nd", "ck", "ng"]
SAMPLE = 8_000_000  # characters to learn the tokenizer from
VOCABULARY = 16_000
# The other library's part: argv are vocabulary and merges, text and output.
PEER = """
import json, sys
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
given = json.load(open(sys.argv[1]))
merges = [tuple(pair) for pair in given["merges"]]
tokenizer = Tokenizer(models.BPE(given["vocab"], merges, byte_fallback=True, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
end = given["vocab"]["<0x0A>"]
with open(sys.argv[2], encoding="utf-8", newline="\\n") as text, open(sys.argv[3], "wb") as out:
    while lines := text.readlines(1 << 20):
        lines = [line.removesuffix("\\n") for line in lines]
        ids = []
        for encoding in tokenizer.encode_batch_fast(lines, add_special_tokens=False):
            ids += encoding.ids
            ids.append(end)
        np.array(ids, np.uint16).tofile(out)
"""


def words(rng):
    """Return ``TYPES`` different words, the short ones first."""
    parts = np.array([o + v + c for o in ONSETS for v in VOWELS for c in CODAS])
    found = {}
    while len(found) < TYPES:
        most = 1 if len(found) < 1000 else min(2 + len(found) // 150_000, 6)
        draws = rng.choice(parts, (50_000, most))
        counts = np.maximum(most - rng.integers(0, 2, len(draws)), 1)
        for row, count in zip(draws, counts, strict=True):
            found.setdefault("".join(row[:count]))
    return np.array(list(found)[:TYPES], object)


def write_text(path, size, seed=0):
    """Write about ``size`` bytes of lines, sentences and numbers."""
    rng = np.random.default_rng(seed)
    vocabulary, ranks = words(rng), np.arange(TYPES) + 2.7
    chances = np.cumsum(1 / (ranks * np.maximum(1, ranks / 8000) ** 0.9))
    written = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        while written < size:
            at = np.searchsorted(chances, rng.random(200_000) * chances[-1])
            found = vocabulary[np.minimum(at, TYPES - 1)].tolist()
            for i, chance in enumerate(rng.random(len(found)).tolist()):
                if chance < 0.11:
                    found[i] += "," if chance < 0.06 else ".\n" if chance < 0.075 else "."
                elif chance > 0.99:
                    found[i] = str(int(10 ** ((chance - 0.99) * 400)))
            written += file.write(" ".join(found).replace("\n ", "\n") + "\n")


def merges(tokenizer):
    """Return the pairs of pieces that make a piece, the most frequent piece first."""
    pieces = tokenizer.pieces
    ids = {piece: i for i, piece in enumerate(pieces)}
    found = []
    for piece in pieces[SPECIALS + 256 :]:  # in the order of their merges, characters last
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        found += sorted((c for c in cuts if c[0] in ids and c[1] in ids),
                        key=lambda cut: (ids[cut[0]], ids[cut[1]]))  # fmt: skip
    return {"vocab": ids, "merges": found}


def timed(command, size):
    """Run a command; return MB/s and seconds of CPU time, its processes included."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.PIPE)
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return size / seconds / 1e6, after.ru_utime - before.ru_utime


def main(folder, size, rounds, python):
    write_text(folder / "text", size)
    size = os.path.getsize(folder / "text")
    with open(folder / "text", encoding="utf-8") as file:
        tokenizer = Tokenizer.train(file.read(SAMPLE).split("\n"), VOCABULARY)
    tokenizer.save(folder / "tokenizer")
    (folder / "peer.json").write_text(json.dumps(merges(tokenizer)))
    peer = [python, "-c", PEER, *map(str, (folder / n for n in ("peer.json", "text", "peer.bin")))]
    for i in range(rounds):
        ours = [sys.executable, "-m", "gpuattn", "prepare", str(folder / "text"), "--tokenizer",
                str(folder / "tokenizer"), "--out", str(folder / f"store{i}")]  # fmt: skip
        (speed, cpu), (other, other_cpu) = timed(ours, size), timed(peer, size)
        print(f"gpuattn prepare {speed:.1f} MB/s, {cpu:.1f} s of CPU; tokenizers {other:.1f} MB/s, "
              f"{other_cpu:.1f} s: {speed / other:.2f} x")  # fmt: skip
    ids = TokenStore(folder / "store0").tokens("text")
    assert np.array_equal(ids, np.fromfile(folder / "peer.bin", np.uint16))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="one that has tokenizers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), given.mb * 1e6, given.rounds, given.python)
