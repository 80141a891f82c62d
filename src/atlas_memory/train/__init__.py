"""Optimisers; configuration, the training run and its folder. Each is imported when it is first asked for, so that the
logs of a run can be read without torch."""

from typing import TYPE_CHECKING

from atlas_memory.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from atlas_memory.train.config import RunConfig, load_config
    from atlas_memory.train.optimisers import M3, m3_groups
    from atlas_memory.train.periods import MultiPeriod, split_by_period
    from atlas_memory.train.runs import load_run
    from atlas_memory.train.trainer import train

__all__ = ["M3", "MultiPeriod", "RunConfig", "load_config", "load_run", "m3_groups", "split_by_period", "train"]

__getattr__ = lazy_getattr(
    __name__,
    {
        "M3": ".optimisers",
        "MultiPeriod": ".periods",
        "RunConfig": ".config",
        "load_config": ".config",
        "load_run": ".runs",
        "m3_groups": ".optimisers",
        "split_by_period": ".periods",
        "train": ".trainer",
    },
)
