"""A decoding step in one launch, emulated on any CPU."""

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
from gpuattn.engine.steps import decoder_step

pytestmark = pytest.mark.usefixtures("host_compiler")
BLOCKS = 4


def emulated(case, dtype, steps=1, texts=None, order=1, blocks=BLOCKS, counts=None):
    """Return a search after ``steps`` by the emulator, and the logits of each.

    ``texts``: (Search, n), the first n sentences are as there. ``order``: of events, a seed.
    ``counts``: keys of each sentence, if not random.
    """
    machine, card = emulator.Machine(order, blocks), replace(GPUS["9.0"], multiprocessors=blocks)
    with launches_on(card), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_step, "kernel", machine.kernel)
        search = Search(case, 1, dtype, model_of(case, 1, dtype, dtype, as_array), counts)
        if texts:
            search.take(*texts)
        decoder, found = search.decoder(), []
        assert decoder.blocks == blocks
        decoder.pack()
        for step in range(steps):
            if step:
                search.advance()
            found.append(assert_step_keeps(search, decoder))
            ends = [(step + 1) % 2 if decoder.polled else 0, 0]
            assert decoder._barrier.tolist() == ends, "zeros, or the number of a set"
    return search, found


def check(case, dtype, steps=1, order=1, **settings):
    """Compare logits and caches with the step op by op; return the logits."""
    search, found = emulated(case, dtype, steps, order=order, **settings)
    known = (
        Search(case, 1, dtype, model_of(case, 1, dtype, kind), settings.get("counts"))
        for kind in (np.float32, dtype)
    )
    assert_steps_by_ops(search, found, *known, search.model.config.vocab)
    return found


POST = {"norm": "post", "output_bias": True}
CASES = {  # sentences, beams, settings; dtype, steps
    "beams, two groups, post-norm": (Case(9, 4, POST), np.float16, 1),
    "one group of 8": (Case(5, 1, {"kv_heads": 1, "bias": False}), BFLOAT16, 2),
    "three rows": (Case(3, 1, {"kv_heads": 1, "bias": False}), BFLOAT16, 3),
    "one group of 16": (Case(13, 1, {"heads": 1, "activation": "relu"}), np.float16, 1),
    "heads of 64 and beams": (
        Case(2, 3, {"norm": "pre", "heads": 1, "tied": False, "layers": (1, 1)}), BFLOAT16, 2,
    ),
    "heads of 128": (
        Case(17, 1, {"d_model": 256, "kv_heads": 1, "layers": 1, "activation": "relu"}), BFLOAT16, 1
    ),
    "one row": (Case(1, 1, {"layers": 1, "inner": 320}, room=100), np.float16, 2),
    "one row, heads of 128, three stages": (
        Case(1, 1, {"d_model": 256, "kv_heads": 1, "inner": 2080, "layers": 1}, room=40),
        BFLOAT16, 2,
    ),
    "four beams": (Case(1, 4, {"norm": "pre", "layers": (1, 1)}), np.float16, 2),
    "one row of a translation": (
        Case(1, 1, {"norm": "pre", "layers": (1, 2)}, source_room=40), BFLOAT16, 2,
    ),
    "learned positions, a width of two stages": (
        Case(2, 4, {
            "norm": "post", "positions": "learned", "activation": "gelu", "ffn": 1056,
            "layers": (1, 1),
        }), BFLOAT16, 1,
    ),
    "five stages": (Case(40, 1, {"d_model": 96, "heads": 3, "inner": 2080, "layers": 1}),
                    BFLOAT16, 1),
    "four groups": (Case(16, 4, {"norm": "pre", "d_model": 128, "heads": 1}, room=12),
                    np.float16, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(CASES, 2))
def test_step(name):
    check(*CASES[name])


IDLE = Case(1, 1, {"d_model": 32, "heads": 1, "layers": 1})  # most of 8 blocks skip most phases


@pytest.mark.parametrize(
    "order", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 10))]
)
def test_blocks_without_work(order):
    check(IDLE, BFLOAT16, 2, order=order, blocks=8)


ONE_HEAD = {"heads": 1, "layers": 1, "block": 600}
TWO_STAGES = {"heads": 9, "d_model": 1152, "layers": 1, "inner": 32, "block": 80}
PRE, POST_NORM = (
    {"norm": norm, "heads": 1, "layers": (1, layers), "max_length": 99}
    for norm, layers in (("pre", 1), ("post", 2))
)
SHARES = {  # case, dtype, blocks, keys of a share at least, counts; logarithms of the most shares
    "four shares, the last one smaller": (
        Case(1, 1, {**ONE_HEAD, "layers": 2}, room=200), BFLOAT16, 4, 32, [131], [2, 2],
    ),
    "eight shares, one head of two": (
        Case(1, 1, {**ONE_HEAD, "kv_heads": 1, "d_model": 64, "heads": 2}, room=520), np.float16,
        16, 32, [505], [3],
    ),
    "a short text and a long one": (
        Case(2, 1, ONE_HEAD, room=200), np.float16, 8, 32, [9, 170], [2],
    ),
    "three texts, one ends a share": (
        Case(3, 1, {**ONE_HEAD, "bias": False}, room=140), BFLOAT16, 8, 64, [64, 128, 1], [1],
    ),
    "beams and a memory": (
        Case(2, 2, POST_NORM, room=90, source_room=80), np.float16, 8, 32, [70, 45], [1, 1, 1, 1],
    ),
    "beams and a short memory": (
        Case(1, 3, PRE, room=90), BFLOAT16, 8, 32, [75], [1, 0],
    ),
    "heads of 128 and two stages": (
        Case(1, 1, TWO_STAGES, room=80), BFLOAT16, 20, 32, [70], [1],
    ),
}  # fmt: skip


