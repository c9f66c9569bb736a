"""CTranslate2 with our weights, in a process of its own: beam search for translation.

The process is needed because CTranslate2's wheel opens libcublas.so.12 while it runs: where only
CUDA 13 is installed, a link of that name to libcublas.so.13 is put on its library path. It measures
nothing: who asks waits for the tokens, and the pipe between both costs microseconds.
"""

import contextlib
import glob
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.bench.decode.cases import BANNED, FREE_BATCH, Decoding
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.errors import UnsupportedError
from gpuattn.nn.embedding import sinusoidal_positions

NEEDED, OTHER = "libcublas.so.12", "libcublas.so.13"
ENDING = 5  # seconds that the process may take to end


class Process:
    """CTranslate2 with a case's model. Raises UnsupportedError where it cannot be used."""

    def __init__(self, case: Decoding, weights: Mapping[str, np.ndarray], device: str) -> None:
        if importlib.util.find_spec("ctranslate2") is None:
            raise UnsupportedError("CTranslate2 is not installed")
        self._folder = tempfile.TemporaryDirectory(prefix="gpuattn-ct2-")
        folder = Path(self._folder.name)
        arrays: Any = weights
        np.savez(folder / "weights.npz", **arrays)
        environment = dict(os.environ)
        if device == "cuda":
            _link_cublas(folder, environment)
        self._errors = (folder / "errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._folder.name, device], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        try:
            self.ask({"model": case.as_dict()})
        except UnsupportedError:
            self.close()
            raise

    def ask(self, question: dict) -> Any:
        """Return the answer of the process. Raises UnsupportedError if it ends instead."""
        pipes: Any = self._process
        with contextlib.suppress(BrokenPipeError):
            pipes.stdin.write(json.dumps(question) + "\n")
            pipes.stdin.flush()
        line = pipes.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = (self._errors.read().strip().splitlines() or ["it ended"])[-1]
            raise UnsupportedError(f"CTranslate2: {said[:300]}")
        return json.loads(line)

    def call(self, case: Decoding) -> "Call":
        """Return the generation of a case."""
        return Call(self, case)

    def close(self) -> None:
        """End the process."""
        pipes: Any = self._process
        with contextlib.suppress(BrokenPipeError):
            pipes.stdin.close()
        try:
            pipes.wait(ENDING)
        except subprocess.TimeoutExpired:
            pipes.kill()
            pipes.wait()
        pipes.stdout.close()
        self._errors.close()
        self._folder.cleanup()


class Call:
    """The generation of one case."""

    def __init__(self, process: Process, case: Decoding) -> None:
        self.process = process
        process.ask({"case": case.as_dict()})

    def run(self) -> list[list[int]]:
        """Return the best translations."""
        return self.process.ask({"run": True})


def _link_cublas(folder, environment):
    """Let the process find NEEDED, or a link of that name to OTHER, where it is installed."""
    roots = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "**")]
    spec = importlib.util.find_spec("nvidia")
    if spec and spec.submodule_search_locations:
        roots = [os.path.join(path, "**") for path in spec.submodule_search_locations] + roots
    for name in (NEEDED, OTHER):
        for root in roots:
            if found := glob.glob(os.path.join(root, name), recursive=True):
                (folder / NEEDED).symlink_to(found[0])
                # the folder itself too: the library opens libcublasLt beside it
                paths = [str(folder), os.path.dirname(found[0])]
                paths += filter(None, [environment.get("LD_LIBRARY_PATH")])
                environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
                return


# ---- in the process -----------------------------------------------------------------------------


