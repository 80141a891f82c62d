"""Configuration, the training run and its folder."""

from atlas_memory.training.config import RunConfig, load_config
from atlas_memory.training.runs import load_run
from atlas_memory.training.trainer import train

__all__ = ["RunConfig", "load_config", "load_run", "train"]