def share_keys(monkeypatch, keys):
    monkeypatch.setattr(decoder_step, "SHARED_ROOM", keys)
    monkeypatch.setattr(decoder_step, "SHARE_KEYS", keys)


@pytest.mark.parametrize("name", sampled(SHARES, 3))
def test_blocks_share_the_keys_of_a_row(name, monkeypatch):
    """Also where the next step has more shares than the one before."""
    case, dtype, blocks, keys, counts, splits = SHARES[name]
    share_keys(monkeypatch, keys)
    steps = 3 if case.rows == 1 and len(splits) == 2 else 2 if case.rows < 4 else 1
    made, build = [], decoder_step.DecoderStep._build
    monkeypatch.setattr(
        decoder_step.DecoderStep, "_build", lambda own, *args: made.append(own) or build(own, *args)
    )
    check(case, dtype, steps, blocks=blocks, counts=counts)
    (decoder,) = made
    attention = decoder.phases[decoder.phases["kind"] == decoder_step.ATTEND]
    seen = [(int(phase["split"]), int(phase["split_keys"])) for phase in attention]
    assert seen == [(split, keys.bit_length() - 1) for split in splits]


def test_shares_of_another_step_are_not_used(monkeypatch):
    """A text that is short after a long one has the bits of one that no other came before."""
    share_keys(monkeypatch, 32)
    case = Case(1, 1, ONE_HEAD, room=200)
    machine, card = emulator.Machine(1, 4), replace(GPUS["9.0"], multiprocessors=4)
    found = []
    with launches_on(card), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_step, "kernel", machine.kernel)
        for all_counts in ([150, 20], [20]):
            model = model_of(case, 1, BFLOAT16, BFLOAT16, as_array)
            search = Search(case, 1, BFLOAT16, model, [150])
            decoder = search.decoder()
            decoder.pack()
            for count in all_counts:
                search.counts[...] = count
                search.begin()
                search.state.tokens[...] = 3
                logits = decoder().tobytes()
            found.append(logits)
        monkeypatch.setattr(decoder_step, "MOST_SHARES", 1)
        decoder = search.decoder()
        decoder.pack()
        found.append(decoder().tobytes())
    assert found[0] == found[1] == found[2]


def test_bits_of_shares_do_not_depend_on_the_order_of_events(monkeypatch):
    share_keys(monkeypatch, 32)
    case = Case(2, 1, ONE_HEAD, room=200)
    one, other = (
        emulated(case, BFLOAT16, 2, order=order, blocks=8, counts=[120, 190])[1] for order in (1, 2)
    )
    assert [x.tobytes() for x in one] == [x.tobytes() for x in other]


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


WAIT = "mbar_wait(shared.full(slot.stage), slot.parity);\n"
RELEASE = "__syncwarp();\n                release(freed"
MISTAKES = {  # file, (what is replaced, by what) ...
    "no wait for the grid before a matmul": ("products.cuh", ("if (first) grid.wait();", "")),
    "no wait for the grid before attention": ("attention.cuh", ("if (!waited) grid.wait();", "")),
    "polled: a matmul waits for nothing": (
        "products.cuh", ("if (!missing()) return;", "return;")
    ),
    "polled: a matmul waits for one word of two": (
        "polled.cuh", ("return !x.x || !x.y || !x.z || !x.w;", "return !x.x || !x.z;")
    ),
    "polled: attention waits for nothing": (
        "attention.cuh", ("while (__any_sync(~0u, missing));", "while (false);")
    ),
    "polled: a residual is not waited for": (
        "polled.cuh", ("if (word) return word;", "return word;")
    ),
    "polled: the other set is not cleared": (
        "products.cuh", ("if (POLLED && !grid.last) clear_word", "if (false) clear_word")
    ),
    "polled: attention does not clear the other set": (
        "attention.cuh", ("if (POLLED && mine && part == 0", "if (false && mine && part == 0")
    ),
    "polled: both launches have the same set": (
        "decoder_step.cu", ("POLLED ? 1 - barrier[0] : 0", "0")
    ),
    "no barrier between partial sums and their sum": (
        "products.cuh", ("sync_consumers();\n        float mean", "float mean")
    ),
    "weights are read before the wait for them": (
        "products.cuh", (WAIT, "\n"), (RELEASE, WAIT + RELEASE)
    ),
    "fewer bytes expected than copied": (
        "program.cuh", ("mbar_expect(full, size);", "mbar_expect(full, size - 16);")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MISTAKES, 2))
def test_mistakes_are_found(name, monkeypatch, tmp_path):
    """Each is found by at least one order of events."""
    file, *replaced = MISTAKES[name]
    root = tmp_path / "rawkernels"
    shutil.copytree(sources.ROOT, root)
    text = (root / "decoder" / file).read_text()
    for there, instead in replaced:
        assert text.count(there) == 1
        text = text.replace(there, instead)
    (root / "decoder" / file).write_text(text)
    monkeypatch.setattr(sources, "ROOT", root)
    monkeypatch.setattr(emulator, "library", emulator.library.__wrapped__)
    case, blocks, steps = Case(5, 1, {"bias": False}), BLOCKS, 1
    if name.startswith("polled"):
        case, blocks, steps = IDLE, 8, 3
    found = False
    for order in range(8):
        try:
            check(case, BFLOAT16, steps, order=order, blocks=blocks)
        except AssertionError:
            found = True
            break
    assert found
