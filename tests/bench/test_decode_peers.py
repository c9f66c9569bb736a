"""Peers of bench decode find the tokens of gpuattn.decode: with our weights, in float32."""

from dataclasses import replace

import numpy as np
import pytest

from gpuattn.arrays import get_xp, to_cpu
from gpuattn.bench.decode import measure as decode
from gpuattn.bench.decode.cases import BANNED, Decoding
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.decode.beam import beam_search

TRANSLATIONS = [
    Decoding("toy", (5, 9, 7), "A", beam=4, dtype="float32"),
    Decoding("toy", (3, 9, 7), "A", dtype="float32"),
]
MIXED = Decoding("toy", (6, 20, 20), "B", beam=3, dtype="float32")
TEXTS = [
    Decoding("toy-gpt", (3, 5, 7), "D", dtype="float32"),
    Decoding("toy-gpt", (3, 1, 6), "D", dtype="float32"),
    Decoding("toy-gpt", (2, 5, 7), "D", kv_heads=1, dtype="float32"),
]


def places(cases, on_gpu):
    """Parameters (case, device): all on a CPU, on a GPU only ``on_gpu``: compiling takes long."""
    here = [pytest.param(case, "cpu", id=f"{case}-cpu") for case in cases]
    gpu = {"marks": pytest.mark.gpu}
    return here + [pytest.param(case, "cuda", id=f"{case}-cuda", **gpu) for case in on_gpu]


def need_torch(device):
    """Skip without PyTorch: a CPU's tests can do without it, the receipt of a GPU cannot."""
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def model_and_tensors(case, device):
    """Return our model and its parameters as tensors."""
    import torch

    if device == "cpu":
        model = decode.random_model(case, np)
        return model, {name: torch.from_numpy(p.data) for name, p in model.named_parameters()}
    import cupy

    from gpuattn.bench.peers.decode import tensors

    model = decode.random_model(case, cupy)
    return model, tensors(model, case)


def wanted(model, case, limits=None, **changes):
    """Return the tokens of ``gpuattn.decode``, each text by itself."""
    found, limits = [], limits or case.lengths()[1].tolist()
    for text, limit in zip(case.texts(), limits, strict=True):
        if changes:
            stepper = model.stepper(model.pack([text]), limit, case.beam)
            search = {"bos": BOS, "eos": EOS, "banned": BANNED, "beam": case.beam}
            ((best, *_),) = beam_search(stepper, max_length=limit, **search, **changes)
        else:
            (best,) = decode.by_reference(model, case, [text], [limit], kv_cache=True)
        found.append(best.tokens)
    return found


@pytest.mark.parametrize(("case", "device"), places([*TRANSLATIONS, MIXED], TRANSLATIONS[:1]))
def test_the_beam_search_of_pytorch(case, device):
    need_torch(device)
    from gpuattn.bench.peers.torch_decode import Named
    from gpuattn.bench.peers.torch_search import Translations

    model, weights = model_and_tensors(case, device)
    search = Translations(case, Named(weights), device)
    want = wanted(model, case)
    assert search.run() == want and search.run() == want
    assert len({token for text in want for token in text}) > 5


def test_batches_of_several_shapes_in_pytorch(monkeypatch):
    need_torch("cpu")
    from gpuattn.bench.peers import torch_search

    monkeypatch.setattr(torch_search, "FREE_BATCH", 2)
    monkeypatch.setattr(torch_search, "ROUND", 4)
    model, weights = model_and_tensors(MIXED, "cpu")
    search = torch_search.Translations(MIXED, torch_search.Named(weights), "cpu")
    assert len(search.batches) == 3 and len({id(one) for one, *_ in search.batches}) > 1
    assert search.run() == wanted(model, MIXED)


@pytest.mark.parametrize(("case", "device"), places(TEXTS, TEXTS[2:]))
def test_the_sampler_of_pytorch(case, device):
    need_torch(device)
    from gpuattn.bench.peers.torch_decode import Named
    from gpuattn.bench.peers.torch_sampler import Sampler

    model, weights = model_and_tensors(case, device)
    sampler, want = Sampler(case, Named(weights), device), wanted(model, case)
    assert sampler.run() == want and sampler.run() == want
    drawn = Sampler(replace(case, top_k=5), Named(weights), device)
    first, second = drawn.run(), drawn.run()
    assert first != second and [len(text) for text in first] == [len(text) for text in want]
    for prompt, text in zip(case.texts(), first, strict=True):
        xp = get_xp(model.parameters()[0].data)
        states = model.states(xp.asarray([[*prompt, *text[:-1]]], np.int32))
        logits = to_cpu(model.head(states).data)[0, len(prompt) - 1 :, : case.config().vocab]
        best = np.argsort(-logits, axis=-1)[:, :5]
        assert all(token in row for token, row in zip(text, best, strict=True))


@pytest.mark.parametrize(
    ("case", "device"), places([*TRANSLATIONS, *TEXTS[:2]], [TRANSLATIONS[0], TEXTS[0]])
)
def test_generate_of_transformers(case, device):
    need_torch(device)
    pytest.importorskip("transformers")
    from gpuattn.bench.peers.hugging_face import Model

    model, weights = model_and_tensors(case, device)
    peer = Model(case, weights, device).call(case, static=False)
    assert peer.run() == wanted(model, case)


@pytest.mark.parametrize("case", [*TRANSLATIONS, MIXED], ids=str)
def test_ctranslate2(case):
    pytest.importorskip("ctranslate2")
    from gpuattn.bench.peers.ctranslate2_process import Process

    model = decode.random_model(case, np)
    process = Process(case, {name: p.data for name, p in model.named_parameters()}, "cpu")
    try:
        # it bans tokens before the normaliser; all texts of a batch are as long as the longest
        limits = case.lengths()[1].tolist()
        want = wanted(model, case, [max(limits)] * len(limits), renormalise=True)
        want = [text[:limit] for text, limit in zip(want, limits, strict=True)]
        assert process.call(case).run() == want
    finally:
        process.close()
