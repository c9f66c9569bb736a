"""Text generation with the whole search on the device: see ``engine.Engine``."""

from gpuattn.engine.engine import SCORED_TOKENS, Engine

__all__ = ["SCORED_TOKENS", "Engine"]
