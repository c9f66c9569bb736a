"""A decoding step in one launch: its program, interpreted with NumPy, and on a GPU its numbers."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from checks import dtype_of
from decoder_steps import (
    Case,
    Search,
    assert_as_accurate,
    host,
    model_of,
    skip_without,
    take_weights,
)
from fake_gpu import GPUS
from fake_launches import as_array, launches_on
from program_interpreter import Interpreter

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda.compiler import ROOT
from gpuattn.engine import Engine
from gpuattn.engine.steps import decoder_step
from gpuattn.models.llama import Llama, LlamaConfig

PROGRAMS = {
    "gpt2": Case(3, 1, {}),
    "grouped heads, no bias, relu": Case(
        13, 1, {"bias": False, "kv_heads": 1, "activation": "relu", "tied": False}
    ),
    "two groups": Case(40, 1, {"d_model": 96, "heads": 3, "inner": 32}),
    "heads of 128": Case(50, 1, {"d_model": 128, "heads": 1, "layers": 1}),
    "pre-norm": Case(2, 3, {"norm": "pre"}),
    "pre-norm, not tied, gelu": Case(
        4, 4, {"norm": "pre", "tied": False, "activation": "gelu", "kv_heads": 1}
    ),
    "shares of keys": Case(2, 1, {"block": 700, "heads": 1}, room=600),
    "shares of keys and of a memory": Case(
        1, 2, {"norm": "pre", "max_length": 700}, room=600, source_room=300
    ),
    "post-norm": Case(9, 4, {"norm": "post", "layers": (1, 3)}),
    "post-norm, learned positions, not padded": Case(
        3, 1, {"norm": "post", "positions": "learned", "tied": False, "pad_vocab": False}
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    case, dtype = PROGRAMS[name], np.float16
    known = Search(case, 1, dtype, model_of(case, 1, dtype, np.float32))
    with launches_on(GPUS["9.0"]) as noted:
        search = Search(case, 1, dtype, model_of(case, 1, dtype, dtype, as_array))
        decoder = search.decoder()
        run = Interpreter(decoder)
        noted.clear()
        for step in range(3):
            if step:
                search.advance()
                known.advance()
            logits = run()
            np.testing.assert_allclose(logits, known.by_ops(), rtol=2e-4, atol=2e-4)
        stored = [[run.read(x.data.ptr, x.shape) for x in (c.k, c.v)] for c in search.caches]
        np.testing.assert_allclose(stored, known.stored(), rtol=2e-4, atol=2e-4)
        decoder.pack()
        assert decoder().shape == (case.rows, decoder.logits.shape[1])
    check_launches(decoder, noted)


def check_launches(decoder, noted):
    packed, linears = np.stack(decoder._packed), 0
    for phase in decoder.phases:
        assert phase["rotation"] % (1 << decoder.shift) == 0
        assert 0 <= phase["rotation"] < decoder.blocks
        assert phase["rotation"] == (linears << decoder.shift) % decoder.blocks
        if phase["kind"] == decoder_step.LINEAR:
            linears += -(-phase["outputs"] // 16)
    assert decoder.group << decoder.shift >= decoder.count
    pack, run = noted
    scalar = ("scalar", "f16")
    assert pack[1:] == ("pack_weights", (scalar,), (linears, 1, 1), (256, 1, 1), 0)
    shares = int(any(phase["split"] for phase in decoder.phases))
    polled = int(decoder.polled)
    own = {"ROWS": decoder.group, "HEAD_DIM": decoder.head_dim, "SHARES": shares, "POLLED": polled}
    constants = (scalar, *own.items())
    assert run[1:] == ("decoder_step", constants, (132, 1, 1), (384, 1, 1), 232448)
    ends = np.cumsum(-(-packed["outputs"] // 16))
    assert (packed["first"] == [0, *ends[:-1]]).all() and ends[-1] == len(decoder._owners)


@pytest.mark.parametrize("count, head_dim, group, shift", [
    (1, 32, 8, 0), (8, 32, 8, 0), (9, 64, 16, 0), (17, 64, 32, 0), (33, 64, 32, 1), (64, 32, 32, 1),
    (16, 128, 16, 0), (17, 128, 16, 1), (33, 128, 16, 2), (64, 128, 16, 2),
])  # fmt: skip
def test_groups_of_rows(count, head_dim, group, shift):
    case = Case(count, 1, {"d_model": 128, "heads": 128 // head_dim, "layers": 1})
    with launches_on(replace(GPUS["9.0"], multiprocessors=135)):
        search = Search(case, 1, BFLOAT16, model_of(case, 1, BFLOAT16, BFLOAT16, as_array))
        decoder = search.decoder()
    assert (decoder.group, decoder.shift, decoder.blocks) == (group, shift, 132)
    assert decoder.logits.shape[0] == group << shift


@pytest.mark.parametrize("count, heads, room, polled", [
    (1, 12, 256, True), (4, 12, 256, True), (5, 12, 256, False),  # 768 columns
    (4, 20, 256, True), (5, 20, 256, False), (8, 25, 256, True), (9, 25, 256, False),
    (1, 12, 257, False), (1, 25, 257, False),  # blocks share keys
    (5, 25, 1024, True),  # too many rows for that
])  # fmt: skip
def test_which_steps_wait_for_numbers(count, heads, room, polled):
    size = {"d_model": 64 * heads, "heads": heads, "layers": 1, "inner": 32, "block": 1024}
    case = Case(count, 1, size, room=room)
    with launches_on(replace(GPUS["9.0"], multiprocessors=132)):
        search = Search(case, 1, BFLOAT16, model_of(case, 1, BFLOAT16, BFLOAT16, as_array))
        assert search.decoder().polled == polled


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_sums_that_are_normalised_wait_for_barriers(norm):
    case = Case(1, 1, {"norm": norm})
    with launches_on(GPUS["9.0"]):
        search = Search(case, 1, BFLOAT16, model_of(case, 1, BFLOAT16, BFLOAT16, as_array))
        assert search.decoder().polled == (norm == "pre")


@pytest.mark.parametrize("count, heads, head_dim, room, split", [
    (1, 12, 64, 256, 0), (1, 12, 64, 257, 3), (1, 12, 64, 1024, 3), (1, 12, 64, 8192, 3),
    (2, 12, 64, 4096, 2), (3, 12, 64, 2048, 1), (4, 12, 64, 2048, 1), (5, 12, 64, 1024, 0),
    (4, 16, 64, 2048, 1), (4, 17, 64, 2048, 0), (1, 25, 64, 1024, 2), (1, 33, 64, 1024, 0),
    (1, 16, 128, 300, 3), (1, 17, 128, 1024, 0), (1, 8, 32, 4096, 3), (16, 1, 64, 512, 0),
])  # fmt: skip
def test_blocks_that_share_keys(count, heads, head_dim, room, split):
    """In rooms of many keys, if there are idle blocks and columns."""
    step = SimpleNamespace(count=count, head_dim=head_dim, blocks=132)
    assert decoder_step.DecoderStep._split(step, heads, room) == (split, 6)


WIDE, WIDER = ({"d_model": d, "heads": d // 32, "layers": 1} for d in (800, 1056))
REFUSALS = [  # settings of GPT-2, rows, room, dtype, GPU, what is said
    ({}, 4, 64, "float16", "9.0", None), ({}, 64, 128, "bfloat16", "9.0", None),
    ({}, 4, 64, "float16", "10.0", "capability is 10.0, the kernel needs 9.0"),
    ({}, 4, 64, "float32", "9.0", "the weights are float32, the kernel takes float16 or bfloat16"),
    ({}, 4, 64, "float64", "9.0", "the weight is float64, the kernel takes float32, float16 or"),
    ({}, 4, 64, "float16", "8.0", "capability is 8.0, the kernel needs 9.0"),
    ({}, 4, 64, "float16", "12.0", "capability is 12.0, the kernel needs 9.0"),
    ({}, 65, 64, "float16", "9.0", "there are 65 rows of up to 64 keys; up to 64 rows and 8192"),
    ({}, 64, 129, "float16", "9.0", "there are 64 rows of up to 129 keys"),
    (WIDE, 32, 64, "float16", "9.0", None), (WIDER, 16, 64, "float16", "9.0", None),
    (WIDE, 33, 64, "float16", "9.0", "there are 33 rows of up to 64 keys; up to 32 rows and 8192"),
    (WIDER, 17, 64, "float16", "9.0", "there are 17 rows of up to 64 keys; up to 16 rows and 8192"),
    ({"positions": "rotary"}, 4, 64, "float16", "9.0", "queries and keys are rotated"),
    ({"heads": 4}, 4, 64, "float16", "9.0", "the head size is 16, the kernel takes 32, 64 or 128"),
    ({"activation": "gelu_exact"}, 4, 64, "float16", "9.0", "the activation is not ReLU"),
    ({"inner": 80}, 4, 64, "float16", "9.0", "a weight is (64, 80), the kernel takes even outputs"),
    ({"inner": 33}, 4, 64, "float16", "9.0", "a weight is (33, 64), the kernel takes even outputs"),
]  # fmt: skip


@pytest.mark.parametrize("settings, rows, room, dtype, card, said", REFUSALS)
def test_refusal(settings, rows, room, dtype, card, said):
    case = Case(1, 1, settings)
    with launches_on(GPUS[card]):
        model = model_of(case, 1, np.float32, dtype_of(dtype), as_array)
        found = decoder_step.refusal(model, rows, room)
        state = SimpleNamespace(sentences=rows, beam=1, room=room)
        if said:
            assert said in found
            assert decoder_step.decoder_of(model, state, []) is None
        else:
            assert found is None


def test_llama_is_refused():
    size = {"vocab": 40, "d_model": 64, "heads": 2, "layers": 1, "block": 48, "ffn": 64}
    with launches_on(GPUS["9.0"]):
        model = Llama(LlamaConfig(**size))
        for parameter in model.parameters():
            parameter.data = as_array(parameter.data.astype(np.float16))
        assert "rotated or normalised" in decoder_step.refusal(model, 1, 48)


def test_none_on_numpy():
    case = Case(2, 1, {})
    search = Search(case, 1, np.float16, model_of(case, 1, np.float16, np.float16))
    assert decoder_step.decoder_of(search.model, search.state, search.caches) is None
    found = decoder_step.refusal(search.model, 2, 24)
    assert found == "the weight is a NumPy array; move it with gpuattn.to_gpu(x)"


SIZES = {"int": 4, "float": 4}


def test_structs_are_those_of_the_kernels():
    for name, file, struct in (
        ("Phase", "program.cuh", decoder_step.PHASE),
        ("Layer", "pack_weights.cu", decoder_step.LAYER),
    ):  # fmt: skip
        text = re.sub(r"//[^\n]*", "", (ROOT / "decoder" / file).read_text())
        inside = re.search(rf"struct (?:alignas\(16\) )?{name} {{(.*?)}};", text, re.DOTALL)[1]
        fields = []
        for line in inside.split(";"):
            if line := re.sub(r"\bconst\b", "", line).strip():
                kind, names = re.match(r"(\w+\*?)\s+(.*)", line, re.DOTALL).groups()
                fields += [(x.strip(), SIZES.get(kind, 8)) for x in names.split(",")]
        offsets, end = [], 0
        for _, size in fields:
            end = -(-end // size) * size  # as the compiler aligns
            offsets.append(end)
            end += size
        assert [field for field, _ in fields] == list(struct.names)
        assert offsets == [struct.fields[field][1] for field in struct.names]
        assert end == struct.itemsize and end % 8 == 0
        if name == "Phase":
            assert f"static_assert(sizeof(Phase) == {struct.itemsize})" in text


# ---- on a GPU -----------------------------------------------------------------------------------


def random_case(seed):
    rng = np.random.default_rng(seed)
    heads, head_dim = int(rng.integers(1, 4)), int(rng.choice([32, 64, 128]))
    kv_heads = None if rng.integers(2) else 1
    size = {"vocab": 1000, "d_model": heads * head_dim, "heads": heads, "kv_heads": kv_heads}
    ffn, activation = int(rng.integers(1, 60)) * 32, str(rng.choice(["relu", "gelu"]))
    size["activation"], room = activation, int(rng.integers(5, 60))
    if seed % 2:
        rows, bias = int(rng.choice([1, 3, 8, 13, 30, 64])), bool(rng.integers(2))
        return Case(rows, 1, {**size, "inner": ffn, "bias": bias, "layers": 3}, room)
    beam = int(rng.integers(1, 6))
    rest = {"norm": ["pre", "post"][seed // 2 % 2], "tied": bool(rng.integers(2))}
    sentences = int(rng.integers(1, 64 // beam + 1))
    return Case(sentences, beam, {**size, **rest, "ffn": ffn, "layers": (1, 2)}, room)


def searches(gpu, case, rounded, *dtypes):
    """Return a Search for each dtype, on the GPU, with the same numbers."""
    found = [
        Search(case, 1, rounded, model_of(case, 1, rounded, dtype, gpu.asarray)) for dtype in dtypes
    ]
    skip_without(decoder_step.FILE, found[-1].model)
    return found


def bits(x):
    return x.get().tobytes()


def at_end(decoder, launches):
    """What the barrier of the grid holds after so many launches: 0, or the number of a set."""
    return [launches % 2 if decoder.polled else 0, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(6))
def test_numbers(gpu, seed, dtype):
    """As accurate as the step op by op, and the same bits twice."""
    case, dtype = random_case(seed), dtype_of(dtype)
    three = exact, by_ops, search = searches(gpu, case, dtype, np.float32, dtype, dtype)
    decoder = search.decoder()
    decoder.pack()
    for step in range(3):
        if step:
            for each in three:
                each.advance()
        found, before = decoder().copy(), search.stored()
        assert bits(decoder()) == bits(found)
        assert decoder._barrier.tolist() == at_end(decoder, 2 * step + 2)
        assert (search.stored() == before).all()
        logits = (found, by_ops.by_ops(), exact.by_ops())
        assert_as_accurate(*(host(x)[:, : search.model.config.vocab] for x in logits))
    assert_as_accurate(search.stored(), by_ops.stored(), exact.stored())


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("counts", [[1500], [9, 700], [400, 257, 256], [90, 900, 513, 1]])
def test_blocks_share_keys(gpu, counts, head_dim):
    """As accurate as the step op by op, the same bits twice, and for short texts as unshared."""
    size = {"vocab": 1000, "d_model": 8 * head_dim, "heads": 8, "layers": 2, "block": 1600}
    case, dtype = Case(len(counts), 1, {**size, "inner": 512}, room=1600), BFLOAT16
    exact, by_ops, search = (
        Search(case, 1, dtype, model_of(case, 1, dtype, kind, gpu.asarray), counts)
        for kind in (np.float32, dtype, dtype)
    )
    skip_without(decoder_step.FILE, search.model)
    decoder = search.decoder()
    assert (decoder.phases["split"] > 0).sum() == 4  # attention and the layer behind it
    decoder.pack()
    for step in range(2):
        if step:
            for each in (exact, by_ops, search):
                each.advance()
        found = decoder().copy()
        assert bits(decoder()) == bits(found) and not decoder._barrier.any()
        logits = (found, by_ops.by_ops(), exact.by_ops())
        assert_as_accurate(*(host(x)[:, :1000] for x in logits))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_step, "MOST_SHARES", 1)
        unshared = search.decoder()
    assert not unshared.phases["split"].any()
    unshared.pack()
    plain, least = unshared(), decoder_step.SHARE_KEYS
    for row, count in enumerate(counts):
        if count + 1 <= least:
            assert bits(plain[row]) == bits(found[row])


@pytest.mark.parametrize("seed", [1, 4])
def test_a_thousand_replays(gpu, seed):
    """Replays of a graph give the bits of a call."""
    (search,) = searches(gpu, random_case(seed), BFLOAT16, BFLOAT16)
    decoder, stream = search.decoder(), gpu.cuda.Stream(non_blocking=True)
    decoder.pack()
    called = bits(decoder())
    gpu.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        decoder()
        graph = stream.end_capture()
        decoder.logits.view(np.uint16).fill(0)
        for _ in range(1000):
            graph.launch(stream)
        stream.synchronize()
        assert bits(decoder.logits[: decoder.count]) == called
        assert decoder._barrier.tolist() == at_end(decoder, 1001)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows, width, heads, inner", [
    (1, 64, 2, 96), (3, 768, 12, 3072), (1, 1024, 8, 4096), (4, 1152, 36, 2080),
    (1, 1600, 25, 6400), (8, 1600, 25, 6400),
])  # fmt: skip
def test_polled_numbers_are_those_of_barriers(gpu, rows, width, heads, inner, dtype, monkeypatch):
    """Also in a thousand launches, as blocks meet in another way in each."""
    size = {"d_model": width, "heads": heads, "inner": inner, "layers": 3, "block": 200}
    case, dtype = Case(rows, 1, {"vocab": 1000, **size}, room=200), dtype_of(dtype)
    found = []
    for polled in (False, True):
        monkeypatch.setattr(decoder_step.DecoderStep, "_polls", lambda *_, polled=polled: polled)
        (search,) = searches(gpu, case, dtype, dtype)
        decoder = search.decoder()
        assert decoder.polled == polled
        decoder.pack()
        found.append([bits(decoder())])
        for _ in range(3):
            search.advance()
            found[-1].append(bits(decoder()))
        found[-1].append(search.stored().tobytes())
    assert found[0] == found[1]
    repeated = [decoder().copy() for _ in range(1000)]
    assert {bits(x) for x in repeated} == {found[0][3]}


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_repeated_steps_have_the_same_bits(gpu, rows, monkeypatch):
    """Also where some warps have no piece of a unit's last stage, and arrive before the others."""
    wide = {"d_model": 1600, "heads": 25, "layers": 1, "inner": 6400}
    (search,) = searches(gpu, Case(rows, 1, wide), BFLOAT16, BFLOAT16)
    handed, hand = [], decoder_step.DecoderStep._handed
    monkeypatch.setattr(
        decoder_step.DecoderStep, "_handed", lambda *args: handed.append(hand(*args)) or handed[-1]
    )
    decoder, states = search.decoder(), []
    decoder.pack()
    for _ in range(30):
        decoder()
        rows_of = [x if decoder.polled else x[:rows] for x in handed]
        states.append([bits(x) for x in (decoder.logits[:rows], *rows_of)])
        if decoder.polled:
            decoder()  # clears what the launch before it wrote
    assert all(state == states[0] for state in states)


