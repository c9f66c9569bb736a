"""A decoding step of a translation model by clusters of blocks, emulated on any CPU."""

import shutil
from dataclasses import replace

import emulator
import numpy as np
import pytest
from checks import sampled
from decoder_steps import Case, Search, assert_step_keeps, assert_steps_by_ops, model_of
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import sources
from gpuattn.engine.steps import cluster_step

pytestmark = pytest.mark.usefixtures("host_compiler")


def search_of(case, rounded, dtype, counts=None, put=np.asarray):
    """Return a search whose logits are the states behind the last norm."""
    model = model_of(case, 1, rounded, dtype, put)
    model.output = lambda x: x
    return Search(case, 1, rounded, model, counts)


def emulated(case, dtype, steps=1, *, order=1, clusters=2, texts=None, counts=None):
    """Return a search after ``steps`` by the emulator, and the states of each."""
    blocks = case.settings.get("d_model", 64) // cluster_step.OWN
    machine = emulator.Machine(order, blocks * clusters)
    card = replace(GPUS["9.0"], multiprocessors=blocks * (clusters + 1))
    with launches_on(card), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_step, "kernel", machine.kernel)
        search, found = search_of(case, dtype, dtype, counts, as_array), []
        if texts:
            search.take(*texts)
        step = cluster_step.ClusterStep(search.model, *search.own)
        step.pack()
        for n in range(steps):
            if n:
                search.advance()
            found.append(assert_step_keeps(search, step))
    return search, found


def check(case, dtype, steps=1, **settings):
    """Compare states and caches with the step op by op; return the states."""
    search, found = emulated(case, dtype, steps, **settings)
    known = (search_of(case, dtype, kind, settings.get("counts")) for kind in (np.float32, dtype))
    assert_steps_by_ops(search, found, *known)
    return found


PRE, POST = {"norm": "pre", "ffn": 128}, {"norm": "post", "ffn": 128}
CASES = {  # sentences, beams, settings; dtype, steps
    "one sentence": (Case(1, 4, PRE), BFLOAT16, 2),
    "post-norm, heads of 64, two clusters": (
        Case(2, 3, {**POST, "d_model": 128, "activation": "gelu"}), np.float16, 1,
    ),
    "greedy, one row": (Case(1, 1, {**POST, "heads": 1}), BFLOAT16, 2),
    "three clusters of nine rows": (Case(9, 3, PRE), np.float16, 1),
    "many keys and two warps of a row": (
        Case(1, 2, {**PRE, "layers": (1, 1), "max_length": 99}, room=90, source_room=70),
        BFLOAT16, 1,
    ),
    "learned positions, three blocks": (
        Case(2, 2, {**POST, "d_model": 96, "heads": 3, "ffn": 192, "positions": "learned"}),
        BFLOAT16, 1,
    ),
    "16 rows with many keys": (
        Case(4, 4, {**PRE, "layers": (1, 1), "max_length": 99}, room=97, source_room=70), BFLOAT16,
        1, {"clusters": 1},
    ),
    "two warps of a row, each with many keys": (
        Case(2, 4, {**PRE, "heads": 1, "layers": (1, 1), "max_length": 99}, room=97), BFLOAT16, 1,
        {"clusters": 1, "counts": [94, 1]},
    ),
    "more units than warps": (
        Case(1, 2, {"norm": "pre", "d_model": 288, "heads": 9, "ffn": 576, "layers": (1, 1)}),
        BFLOAT16, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_step(name):
    case, dtype, steps, *more = CASES[name]
    check(case, dtype, steps, **(more[0] if more else {}))


def test_bits_depend_neither_on_the_order_of_events_nor_on_other_rows():
    settings, dtype = {**PRE, "layers": (1, 1)}, BFLOAT16
    three = Case(3, 2, settings)
    source = search_of(three, dtype, dtype)
    found = []
    for sentences, order in ((1, 1), (2, 1), (2, 2)):
        case = Case(sentences, 2, settings)
        found.append(emulated(case, dtype, texts=(source, 1), order=order, clusters=1)[1][0])
    alone, beside, again = found
    assert alone.tobytes() == beside[:2].tobytes()
    assert beside.tobytes() == again.tobytes()


WAIT = "            if (sent) events.wait(shared, STATES, states_bytes);\n"
# None that makes a wait spin for ever: the emulator takes minutes to report that.
MISTAKES = {  # file, what is replaced, by what
    "weights are read before they are there": (
        "cluster_products.cuh",
        "            if (piece == 0) mbar_wait(shared.full(slot), weights.slot.parity);\n", "",
    ),
    "no barrier between partial sums and their sum": (
        "cluster_products.cuh", "    bar_sync(1, THREADS);\n#pragma unroll 1", "#pragma unroll 1"
    ),
    "states are read before others sent theirs": (
        "cluster_step.cu", WAIT, "",
    ),
    "hidden columns are read before all warps stored theirs": (
        "cluster_step.cu", "        bar_sync(1, THREADS);\n#pragma unroll 1", "#pragma unroll 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MISTAKES, 1))
def test_mistakes_are_found(name, monkeypatch, tmp_path):
    """Each is found by at least one order of events."""
    file, there, instead = MISTAKES[name]
    root = tmp_path / "rawkernels"
    shutil.copytree(sources.ROOT, root)
    text = (root / "decoder" / file).read_text()
    assert text.count(there) == 1
    (root / "decoder" / file).write_text(text.replace(there, instead))
    monkeypatch.setattr(sources, "ROOT", root)
    monkeypatch.setattr(emulator, "library", emulator.library.__wrapped__)
    found = False
    for order in range(8):
        try:
            check(Case(2, 2, {**PRE, "layers": (1, 2)}), BFLOAT16, order=order, clusters=1)
        except AssertionError:
            found = True
            break
    assert found
