"""The smallest run worth the name, shared by the tests of training, evaluation and the command."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_memory.layers.mlp import SwiGLU
from atlas_memory.train import RunConfig, load_config

SMALL = (
    "model.preset=nano",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.rule=deltanet",
    "data.seq_len=16",
    "data.interleave=1",
    "train.batch_size=2",
    "train.warmup_steps=1",
    "train.save_every=3",
    "train.steps=6",
    "train.sample_tokens=0",
    "train.device=cpu",
)


def write_corpus(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"document {i}: " + " ".join(str(n * i) for n in range(60)))
    return folder


def overrides(folder: Path, *more: str) -> list[str]:
    """Command-line overrides of a small run in folder/run on a small corpus."""
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    return [*SMALL, f"data.path={corpus}", f"output_dir={folder / 'run'}", *more]


def copied(run: Path, folder: Path) -> Path:
    """A copy of a run and of the text beside it, as if it had been trained in folder / "run"."""
    shutil.copytree(run.parent, folder, dirs_exist_ok=True)
    described = folder / run.name / "run.yaml"
    described.write_text(described.read_text().replace(str(run.parent), str(folder)))
    return folder / run.name


def settings(folder: Path, *more: str) -> RunConfig:
    return load_config(None, overrides(folder, *more))


def count_in_training(patch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each time that the MLP of a block is computed with gradients, from now on."""
    forward, calls = SwiGLU.forward, []

    def counted(self: SwiGLU, x: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            calls.append(None)
        return forward(self, x)

    patch.setattr(SwiGLU, "forward", counted)
    return calls