def _saved(case, weights, folder):
    """Write the model as CTranslate2 reads it."""
    from ctranslate2.specs import TransformerSpec

    c = case.config()
    spec = TransformerSpec.from_config(c.layers, c.heads)
    table, positions = weights["source.weight"][: c.vocab], sinusoidal_positions(
        c.max_length, c.d_model
    )  # fmt: skip
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = table
    spec.decoder.projection.weight = table
    for side, stack in ((spec.encoder, "encoder"), (spec.decoder, "decoder")):
        side.position_encodings.encodings = positions
        _set_norm(side.layer_norm, weights, f"{stack}_norm")
        for i, layer in enumerate(side.layer):
            _set_layer(layer, weights, f"{stack}.{i}.")
    count = c.layers[1]
    memory = [np.split(weights[f"memory.kv.{kind}"], count) for kind in ("weight", "bias")]
    for layer, weight, bias in zip(spec.decoder.layer, *memory, strict=True):
        layer.attention.linear[1].weight, layer.attention.linear[1].bias = weight, bias
    marks = {BANNED[0]: "<unk>", BOS: "<s>", EOS: "</s>"}  # the first is never drawn: disable_unk
    tokens = [marks.get(i, f"t{i}") for i in range(c.vocab)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.validate()
    spec.save(folder)
    return tokens


def _set_layer(layer, weights, name):
    own = layer.self_attention
    _set_norm(own.layer_norm, weights, f"{name}norms.0")
    _set_linear(own.linear[0], weights, f"{name}attention.qkv")
    _set_linear(own.linear[1], weights, f"{name}attention.out")
    last = "norms.1"
    if hasattr(layer, "attention"):
        _set_norm(layer.attention.layer_norm, weights, f"{name}norms.1")
        _set_linear(layer.attention.linear[0], weights, f"{name}cross_attention.q")
        _set_linear(layer.attention.linear[2], weights, f"{name}cross_attention.out")
        last = "norms.2"
    _set_norm(layer.ffn.layer_norm, weights, name + last)
    _set_linear(layer.ffn.linear_0, weights, f"{name}feed_forward.inner")
    _set_linear(layer.ffn.linear_1, weights, f"{name}feed_forward.out")


def _set_linear(spec, weights, name):
    spec.weight, spec.bias = weights[f"{name}.weight"], weights[f"{name}.bias"]


def _set_norm(spec, weights, name):
    spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


class _Searches:
    """The searches of a case, up to FREE_BATCH texts of similar length at a time.

    A limit holds for all texts of a call: they get the longest one's, and are cut to their own.
    """

    def __init__(self, translator, tokens, case):
        self.translator, self.beam = translator, case.beam
        self.numbers = {token: i for i, token in enumerate(tokens)}
        self.limits = case.lengths()[1].tolist()
        self.texts = [[*(tokens[t] for t in text), tokens[EOS]] for text in case.texts()]
        order = sorted(range(len(self.texts)), key=lambda i: -self.limits[i])
        self.batches = [order[n : n + FREE_BATCH] for n in range(0, len(order), FREE_BATCH)]

    def run(self):
        found, waiting = [None] * len(self.texts), []
        for batch in self.batches:
            longest = self.limits[batch[0]]
            results = self.translator.translate_batch(
                [self.texts[i] for i in batch], max_batch_size=FREE_BATCH, beam_size=self.beam,
                min_decoding_length=longest, max_decoding_length=longest, disable_unk=True,
                asynchronous=True,
            )  # fmt: skip
            waiting += zip(batch, results, strict=True)
        for i, result in waiting:
            words = result.result().hypotheses[0][: self.limits[i]]
            found[i] = [self.numbers[word] for word in words]
        return found


def _serve(folder, device):
    """Answer questions, a line of JSON each, until standard input ends."""
    import ctranslate2

    for line in sys.stdin:
        question, answer = json.loads(line), None
        if "model" in question:
            case = Decoding.from_dict(question["model"])
            with np.load(os.path.join(folder, "weights.npz")) as weights:
                tokens = _saved(case, weights, folder)
            translator = ctranslate2.Translator(folder, device=device, compute_type=case.dtype)
        elif "case" in question:
            searches = _Searches(translator, tokens, Decoding.from_dict(question["case"]))
        else:
            answer = searches.run()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
