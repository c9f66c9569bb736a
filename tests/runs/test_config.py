"""Options: units, limits, precedence, files, and changes allowed when a run resumes."""

import dataclasses

import pytest

from gpuattn.data.generated import GENERATED
from gpuattn.errors import ConfigError
from gpuattn.models.kinds import MODELS
from gpuattn.runs.config import (
    OPTIONS,
    TrainConfig,
    describe_growth,
    differences,
    read_toml,
    resolve,
    to_toml,
)
from gpuattn.tasks.translation import BUILT_IN_DEFAULTS
from gpuattn.units import Length, parse_count, parse_layers, parse_length, parse_share, parse_warmup


@pytest.mark.parametrize("text, length", [
    ("30e", (30, "e")), ("8000u", (8000, "u")), ("8ku", (8000, "u")), ("90s", (90, "s")),
    ("1.5m", (90, "s")), ("2h", (7200, "s")),
])  # fmt: skip
def test_lengths(text, length):
    assert parse_length(text) == length
    assert parse_length(str(parse_length(text))) == length


@pytest.mark.parametrize("text", ["", "30", "e", "0e", "-3u", "1.5e", "3ke", "nan s", "1e5", 7])
def test_invalid_lengths(text):
    with pytest.raises(ConfigError, match="30e, 8000u, 90s"):
        parse_length(text)


def test_counts_layers_and_warmups():
    assert [parse_count(x) for x in ("4096", "8k", "1.5M", 12)] == [4096, 8000, 1_500_000, 12]
    assert [parse_layers(x) for x in ("4", "4:2", 3, [2, 1], (5, 6))] == [
        (4, 4), (4, 2), (3, 3), (2, 1), (5, 6),
    ]  # fmt: skip
    assert [parse_share(x) for x in ("15%", "0.15", 0.15, ".5", "99.5%")] == [
        0.15, 0.15, 0.15, 0.5, 0.995]  # fmt: skip
    assert [parse_warmup(x) for x in ("400", 400, "5%", 0.05)] == [400, 400, 0.05, 0.05]


@pytest.mark.parametrize("parse, value", [
    (parse_count, "8kk"), (parse_count, "0"), (parse_count, "1.5"), (parse_count, True),
    (parse_layers, "0"), (parse_layers, "1:2:3"), (parse_layers, "two"), (parse_layers, ""),
    (parse_share, "0%"), (parse_share, 1), (parse_share, "-5%"), (parse_share, "1e-3"),
    (parse_warmup, "100%"), (parse_warmup, "-1"), (parse_warmup, 1.5), (parse_warmup, "many"),
])  # fmt: skip
def test_values_that_mean_none(parse, value):
    with pytest.raises(ConfigError, match="accepted"):
        parse(value)


@pytest.mark.parametrize("name, value, message", [
    ("lr", float("nan"), "lr: nan is out of range"), ("lr", 0, "lr"), ("lr", "fast", "'fast'"),
    ("dropout", 1.0, "dropout"), ("dropout", True, "dropout"), ("heads", 5, "divisor of dim"),
    ("dim", 64.5, "dim: 64.5 is no whole number"), ("seed", -1, "seed"), ("source", "x", "one of"),
    ("schedule", "cosin", "Did you mean 'cosine'"), ("task", "toyy", "Did you mean 'toy'"),
    ("max_len", 9000, "batch"), ("valid_source", "x", "one of both"),
    ("positions", "Learned", "Did you mean 'learned'"), ("precision", "fp8", "fp16"),
    ("kv_heads", 3, "kv-heads is 3; accepted: a divisor of heads, 4"), ("kv_heads", 0, "kv-heads"),
    ("pad_vocab", "maybe", "pad-vocab: 'maybe' is neither true nor false"),
    ("deterministic", "yes", "deterministic: 'yes' is neither true nor false"),
])  # fmt: skip
def test_one_wrong_option_is_named(name, value, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"task": "toy", name: value})


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError, match="dim / heads is 3; .* positions rotary"):
        TrainConfig(task="toy", dim=12, heads=4, positions="rotary")
    with pytest.raises(ConfigError, match="warmup is 200 updates.*100"):
        TrainConfig(task="toy", warmup=200, length="100u")
    with pytest.raises(ConfigError, match="warmup is 0"):
        TrainConfig(task="toy", warmup=0, schedule="invsqrt")
    with pytest.raises(ConfigError, match="--valid SRC TGT"):
        TrainConfig(source="a", target="b", valid_source="c")
    with pytest.raises(ConfigError, match="source and a target"):
        TrainConfig(source="a")


def test_the_upper_layer_wins_and_is_remembered():
    config, origins = resolve(
        ("x.toml", {"dim": 32, "heads": 2, "lr": 0.1, "preset": "small"}),
        ("environment", {"lr": 0.2}),
        ("command line", {"heads": 8}),
    )
    assert (config.task, config.dim, config.heads, config.lr) == ("toy", 32, 8, 0.2)
    assert config.ffn == MODELS["translation"].presets["small"]["ffn"]
    assert config.vocab_size == GENERATED["toy"].vocab_size
    assert config.length == parse_length(BUILT_IN_DEFAULTS["toy"]["length"])
    chosen = {name: origins[name] for name in ("dim", "lr", "heads", "ffn", "seed")}
    assert chosen == {
        "dim": "x.toml", "lr": "environment", "heads": "command line", "ffn": "preset small",
        "seed": "default",
    }  # fmt: skip


