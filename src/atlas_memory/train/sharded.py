"""Weights, gradients and the optimiser's state shared out among processes (FSDP2), and checkpoints of that.

checkpoint-N/shards/   weights and optimiser, by torch.distributed.checkpoint: a file of every process, .metadata last
"""

from __future__ import annotations

import os
import pickle
import warnings
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from atlas_memory.models import AtlasConfig
from atlas_memory.train.config import ConfigError, RunConfig
from atlas_memory.train.loaded import check_groups, fitting, number, read_optimizer
from atlas_memory.train.processes import processes

SHARDS = "shards"
_PLAIN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""What `.metadata`, a pickle, is made of; whatever else it names is not called."""


def check(config: RunConfig) -> None:
    """ConfigError if the run is to be sharded and cannot be, whatever its model."""
    if not config.train.fsdp:
        return
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "train.fsdp=True shards weights among the processes of torchrun, and this one was started alone: start it "
            "with torchrun --nproc-per-node N -m atlas_memory train, or leave train.fsdp out"
        )
    if config.train.optimizer != "adamw":
        raise ConfigError(
            f"train.optimizer={config.train.optimizer!r} works on whole matrices, and train.fsdp=True leaves each "
            "process a part of them: take train.optimizer=adamw, or leave train.fsdp out"
        )


def check_model(config: RunConfig, architecture: AtlasConfig) -> None:
    """ConfigError if the run is to be sharded and its model cannot be."""
    if config.train.fsdp and any(period > 1 for period in architecture.continuum_periods or ()):
        raise ConfigError(
            f"model.continuum_periods={architecture.continuum_periods} sums gradients over steps (MultiPeriod), and "
            "sharded checkpoints do not hold such sums: leave train.fsdp out"
        )


def shard(model: Any, device: torch.device) -> None:
    """Leave this process its part of every parameter of an `AtlasForCausalLM`, in place; all processes must call.

    A block's parameters are gathered while it is called, forward or backward, and let go of afterwards; what is in no
    block is gathered together. They stay what they are, float32: mixed precision is autocast's, as without sharding.

    The parts of a copy lie within a machine, and every machine has a copy: between machines gradients alone are sent.
    Where every machine has one process, the machines share one copy.
    """
    if not torch.distributed.is_initialized():  # one process on a CPU, for which accelerate begins no group
        torch.distributed.init_process_group("gloo")
    count, here = processes(), int(os.environ.get("LOCAL_WORLD_SIZE", processes()))
    if 1 < here < count:
        mesh = init_device_mesh(device.type, (count // here, here), mesh_dim_names=("copies", "parts"))
    else:
        mesh = init_device_mesh(device.type, (count,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_weights(model: Any) -> dict[str, Any]:
    """The weights of a sharded model, on the CPU of the first process (others: nothing); all processes must call."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else ()  # gathered, they are two tensors
    return {name: weight for name, weight in weights.items() if name not in tied}


