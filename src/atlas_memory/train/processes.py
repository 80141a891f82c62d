"""One process of several, as torchrun and accelerate start them."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed


def process() -> int:
    """Which of the processes this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def largest(*values: float) -> tuple[float, ...]:
    """The largest of each value over all processes; all must ask."""
    if processes() == 1:
        return values
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    gathered = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(gathered, torch.distributed.ReduceOp.MAX)
    return tuple(gathered.tolist())


def leave() -> None:
    """Let go of the other processes, at the end of the work that all share.

    A process that ends with its connections open may be aborted: their threads are still running when Python's last
    objects are deleted. The threads end when nothing refers to the group any more. A trainer and its wrapped model do,
    and they refer to each other, so they are collected here (what fsdp leaves in PyTorch's own caches is not). This
    function's own reference is the last to go: deleting it waits for the threads without keeping Python's lock, which
    they may need to end.
    """
    if torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        gc.collect()
        del group
