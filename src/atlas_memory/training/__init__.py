"""Optimisers; configuration, the training run and its folder."""

from atlas_memory.training.config import RunConfig, load_config
from atlas_memory.training.optimisers import M3, m3_groups
from atlas_memory.training.periods import MultiPeriod, split_by_period
from atlas_memory.training.runs import load_run
from atlas_memory.training.trainer import train

__all__ = ["M3", "MultiPeriod", "RunConfig", "load_config", "load_run", "m3_groups", "split_by_period", "train"]