def test_pack_takes_over_new_weights(gpu):
    case = Case(5, 1, {})
    (search,) = searches(gpu, case, BFLOAT16, BFLOAT16)
    decoder = search.decoder()
    decoder.pack()
    before = bits(decoder())
    take_weights(search.model, model_of(case, 7, BFLOAT16, BFLOAT16, gpu.asarray))
    decoder.pack()
    after, fresh = bits(decoder()), search.decoder()
    fresh.pack()
    assert bits(fresh()) == after != before


@pytest.mark.parametrize("texts, used", [(2, True), (70, False)])
def test_the_engine_uses_it_for_few_rows(gpu, texts, used):
    for settings, ask in (
        ({}, lambda engine, given: engine.generate(given, limits=[6] * texts, seed=1)),
        ({"norm": "pre"}, lambda engine, given: engine.translate(
            given, limits=[6] * texts, bos=1, beam=3, eos=2,
        )),
    ):  # fmt: skip
        model = model_of(Case(1, 1, settings), 1, BFLOAT16, BFLOAT16, gpu.asarray)
        skip_without(decoder_step.FILE, model)
        with Engine(model) as engine:
            found = ask(engine, [[5, 6, 7]] * texts)
            (search,) = engine._searches.kept.values()
        assert len(found) == texts
        assert (search.decoder is not None) == used
