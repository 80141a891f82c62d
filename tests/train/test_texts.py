"""The text of a run: that it is the same when the run goes on, in the tokens of the model that it begins with."""

import pytest
from rich.console import Console

from atlas_memory.data import Corpus, Source
from atlas_memory.data.prepared import prepare
from atlas_memory.data.tokenization import train_tokenizer
from atlas_memory.train.config import ConfigError
from atlas_memory.train.run_model import load_run
from atlas_memory.train.trainer import train
from atlas_memory.train.training_data import TrainingData, evaluation_text
from tests.train.small import overrides, settings


def test_a_text_with_one_other_letter_is_not_resumed(finished, tmp_path) -> None:
    """Nor is one whose held-out part has changed."""
    corpus = tmp_path / "corpus"
    held, trained = (part[0].name for part in (Corpus.load(corpus).held_out, Corpus.load(corpus).train))
    note = finished / "data.json"
    for name, says in ((trained, r"\(.* differs: digest\)"), (held, r"\(.* differs: held_out\)")):
        text = (corpus / name).read_text()
        (corpus / name).write_text(text.replace("document", "dokument"))
        with pytest.raises(ConfigError, match=f"the text has changed since .* began {says}: restore it"):
            train(settings(tmp_path, "train.steps=8"), resume=True)
        (corpus / name).write_text(text)
    assert train(settings(tmp_path, "train.steps=7"), resume=True).steps == 7
    note.write_text('{"tokens": 1')
    with pytest.raises(ConfigError, match=r"data.json' is damaged: delete it, if the text is still that"):
        train(settings(tmp_path, "train.steps=8"), resume=True)


def test_a_model_goes_on_with_its_own_tokens(tmp_path) -> None:
    """Others are refused, whether they are read from text or were prepared; its own, and more, are not."""
    mine, first = tmp_path / "mine", tmp_path / "first"
    overrides(tmp_path)
    tokenizer = train_tokenizer(Source(tmp_path / "corpus"), mine, 280)
    train(settings(tmp_path, f"data.tokenizer={mine}", f"output_dir={first}", "train.steps=2"))
    begin = f"model.init_from={first}"
    with pytest.raises(ConfigError, match=r"data.tokenizer='bytes' is not the tokenizer that the model in") as caught:
        train(settings(tmp_path, begin))
    assert str(caught.value).endswith(f"which has {len(tokenizer)} tokens: set data.tokenizer={first}")
    prepare(Source(str(tmp_path / "corpus")), tmp_path / "prepared")
    with pytest.raises(ConfigError, match=f"prepare the text with --tokenizer {first}"):
        train(settings(tmp_path, begin, f"data.path={tmp_path / 'prepared'}"))
    assert not (tmp_path / "run").exists()
    assert train(settings(tmp_path, begin, f"data.tokenizer={first}")).steps == 6
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "more")
    TrainingData.load(settings(tmp_path, begin, f"data.tokenizer={tmp_path / 'more'}"))


def test_a_long_text_is_announced(tmp_path, capsys, monkeypatch) -> None:
    """Without a terminal in one line, before it is tokenised; a short one, and bytes, are not."""
    given = settings(tmp_path, f"data.tokenizer={tmp_path / 'mine'}")
    train_tokenizer(Source(tmp_path / "corpus"), tmp_path / "mine", 280)
    TrainingData.load(given)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("atlas_memory.train.training_data.LONG", 100)
    TrainingData.load(settings(tmp_path))
    text = TrainingData.load(given)
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("tokenising 0.0M characters of ") and said[-1].endswith("once for all runs")
    console = Console(force_terminal=True, width=120, record=True, quiet=False)
    assert len(TrainingData.load(given, console).tokens.ids) == len(text.tokens.ids)


def test_a_text_that_has_grown_since_is_said(tmp_path, caplog) -> None:
    """Its held-out part is another one then, and may have been trained on."""
    train(settings(tmp_path, "train.steps=1"))
    evaluation_text(load_run(tmp_path / "run"))
    assert "has changed since" not in caplog.text
    for name in "abc":
        (tmp_path / "corpus" / f"{name}.txt").write_text(f"another {name} " * 50)
    evaluation_text(load_run(tmp_path / "run"))
    assert "has changed since it was trained: some of its held-out part may have been trained on" in caplog.text


def test_a_run_within_its_text_is_no_part_of_it(tmp_path) -> None:
    within = [f"output_dir={tmp_path / 'corpus' / 'runs' / 'a'}", "train.steps=1"]
    train(settings(tmp_path, *within))
    assert train(settings(tmp_path, *within[:1], "train.steps=2"), resume=True).steps == 2
