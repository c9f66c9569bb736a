"""Text generation with the whole search on the device: see ``engine.Engine``."""

from gpuattn.engine.engine import SCORED_TOKENS, Engine
from gpuattn.engine.lookup import MOST_PROPOSED, Speculation

__all__ = ["MOST_PROPOSED", "SCORED_TOKENS", "Engine", "Speculation"]
