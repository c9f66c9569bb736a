"""A decoding step in one launch, emulated on any CPU."""

import shutil
from dataclasses import replace

import emulator
import numpy as np
import pytest
from checks import sampled
from decoder_steps import Case, Search, assert_as_accurate, model_of
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import kernels
from gpuattn.engine import decoder_step

pytestmark = pytest.mark.usefixtures("host_compiler")
BLOCKS = 4


def emulated(case, dtype, steps=1, texts=None, order=1, blocks=BLOCKS, launches_left=None):
    """Return a search after ``steps`` by the emulator, and the logits of each.

    ``texts``: (Search, n), the first n sentences are as there. ``order``: of events, a seed.
    ``launches_left``: until the marks begin again at 0.
    """
    machine, card = emulator.Machine(order, blocks), replace(GPUS["9.0"], multiprocessors=blocks)
    with launches_on(card), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_step, "kernel", machine.kernel)
        search = Search(case, 1, dtype, model_of(case, 1, dtype, dtype, as_array))
        if texts:
            search.take(*texts)
        decoder, found = search.decoder(), []
        assert decoder.blocks == blocks
        phases = len(decoder.phases)
        used = 0 if launches_left is None else 2**32 - round(launches_left * phases)
        decoder._counter[0] = used
        decoder.pack()
        for step in range(steps):
            if step:
                search.advance()
            before = search.stored()
            found.append(np.array(decoder()))
            same = search.stored() == before
            assert same[:, :, ~search.appended()].all(), "it writes beside the new keys"
            assert list(decoder._counter) == [(used + (step + 1) * phases) % 2**32, 0]
    return search, found


def check(case, dtype, steps=1, **settings):
    """Compare logits and caches with the step op by op; return the logits."""
    search, found = emulated(case, dtype, steps, **settings)
    known = {}
    for kind in (np.float32, dtype):
        other = Search(case, 1, dtype, model_of(case, 1, dtype, kind))
        known[kind] = []
        for step in range(steps):
            if step:
                other.advance()
            known[kind].append(other.by_ops())
        known[kind].append(other.stored())
    vocab = search.model.config.vocab
    for got, plain, want in zip(found, known[dtype], known[np.float32], strict=False):
        assert_as_accurate(*(x[:, :vocab] for x in (got, plain, want)))
    assert_as_accurate(search.stored(), known[dtype][-1], known[np.float32][-1])
    return found


POST = {"norm": "post", "output_bias": True}
CASES = {  # sentences, beams, settings; dtype, steps
    "beams, post-norm": (Case(7, 4, POST), np.float16, 1),
    "8 rows": (Case(3, 1, {"kv_heads": 1, "bias": False}), BFLOAT16, 2),
    "16 rows": (Case(13, 1, {"heads": 1, "activation": "relu"}), np.float16, 1),
    "heads of 64 and beams": (
        Case(2, 3, {"norm": "pre", "heads": 1, "tied": False, "layers": (1, 1)}), BFLOAT16, 2,
    ),
    "heads of 128": (
        Case(17, 1, {"d_model": 256, "kv_heads": 1, "layers": 1, "activation": "relu"}), BFLOAT16, 1
    ),
    "one row": (Case(1, 1, {"layers": 1, "inner": 320}, room=100), np.float16, 1),
    "learned positions, a width of two stages": (
        Case(2, 4, {
            "norm": "post", "positions": "learned", "activation": "gelu", "ffn": 1056,
            "layers": (1, 1),
        }), BFLOAT16, 1,
    ),
    "five stages": (Case(32, 1, {"d_model": 96, "heads": 3, "inner": 2080, "layers": 1}),
                    BFLOAT16, 1),
    "32 rows of 128": (Case(8, 4, {"norm": "pre", "d_model": 128, "heads": 1}, room=12),
                       np.float16, 1),
    "several units and more keys than a warp takes at once": (
        Case(32, 1, {"d_model": 576, "heads": 9, "layers": 1}, room=40), BFLOAT16, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(CASES, 2))
def test_step(name):
    check(*CASES[name])


def test_marks_begin_again():
    check(Case(2, 1, {"layers": 1}), BFLOAT16, 4, launches_left=1.4)


IDLE = Case(1, 1, {"d_model": 32, "heads": 1, "layers": 1})  # most of 8 blocks skip most phases


@pytest.mark.parametrize(
    "order", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 10))]
)
def test_blocks_without_work(order):
    check(IDLE, BFLOAT16, 2, order=order, blocks=8)


def test_bits_depend_neither_on_the_order_of_events_nor_on_other_rows():
    settings, dtype = {"layers": 1}, BFLOAT16
    three = Case(3, 1, settings)
    source = Search(three, 5, dtype, model_of(three, 1, dtype, dtype))
    (_, (alone,)), (_, (beside,)), (_, (again,)) = (
        emulated(Case(rows, 1, settings), dtype, texts=(source, 1), order=order)
        for rows, order in ((1, 1), (2, 1), (2, 2))
    )
    assert alone[0].tobytes() == beside[0].tobytes()
    assert beside.tobytes() == again.tobytes()


MISTAKES = {  # file, what is replaced, by what
    "no check of marks": (
        "words.cuh", "if (!__any_sync(~0u, missing != nullptr)) return;", "return;"
    ),
    "a check of one word of two": (
        "words.cuh", "first | (mark_of(word[2]) ^ mark) | (mark_of(word[3]) ^ mark)", "first"
    ),
    "no check of the residual's marks": (
        "words.cuh", "if (mark_of(word) == mark) return word;", "return word;"
    ),
    "the same marks in each launch": ("program.cuh", "load_relaxed(counter) + 1", "1"),
    "no barrier between partial sums and their sum": (
        "products.cuh", "sync_consumers();\n        if (first && norm)", "if (first && norm)"
    ),
    "no other half for the next sums": ("products.cuh", "++turn;", ""),
    "no wait for the weights": (
        "products.cuh", "mbar_wait(shared.full(at.stage), at.parity);", ""
    ),
    "fewer bytes expected than copied": (
        "program.cuh", "mbar_expect(full, size);", "mbar_expect(full, size - 16);"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MISTAKES, 2))
def test_mistakes_are_found(name, monkeypatch, tmp_path):
    """Each is found by at least one order of events."""
    file, there, instead = MISTAKES[name]
    root = tmp_path / "rawkernels"
    shutil.copytree(kernels.ROOT, root)
    text = (root / "decoder" / file).read_text()
    assert text.count(there) == 1
    (root / "decoder" / file).write_text(text.replace(there, instead))
    monkeypatch.setattr(kernels, "ROOT", root)
    monkeypatch.setattr(emulator, "library", emulator.library.__wrapped__)
    idle = "residual" in name or "launch" in name  # others do not show there
    case, blocks = (IDLE, 8) if idle else (Case(3, 1, {"bias": False}), BLOCKS)
    found = False
    for order in range(8):
        try:
            check(case, BFLOAT16, 2, order=order, blocks=blocks)
        except AssertionError:
            found = True
            break
    assert found
