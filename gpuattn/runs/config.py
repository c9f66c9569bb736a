"""The options of a training run: one table with defaults and limits.

The command line, TOML files and programs all go through ``resolve``, so that they accept the same
values and raise the same errors.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gpuattn.data.batching import BATCHING
from gpuattn.data.generated import find_generated
from gpuattn.data.text import ON_LONG
from gpuattn.errors import ConfigError
from gpuattn.models.config import CHECKPOINT, CHOICES
from gpuattn.models.kinds import MODELS
from gpuattn.optim import OPTIMIZERS, SCHEDULES
from gpuattn.runtime.precision import PRECISIONS
from gpuattn.tasks.registry import (
    TASKS,
    has_option,
    models_of,
    models_with,
    task_for,
    task_of,
)
from gpuattn.tasks.task import DATA_FILES, MOST_BEAMS
from gpuattn.typing import StrPath
from gpuattn.units import (
    AUTO,
    Length,
    OneOf,
    choice,
    flag,
    nearest,
    number,
    or_auto,
    parse_count,
    parse_layers,
    parse_length,
    parse_share,
    parse_warmup,
    shown,
    text,
    whole,
)

KEYS = {"length": "for", "origin": "from"}  # fields whose option has another name


DEFAULT_MODEL = next(iter(MODELS))


def _option(default, parse):
    """Declare a field by its default and what checks its value."""
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes. Values are parsed and checked on construction.

    Data: ``task`` is a built-in one, or None where ``source`` and ``target`` name files, or
    ``pairs`` a token store (``data.store``); ``valid_source``, ``valid_target`` files;
    ``vocab_size`` the most subwords, of both languages together; ``max_len`` the most tokens of a
    sentence, ``on_long`` whether longer ones are left out or an error; ``seed`` decides data order,
    first parameters and dropout. For a language model instead: ``lm`` and ``valid_lm`` name texts
    or token stores, ``documents`` whether no token attends to another document of a store,
    ``tokenizer`` is "subwords" or "chars" where there is no store, ``block`` the tokens that it
    sees. For masked tokens of the same texts: ``mask``, the share that is to be guessed; ``block``
    is then the longest line, longer ones are cut. For a classifier of images: ``images`` and
    ``valid_images`` name folders of classes or .npz files, ``image_size``, ``patch`` and
    ``channels`` are as in a ViTConfig, ``shift`` the pixels by which training moves images,
    ``flip`` whether it mirrors half of them, ``mixup`` as in ``data.images.ImageLoader``. For a
    classifier of texts: ``classify`` and ``valid_classify`` name files of lines with labels; longer
    lines than ``block`` are cut. Model: ``model`` is a name in ``models.kinds.MODELS``, whose
    config has the fields of the model; None for ``positions`` and ``activation``: the model's
    default; ``init_from``: the folder of a run whose weights and tokenizer this run begins with;
    ``origin``: a folder of Hugging Face, whose model (fields that ``fine_tuning`` gives), weights
    and tokenizer it begins with; ``freeze``: patterns, with commas between them, of parameters that
    stay. Optimisation: ``batch`` tokens on the longer side, or "auto": what fits the GPU;
    ``batching`` one of ``data.batching.BATCHING``, ``accumulate`` batches an update of each of
    ``replicas``, which one process computes in turn or several share, ``outer_every`` updates that
    each replica makes alone before a step of all (0: each update is of all), ``checkpoint`` as in
    ``models.config.CHECKPOINT``, ``optimizer`` one of ``optim.OPTIMIZERS``, ``beta2`` of adamw and
    adam, ``lr`` the peak of ``schedule`` after ``warmup`` (updates, or a share of the run),
    ``lr_floor`` the share of it where cosine and linear end, ``lr_decay`` the updates after which
    they end (0: those of the run), ``label_smoothing``, ``clip`` (0: never), ``weight_decay``.
    ``length`` of the run; ``patience``: evaluations without a better one before it stops (0: off);
    ``until``: for a built-in task, the exact match in % that every kind of pair must reach in two
    evaluations in a row for the run to stop (0: off). Evaluation: ``eval_every``, or "auto": as
    ``train.trainer`` says; ``score_pairs`` sentences are translated each time; ``beam`` and
    ``length_penalty`` of translations later; ``ema`` decay of a moving average of the parameters
    (0: off); ``average`` the last checkpoints in the end (0: off). ``precision``;
    ``deterministic``: the same bits in every run on a GPU too; ``threads`` of BLAS on NumPy, or
    "auto": as ``train.threads`` measures.

    Raises ConfigError that names the option, what came, and what is accepted.
    """

    task: str | None = _option(None, lambda name: find_generated(name).name)
    source: str | None = _option(None, text)
    target: str | None = _option(None, text)
    pairs: str | None = _option(None, text)
    valid_source: str | None = _option(None, text)
    valid_target: str | None = _option(None, text)
    lm: str | None = _option(None, text)
    valid_lm: str | None = _option(None, text)
    documents: bool = _option(False, flag)
    mask: float | None = _option(None, parse_share)
    tokenizer: str = _option("subwords", choice("subwords", "chars"))
    vocab_size: int = _option(10_000, parse_count)
    max_len: int = _option(256, whole(1))
    on_long: str = _option("skip", choice(*ON_LONG))
    images: str | None = _option(None, text)
    valid_images: str | None = _option(None, text)
    shift: int = _option(0, whole(0))
    flip: bool = _option(False, flag)
    mixup: float = _option(0.0, number(0))
    classify: str | None = _option(None, text)
    valid_classify: str | None = _option(None, text)
    seed: int = _option(1, whole(0))

    model: str = _option(DEFAULT_MODEL, OneOf(MODELS))
    dim: int = _option(128, whole(2))
    heads: int = _option(4, whole(1))
    kv_heads: int | None = _option(None, whole(1))
    layers: tuple[int, int] = _option((4, 4), parse_layers)
    ffn: int = _option(256, whole(1))
    block: int = _option(256, whole(1))
    image_size: int = _option(224, whole(1))
    patch: int = _option(16, whole(1))
    channels: int = _option(3, whole(1))
    bias: bool = _option(True, flag)
    dropout: float = _option(0.3, number(0, below=1))
    attention_dropout: float = _option(0.0, number(0, below=1))
    stochastic_depth: float = _option(0.0, number(0, below=1))
    layer_drop: float = _option(0.0, number(0, below=1))
    norm: str = _option("pre", choice(*CHOICES["norm"]))
    positions: str | None = _option(None, choice(*CHOICES["positions"]))
    activation: str | None = _option(None, choice(*CHOICES["activation"]))
    pad_vocab: bool = _option(True, flag)
    init_from: str | None = _option(None, text)
    origin: str | None = _option(None, text)
    freeze: str | None = _option(None, text)

    batch: int | str = _option(8000, or_auto(parse_count))
    batching: str = _option("packed", choice(*BATCHING))
    accumulate: int = _option(1, whole(1))
    replicas: int = _option(1, whole(1))
    outer_every: int = _option(0, whole(0))
    checkpoint: str = _option("none", choice(*CHECKPOINT))
    optimizer: str = _option("adamw", choice(*OPTIMIZERS))
    lr: float = _option(5e-3, number(0, above=True))
    beta2: float = _option(0.98, number(0, below=1))
    schedule: str = _option("cosine", choice(*SCHEDULES))
    lr_floor: float = _option(0.0, number(0, most=1))
    lr_decay: int = _option(0, whole(0))
    warmup: int | float = _option(0.1, parse_warmup)
    label_smoothing: float = _option(0.1, number(0, below=1))
    clip: float = _option(1.0, number(0))
    weight_decay: float = _option(0.0, number(0))
    precision: str = _option("auto", choice("auto", *PRECISIONS))
    deterministic: bool = _option(False, flag)
    threads: int | str = _option(AUTO, or_auto(whole(1)))

    length: Length = _option(Length(120, "e"), parse_length)
    patience: int = _option(0, whole(0))
    until: float = _option(0.0, number(0, most=100))

    eval_every: Length | str = _option(AUTO, or_auto(parse_length))
    score_pairs: int = _option(1000, whole(0))
    beam: int = _option(5, whole(1, MOST_BEAMS))
    length_penalty: float = _option(1.0, number(0))
    ema: float = _option(0.998, number(0, below=1))
    average: int = _option(0, whole(0))

    def __post_init__(self):
        kind = MODELS.get(self.model)
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and kind and self.has(option.name):
                value = kind.defaults.get(option.name)
            if value is not None:
                object.__setattr__(self, option.name, parse_option(option.name, value))
        if self.classify and self.model not in models_with("classify"):
            raise ConfigError(f"classify is for {_owners('classify', self.model)}")
        task_of(self).check(self)
        for name, option in OPTIONS.items():
            if not self.has(name) and getattr(self, name) != option.default:
                raise ConfigError(f"{option_key(name)} is for {_owners(name, self.model)}")
        if self.origin is None:
            self._check_model()
        elif self.pairs or self.init_from:
            other = "--init-from" if self.init_from else "--pairs"
            raise ConfigError(f"--from and {other} are given; accepted: one of both")
        if self.length.unit == "u" and self.warmup > self.length.amount:
            raise ConfigError(
                f"warmup is {self.warmup} updates; accepted: at most those of the run, "
                f"{self.length.amount}. Try --warmup 5%"
            )
        if self.outer_every and self.ema:
            raise ConfigError(
                f"ema is {self.ema:g}; accepted: 0 with outer-every, where each replica has "
                "parameters of its own. Give --ema 0"
            )
        if self.schedule == "invsqrt" and not self.warmup:
            raise ConfigError("warmup is 0; accepted: above 0 for the schedule invsqrt")

    def _check_model(self):
        """Raise ConfigError for a new model of sizes that do not fit together."""
        MODELS[self.model].check(self)
        if self.dim % self.heads:
            raise ConfigError(f"heads is {self.heads}; accepted: a divisor of dim, {self.dim}")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(
                f"kv-heads is {self.kv_heads}; accepted: a divisor of heads, {self.heads}"
            )
        if self.positions == "rotary" and self.dim // self.heads % 2:
            raise ConfigError(
                f"dim / heads is {self.dim // self.heads}; accepted: an even number for positions "
                "rotary"
            )

    def has(self, name: str) -> bool:
        """Return whether the run has a field: its model, for the task that the data name."""
        return has_option(self.model, task_of(self), name)

    @property
    def update_batches(self) -> int:
        """Batches of an update, of all replicas."""
        return self.accumulate * self.replicas

    @property
    def exact_match(self) -> bool:
        """Whether sentences have one right translation, as those of built-in tasks do."""
        return self.task is not None