def save(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a sharded model and its optimiser, each process its part; all processes must call."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=checkpoint / SHARDS)


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Read the weights into a model, sharded among any number of processes (all must call) or not at all."""
    weights = get_model_state_dict(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        _read({"model": weights}, checkpoint, no_dist=not isinstance(model, FSDPModule))
    set_model_state_dict(model, weights)


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read the optimiser's state of a sharded model; all processes must call."""
    state = get_optimizer_state_dict(model, optimizer)
    groups = cast(list[dict[str, Any]], state["param_groups"])
    before = [dict(group) for group in groups]
    _read({"optimizer": state}, checkpoint)
    with fitting(checkpoint / SHARDS):
        check_groups(cast(list[dict[str, Any]], state["param_groups"]), before)
    set_optimizer_state_dict(model, optimizer, state)


class ShardedTrainer(Trainer):
    """The Trainer of a model that is sharded, or of one that is not.

    Args:
        model: An `AtlasForCausalLM`.
        fsdp: Whether to shard it, which changes it in place.
        kind: Of its optimiser: "adamw", "muon" or "m3".
    """

    # Accelerate's own FSDP leaves CPUs out and would gather M_0 in bfloat16. So the model comes sharded, and accelerate
    # is kept from putting DistributedDataParallel around it.

    def __init__(self, model: Any, fsdp: bool, kind: str, args: TrainingArguments, **kwargs: Any) -> None:
        self.network, self.fsdp, self.kind = model, fsdp, kind
        if fsdp:
            shard(model, args.device)
        super().__init__(model=model, args=args, **kwargs)
        if fsdp:
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.fsdp:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:  # what stands beside the weights, which all processes write with the optimiser
            self.network.config.save_pretrained(output_dir)
            cast(Any, self.processing_class).save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.fsdp:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save(Path(output_dir), self.network, cast(Any, self.optimizer).optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.fsdp:
            load_weights(Path(resume_from_checkpoint), self.network)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, optimizer, scheduler = Path(checkpoint), cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        if self.fsdp:
            load_optimizer(folder, self.network, optimizer.optimizer)
        else:
            optimizer.load_state_dict(read_optimizer(folder, optimizer.optimizer, self.kind))
        # The step says all that a schedule knows; the checkpoint's own rate may be that of a shorter run.
        scheduler.last_epoch, scheduler._step_count = number(folder) - 1, number(folder) + 1
        scheduler.step()


def is_in(checkpoint: Path) -> bool:
    """Whether a checkpoint is sharded."""
    return (checkpoint / SHARDS).is_dir()


def shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a sharded checkpoint; FileNotFoundError or ValueError if it is not whole."""
    about = _metadata(checkpoint / SHARDS)
    ends: dict[str, int] = {}
    try:
        for part in about.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        found = about.state_dict_metadata.items()
        weights = {name.removeprefix("model."): what for name, what in found if name.startswith("model.")}
        tensors = {name: what for name, what in weights.items() if isinstance(what, TensorStorageMetadata)}
        integers = [name for name, what in tensors.items() if not what.properties.dtype.is_floating_point]
        sizes = {name: tuple(what.size) for name, what in tensors.items()}
    except (AttributeError, TypeError) as error:  # of something else that was pickled
        raise ValueError(f"{SHARDS}/.metadata is damaged ({type(error).__name__})") from error
    for name, end in ends.items():
        if (size := (checkpoint / SHARDS / name).stat().st_size) < end:
            raise ValueError(f"{SHARDS}/{name} has {size:,} of {end:,} bytes")
    if integers:
        raise ValueError(f"the weight {integers[0]} in {SHARDS} is of whole numbers, and weights are floating-point")
    return sizes


def _read(state: dict[str, Any], checkpoint: Path, no_dist: bool = False) -> None:
    """Read what a sharded checkpoint has of `state` into it; ConfigError if that does not fit."""
    with fitting(checkpoint / SHARDS):
        try:
            dcp.load(state, storage_reader=_Reader(checkpoint / SHARDS), planner=_Planner(), no_dist=no_dist)
        except CheckpointException as error:  # which is none that `except Exception` knows
            raise ValueError(str(next(iter(error.failures.values()))[0])) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """PyTorch's own, which would call whatever `.metadata` names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            _Unpickler(file).load()  # or an error
        return super().read_metadata(*args, **kwargs)


class _Planner(dcp.DefaultLoadPlanner):
    """PyTorch's own, which would call whatever a value that is no tensor names."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        torch.load(value, weights_only=True)  # or an error
        value.seek(0)
        super().load_bytes(read_item, value)


def _metadata(shards: Path) -> Metadata:
    try:
        return _Reader(shards).read_metadata()
    except FileNotFoundError:
        raise
    except Exception as error:  # a pickle that was cut short raises many types
        raise ValueError(f"{SHARDS}/.metadata is damaged ({type(error).__name__})") from error
