"""Resumed runs equal uninterrupted ones in bits and metrics, also after kill -9."""

import dataclasses

import pytest
from kill_drill import drill, new_config
from stopping import After, assert_same_bits, assert_same_metrics

from gpuattn.errors import ConfigError, DataError
from gpuattn.gemm.tuning import tune
from gpuattn.nn import attention
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint
from gpuattn.tasks.registry import task_of
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.trainer import Trainer


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40,
        dim=16, heads=2, layers=(1, 1), ffn=16, dropout=0.3, batch=120, lr=1e-2, warmup=4,
        length="4e", eval_every="1e", score_pairs=3, ema=0.9, accumulate=2, average=2, beam=2,
    )  # fmt: skip


@pytest.mark.parametrize("change", [
    {}, {"length": "11u", "schedule": "cosine", "eval_every": "3u"},
    {"ema": 0.0, "accumulate": 1, "optimizer": "lion"}, {"batching": "padded"},
], ids=["epochs", "updates", "plain", "padded"])  # fmt: skip
def test_a_run_stopped_at_any_update_resumes_bit_for_bit(config, tmp_path, change):
    config = dataclasses.replace(config, **change)
    whole = train(config, tmp_path / "whole", device="numpy")
    stopped, stops = False, 0
    for calls in (1, 2, 5, 3, 9, 10_000):  # calls of stop: after updates and within evaluations
        stopped = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
        stops += not stopped.finished
        if stopped.finished:
            break
    assert stops >= 3 and stopped.finished
    assert stopped.update == whole.update
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


def test_evaluations_by_time_do_not_affect_training(config, tmp_path):
    config = dataclasses.replace(config, eval_every="auto", average=0)
    train(config, tmp_path / "whole", device="numpy")
    for calls in (5, 3, 10_000):
        outcome = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts", ("state", "last"))


def test_a_built_in_task_resumes_in_later_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuattn.tasks.texts.GENERATED_PAIRS", 60)
    config = TrainConfig(
        task="reverse", vocab_size=384, max_len=64, dim=16, heads=2, layers=(1, 1), ffn=16,
        batch=400, warmup=2, length="3e", eval_every="5u", score_pairs=0,
    )  # fmt: skip
    train(config, tmp_path / "whole", device="numpy")
    for calls in (3, 4, 1000):
        outcome = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_an_extended_run_equals_one_of_the_full_length(config, tmp_path):
    growing = {"schedule": "invsqrt", "warmup": 2}  # this schedule does not depend on the length
    short = dataclasses.replace(config, length="5u", average=0, eval_every="5u", **growing)
    long = dataclasses.replace(short, length="10u")
    train(short, tmp_path / "a", device="numpy")
    assert train(long, tmp_path / "a", device="numpy").update == 10
    train(long, tmp_path / "b", device="numpy")
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="--for was 10u, now 5u"):
        train(short, tmp_path / "a", device="numpy")


def test_changed_text_is_refused(config, tmp_path):
    train(config, tmp_path / "run", device="numpy", stop=After(2))
    lines = (tmp_path / "src").read_text().splitlines()
    (tmp_path / "src").write_text("\n".join(["h g f", *lines[1:]]) + "\n")
    with pytest.raises(DataError, match="not the one that .* began with"):
        train(config, tmp_path / "run", device="numpy")


def test_a_damaged_last_state_falls_back_to_the_previous_one(config, tmp_path):
    train(config, tmp_path / "whole", device="numpy")
    for _ in range(2):
        train(config, tmp_path / "run", device="numpy", stop=After(4))
    newest = checkpoint.generations(tmp_path / "run", "state")[0].with_suffix(".safetensors")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged.*is used instead"):
        assert train(config, tmp_path / "run", device="numpy").finished
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


@pytest.mark.exhaustive  # test_saving.py has copies of what kills leave
@pytest.mark.parametrize("kills", [3, 6])
def test_a_run_killed_at_random_moments_loses_nothing(tmp_path, kills):
    updates, torn, _ = drill(tmp_path, "numpy", kills)
    assert len(set(updates)) >= kills // 2 and torn >= 1


def test_on_a_gpu_a_deterministic_run_resumes_bit_for_bit(gpu, tmp_path, delayed):
    config = dataclasses.replace(new_config(tmp_path, "cuda", kills=0), eval_every="8u")
    train(config, tmp_path / "whole", device="cuda")
    for calls in (3, 9, 10_000):
        outcome = train(config, tmp_path / "parts", device="cuda", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("model", ["translation", "gpt2"])
def test_deterministic_reaches_every_attention(config, tmp_path, monkeypatch, model):
    if model == "gpt2":
        config = TrainConfig(model="gpt2", lm=config.source, tokenizer="chars", dim=16, heads=2,
                             layers=2, block=8, batch=16, length="1u", warmup=0)  # fmt: skip
    asked, inner = [], attention.flash_attention

    def noted(*arrays, deterministic, **options):
        asked.append(deterministic)
        return inner(*arrays, deterministic=deterministic, **options)

    monkeypatch.setattr(attention, "flash_attention", noted)
    for deterministic in (False, True):
        config = dataclasses.replace(config, deterministic=deterministic)
        trainer = Trainer(task_of(config)(config), "numpy", Listener())
        trainer._update()
        assert (trainer.step.calls.first is tune) != deterministic  # tuning depends on timings
        layers = {"translation": 3 * config.accumulate, "gpt2": 2}[model]
        assert asked[-layers:] == [deterministic] * layers
    assert len(asked) == 2 * layers


def test_a_run_killed_before_its_first_update_starts_again(config, tmp_path):
    """Only the tokenizer and a part of the config were written."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tokenizer.model").write_bytes(b"half")
    (tmp_path / "run/.config.toml.tmp").write_text("dim =")
    assert train(config, tmp_path / "run", device="numpy", stop=After(2)).update > 0
    assert not list((tmp_path / "run").rglob(".*.tmp"))


def test_a_run_stopped_during_averaging_averages_after_resume(config, tmp_path, monkeypatch):
    train(config, tmp_path / "whole", device="numpy")
    inner, asked = RunFolder.average_snapshots, []

    def stop():
        return bool(asked)

    def interrupted(*args):
        asked.append(True)
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "average_snapshots", interrupted)
        assert not train(config, tmp_path / "parts", device="numpy", stop=stop).finished
        patch.setattr(RunFolder, "average_snapshots", raise_killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts", device="numpy")
    assert train(config, tmp_path / "parts", device="numpy").finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


def raise_killed(*_):
    raise KeyboardInterrupt