OPTIONS = {option.name: option for option in fields(TrainConfig)}


def option_key(name: str) -> str:
    """Return the name of the option of a field: ``eval_every`` as ``eval-every``, ``length`` as
    ``for``."""
    return KEYS.get(name, name).replace("_", "-")


def field_name(key: str) -> str:
    """Return the field of an option, written with dashes or underscores."""
    name = key.replace("-", "_")
    return next((field for field, known in KEYS.items() if known == name), name)


def _owners(name, model):
    """Return what an option is for, and that a run of ``model`` is not that, in words."""
    if model not in models_with(name):
        return f"--model {' or '.join(models_with(name))}, not {model}"
    fields = [TASKS[task].chosen_by[0] for task in MODELS[model].tasks
              if name in TASKS[task].options]  # fmt: skip
    return f"--{' or --'.join(map(option_key, fields))}, not for what this {model} learns from"


def parse_option(name: str, value: Any) -> Any:
    """Return the checked value of a field; ConfigError begins with the option."""
    try:
        return OPTIONS[name].metadata["parse"](value)
    except ConfigError as error:
        if name == "task":
            raise
        raise ConfigError(f"{option_key(name)}: {error}") from None


def resolve(
    *layers: tuple[str, dict[str, Any]], device: str | None = None
) -> tuple[TrainConfig, dict[str, str]]:
    """Return (TrainConfig, {field: origin}) from layers of (origin, {field: value}), lowest first.

    Below them are the defaults, those of the model, those of ``device`` ("numpy", "cuda" or None)
    and those of the built-in task. A layer may have ``preset``, which is right above the defaults.
    """
    given = {name: (value, origin) for origin, values in layers for name, value in values.items()}
    preset, _ = given.pop("preset", (None, None))
    fitting = [task for task in TASKS.values() if any(name in given for name in task.chosen_by)]
    if fitting:  # the first of those that know most of what is given
        task = max(fitting, key=lambda task: len(given.keys() & set(task.options)))
        given.setdefault("model", (models_of(task)[0], "default"))
    kind = MODELS[parse_option("model", given.get("model", (DEFAULT_MODEL, None))[0])]
    values = {name: value for name, (value, _) in given.items()}
    task = task_for(kind.name, values)
    found = task.default_data(values)
    given |= {name: (value, "default") for name, value in found.items()}
    below = [
        ("default", kind.defaults),
        (f"default on {device}", kind.device_defaults.get(device or "", {})),
        ("default", task.data_defaults(values | found)),
    ]
    if preset is not None:
        below.append((f"preset {preset}", kind.presets[OneOf(kind.presets)(preset)]))
    lower = {
        name: (value, origin)
        for origin, values in below
        for name, value in values.items()
        if has_option(kind.name, task, name)
    }
    chosen = lower | given
    if "warmup" not in given and not _has_room_for_warmup(chosen):
        chosen["warmup"] = (0.1, "default")
    if "length" in given and "lr_decay" not in given and not _is_time(given["length"][0]):
        chosen.pop("lr_decay", None)  # of a built-in task: the requested length wins
    config = TrainConfig(**{name: value for name, (value, _) in chosen.items()})
    return config, {name: chosen[name][1] if name in chosen else "default" for name in OPTIONS}


