"""Optimizers over flat workspaces, learning rates, and averages of parameters."""

from gpuattn.optim.averaging import ExponentialAverage, average_tensors
from gpuattn.optim.optimizers import OPTIMIZERS, SGD, Adam, AdamW, Lamb, Lion, Optimizer
from gpuattn.optim.schedule import SCHEDULES, Schedule

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "Adam",
    "AdamW",
    "ExponentialAverage",
    "Lamb",
    "Lion",
    "Optimizer",
    "Schedule",
    "average_tensors",
]
