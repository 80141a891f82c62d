"""Corpora and crops: what is read, what is held out, what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_memory.data import Corpus, RandomCrops


def folder_of(path: Path, count: int) -> Path:
    for i in range(count):
        file = path / f"part{i % 3}" / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text number {i}\n")
    return path


def test_standard_library() -> None:
    corpus = Corpus.load()
    train, held = {d.name for d in corpus.train}, {d.name for d in corpus.held_out}
    assert "argparse.py" in train | held
    assert not train & held
    assert 0.03 < len(held) / len(train) < 0.25
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in train | held)
    assert sum(len(d.text) for d in corpus.train) > 3e6


def test_folder_is_split_by_file_and_the_same_everywhere(tmp_path) -> None:
    one = Corpus.load(folder_of(tmp_path / "one", 40))
    two = Corpus.load(folder_of(tmp_path / "two", 40))
    assert one.train == two.train
    assert one.held_out == two.held_out
    assert len(one.train) + len(one.held_out) == 40
    assert not {d.name for d in one.train} & {d.name for d in one.held_out}


def test_adding_a_file_moves_no_other(tmp_path) -> None:
    before = Corpus.load(folder_of(tmp_path, 40))
    (tmp_path / "another.txt").write_text("more")
    after = Corpus.load(tmp_path)
    assert {d.name for d in before.held_out} <= {d.name for d in after.held_out}
    assert {d.name for d in before.train} <= {d.name for d in after.train}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_both_halves_hold_a_file(tmp_path, count: int) -> None:
    corpus = Corpus.load(folder_of(tmp_path, count))
    assert corpus.train
    assert corpus.held_out


@pytest.mark.parametrize("name", ["input.txt", "n4.txt"])  # whose hashes hold neither, or hold the book
def test_a_book_beside_a_note_is_held_out_at_its_end(tmp_path, name: str) -> None:
    book = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / name).write_text(book)
    (tmp_path / "README.md").write_text("a note")
    corpus = Corpus.load(tmp_path)
    assert {d.name: d.text for d in corpus.train} == {"README.md": "a note", name: book[:900]}
    assert [(d.name, d.text) for d in corpus.held_out] == [(name, book[900:])]


def test_two_documents_of_one_name(tmp_path) -> None:
    for folder, text in (("a", "x" * 1000), ("b", "a note")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "n.txt").write_text(text)
    corpus = Corpus.load([str(tmp_path / "a" / "n.txt"), str(tmp_path / "b" / "n.txt")])
    assert sorted(len(d.text) for d in (*corpus.train, *corpus.held_out)) == [6, 100, 900]


def test_what_is_skipped(tmp_path) -> None:
    folder_of(tmp_path, 4)
    (tmp_path / "copy.txt").write_text("text number 0\n")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    corpus = Corpus.load(tmp_path)
    assert corpus.skipped == 4
    assert len(corpus.train) + len(corpus.held_out) == 4
    assert "4 skipped" in str(corpus)


def test_one_file_is_split_by_position(tmp_path) -> None:
    text = "".join(chr(33 + i % 90) for i in range(1000))
    (tmp_path / "book.txt").write_text(text)
    for path in (tmp_path / "book.txt", tmp_path):
        corpus = Corpus.load(path)
        assert corpus.train[0].text == text[:900]
        assert corpus.held_out[0].text == text[900:]


def test_refusals(tmp_path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\xff\0")
    (tmp_path / "letter").write_text("a")
    for path, message in (
        ("nowhere", "does not exist"),
        ("empty.txt", "is empty"),
        ("binary", "is not UTF-8 text"),
        ("letter", "too short"),
    ):
        with pytest.raises(ValueError, match=message):
            Corpus.load(tmp_path / path)
    (tmp_path / "letter").unlink()
    with pytest.raises(ValueError, match=r"no text in .*2 skipped"):
        Corpus.load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path) -> None:
    (tmp_path / "secret.txt").write_text("text")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(ValueError, match="cannot be read"):
        Corpus.load(tmp_path / "secret.txt")


def test_crops() -> None:
    tokens = np.arange(50, dtype=np.int32)
    crops = RandomCrops(tokens, 8, 200, seed=1)
    assert len(crops) == 200
    for item in (crops[i] for i in range(200)):
        assert torch.equal(item["input_ids"], torch.arange(8) + item["input_ids"][0])
        assert torch.equal(item["labels"][1:], item["input_ids"][1:]) and item["labels"][0] == -100
    starts = [int(crops[i]["input_ids"][0]) for i in range(200)]
    assert (min(starts), max(starts)) == (0, 42)
    again, other = RandomCrops(tokens, 8, 300, seed=1), RandomCrops(tokens, 8, 200, seed=2)
    assert starts == [int(again[i]["input_ids"][0]) for i in range(200)]
    assert starts != [int(other[i]["input_ids"][0]) for i in range(200)]
    assert len(RandomCrops(tokens, 50, 1, seed=0)[0]["input_ids"]) == 50
    with pytest.raises(ValueError, match=r"data.seq_len=51 .*50 tokens"):
        RandomCrops(tokens, 51, 1, seed=0)
