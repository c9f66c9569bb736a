"""A registered model works everywhere: options, command line, memory plans, FLOPs."""

import sys
from dataclasses import dataclass
from itertools import chain

import pytest

from gpuattn import load_run
from gpuattn.cli.main import main
from gpuattn.errors import ConfigError
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.kinds import MODELS, ModelKind, register
from gpuattn.runs.config import TrainConfig, resolve
from gpuattn.runtime.precision import PRECISIONS
from gpuattn.tasks.registry import models_with, task_of
from gpuattn.train import memory


@dataclass(frozen=True)
class SlimConfig(GPT2Config):
    """A GPT2 with a separate option for the feed-forward width."""

    inner: int = 64

    @property
    def ffn(self):
        return self.inner


def configure(options, vocab):
    return SlimConfig(
        vocab, options.dim, options.heads, options.layers[0], options.block, inner=options.ffn
    )


def check(options):
    if options.ffn > options.dim:
        raise ConfigError(f"ffn is {options.ffn}; accepted: up to dim, {options.dim}, for slim")


@pytest.fixture
def slim(monkeypatch):
    """Register one more model, and rebuild the command line as a new process would."""
    monkeypatch.setitem(MODELS, "slim", None)  # removed again after the test
    del MODELS["slim"]
    for name in ("gpuattn.cli.train", "gpuattn.cli.shared.training"):
        monkeypatch.delattr(name, raising=False)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return register(ModelKind(
        name="slim", tasks=("language",), model=GPT2, configure=configure, check=check,
        options=("block", "ffn"),
        defaults={"positions": "learned", "activation": "gelu", "dim": 32, "heads": 2, "ffn": 24,
                  "layers": 2, "block": 16, "dropout": 0.0, "batch": 64, "warmup": 0},
        presets={"slender": {"dim": 16, "ffn": 8}},
    ))  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("a rose is a rose is a rose\n" * 60)
    return path


def test_options_and_checks_come_from_the_registry(slim):
    config = resolve(("", {"model": "slim", "lm": "text"}))[0]
    assert (config.dim, config.ffn, config.positions, config.layers) == (32, 24, "learned", (2, 2))
    assert resolve(("", {"model": "slim", "lm": "text", "preset": "slender"}))[0].ffn == 8
    assert models_with("ffn") == ["translation", "llama", "slim"] and models_with("bias") == [
        "gpt2"
    ]
    with pytest.raises(ConfigError, match="bias is for --model gpt2, not slim"):
        TrainConfig(model="slim", lm="text", bias=False)
    with pytest.raises(ConfigError, match="ffn is 99; accepted: up to dim, 32, for slim"):
        resolve(("", {"model": "slim", "lm": "text", "ffn": 99}))
    with pytest.raises(ConfigError, match="--model slim learns from one text"):
        TrainConfig(model="slim")
    with pytest.raises(
        ConfigError, match="not one of translation, bert, gpt2, llama, vit, slim.*Did you mean"
    ):
        TrainConfig(model="slin")
    with pytest.raises(ValueError, match="'slim' already"):
        register(slim)


def test_memory_and_flops_are_those_of_its_own_config(slim, text):
    config = resolve(("", {"model": "slim", "lm": str(text), "tokenizer": "chars"}))[0]
    task = task_of(config)(config)
    layers = [p for p in task.model.layers[0].parameters() if p.ndim == 2]
    assert memory.layer_weights(config) == 2 * sum(p.size for p in layers)
    batch = next(chain(task.corpus.valid_batches()))
    width, weights = 32, memory.layer_weights(config) + 32 * task.model.config.vocab
    rows, tokens = len(batch.tokens), config.block
    want = 6 * weights * rows * tokens + 12 * width * 2 * rows * tokens**2 / 2
    assert task.flops([batch]) == want
    plan = memory.plan(task.model, config, PRECISIONS["fp32"], 10_000)
    wide = GPT2(GPT2Config(task.model.config.vocab, 32, 2, 2, 16))
    hidden = (4 * width - 24) * 10_000 * 4  # bytes of the missing values, kept twice in 2 layers
    more = memory.plan(wide, config, PRECISIONS["fp32"], 10_000).activations - plan.activations
    assert 4 * hidden <= more <= 6 * hidden


def test_the_command_line_trains_and_samples_it(slim, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "[translation|bert|gpt2|llama|vit|slim]" in shown
    sizes = (
        "[default: 128; bert: 256, on NumPy 64; gpt2: 384, on NumPy 128; "
        "llama: 384, on NumPy 128; vit: 192, on NumPy 64; slim: 32]"
    )
    assert sizes in shown and "slender" in shown
    out = tmp_path / "run"
    arguments = f"--model slim --lm {text} --tokenizer chars --for 2u --device numpy --out {out}"
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments.split()])
    assert not ended.value.code and "gpuattn sample" in capsys.readouterr().err
    assert len(load_run(out, device="numpy", task="language").sample(tokens=5)) == 1