def default_batch(config: TrainConfig, device: str) -> int | str:
    """Return the tokens of a batch for the model and the data of a config, if none are given."""
    data = {name: getattr(config, name) for name in ("model", "task", *DATA_FILES)}
    given = {name: value for name, value in data.items() if value is not None}
    return resolve(("", given), device=device)[0].batch


def _is_time(length):
    return parse_option("length", length).unit == "s"


def _has_room_for_warmup(chosen):
    """Return whether the run is long enough for a default number of warm-up updates."""
    length = parse_option("length", chosen.get("length", (TrainConfig.length,))[0])
    warmup = chosen.get("warmup", (TrainConfig.warmup,))[0]
    if isinstance(warmup, float) or length.unit == "e":
        return True
    return length.unit == "u" and length.amount >= warmup


def read_toml(path: StrPath) -> dict[str, Any]:
    """Return {field: value} of a TOML file of options, ``preset`` among them.

    Raises ConfigError for a missing or damaged file and an unknown key, with the nearest one.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from error
    values = {}
    for key, value in table.items():
        name = field_name(key)
        if name != "preset" and name not in OPTIONS:
            known = [*map(option_key, OPTIONS), "preset"]
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key.replace('_', '-'), known)}")
        values[name] = value if name == "preset" else parse_option(name, value)
    return values


def to_toml(config: TrainConfig, origins: Mapping[str, str] | None = None) -> str:
    """Return the text of ``read_toml`` for a config, with the origin of each value."""
    lines = []
    for name in OPTIONS:
        value = getattr(config, name)
        if value is not None and config.has(name):
            line = f"{option_key(name)} = {_toml_value(value)}"
            origin = (origins or {}).get(name, "default")
            lines.append(line if origin == "default" else f"{line}  # {origin}")
    return "\n".join(lines) + "\n"


def _toml_value(value):
    if isinstance(value, Length):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f'"{shown(value)}"'
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def differences(
    old: TrainConfig, new: TrainConfig, names: Iterable[str] | None = None
) -> list[str]:
    """Return sentences on the options that differ between a run and a new request: among all
    options, or ``names``."""
    return [
        f"--{option_key(name)} was {shown(getattr(old, name))}, now {shown(getattr(new, name))}"
        f"{' (it may grow, in the same unit)' if name == 'length' else ''}"
        for name in names or OPTIONS
        if getattr(old, name) != getattr(new, name) and not _may_change(name, old, new)
    ]


def _may_change(name, old, new):
    """Return whether a resumed run may have another value: what is recomputed, the threads, a
    longer length, and other names of files, whose content is compared when they are read."""
    if name == "length":
        return old.length.unit == new.length.unit and old.length.amount < new.length.amount
    if name in (*DATA_FILES, "init_from"):
        return None not in (getattr(old, name), getattr(new, name))
    return name in ("checkpoint", "threads")


def describe_growth(old: TrainConfig, new: TrainConfig) -> str:
    """Return a sentence on the learning rate of a run that gets longer."""
    text = f"--for was {old.length}, now {new.length}"
    to_its_end = new.schedule in ("cosine", "linear") or isinstance(new.warmup, float)
    if to_its_end and not new.lr_decay:
        planned = f"the {new.schedule} schedule of {new.length.describe()}"
        text += f": the learning rate goes on along {planned}"
    return text


def plain(value: Any) -> int | float | str:
    """Return a value for JSON: a number, or else the text of the option."""
    return value if isinstance(value, int | float) else shown(value)