def test_task_defaults_do_not_apply_to_files():
    config, _ = resolve(("command line", {"source": "a", "target": "b"}))
    assert config.task is None
    assert config.length == OPTIONS["length"].default


def test_numpy_defaults_have_the_lowest_priority():
    files = {"source": "a", "target": "b"}
    config, origins = resolve(("command line", files), device="numpy")
    assert (config.batch, origins["batch"]) == (2000, "default on numpy")
    assert resolve(("command line", files))[0].batch == 8000
    given = files | {"preset": "base", "batch": "4k"}
    config, origins = resolve(("command line", given), device="numpy")
    assert (config.batch, config.warmup, origins["warmup"]) == (4000, 4000, "preset base")
    toy = resolve(("command line", {"task": "toy"}), device="numpy")[0]
    assert toy == resolve(("command line", {"task": "toy"}))[0]


def test_a_default_warmup_shrinks_with_a_short_run_but_a_given_one_does_not():
    files = {"source": "a", "target": "b", "length": "50u", "preset": "base"}
    assert resolve(("command line", files))[0].warmup == 0.1
    assert resolve(("command line", files | {"length": "60s"}))[0].warmup == 0.1
    assert resolve(("command line", files | {"length": "2e"}))[0].warmup == 4000
    assert (
        resolve(("command line", {"length": "60s"}))[0].warmup == BUILT_IN_DEFAULTS["toy"]["warmup"]
    )
    with pytest.raises(ConfigError, match="warmup"):
        resolve(("command line", files | {"warmup": 400}))


@pytest.mark.parametrize("name", sorted(BUILT_IN_DEFAULTS))
def test_defaults_of_every_task_are_consistent(name):
    assert set(BUILT_IN_DEFAULTS) == set(GENERATED)
    for preset in (None, *MODELS["translation"].presets):
        given = {"task": name} | ({"preset": preset} if preset else {})
        assert resolve(("command line", given))[0].exact_match


def test_toml_gives_back_the_config(tmp_path):
    layers = {"layers": "3:1", "warmup": "7%", "length": "12ku", "source": 'odd "name"\\ü'}
    layers |= {"pad_vocab": False, "kv_heads": 2, "deterministic": True}
    config, origins = resolve(("command line", layers | {"target": "b"}))
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config, origins), encoding="utf-8")
    assert resolve(("file", read_toml(path)))[0] == config
    text = path.read_text(encoding="utf-8")
    assert 'layers = "3:1"  # command line' in text and "pad-vocab = false  # command" in text


@pytest.mark.parametrize("text, message", [
    ("learning_rate = 1", "unknown key 'learning_rate'"),
    ("drop-out = 0.1", "unknown key 'drop-out'. Did you mean 'dropout'"),
    ("dropout = 'much'", "dropout: 'much'"), ("dim = 1.5", "dim: 1.5"), ("dim = [", "no TOML"),
    ("for = 30", "30 is no length"),
])  # fmt: skip
def test_toml_errors_name_the_key(tmp_path, text, message):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_toml(path)


def test_a_missing_toml_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")


def test_differences_name_both_values():
    old = TrainConfig(task="toy", layers=(4, 4))
    new = dataclasses.replace(old, layers=(6, 6), lr=0.1)
    assert differences(old, new) == ["--layers was 4, now 6", "--lr was 0.005, now 0.1"]
    assert differences(old, old) == []


@pytest.mark.parametrize("change", [
    {}, {"schedule": "cosine"}, {"warmup": 0.1}, {"length": Length(100, "e")},
    {"length": Length(100, "s")},
], ids=["invsqrt", "cosine", "a share", "epochs", "seconds"])  # fmt: skip
def test_a_run_may_grow_in_its_unit_under_any_schedule(change):
    short = TrainConfig(task="toy", length="100u", warmup=10, schedule="invsqrt")
    short = dataclasses.replace(short, **change)
    unit = short.length.unit
    long = dataclasses.replace(short, length=Length(200, unit))
    assert differences(short, long) == []
    planned = " learning rate goes on along " in describe_growth(short, long)
    assert planned == (short.schedule == "cosine" or short.warmup == 0.1)
    (shrunk,) = differences(long, short)
    assert f"--for was 200{unit}, now 100{unit} (it may grow, in the same unit)" in shrunk
    other = dataclasses.replace(short, length=Length(300, "u" if unit == "e" else "e"))
    assert len(differences(short, other)) == 1


def test_file_names_are_compared_by_content():
    old = TrainConfig(source="a", target="b", valid_source="c", valid_target="d")
    assert differences(old, dataclasses.replace(old, source="../a", valid_target="../d")) == []
    without = dataclasses.replace(old, valid_source=None, valid_target=None)
    assert len(differences(old, without)) == 2
