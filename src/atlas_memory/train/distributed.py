"""Training by several processes, as torchrun and accelerate start them; FSDP2."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def all_reduce_max(*values: float) -> tuple[float, ...]:
    """The largest of each value over all processes; all must call."""
    if world_size() == 1:
        return values
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    gathered = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(gathered, torch.distributed.ReduceOp.MAX)
    return tuple(gathered.tolist())


def barrier() -> None:
    """Wait for all processes, if there are several."""
    if world_size() > 1:
        torch.distributed.barrier()


def destroy_process_group() -> None:
    """Leave the process group at the end of a run.

    Its threads end when nothing refers to it any more: a trainer and its wrapped model are collected, and the last
    reference is deleted without Python's lock, which the threads may need.
    """
    if torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        gc.collect()
        del group


def shard(model: Any, device: torch.device) -> None:
    """Shard the parameters of an `AtlasForCausalLM` among all processes, in place; all must call.

    A block's parameters are gathered while it computes; those outside of blocks are gathered together. They stay
    float32: mixed precision is autocast's. Every machine holds a whole copy, so that only gradients are sent between
    machines; where every machine has one process, machines share one copy.
    """
    if not torch.distributed.is_initialized():  # one process on a CPU, for which accelerate begins no group
        torch.distributed.init_process_group("gloo")
    count, here = world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if 1 < here < count:
        mesh = init_device_mesh(device.type, (count // here, here), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (count,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gather_weights(model: Any) -> dict[str, Any]:
    """The weights of a sharded model, on the CPU of the first process (others: nothing); all processes must call."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else ()  # gathered, they are two tensors
    return {name: weight for name, weight in weights.items() if name not in tied}
