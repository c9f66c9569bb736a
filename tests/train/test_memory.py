"""Memory: recomputed layers give equal bits, plans match steps, batches are split."""

import dataclasses

import numpy as np
import pytest
from stopping import After, assert_same_bits

from gpuattn.arrays import to_cpu
from gpuattn.cli.main import main
from gpuattn.errors import ConfigError, MemoryLimitError
from gpuattn.models.kinds import MODELS
from gpuattn.nn.module import uninitialised
from gpuattn.runs.config import TrainConfig, default_batch, resolve
from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint, precision
from gpuattn.runtime.device import is_out_of_memory
from gpuattn.runtime.graphs import Replays
from gpuattn.tasks import language, translation
from gpuattn.tasks.language import LanguageTask
from gpuattn.tasks.registry import task_of
from gpuattn.tasks.translation import TranslationTask
from gpuattn.train import memory
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.state import tensors_of
from gpuattn.train.trainer import Trainer


class Heard(Listener):
    def __init__(self):
        self.said = []

    def say(self, topic, text):
        self.said.append((topic, text))

    def about(self, topic):
        return [text for about, text in self.said if about == topic]


@pytest.fixture
def pairs(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40,
        dim=32, heads=2, layers=(2, 2), ffn=48, dropout=0.2, batch=240, lr=1e-2, warmup=4,
        length="8u", eval_every="4u", score_pairs=0,
    )  # fmt: skip


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "text").write_text("".join(rng.choice(list("abcdefgh \n"), 3000)))
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=32, heads=2, layers=2,
        block=16, dropout=0.2, batch=12 * 16, lr=1e-2, warmup=4, length="8u", label_smoothing=0.0,
        eval_every="4u",
    )  # fmt: skip


@pytest.fixture
def fails(monkeypatch):
    """Return a function that makes losses of more than ``most`` tokens run out of memory, starting
    with batch ``first`` of a run."""

    def arrange(task, most, first):
        loss = task.loss

        def short(self, batch, *args, **kwargs):
            draw = int(np.ravel(self.model.random.step)[0])
            if self.model.training and draw >= first and batch.labels.size > most:
                raise MemoryError("no room")
            return loss(self, batch, *args, **kwargs)

        monkeypatch.setattr(task, "loss", short)

    return arrange


# ---- recomputation -----------------------------------------------------------------------------


def gradients(config, device="numpy", graphs=False):
    """Return the state of a run of 3 updates: (parameters and moments, loss of each Progress)."""
    config = dataclasses.replace(config, length="3u", warmup=0)
    trainer = Trainer(task_of(config)(config), device, Listener(), graphs=graphs)
    trainer.run(lambda: False, lambda: {"loss": 0.0, "score": 0.0}, lambda row: None)
    return {name: to_cpu(array) for name, array in tensors_of(trainer.step).items()}


CASES = [("text", {}), ("pairs", {}), ("pairs", {"norm": "post", "activation": "gelu"})]


