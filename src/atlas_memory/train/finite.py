"""Whether a run still computes with numbers, and what to do when it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from atlas_memory.train.checkpoints import newest_step
from atlas_memory.train.processes import largest


def finite(model: Any) -> bool:
    """Whether all weights are numbers; of a sharded model, those of this process."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return bool(torch.stack([part.detach().isfinite().all() for part in parts]).all())


def check_finite(step: int, folder: Path, loss: float, norm: float) -> None:
    """ValueError in all processes, which all must call, unless the loss of each and the gradient's norm are finite;
    before the ``step``, counted from 1, changes the weights."""
    wrong = largest(math.isnan(loss), math.isinf(loss), math.isnan(norm), math.isinf(norm))
    told = ("the loss is nan", "the loss is inf", "the norm of the gradient is nan", "the norm of the gradient is inf")
    for what, found in zip(told, wrong, strict=True):
        if found and step == 1:
            raise ValueError(
                f"{what} at step 1, before any weight has changed, so that it is not train.learning_rate: look at the "
                "rule (raw inner steps, or a part of your own whose memory diverges), at the weights "
                "that it began with, or for damaged text"
            )
        if found:
            raise not_finite(what, step, folder)


def not_finite(what: str, step: int, folder: Path) -> ValueError:
    """What to say of a run that came to its end so; it cannot be resumed with another learning rate."""
    last = newest_step(folder)
    first = (
        "" if last < 0 else f" (model.init_from={folder / f'checkpoint-{last}'} begins with the last weights before)"
    )
    return ValueError(
        f"{what} at step {step}: lower train.learning_rate in a run with another output_dir{first}, or look for "
        "damaged text; nothing was saved of this step, and earlier checkpoints are kept"
    )
