"""What training, benchmarks and decoding share on a device: memory, graphs, files, the step."""

import importlib

MODULES = {"TrainingStep": "training_step", "Workspace": "workspace"}  # imported on first use

__all__ = ["TrainingStep", "Workspace"]


def __getattr__(name: str) -> object:
    if name in MODULES:
        return getattr(importlib.import_module(f"gpuattn.runtime.{MODULES[name]}"), name)
    raise AttributeError(f"module 'gpuattn.runtime' has no attribute {name!r}")
