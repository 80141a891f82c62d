"""One description of a run: files, overrides, and one line for each mistake."""

import pytest

from atlas_memory.training.config import ConfigError, RunConfig, load_config


def test_defaults_files_and_overrides(tmp_path) -> None:
    assert load_config() == RunConfig()
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: mini, window: 4}\ntrain:\n  steps: 7\n")
    config = load_config(
        file, ["train.steps=9", "train.learning_rate=1e-3", "model.rule_options={optimiser: {every: 2}}"]
    )
    assert (config.model.preset, config.train.steps, config.train.learning_rate) == ("mini", 9, 1e-3)
    assert config.model.overrides == {"window": 4, "rule_options": {"optimiser": {"every": 2}}}
    config.save(tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_saved_paths_are_read_from_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, saved in (("text/a.txt", tmp_path / "text/a.txt"), ("~/a.txt", tmp_path / "home/a.txt")):
        load_config(None, [f"data.path={given}", f"model.init_from={given}"]).save(tmp_path / "run.yaml")
        config = load_config(tmp_path / "run.yaml")
        assert config.data.path == config.model.init_from == str(saved.resolve())


def test_the_demo_is_valid() -> None:
    assert load_config("examples/demo.yaml").train.max_minutes == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=3", r"unknown key train.stpes \(=3\); did you mean train.steps\?"),
        ("steps=3", r"unknown key steps \(=3\); did you mean train.steps\?"),
        ("zebra=3", r"unknown key zebra \(=3\); known: data.carry, "),
        ("train.steps=many", "train.steps='many': input should be a valid integer"),
        ("train.steps=0", "train.steps=0: input should be greater than or equal to 1"),
        ("train.learning_rate=.nan", "train.learning_rate=nan: input should be a finite number"),
        ("train.device=tpu", "train.device='tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("train=3", "train=3: "),
        ("output_dir=", "output_dir=None: "),
        ("train.steps", "'train.steps' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("train.steps=[1", "the value is not YAML"),
        ("output_dir.name=3", r"output_dir is a value \('runs/x'\), not a section"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, ["output_dir=runs/x", override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"is not a YAML file \(line"),
        ("- 1", "must hold keys and values, not a list"),
        ("a: 1", "unknown key a"),
    ],
)
def test_wrong_files(tmp_path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_the_defaults(tmp_path) -> None:
    (tmp_path / "run.yaml").touch()
    assert load_config(tmp_path / "run.yaml") == RunConfig()
