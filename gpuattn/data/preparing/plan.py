"""What is prepared, and how: the sources and options of a token store."""

import hashlib
import json
from dataclasses import dataclass, field

from gpuattn.data.preparing.sources import STANDARD, Source
from gpuattn.data.tokenizer import BaseTokenizer
from gpuattn.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """What to prepare.

    ``sources``: of a text, or ``pairs``: (source, target) files whose lines are translations.
    ``tokenizer``: None learns subwords from a sample, "chars" takes all characters.
    ``documents``: end each file, JSON line or row with ``eos``. ``valid``: the share of documents
    or pairs that is held out, chosen by a hash of the text. ``longest`` (tokens of a side),
    ``max_ratio`` (of the tokens of both sides) and ``duplicates``: which pairs are kept. ``mix``:
    {group of sources: weight}. ``workers``: processes, at most.
    """

    sources: tuple[Source, ...] = ()
    pairs: tuple[tuple[Source, Source], ...] = ()
    tokenizer: BaseTokenizer | str | None = None
    vocab_size: int = 8000
    seed: int = 0
    documents: bool = False
    valid: float = 0.0
    longest: int | None = None
    max_ratio: float | None = None
    duplicates: bool = True
    mix: dict[str, float] = field(default_factory=dict)
    workers: int = 1

    @property
    def units(self) -> list[tuple[Source, ...]]:
        """What is read together: a file, or two."""
        return [*self.pairs] if self.pairs else [(source,) for source in self.sources]

    @property
    def files(self) -> list[Source]:
        """All files, in order."""
        return [source for unit in self.units for source in unit]

    @property
    def from_stream(self) -> bool:
        """Whether a source is standard input, which can be read once."""
        return any(source.path == STANDARD for source in self.files)

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if not self.units:
            raise ConfigError("prepare: there are no sources; accepted: files, folders, globs or -")
        if self.mix:
            groups = sorted({source.group for source in self.files})
            if groups != sorted(self.mix):
                raise ConfigError(f"mix names {sorted(self.mix)}; the sources are {groups}")
            if min(self.mix.values()) <= 0 or abs(sum(self.mix.values()) - 1) > 1e-6:
                weights = " + ".join(f"{weight:g}" for weight in self.mix.values())
                raise ConfigError(
                    f"mix: the weights {weights} add up to {sum(self.mix.values()):g}; accepted: "
                    "weights above 0 that add up to 1"
                )
        if self.from_stream and (self.pairs or self.tokenizer == "chars"):
            what = "pairs" if self.pairs else "the characters of a text without --tokenizer FILE"
            raise ConfigError(f"{STANDARD}: {what} cannot come from standard input; give files")

    def key(self) -> str:
        """Return a digest of the sources, as they lie on the disk, and of the options."""
        values = vars(self) | {"workers": 0, "files": [source.stat() for source in self.files]}
        if isinstance(self.tokenizer, BaseTokenizer):
            values["tokenizer"] = hashlib.sha256(self.tokenizer.to_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=vars).encode()).hexdigest()
