"""A run that fails at its start does not block its folder, and an unregistered block is not called damage."""

import json

import pytest

from atlas_memory.models import AtlasForCausalLM
from atlas_memory.train import train
from atlas_memory.train.config import ConfigError
from atlas_memory.train.run_model import load_run

from .small import settings


@pytest.fixture
def broken(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(AtlasForCausalLM, "forward", fail)


def test_a_run_that_failed_in_its_first_step_begins_again(tmp_path, broken, monkeypatch):
    for rate in (0.1, 0.01):  # other settings, too, and as often as one likes
        with pytest.raises(RuntimeError, match="no such thing"):
            train(settings(tmp_path, f"train.learning_rate={rate}"))
    assert (tmp_path / "run" / "run.yaml").is_file()
    (tmp_path / "run" / "mine.txt").write_text("something else")
    with pytest.raises(ConfigError, match="is not empty: choose another, or continue the run in it with --resume"):
        train(settings(tmp_path))
    (tmp_path / "run" / "mine.txt").unlink()
    monkeypatch.undo()
    assert train(settings(tmp_path, "train.steps=1", "data.seq_len=8")).steps == 1
    with pytest.raises(ConfigError, match="is not empty: choose another, or continue the run in it with --resume"):
        train(settings(tmp_path, "train.steps=1"))


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("something else")
    with pytest.raises(ConfigError, match=r"is not empty, and what it holds is no run: choose another$"):
        train(settings(tmp_path))


def test_what_is_not_registered_is_not_damaged(tmp_path):
    train(settings(tmp_path, "train.steps=3"))
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"block": "mine"}, r"config.json' cannot be made into a model: block='mine' is unknown.*BLOCKS\['mine'\] = "),
        ({"rule": "mine"}, r"config.json' cannot be made into a model: rule='mine' is unknown.*RULES\['mine'\] = "),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message) as caught:
            load_run(tmp_path / "run")
        assert "damaged" not in str(caught.value) and "move" not in str(caught.value)
        with pytest.raises(ConfigError, match=f"model.init_from: .*{message}"):
            train(settings(tmp_path, f"model.init_from={tmp_path / 'run'}", f"output_dir={tmp_path / 'next'}"))
