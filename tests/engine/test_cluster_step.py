"""A decoding step by clusters of blocks: which models and rows it takes; on a GPU its numbers."""

import re

import numpy as np
import pytest
from checks import dtype_of
from decoder_steps import (
    Case,
    Search,
    assert_step_keeps,
    assert_steps_by_ops,
    host,
    model_of,
    skip_without,
    take_weights,
)
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn.cuda.compiler import ROOT
from gpuattn.engine import Engine
from gpuattn.engine.steps import cluster_step
from gpuattn.engine.steps.cluster_step import ClusterStep

PRE, POST = {"norm": "pre", "ffn": 128}, {"norm": "post", "ffn": 128}
BASE = PRE | {"d_model": 512, "heads": 8, "ffn": 2048, "layers": (1, 2), "max_length": 128}
CASES = {
    "one sentence": Case(1, 4, PRE),
    "greedy, one row": Case(1, 1, {**POST, "heads": 1}),
    "post-norm, heads of 64": Case(5, 3, {**POST, "d_model": 128, "activation": "gelu"}),
    "two warps of a row": Case(1, 2, {**PRE, "max_length": 99}, room=90, source_room=70),
    "keys beyond the copied slots": Case(2, 2, {**PRE, "max_length": 300}, room=200),
    "learned positions, three blocks": Case(
        2, 2, {**POST, "d_model": 96, "heads": 3, "ffn": 192, "positions": "learned"}
    ),
    "16 rows of 256 columns": Case(60, 4, {**BASE, "d_model": 256, "heads": 4, "ffn": 1024}),
    "base": Case(1, 4, BASE, room=97, source_room=32),
    "base, seven clusters of eight rows": Case(14, 4, BASE, room=97, source_room=32),
}


@pytest.mark.parametrize("sentences, beam, width, rows", [
    (1, 4, 512, 4), (7, 4, 512, 4), (8, 4, 512, 8), (14, 4, 512, 8), (15, 4, 512, 12),
    (56, 1, 512, 8), (60, 4, 256, 16), (61, 4, 256, 20), (16, 1, 64, 1), (66, 1, 64, 2),
])  # fmt: skip
def test_rows_of_a_cluster(sentences, beam, width, rows):
    assert cluster_step.rows_of_cluster(sentences, beam, width, 132) == rows


HALF = {**BASE, "d_model": 256, "heads": 4, "ffn": 1024}
REFUSALS = [  # settings, sentences, beam, dtype, GPU, what is said
    (PRE, 1, 4, "float16", "9.0", None), (BASE, 14, 4, "bfloat16", "9.0", None),
    (HALF, 60, 4, "bfloat16", "9.0", None), (BASE, 56, 1, "float16", "9.0", None),
    (BASE, 15, 4, "float16", "9.0", "a cluster would have 12 rows; up to 8 it is faster"),
    (HALF, 61, 4, "float16", "9.0", "a cluster would have 20 rows; up to 16 it is faster"),
    ({}, 1, 1, "float16", "9.0", "the model does not translate"),
    (PRE, 1, 4, "float32", "9.0", "the weights are float32, the kernel takes float16 or bfloat16"),
    (PRE, 1, 4, "float16", "10.0", "capability is 10.0, the kernel needs 9.0"),
    ({**PRE, "d_model": 544, "heads": 17}, 1, 4, "float16", "9.0", "the width is 544, the kernel"),
    ({**PRE, "d_model": 80, "heads": 5}, 1, 4, "float16", "9.0", "the width is 80, the kernel"),
    ({**PRE, "ffn": 96}, 1, 4, "float16", "9.0", "the inner width is 96, the kernel takes up to 4"),
    ({**PRE, "ffn": 320}, 1, 4, "float16", "9.0", "the inner width is 320, the kernel takes up to"),
    ({**PRE, "layers": (1, 25)}, 1, 4, "float16", "9.0", "there are 25 layers, the kernel takes"),
    ({**PRE, "heads": 4}, 1, 4, "float16", "9.0", "there are 4 heads of 16 with 4 for keys"),
    ({**PRE, "kv_heads": 1}, 1, 4, "float16", "9.0", "there are 2 heads of 32 with 1 for keys"),
    ({**PRE, "activation": "silu"}, 1, 4, "float16", "9.0", "the activation is not ReLU"),
    ({**PRE, "positions": "rotary"}, 1, 4, "float16", "9.0", "queries and keys are rotated"),
]  # fmt: skip


