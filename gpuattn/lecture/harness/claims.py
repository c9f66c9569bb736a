"""The 120 claims and their five sources: ``claims.toml``."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "claims.toml"


@dataclass(frozen=True)
class Claim:
    """A claim, in our own words; the fields are explained at the top of ``claims.toml``."""

    id: str
    place: str
    chapter: int
    kind: str
    claim: str
    printed: Mapping[str, Any] = field(default_factory=dict)
    right: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    why: str | None = None


@functools.cache
def load() -> tuple[dict[str, str], dict[str, Claim]]:
    """Return the sources by letter, and the claims by id."""
    with FILE.open("rb") as file:
        rows = tomllib.load(file)
    sources = rows.pop("sources")
    return sources, {id: Claim(id, **row) for id, row in rows.items()}
