"""A model in a folder: its configuration and its weights, of which nothing is trusted.

Weights are read from safetensors, or from shards of our own. Nothing else that may lie beside them is opened: no
pickle, no adapter, no code, and no generation_config.json, since the command says itself how it writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.train import sharded
from atlas_memory.train.checkpoints import shapes, weight_files
from atlas_memory.train.yaml_files import read_json


class Refused(ValueError):
    """A configuration that is whole, and that `AtlasConfig` refuses."""


def saved_config(folder: Path) -> AtlasConfig:
    """The configuration in a model's folder.

    Raises:
        Refused: it can be read, and no model can be made of it here: a block or rule is not registered, for one.
        ValueError: it is missing or damaged, or of another kind of model.
    """
    path = folder / "config.json"
    try:
        said = read_json(path)
        kind = said["model_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is missing or damaged") from error
    if kind != AtlasConfig.model_type:
        raise ValueError(f"{str(folder)!r} holds a {kind!r} model, not an Atlas model")
    try:
        return AtlasConfig.from_dict(said)
    except (ValueError, TypeError) as error:
        raise Refused(f"{str(path)!r} cannot be made into a model: {error}") from error


def read_model(folder: Path) -> Any:
    """The model in a folder; ValueError if there is none, or its weights are none."""
    config = saved_config(folder)
    check_fit(folder, config, "its config.json")
    return read_weights(folder, config)


def read_weights(folder: Path, config: AtlasConfig) -> Any:
    """A model of this configuration with the weights in a folder, which fit it; ValueError if some are not finite."""
    found: dict[str, Path] = {}
    if sharded.is_in(folder):
        model = AtlasForCausalLM(config)
        sharded.load_weights(folder, model)
    else:
        weights: dict[str, torch.Tensor] = {}
        for path in weight_files(folder):
            # Copied: what lies in a file begins anywhere, and products of it differ in the last bit.
            weights |= {name: weight.clone() for name, weight in load_file(path).items()}
            found |= dict.fromkeys(weights.keys() - found.keys(), path)
        model = AtlasForCausalLM.from_pretrained(None, config=config, state_dict=weights)
        model.config.name_or_path = str(folder)
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ValueError(
                f"the weight {name} in {str(found.get(name, folder))!r} has numbers that are not finite: take an older "
                "checkpoint, or train anew"
            )
    return model


def check_fit(folder: Path, config: AtlasConfig, name_of_model: str) -> None:
    """ValueError unless the weights in `folder` have the names and shapes of a model of this configuration."""
    stored, what = shapes(folder), f"the weights in {str(folder)!r}"
    if (layers := config.num_hidden_layers) > len(stored):  # before they are made
        raise ValueError(f"{what} do not fit {name_of_model}: num_hidden_layers={layers}, and they are {len(stored)}")
    with torch.device("meta"):
        model: Any = AtlasForCausalLM(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    for name in sorted(stored.keys() | wanted.keys() - tied):
        if stored.get(name) != wanted.get(name):
            raise ValueError(
                f"{what} do not fit {name_of_model}: {name} is {_show(stored.get(name))} in them and "
                f"{_show(wanted.get(name))} in the model"
            )


def _show(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