@pytest.mark.parametrize("settings, sentences, beam, dtype, card, said", REFUSALS)
def test_refusal(settings, sentences, beam, dtype, card, said):
    with launches_on(GPUS[card]):
        model = model_of(Case(1, 1, settings), 1, np.float32, dtype_of(dtype), as_array)
        found = cluster_step.refusal(model, sentences, beam, 64)
        assert found is None if said is None else said in found


def test_elements_are_numbered_by_32_bits():
    with launches_on(GPUS["9.0"]):
        model = model_of(Case(1, 1, BASE), 1, np.float32, dtype_of("float16"), as_array)
        assert cluster_step.refusal(model, 14, 4, 74_898) is None
        assert "by 32 bits" in cluster_step.refusal(model, 14, 4, 74_899)


def test_a_gpu_without_such_clusters_takes_another_step(monkeypatch):
    with launches_on(GPUS["9.0"]):
        case = Case(1, 4, PRE)
        search = Search(case, 1, np.float16, model_of(case, 1, np.float16, np.float16, as_array))
        assert type(cluster_step.cluster_step_of(search.model, *search.own)) is ClusterStep
        monkeypatch.setattr(cluster_step.ClusterStep, "runs_at_once", lambda self: False)
        assert cluster_step.cluster_step_of(search.model, *search.own) is None


def test_records_are_the_structs_of_the_kernel():
    text = (ROOT / "decoder/cluster.cuh").read_text()
    inside = re.search(r"struct alignas\(16\) Layer {(.*?)};", text, re.DOTALL)[1]
    fields = []
    for line in re.sub(r"//[^\n]*", "", inside).split(";"):
        if line := re.sub(r"\bconst\b", "", line).strip():
            kind, names = re.match(r"(\w+\s?\*?)(.*)", line, re.DOTALL).groups()
            for name in names.split(","):
                of = re.match(r"\s*\*?(\w+)(?:\[(\d)\])?", name)
                fields.append((of[1], (8 if "*" in line else 4) * int(of[2] or 1)))
    sizes = {name: cluster_step.RECORD[name].itemsize for name in cluster_step.RECORD.names}
    assert fields == list(sizes.items()) and cluster_step.RECORD.itemsize == 96


# ---- on a GPU -----------------------------------------------------------------------------------


def step_of(search):
    step = ClusterStep(search.model, *search.own)
    step.pack()
    return step


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_numbers(gpu, name, dtype):
    """As accurate as the step op by op; the same bits each time; new weights are taken over."""
    case, dtype = CASES[name], dtype_of(dtype)
    exact, by_ops, search = (
        Search(case, 1, dtype, model_of(case, 1, dtype, of, gpu.asarray))
        for of in (np.float32, dtype, dtype)
    )
    skip_without(cluster_step.FILE, search.model)
    step = step_of(search)
    found = assert_step_keeps(search, step)
    for _ in range(20):
        assert host(step()).tobytes() == found.tobytes()
    assert_steps_by_ops(search, [found], exact, by_ops, search.model.config.vocab)
    take_weights(search.model, model_of(case, 7, dtype, dtype, gpu.asarray))
    step.pack()
    fresh = step_of(search)
    assert host(fresh()).tobytes() == host(step()).tobytes() != found.tobytes()


def test_bits_do_not_depend_on_other_rows(gpu):
    dtype = dtype_of("bfloat16")
    many = Case(16, 2, {**POST, "layers": (1, 2)})
    source = Search(many, 5, dtype, model_of(many, 1, dtype, dtype, gpu.asarray))
    skip_without(cluster_step.FILE, source.model)
    found = []
    for sentences in (1, 2, 16):
        case = many._replace(sentences=sentences)
        search = Search(case, 1, dtype, source.model)
        search.take(source, 1)
        step = step_of(search)
        step()
        found.append(host(step.states)[:2].tobytes())
    assert found[0] == found[1] == found[2]


def test_the_engine_uses_it(gpu):
    model = model_of(Case(1, 1, PRE), 1, dtype_of("bfloat16"), dtype_of("bfloat16"), gpu.asarray)
    skip_without(cluster_step.FILE, model)
    with Engine(model) as engine:
        engine.translate([[5, 6, 7]] * 3, limits=[6] * 3, beam=4, bos=1, eos=2)
        (search,) = engine._searches.kept.values()
        assert type(search.decoder) is ClusterStep
