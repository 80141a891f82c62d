"""One description of a run: files, overrides, and one line for each mistake."""

import pytest

from atlas_memory.data import byte_tokenizer
from atlas_memory.train.config import ConfigError, RunConfig, load_config, load_saved
from atlas_memory.train.plan import without_weights
from atlas_memory.train.run_model import model_config


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
    (tmp_path / "tokens").mkdir()
    load_config(None, ["data.tokenizer=tokens"]).save(tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml").data.tokenizer == str((tmp_path / "tokens").resolve())


def test_the_demo_is_valid() -> None:
    assert load_config("examples/demo.yaml").train.max_minutes == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=3", r"unknown key train.stpes \(=3\); did you mean train.steps\?"),
        ("steps=3", r"unknown key steps \(=3\); did you mean train.steps\?"),
        ("zebra=3", r"unknown key zebra \(=3\); choose one of data.column, "),
        ("train.lr=3", r"unknown key train.lr \(=3\); did you mean train.learning_rate\?"),
        ("train.zebra=3", r"unknown key train.zebra \(=3\); choose one of train.alarm_webhook, train.batch_size"),
        ("train.steps=many", "train.steps='many': input should be a valid integer"),
        ("train.steps=true", "train.steps=True: input should be a valid integer"),
        ("train.gate_lr_scale=true", "train.gate_lr_scale=True: input should be a valid number"),
        ("train.threads=100000", "train.threads=100000: input should be less than or equal to 1024"),
        ("train.alarm_webhook=http://", "train.alarm_webhook='http://'"),
        ("train.seed=4294967296", "train.seed=4294967296: input should be less than 4294967296"),
        ("trian.steps=3", r"unknown section trian; did you mean train\?"),
        (
            "data.seq_len_schedule={20:64}",
            r"data.seq_len_schedule='20:64': input should be a valid integer; write {500: 512}, with a space",
        ),
        ("data.seq_len_schedule=20:64", r"write {500: 512}, with a space"),
        ("train.steps=0", "train.steps=0: input should be greater than or equal to 1"),
        ("train.steps=9000000000000000000", "9000000000000000000: input should be less than or equal to 10"),
        ("train.learning_rate=.nan", "train.learning_rate=nan: input should be a finite number"),
        ("train.device=tpu", "train.device='tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("train=3", "train is a section, not 3: set its keys, such as train.steps"),
        ("output_dir=", "output_dir=None: "),
        ("train.steps", "'train.steps' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("train.steps=[1", "the value is not YAML"),
        ("data.seq_len_schedule={3: 512, 3: 1024}", r"the value is not YAML \(line 1: found duplicate key \"?3"),
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
        ("a: [", r"is not YAML \(line"),
        (
            "train:\n  steps: 3\n  seed: 1\n  'steps': 5\n",
            r"\(line 4: found duplicate key \"steps\"",
        ),
        ("train: {}\ntrain: {}\n", r"\(line 2: found duplicate key \"train\""),
        ("- 1", "must hold keys and values, not a list"),
        ("a: 1", "unknown key a"),
        ("train.steps: 3", "train.steps has a dot, and files have sections: write train: {steps: 3}"),
        ("train: {seed.x: 3}", "train.seed.x has a dot, and files have sections"),
        ("trian: {steps: 3}", r"unknown section trian; did you mean train\?"),
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


@pytest.mark.parametrize("name", ["50m", "170m", "340m", "400m", "760m", "1.3b"])
def test_the_configurations_that_come_with_the_library(name: str) -> None:
    config = load_config(name, ["train.seed=3"])
    assert config.train.seed == 3
    counted = without_weights(model_config(config, byte_tokenizer())).num_parameters()
    assert counted == pytest.approx(float(name[:-1]) * (1e6 if name.endswith("m") else 1e9), rel=0.02)
    rows = config.train.batch_size * config.train.gradient_accumulation_steps
    tokens = {"50m": 1e9, "760m": 30e9, "1.3b": 100e9}.get(name, 15e9)
    assert config.train.last_step * rows * config.data.seq_len == pytest.approx(tokens, rel=0.01)


def test_a_file_goes_before_a_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "340m").write_text("train: {steps: 3}")
    assert load_config("340m").train.steps == 3


@pytest.mark.parametrize(
    "text", ["#notes.txt", "my file #1.txt", "runs/try #2", "&x y", "---", " a ", "it's", "1e5", "{x}"]
)
def test_a_text_is_taken_as_it_stands(text: str) -> None:
    config = load_config(None, [f"data.path={text}", f"output_dir={text}", f"train.prompt={text}"])
    assert config.data.path == config.output_dir == config.train.prompt == text


def test_values_of_the_command_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(None, ["output_dir=~/runs/a"]).output_dir == str(tmp_path / "runs/a")
    assert load_config(None, ['train.prompt=" #"', "data.path=[a, b]"]).data.path == ["a", "b"]
    assert load_config(None, ["model.rms_norm_eps=1e-5"]).model.overrides == {"rms_norm_eps": 1e-5}
    for programs in ("none", "[none]", "[]"):  # as transformers has it
        assert load_config(None, [f"train.report_to={programs}"]).train.report_to == []
    assert load_config(None, ["train.report_to=trackio"]).train.report_to == ["trackio"]


def test_a_saved_description_that_was_cut_short(tmp_path) -> None:
    load_config(None, ["train.learning_rate=0.02"]).save(tmp_path / "run.yaml")
    assert load_saved(tmp_path).train.learning_rate == 0.02
    whole = (tmp_path / "run.yaml").read_text()
    for part in ("", whole[: whole.index("train:")]):
        (tmp_path / "run.yaml").write_text(part)
        with pytest.raises(ConfigError, match="was cut short: it needs model, data, train"):
            load_saved(tmp_path)
