"""Training: settings, the run and its folder, optimizers. Names are imported lazily, so that logs need no torch."""

from typing import TYPE_CHECKING

from atlas_memory.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from atlas_memory.train.config import RunConfig, load_config
    from atlas_memory.train.optim import M3, MultiPeriod, m3_groups, split_by_period
    from atlas_memory.train.run_model import load_run
    from atlas_memory.train.trainer import train

__all__ = ["M3", "MultiPeriod", "RunConfig", "load_config", "load_run", "m3_groups", "split_by_period", "train"]

_MODULES = dict.fromkeys(("M3", "MultiPeriod", "m3_groups", "split_by_period"), ".optim")
_MODULES |= {"RunConfig": ".config", "load_config": ".config", "load_run": ".run_model", "train": ".trainer"}
__getattr__ = lazy_getattr(__name__, _MODULES)
