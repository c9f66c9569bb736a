"""The version, as ``setup.cfg`` has it."""

import configparser
import contextlib
from pathlib import Path

TREE = Path(__file__).parents[1]


def version() -> str:
    """Return the version of this source tree, or else of the installed package."""
    config = configparser.ConfigParser()
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        config.read(TREE / "setup.cfg", encoding="utf-8")
    if config.get("metadata", "name", fallback=None) == "gpuattn":
        return config["metadata"]["version"]
    from importlib import metadata  # slow to import

    try:
        return metadata.version("gpuattn")
    except metadata.PackageNotFoundError:
        return "unknown"
