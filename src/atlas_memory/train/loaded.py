"""What a checkpoint holds besides the weights, looked at before it is used: a moment of another shape than its weights'
would write over foreign memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerState

from atlas_memory.train.config import ConfigError
from atlas_memory.train.yaml_files import read_json

STATE, OPTIMIZER, RANDOM = "trainer_state.json", "optimizer.pt", "rng_state*.pth"
_MOMENTS = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "muon": {"momentum_buffer"},
    "m3": {"fast", "slow", "slow_direction", "square"},
}
"""Of each kind of optimiser: what it keeps of a parameter, in the parameter's shape."""
LARGEST_STATE = 2**30
"""Bytes of Trainer's state, at most; it has a line for every step."""


def number(checkpoint: Path) -> int:
    """The step of a `checkpoint-N`."""
    return int(checkpoint.name.partition("-")[2])


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Around the loading of a file of a checkpoint: ConfigError that names it where it does not fit the run."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # what reads pickles, JSON and random states raises a dozen types
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{str(path)!r} does not fit this run ({said[:200]}): delete {path.parent.name}, and --resume goes on from "
            "the checkpoint before"
        ) from error


def read_state(checkpoint: Path) -> TrainerState:
    """The state of transformers' Trainer; ConfigError if it is none, or of another step than the checkpoint's name."""
    with fitting(checkpoint / STATE):
        said = read_json(checkpoint / STATE, LARGEST_STATE)
        state, usual = TrainerState(**said), TrainerState()
        for name, value in said.items():
            if not _alike(value, getattr(usual, name)):
                raise ValueError(f"{name} is {value!r}")
        if state.global_step != number(checkpoint):
            raise ValueError(f"it is of step {state.global_step}")
        if state.best_model_checkpoint is not None or not all(isinstance(line, dict) for line in state.log_history):
            raise ValueError("it is not what a run of ours leaves")
    return state


def _alike(value: Any, usual: Any) -> bool:
    """Whether a value is of the kind of another: a truth, a finite number of at least 0, or of the same type."""
    if usual is None or isinstance(usual, bool):
        return value is None or isinstance(value, bool | int | float | str) if usual is None else value in (True, False)
    if isinstance(usual, int | float):
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63
    return isinstance(value, type(usual))


def read_optimizer(checkpoint: Path, optimizer: Optimizer, kind: str) -> dict[str, Any]:
    """What is in `optimizer.pt`, if `optimizer`, of that `kind` ("adamw", "muon", "m3"), can go on from it; ConfigError
    if not."""
    path = checkpoint / OPTIMIZER
    with fitting(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        ours = optimizer.state_dict()
        if ours.keys() != state.keys():
            raise ValueError(f"it has {', '.join(map(str, state))}, and the optimiser {', '.join(ours)}")
        check_groups(state["param_groups"], ours["param_groups"])
        # Options that a newer PyTorch has and an older one had not are as they would be.
        state["param_groups"] = [b | a for a, b in zip(state["param_groups"], ours["param_groups"], strict=True)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = [_kind(kind, group) for group in optimizer.param_groups for _ in group["params"]]
        for i, held in state["state"].items():
            _check_held(held, parameters[_index(i, parameters)], kinds[i], number(checkpoint), f"parameter {i}")
        _check_count("steps", state.get("steps", 0), number(checkpoint))
        for i, total in state.get("accumulated", {}).items():
            _check_tensor(total, parameters[_index(i, parameters)], f"the sum of gradients of parameter {i}")
    return state


def check_groups(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """ValueError unless two lists of parameter groups have the same parameters and settings, but for the rate of the
    step."""
    if len(theirs) != len(ours):
        raise ValueError(f"it has {len(theirs)} groups of parameters, and the optimiser {len(ours)}")
    for n, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        for name in sorted(a.keys() | {"params"}):
            if name != "lr" and (name not in b or type(a.get(name)) is not type(b[name]) or a[name] != b[name]):
                raise ValueError(f"{name} of group {n} is {a.get(name)!r}, and this run has {b.get(name)!r}")


def _kind(kind: str, group: dict[str, Any]) -> str:
    return kind if kind != "adamw" and group.get(kind) else "adamw"


def _index(i: Any, parameters: list[Tensor]) -> int:
    if type(i) is not int or not 0 <= i < len(parameters):
        raise ValueError(f"there is no parameter {i!r}")
    return i


def _check_held(held: dict[str, Any], parameter: Tensor, kind: str, steps: int, where: str) -> None:
    moments = {name: value for name, value in held.items() if name != "step"}
    if moments.keys() != _MOMENTS[kind] or (kind != "muon") is not ("step" in held):
        raise ValueError(f"{where} has {', '.join(map(str, held))}")
    for name, value in moments.items():
        _check_tensor(value, parameter, f"{name} of {where}")
    count = held.get("step", 0)
    if kind == "adamw":
        if count.shape != () or count.dtype != torch.float32:
            raise ValueError(f"step of {where} is of shape {list(count.shape)} and {count.dtype}")
        count = count.item()
    _check_count(f"step of {where}", count, steps)


def _check_tensor(value: Any, parameter: Tensor, where: str) -> None:
    if value.shape != parameter.shape or value.dtype != parameter.dtype or value.layout != parameter.layout:
        raise ValueError(
            f"{where} is {list(value.shape)} of {value.dtype}, and the parameter {list(parameter.shape)} of "
            f"{parameter.dtype}"
        )
    if not value.isfinite().all():
        raise ValueError(f"{where} is not finite")


def _check_count(where: str, count: Any, steps: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count <= steps or count != int(count):
        raise ValueError(f"{where} is {count!r} after {steps} steps")


@contextmanager
def random_state(checkpoint: Path) -> Iterator[None]:
    """Around the setting of random numbers to what a checkpoint has: ConfigError if it is no such state."""
    with fitting(checkpoint / RANDOM):
        yield
        place = np.random.get_state(legacy=False)["state"]["pos"]  # which NumPy takes as it is
        if not 0 <= place <= 624:
            raise ValueError(f"NumPy's numbers stand at place {place} of 624")
