"""Prepared text is the text that training would have read, and is not loaded."""

import json
import os

import numpy as np
import pytest

from atlas_memory.data import Source, Tokens, byte_tokenizer
from atlas_memory.data.prepared import ABOUT, Prepared, prepare
from atlas_memory.data.sources import Document
from atlas_memory.data.tokens import encode
from atlas_memory.training.trainer import train
from tests.training.small import overrides, settings, write_corpus


def test_tokens_are_those_of_the_documents(tmp_path) -> None:
    write_corpus(tmp_path / "corpus")
    heard: list[tuple[int, int]] = []
    made = prepare(Source(str(tmp_path / "corpus")), tmp_path / "out", progress=lambda *n: heard.append(n))
    tokens, held = made.load(), made.corpus().held_out
    texts = {d.name: d.text for d in Source(str(tmp_path / "corpus")).documents()}
    assert made.documents + len(held) == 12 and 1 <= len(held) <= 4 and made.documents == len(tokens.starts)
    trained = [Document(name, text) for name, text in texts.items() if name not in {d.name for d in held}]
    wanted = Tokens.of(byte_tokenizer(), trained)
    assert np.array_equal(tokens.ids, wanted.ids) and np.array_equal(tokens.starts, wanted.starts)
    assert isinstance(tokens.ids, np.memmap) and tokens.ids.dtype == np.uint16
    assert heard[-1] == (made.documents, made.tokens - 1)
    assert all(texts[d.name] == d.text for d in held)


def test_another_tokenizer_in_several_processes(tmp_path) -> None:
    write_corpus(tmp_path / "corpus")
    byte_tokenizer().save_pretrained(tmp_path / "mine")
    one = prepare(Source(str(tmp_path / "corpus")), tmp_path / "one").load()
    two = prepare(Source(str(tmp_path / "corpus")), tmp_path / "two", str(tmp_path / "mine"), workers=2)
    assert np.array_equal(one.ids, two.load().ids) and np.array_equal(one.starts, two.load().starts)
    assert two.name_of_tokenizer == str(tmp_path / "mine")


def test_one_long_document_in_parts(tmp_path, monkeypatch) -> None:
    """A document is one document, however many parts it was read in; its end is held out."""
    text = "".join(f"line {i}\n" for i in range(300))
    (tmp_path / "book.txt").write_text(text)
    monkeypatch.setattr("atlas_memory.data.prepared._PART", 200)
    made = prepare(Source(str(tmp_path / "book.txt")), tmp_path / "out", held_out=1e-9)
    tokens, (held,) = made.load(), made.corpus().held_out
    whole = encode(byte_tokenizer(), text)
    assert tokens.starts.tolist() == [0]
    assert tokens.ids.tolist() == [256, *whole[: -len(held.text)], 256] and text.endswith(held.text)


def test_training_reads_it(tmp_path) -> None:
    write_corpus(tmp_path / "corpus")
    prepare(Source(str(tmp_path / "corpus")), tmp_path / "out")
    prepared, plain = tmp_path / "prepared", tmp_path / "plain"
    outcome = train(settings(prepared, f"data.path={tmp_path / 'out'}"))
    assert outcome.steps == 6
    assert np.isfinite(outcome.loss)
    with pytest.raises(ValueError, match="was prepared with 'bytes'"):
        train(settings(plain, f"data.path={tmp_path / 'out'}", "data.tokenizer=gpt2"))
    assert not (plain / "run").exists() and overrides(plain)


def test_refusals(tmp_path) -> None:
    corpus = Source(str(write_corpus(tmp_path / "corpus")))
    made = prepare(corpus, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        prepare(corpus, tmp_path / "out")
    os.truncate(made.folder / "tokens.bin", 10)
    with pytest.raises(ValueError, match=r"tokens.bin is cut short: prepare it again"):
        Prepared.open(made.folder)
    (made.folder / ABOUT).write_text(json.dumps({"source": "x"}))
    with pytest.raises(ValueError, match="is a damaged prepared folder: prepare it again"):
        Prepared.open(made.folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text in"):
        prepare(Source(str(tmp_path / "empty")), tmp_path / "new")
    with pytest.raises(ValueError, match="does not exist"):
        prepare(Source(str(tmp_path / "nowhere.txt")), tmp_path / "new")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("*.partial"))
    assert Prepared.open(tmp_path / "empty") is None and Prepared.open(None) is None
