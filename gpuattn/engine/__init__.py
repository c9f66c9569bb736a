"""Text generation with the whole search on the device: see ``engine.Engine``."""

from gpuattn.engine.engine import Engine

__all__ = ["Engine"]
