"""What is known of a model of Hugging Face: its config, and the names and places of its tensors.

One table of rules serves both directions: a rule names a parameter of ours and the tensors that are
its rows, and says how they lie in the folder. Loading writes each tensor into the view of its
parameter that the rule describes, saving reads the same view.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuattn.nn.module import Module
from gpuattn.pretrained.settings import Settings
from gpuattn.pretrained.tokens import files_of, load_tokenizer
from gpuattn.typing import StrPath

FIELDS = {"{i}": r"(?P<i>\d+)", "{p}": "(?P<p>weight|bias)"}  # a layer; a weight and its bias


class Rule(NamedTuple):
    """The tensors ``names`` are, one after the other, the rows of the parameter ``path``.

    ``turned``: matrices are (in, out) in the folder. ``padded``: only the rows of the vocabulary
    are in the folder; those after them are zeros. ``heads``: the names are queries, keys and values
    of rotary attention, or the norm of one, where the first D / 2 rows of a query or key head are
    the even ones of ours, and the others the odd ones. ``shaped``: (rows of the parameter, config)
    to the view of them that has the tensor's shape, where that is another.
    Names with ``{i}`` for a path without it are of all layers, one after the other.
    """

    names: tuple[str, ...]
    path: str
    turned: bool
    padded: bool
    heads: bool
    shaped: Callable[[Any, Any], Any] | None


def rule(
    names: str, path: str, *, turned: bool = False, padded: bool = False, heads: bool = False,
    shaped: Callable[[Any, Any], Any] | None = None,
) -> Rule:  # fmt: skip
    """Return a Rule. ``{i}`` and ``{p}`` stand for a layer's number and for weight or bias.

    >>> rule("h.{i}.[q|k].{p}", "layers.{i}.qk.{p}").names
    ('h.{i}.q.{p}', 'h.{i}.k.{p}')
    """
    before, bracket, rest = names.partition("[")
    if not bracket:
        return Rule((names,), path, turned, padded, heads, shaped)
    inside, _, after = rest.partition("]")
    each = tuple(before + n + after for n in inside.split("|"))
    return Rule(each, path, turned, padded, heads, shaped)


def in_one(rows: Any, config: Any) -> Any:
    """Return the rows with an axis of size 1 before them: a ``shaped`` of rules."""
    return rows[None]


class Part(NamedTuple):
    """A tensor of a folder: its name without prefix, and its place in a parameter.

    ``view``: (array of the parameter's shape) to the view that holds the tensor, in its order but
    perhaps with more axes.
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[Any], Any]


@dataclass(frozen=True)
class Architecture:
    """A ``model_type`` of transformers, and the model of ours that computes the same.

    ``tasks``: {name: patterns of tensors that it leaves out}, the first is the usual one.
    ``classes``: of transformers, whose tensors are all in ours. ``heads``: {one of them: its task},
    where that is not the usual one.
    ``configure``: (Settings, names of the tensors, task) to the config of ``model``.
    ``describe``: that config to the keys of config.json. ConfigError where there are none.
    ``prefix``: of the names in files; some have it, some not. ``bare``: patterns of names that
    never have it. ``renamed``: {end of a name in old files: its end now}.
    ``tied``: {name: the tensor that it repeats} where no parameter of its own has the name.
    ``ignored``: {pattern: why the tensor is of no use}, for those without a parameter. ``kept``:
    the same of small ones that saving writes as they were. ``beside``: (config) to {name: bytes} of
    files that a folder has beside config and weights; those of a loaded model's own folder are
    saved instead. ``tokenizer``: (folder) to its tokenizer, or to what a user of the model has in
    the place of one; ``tokenizer_files``: that to {name: bytes} of the files that are saved of it.
    Patterns are regular expressions for whole names.
    """

    model_type: str
    model: type[Module]
    tasks: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...]
    configure: Callable[[Settings, set[str], str | None], Any]
    describe: Callable[[Any], dict[str, Any]]
    rules: tuple[Rule, ...]
    prefix: str
    heads: Mapping[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    beside: Callable[[Any], dict[str, bytes]] = lambda config: {}
    tokenizer: Callable[[StrPath], Any] = load_tokenizer
    tokenizer_files: Callable[[Any], dict[str, bytes]] = files_of

    def usual_task(self, config: Mapping[str, Any]) -> str:
        """Return the task that a folder is for, by its config.json."""
        classes = config.get("architectures")
        found = classes if isinstance(classes, list) else []
        heads = (self.heads[name] for name in found if name in self.heads)
        return next(heads, next(iter(self.tasks)))

    def plain(self, name: str) -> str:
        """Return the name of a tensor as the rules have it, from its name in a file."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name

    def written(self, name: str) -> str:
        """Return the name in a file, from that in the rules."""
        return name if matches(name, self.bare) else self.prefix + name

    def parts(self, path: str, shape: tuple[int, ...], config: Any) -> Iterator[Part]:
        """Yield the tensors that make up a parameter of ``shape``. ``config``: of the model."""
        one, found = self._rule_of(path)
        if "{i}" in one.names[0] and "i" not in found:
            layers = range(config.stacks[-1][0])
            one = one._replace(names=[n.replace("{i}", str(i)) for i in layers for n in one.names])
        turned = one.turned and len(shape) == 2
        first = 0
        for n, (template, rows) in enumerate(
            zip(one.names, _rows(one, shape, config), strict=True)
        ):
            name = template
            for key, value in found.items():
                name = name.replace(f"{{{key}}}", value)
            own = (rows, *shape[1:])
            pairs = config.head_size // 2 if one.heads and n < 2 else None
            shaped = one.shaped and partial(one.shaped, config=config)
            view = partial(_view, first=first, rows=rows, turned=turned, pairs=pairs, shaped=shaped)
            if shaped:
                shape_there = shaped(np.empty(own, np.int8)).shape
            else:
                shape_there = own[::-1] if turned else own
            yield Part(name, shape_there, view)
            first += rows

    def _rule_of(self, path):
        for one in self.rules:
            pattern = re.escape(one.path).replace(r"\{", "{").replace(r"\}", "}")
            for key, expression in FIELDS.items():
                pattern = pattern.replace(key, expression)
            found = re.fullmatch(pattern, path)
            if found:
                return one, found.groupdict()
        raise AssertionError(f"no rule of {self.model_type} has a place for {path}")


def _rows(one, shape, config):
    """Return how many rows of a parameter each name of its rule has."""
    if one.heads and len(one.names) > 1:
        size, keys = config.head_size, config.kv_heads or config.heads
        return [config.heads * size, keys * size, keys * size]
    rows = config.vocab if one.padded else shape[0]
    return [rows // len(one.names)] * len(one.names)


def _view(array, *, first, rows, turned, pairs, shaped):
    """Return the view of a Part; with ``pairs``, (heads, 2, pairs, ...) of rows (pairs, 2)."""
    part = array[first : first + rows]
    if shaped:
        return shaped(part)
    if pairs:
        return part.reshape(-1, pairs, 2, *part.shape[1:]).swapaxes(1, 2)
    return part.T if turned else part


def matches(name: str, patterns: Any) -> bool:
    """Return whether one of the patterns describes the whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


ARCHITECTURES: dict[str, Architecture] = {}  # by model_type


def register(architecture: Architecture) -> Architecture:
    """Add an architecture; return it. Raises ValueError where its model_type is taken."""
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"register: there is a {architecture.model_type!r} already")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture
