"""Alarms: whether a memory that is of no use is noticed, and one that is of use left in peace."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from atlas_memory import NeuralMemory
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.monitor.logs import read_log
from atlas_memory.train import load_config, train

from .study import Study, heads

STEPS = 200
HYBRID = ("model.rule=titans", "model.attention_window=64")
HEALTHY = {
    **{rule: (f"model.rule={rule}",) for rule in ("gated-deltanet", "deltanet", "titans", "omeganet", "ttt-linear")},
    "swla": ("model.rule=swla",),
    "hope": ("model.rule=hope", "model.block=hope"),
    "titans in mag": (*HYBRID, "model.block=mag"),
    "titans in mal": (*HYBRID, "model.block=mal"),
    "titans in mac": (*HYBRID, "model.block=mac"),
}


def _eta(module: nn.Module, _: Any, output: Any) -> Any:
    return replace(output, eta=0 * output.eta) if isinstance(module, GateProjection) else None


def _retention(module: nn.Module, _: Any, output: Any) -> Any:
    return replace(output, alpha=torch.full_like(output.alpha, 0.5)) if isinstance(module, GateProjection) else None


def _branch(module: nn.Module, _: Any, output: Any) -> Any:
    return (0 * output[0], output[1]) if isinstance(module, NeuralMemory) else None


SPOILT = {"eta at 0": _eta, "retention at one half": _retention, "branch at 0": _branch}
OF = ("gated-deltanet", "titans in mag")


@contextmanager
def spoilt(hook: Any) -> Iterator[None]:
    """Inside, what every module gives out goes through ``hook``, if there is one."""
    handle = None if hook is None else nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def raised(
    case: str, dim: int, seed: int, quick: bool, text: str | None = None, steps: int = STEPS
) -> dict[str, float]:
    """See ``ALARMS``."""
    model, _, how = case.partition(": ")
    given = ["model.preset=tiny", f"model.num_attention_heads={heads(dim)}", *HEALTHY[model], "data.seq_len=128"]
    given += ["train.batch_size=16", f"train.steps={2 if quick else steps}", f"train.probe_every={1 if quick else 100}"]
    given += [f"train.seed={seed}", "train.evaluate_every=0", "train.save_every=100000", "train.device=cpu"]
    given += [] if text is None else [f"data.path={text}"]
    with tempfile.TemporaryDirectory() as folder, spoilt(SPOILT.get(how)):
        outcome = train(load_config(None, [*given, f"output_dir={folder}/run"]), console=Console(quiet=True))
        lines = read_log(Path(folder) / "run", "memory.jsonl")
    memories = lines[-1].memories
    lives = [max(memory.half_life) for memory in memories if memory.half_life]
    return ({"half-life": max(lives)} if lives else {}) | {
        "alarms": float(len(lines[-1].alarms)),
        "memory_contribution": min(memory.memory_contribution for memory in memories),
        "branch_ratio": min(memory.branch_ratio for memory in memories),
        "readout_change": min(max(memory.readout_change) for memory in memories),
        "seconds": outcome.seconds,
    }


ALARMS = Study(
    name="alarms",
    shows="Preset tiny, trained by `atlas train` for 200 steps (or `--steps`) of 16 x 128 bytes and probed every "
    "100: alarms of the last probe; the least memory contribution, branch ratio and (of the best head) readout change "
    "of a memory; the longest half-life of a head in tokens. Spoilt: eta pinned at 0, alpha at 1/2, or the memory's "
    "output scaled to 0.",
    cases=(*HEALTHY, *(f"{model}: {how}" for model in OF for how in SPOILT)),
    widths=(64,),
    measure=raised,
    columns=(
        "candidate",
        "alarms",
        "memory_contribution",
        "branch_ratio",
        "readout_change",
        "half-life",
        "seconds",
        "seeds",
        "revision",
    ),
)