@pytest.mark.parametrize(("data", "change"), CASES, ids=["gpt2", "pre-norm", "post-norm"])
def test_recomputed_layers_give_the_same_bits(request, data, change):
    config = dataclasses.replace(request.getfixturevalue(data), accumulate=2, **change)
    kept, again, full = (
        gradients(dataclasses.replace(config, checkpoint=level))
        for level in ("none", "block", "full")
    )
    for name, array in kept.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)
        np.testing.assert_allclose(array, full[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_recomputed_layer_keeps_only_its_input(text):
    def kept(level):
        task = LanguageTask(dataclasses.replace(text, checkpoint=level))
        batch = task.corpus.loader(0).crops(0)
        nodes, sizes = [task.loss(batch).node], {}
        while nodes:
            node = nodes.pop()
            for x in node.inputs:
                if getattr(x, "node", None) is not None:
                    sizes[id(x.data)] = 0 if x.data is None else x.size
                    nodes.append(x.node)
        return sum(sizes.values()) / batch.tokens.size / text.dim

    assert kept("block") == 2 * 2 + 1  # two inputs for each of two layers, and the last states
    assert kept("none") > 2 * kept("block")


@pytest.mark.parametrize("level", ["block", "full"])
def test_in_graphs_too(gpu, pairs, level):
    config = dataclasses.replace(pairs, checkpoint=level, dim=64, ffn=64)
    replayed, plain = (gradients(config, "cuda", graphs) for graphs in (True, False))
    for name, array in plain.items():
        np.testing.assert_array_equal(array, replayed[name], err_msg=name)


# ---- plans -------------------------------------------------------------------------------------

SHAPES = [
    ("text", {"dim": 768, "heads": 12, "layers": (4, 4), "block": 256, "batch": 8192}),
    ("pairs", {"dim": 512, "heads": 8, "layers": (3, 3), "ffn": 2048, "batch": 8192}),
]


@pytest.mark.parametrize(("data", "sizes"), SHAPES, ids=["gpt2", "translation"])
@pytest.mark.parametrize("level", ["none", "block"])
def test_a_plan_matches_the_memory_of_a_step(gpu, request, data, sizes, level, monkeypatch):
    monkeypatch.setattr("gpuattn.arrays.allocate", None)
    monkeypatch.setattr("gpuattn.gemm.tuning.FLUSH_BYTES", 1 << 20)
    config = dataclasses.replace(
        request.getfixturevalue(data), **sizes, checkpoint=level, length="1u", warmup=0
    )
    task = task_of(config)(config)
    pool = gpu.cuda.MemoryPool()
    with gpu.cuda.using_allocator(pool.malloc):
        trainer = Trainer(task, "cuda", Listener(), graphs=False)
        state = pool.used_bytes()
        trainer.run(lambda: False, lambda: {"loss": 0.0, "score": 0.0}, lambda row: None)
    plan = memory.plan(task.model, config, trainer.precision)
    assert plan.state == pytest.approx(state, rel=0.02)
    took, planned = pool.total_bytes(), plan.state + plan.activations - memory.LIBRARY_BYTES
    assert planned == pytest.approx(took, rel=0.1), f"{took / planned:.3f} of the plan"


BF16 = precision.PRECISIONS["bf16"]


@pytest.mark.parametrize("data", ["text", "pairs"])
def test_more_tokens_and_more_parameters_take_more(request, data):
    config = dataclasses.replace(request.getfixturevalue(data), layers=(6, 6))
    model = task_of(config)(config).model
    small, large = (memory.plan(model, config, BF16, tokens) for tokens in (10**5, 2 * 10**5))
    assert small.state == large.state and small.activations < large.activations
    levels = [
        memory.plan(model, dataclasses.replace(config, checkpoint=level), BF16, 10**7).activations
        for level in ("none", "block", "full")
    ]
    assert levels[0] > 1.5 * levels[1] and levels[1] >= levels[2]
    assert "GB activations" in small.describe(80e9)


T4 = 15_600_000_000, 15_843_721_216  # bytes that are free, and all
DATA = {
    "translation": {"source": "a", "target": "b", "valid_source": "c", "valid_target": "d"},
    "language": {"lm": "a"}, "masked": {"lm": "a"}, "labels": {"classify": "a"},
    "images": {"images": "a"},
}  # fmt: skip
PRESETS = [
    (name, task, preset)
    for name, kind in MODELS.items()
    for task in kind.tasks
    for preset in (None, *kind.presets)
]
CUT = {("vit", "images", "base"): 2}  # parts of the default batch; else one


@pytest.mark.parametrize("name, task, preset", PRESETS)
def test_presets_fit_a_t4(name, task, preset):
    """With their default batches in float16, less what a pool needs; some in parts."""
    given = {"model": name, **DATA[task]} | ({"preset": preset} if preset else {})
    config, _ = resolve(("", given), device="cuda")
    with uninitialised():
        model = MODELS[name].model(MODELS[name].configure(config, config.vocab_size), seed=0)
    room, parts = (1 - memory.FREE_SHARE) * T4[0], 1
    fp16 = precision.PRECISIONS["fp16"]
    while memory.plan(model, memory.in_parts(config, parts), fp16).total > room:
        parts = memory.next_parts(config, parts)
    assert parts == CUT.get((name, task, preset), 1)
    plan = memory.plan(model, config, fp16)
    cut = "that are free. Where memory runs out, batches are cut" in plan.describe(T4[1], T4[0])
    assert cut == (parts > 1) and "of 15.8 GB" in plan.describe(T4[1], T4[0])


def test_a_model_larger_than_the_card_is_refused(text):
    config = dataclasses.replace(text, checkpoint="full", ema=0.0)
    model = LanguageTask(config).model
    with pytest.raises(MemoryLimitError, match=r"larger than the card.*optimizer lion") as error:
        memory.check_fits(model, config, BF16, free=1e6)
    assert "--checkpoint" not in str(error.value) and "--ema" not in str(error.value)
    memory.check_fits(model, config, BF16, free=1e9)


@pytest.mark.parametrize(("data", "change"), [
    ("text", {}), ("text", {"kv_heads": 1, "positions": "rotary"}), ("pairs", {}),
    ("pairs", {"kv_heads": 1, "layers": (1, 3), "activation": "swiglu"}),
])  # fmt: skip
def test_a_model_larger_than_memory_is_refused_before_it_is_made(
    request, data, change, monkeypatch, tmp_path
):
    config = dataclasses.replace(request.getfixturevalue(data), **change)
    outside = ("embedding", "source", "target")
    weights = dict(task_of(config)(config).model.named_parameters()).items()
    layers = sum(p.size for name, p in weights if p.ndim == 2 and name.split(".")[0] not in outside)
    assert memory.layer_weights(config) == layers
    monkeypatch.setattr(memory, "host_memory", lambda: 40 * layers)
    memory.check_host(config, "numpy")  # parameters, two moments, average, twice; two buffers
    monkeypatch.setattr(memory, "host_memory", lambda: 40 * layers - 1)
    memory.check_host(config, "cuda")
    memory.check_host(dataclasses.replace(config, ema=0.0), "numpy")
    monkeypatch.setattr(memory, "host_memory", lambda: 16 * layers - 1)
    with pytest.raises(MemoryLimitError, match="GB with the copy to save; this machine"):
        memory.check_host(config, "cuda")
    with pytest.raises(MemoryLimitError, match="a smaller --dim or fewer --layers"):
        train(config, tmp_path / "run", device="numpy")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", ["text", "pairs"])
def test_automatic_batches_are_whole_blocks_and_keep_the_updates_of_an_epoch(request, data):
    config = request.getfixturevalue(data)
    model = task_of(config)(config).model
    unit = config.block * language.BLOCKS if data == "text" else translation.BATCH_UNIT
    tokens = memory.fit(model, config, BF16, 1e9, 10**9)
    need, more = (memory.plan(model, config, BF16, n).total for n in (tokens, tokens + unit))
    assert tokens % unit == 0 and need <= 0.9e9 < more
    assert memory.fit(model, config, BF16, 1e12, 10**9) == memory.MOST_TOKENS
    few = memory.fit(model, config, BF16, 1e12, 10**6)
    assert 10**6 / memory.LEAST_UPDATES - unit < few <= 10**6 / memory.LEAST_UPDATES
    assert memory.fit(model, config, BF16, 1, 10**9) == memory.least_tokens(config)


def test_an_automatic_batch_is_the_default_on_numpy_and_is_stored(text, tmp_path):
    config = dataclasses.replace(text, batch="auto")
    outcome = train(config, tmp_path / "run", device="numpy", stop=After(2))
    stored = RunFolder(tmp_path / "run").config()
    assert stored.batch == default_batch(config, "numpy") == 12 * 64 and not outcome.finished
    assert "batch = 768  # auto" in (tmp_path / "run" / "config.toml").read_text()
    assert train(config, tmp_path / "run", device="numpy").finished
    with pytest.raises(ConfigError, match="or auto"):
        dataclasses.replace(text, batch="some")


# ---- out of memory -----------------------------------------------------------------------------


def test_blocks_are_divided_evenly(text, pairs):
    parts, seen = 1, []
    while parts:
        config = memory.in_parts(text, parts)
        seen.append((config.batch // text.block, config.accumulate))
        assert config.batch * config.accumulate == text.batch
        parts = memory.next_parts(text, parts)
    assert seen == [(12, 1), (6, 2), (3, 4), (1, 12)]
    assert memory.in_parts(pairs, 4).batch == 60 and memory.next_parts(pairs, 4) is None


@pytest.mark.parametrize(("data", "task"), [("text", LanguageTask), ("pairs", TranslationTask)])
def test_out_of_memory_a_run_switches_to_smaller_batches(request, fails, tmp_path, data, task):
    config = request.getfixturevalue(data)
    fails(task, most=config.batch // 2, first=3)  # in the fourth update
    heard = Heard()
    whole = train(config, tmp_path / "whole", device="numpy", listener=heard)
    (said,) = heard.about("memory")
    assert "no room" in said and f"{config.batch // 2:,} tokens, 2 an update" in said
    assert whole.finished and whole.update == 8
    state = checkpoint.load(tmp_path / "whole", "state")[1]
    assert state["parts"] == 2 and state["draws"] > 2 * (8 - 4)
    assert RunFolder(tmp_path / "whole").config() == config, "the config keeps the requested batch"


def test_a_resumed_run_keeps_the_smaller_batches_bit_for_bit(pairs, fails, tmp_path):
    config = dataclasses.replace(pairs, accumulate=2, ema=0.9, length="8e", eval_every="2e")
    fails(TranslationTask, most=120, first=5)  # the second batch of the third update
    for name, stops in (("whole", [10**6]), ("parts", [2, 3, 3, 10**6])):
        for calls in stops:
            outcome = train(config, tmp_path / name, device="numpy", stop=After(calls))
        assert outcome.finished and outcome.update == 8
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_the_run_is_saved_when_no_smaller_batch_fits(text, fails, tmp_path, monkeypatch, capsys):
    fails(LanguageTask, most=0, first=3)
    with pytest.raises(MemoryLimitError, match=r"a block of 16 tokens.*--checkpoint full"):
        train(text, tmp_path / "run", device="numpy")
    assert checkpoint.load(tmp_path / "run", "state")[1]["update"] == 3
    monkeypatch.undo()
    assert train(text, tmp_path / "run", device="numpy").update == 8
    fails(LanguageTask, most=0, first=0)
    options = f"--lm {text.lm} --tokenizer chars --dim 16 --layers 1 --for 2u --warmup 0"
    with pytest.raises(SystemExit) as ended:
        main(["train", *options.split(), "--device", "numpy", "--out", str(tmp_path / "cli")])
    assert ended.value.code == 1 and "memory is used up" in capsys.readouterr().err


def test_a_gpu_with_less_memory_gets_smaller_batches(gpu, text, monkeypatch):
    monkeypatch.setattr("gpuattn.arrays.allocate", None)
    monkeypatch.setattr("gpuattn.gemm.tuning.FLUSH_BYTES", 1 << 20)
    config = dataclasses.replace(
        text, dim=256, heads=4, layers=(4, 4), block=64, batch=64 * 256, length="6u"
    )
    heard, pool = Heard(), gpu.cuda.MemoryPool()
    with gpu.cuda.using_allocator(pool.malloc):
        trainer = Trainer(LanguageTask(config), "cuda", heard, graphs=True)
        plan = memory.plan(trainer.model, config, trainer.precision)
        # the pool of the graphs has no limit: the first steps run out of memory
        pool.set_limit(pool.total_bytes() + (plan.activations - memory.LIBRARY_BYTES) * 2 // 3)
        trainer.run(lambda: False, lambda: {"loss": 0.0, "score": 0.0}, lambda row: None)
    (said,) = heard.about("memory")
    assert "8,192 tokens, 2 an update" in said and trainer.at.parts == 2
    assert trainer.workspace.grads.dtype == np.float32 and trainer.at.update == 6
    calls = trainer.step.calls
    assert isinstance(calls, Replays) and None not in calls.graphs.values()


def test_memory_of_graphs_is_freed_with_them_and_not_before(gpu):
    with gpu.cuda.Stream(non_blocking=True) as stream:
        steps, x = Replays(print), gpu.arange(1 << 20, dtype=np.float32)
        out, alive = gpu.zeros_like(x), []

        def step():
            alive[:] = [x + 1]
            out[...] = x * 2

        for _ in range(2):
            steps("double", None, step)
        pointers = [pointer for pointer, _ in steps.recorder.held]
        steps.recorder.pool.free_all_blocks()  # as CuPy does when an allocation fails

        def kinds():  # 2: device memory, 0: freed
            stream.synchronize()
            return {gpu.cuda.runtime.pointerGetAttributes(p).type for p in pointers}

        assert steps.held_bytes() >= 2 * x.nbytes and kinds() == {2}
        out.fill(0)
        steps("double", None, step)
        np.testing.assert_array_equal(to_cpu(out), 2 * to_cpu(x))
        del steps
        assert kinds() == {0}


def test_errors_that_mean_out_of_memory():
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(ValueError("memory"))
    assert is_out_of_memory(RuntimeError("cudaErrorMemoryAllocation: out of memory"))
