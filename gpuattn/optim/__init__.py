"""Optimizers over flat workspaces, learning rates, and averages of parameters."""

from gpuattn.optim.adamw import AdamW
from gpuattn.optim.averaging import ExponentialAverage, average_tensors
from gpuattn.optim.schedule import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "AdamW", "ExponentialAverage", "Schedule", "average_tensors"]
