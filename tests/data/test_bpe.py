"""Tokenizers learned from text."""

import json
import random
import time

import pytest

from atlas_memory.cli import main
from atlas_memory.data import Corpus, Source, encode, load_tokenizer
from atlas_memory.data.tokenization import END, PAD, _cut_long_words, bytes_per_token, train_tokenizer
from atlas_memory.train.trainer import train
from tests.train.small import settings, write_corpus


def test_it_is_learned_from_what_is_trained_on_and_writes_any_text(tmp_path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    held = Corpus.load(folder).held_out
    for document in held:  # a word that only held-out documents have, often
        (folder / document.name).write_text("zyzzyva " * 500)
    heard: list[tuple[int, int]] = []
    made = train_tokenizer(Source(folder), tmp_path / "out", 300, progress=lambda *n: heard.append(n))
    assert heard[-1][0] == 12 - len(held)
    vocabulary = made.get_vocab()
    assert 258 < len(vocabulary) <= 300 and "document" in vocabulary and not any("zyz" in t for t in vocabulary)
    loaded = load_tokenizer(str(tmp_path / "out"))
    assert loaded.eos_token == END and loaded.pad_token == PAD and loaded.get_vocab() == vocabulary
    text = "document 3: naïve 語 🙂\r\n\t\x00 document"
    ids = encode(loaded, text)
    assert loaded.decode(ids) == text and int(bytes_per_token(loaded, text).sum()) == len(text.encode())
    assert len(ids) < len(text.encode())
    train_tokenizer(Source(folder), tmp_path / "again", 300)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()


def test_a_run_reads_with_it(tmp_path, capsys) -> None:
    given = settings(tmp_path, f"data.tokenizer={tmp_path / 'mine'}")
    sources = [str(tmp_path / "corpus"), "--out", str(tmp_path / "mine"), "--vocab-size", "265"]
    assert main(["tokenizer", "train", *sources]) == 0
    assert "265 tokens; use it with data.tokenizer=" in capsys.readouterr().out
    assert train(given).steps == 6
    assert json.loads((tmp_path / "run" / "config.json").read_text())["vocab_size"] == 265


def test_a_line_without_spaces_is_cut(tmp_path) -> None:
    """One word of so many letters took minutes."""
    line = "".join(random.Random(0).choices("abcdefghij", k=500_000))
    (tmp_path / "a.txt").write_text(line)
    assert "".join(_cut_long_words(f"{line} and {line}")) == f"{line} and {line}"
    start = time.perf_counter()
    made = train_tokenizer(Source(tmp_path / "a.txt"), tmp_path / "out", 600)
    assert len(made) == 600 and time.perf_counter() - start < 20


@pytest.mark.parametrize(
    "options,message",
    [
        (["--vocab-size", "257"], "vocab_size=257 must be at least 258: every byte, <|endoftext|> and <|pad|>"),
        (["--out", "a.jsonl"], "is a file: choose a folder to write to"),
        (["--out", "."], "is not empty: choose another folder to write to"),
        (["--column", "body"], "atlas: 'a.jsonl' has no column 'body': set --column to one of text"),
        (["nowhere.txt"], "atlas: 'nowhere.txt' does not exist"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(tmp_path, monkeypatch, capsys, options, message) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["tokenizer", "train", "a.jsonl", *options]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text in"):
        train_tokenizer(Source(tmp_path / "empty"), tmp_path / "out", 300)
