"""A run that begins with a saved model, some options changed: TNT's second stage, for one."""

import shutil
from pathlib import Path

import pytest
import torch

from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.train import load_run
from atlas_memory.train.config import ConfigError, load_config
from atlas_memory.train.run_model import first_model, model_config
from atlas_memory.train.trainer import train
from tests.train.small import settings

HIERARCHY = "model.hierarchy={global_chunk: 8, local_chunks: [4], shard: 8}"


@pytest.fixture(scope="module")
def stage1(tmp_path_factory) -> Path:
    """A run of two steps of a hierarchy."""
    folder = tmp_path_factory.mktemp("stage1")
    train(settings(folder, "model.rule=tnt", HIERARCHY, "train.steps=2"))
    return folder / "run"


def test_smaller_local_chunks_from_the_command_line(stage1, tmp_path) -> None:
    """Said key by key: what stays is the saved model's."""
    more = ("model.rule=tnt", f"model.init_from={stage1}", "model.hierarchy.local_chunks=[1]")
    run, config = load_run(stage1), settings(tmp_path, *more)
    architecture = model_config(config, run.tokenizer)
    assert architecture.hierarchy == run.model.config.hierarchy | {"local_chunks": [1]}
    first = first_model(config, architecture)
    assert first.model.layers[0].mixer.memory.hierarchy.local_chunks == (1,)
    torch.testing.assert_close(first.state_dict(), run.model.state_dict(), rtol=0, atol=0)

    outcome = train(config)
    assert outcome.steps == 6 and load_run(outcome.folder).model.config.hierarchy["local_chunks"] == [1]
    assert train(settings(tmp_path, *more, "train.steps=7"), resume=True).steps == 7


def test_what_the_preset_is_for_is_said(stage1, tmp_path, capsys) -> None:
    train(settings(tmp_path, "model.rule=tnt", f"model.init_from={stage1}", "train.steps=1"))
    assert f"model: {stage1} (learning rate of preset nano), " in capsys.readouterr().err


def test_a_run_goes_on_without_the_model_it_began_with(stage1, tmp_path) -> None:
    first = tmp_path / "first"
    shutil.copytree(stage1, first)
    more = ("model.rule=tnt", f"model.init_from={first}")
    train(settings(tmp_path, *more, "train.steps=3"))
    shutil.rmtree(first)
    outcome = train(settings(tmp_path, *more, "train.steps=4"), resume=True)
    assert outcome.steps == 4 and load_run(outcome.folder).model.config.hierarchy["shard"] == 8


def test_an_unknown_preset_writes_nothing(stage1, tmp_path) -> None:
    with pytest.raises(ConfigError, match="preset 'foo' is unknown"):
        train(settings(tmp_path, f"model.init_from={stage1}", "model.preset=foo"))
    assert not (tmp_path / "run").exists()


def test_options_are_the_saved_models_and_not_the_presets(tmp_path) -> None:
    saved = AtlasConfig(hidden_size=8, num_attention_heads=1, intermediate_size=8, rule="titans", conv_size=2)
    AtlasForCausalLM(saved).save_pretrained(tmp_path)
    found = model_config(load_config(None, [f"model.init_from={tmp_path}"]), range(258))
    for name in AtlasConfig.__annotations__:
        assert getattr(found, name) == getattr(saved, name), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.init_from=nowhere"], "model.init_from: no run at 'nowhere': the folder does not exist"),
        (["model.hierarchy.shard=6"], "model: hierarchy shard=6 must be a multiple of the local chunk 4"),
        (
            ["model.hierarchy.local_chunks=[4, 2]"],
            "model.init_from: the weights in .* do not fit the options of this run",
        ),
        (["model.hidden_size=32"], "model.init_from: the weights in .* do not fit the options of this run: "),
        (["model.vocab_size=100"], "model.vocab_size=100 is smaller than the tokenizer's .*; take the data.tokenizer"),
    ],
)
def test_what_does_not_fit_is_named(stage1, tmp_path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        train(settings(tmp_path, "model.rule=tnt", f"model.init_from={stage1}", *changes))
    assert not (tmp_path / "run").exists()


def test_empty_and_damaged_folders(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"model.init_from: no run at .*neither model.safetensors nor"):
        train(settings(tmp_path, f"model.init_from={tmp_path / 'empty'}"))
    (tmp_path / "other").mkdir()
    AtlasForCausalLM(AtlasConfig.preset("nano")).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.init_from: .*config.json' is missing or damaged"):
        train(settings(tmp_path, f"model.init_from={tmp_path / 'other'}"))
    with pytest.raises(ConfigError, match=r"model.init_from='': "):
        settings(tmp_path, 'model.init_from=""')


def test_a_damaged_checkpoint_is_not_begun_with(tmp_path) -> None:
    train(settings(tmp_path, "train.save_every=2"))
    checkpoint = max((tmp_path / "run").glob("checkpoint-*"))
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ConfigError, match=r"model.init_from: the checkpoint '.*' is damaged \(model.safetensors is "):
        train(settings(tmp_path / "next", f"model.init_from={checkpoint}"))
    with pytest.raises(ValueError, match="is damaged"):
        load_run(checkpoint)
