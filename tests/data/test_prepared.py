"""Prepared text is the text that training would have read, and is not loaded."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from atlas_memory.data import Source, Tokens, byte_tokenizer
from atlas_memory.data.atomic_folder import new_folder
from atlas_memory.data.prepared import Prepared, prepare
from atlas_memory.data.sources import PREPARED, Document
from atlas_memory.data.tokenization import encode, train_tokenizer
from atlas_memory.train.trainer import train
from atlas_memory.train.training_data import TrainingData
from tests.train.small import settings, write_corpus


def test_tokens_are_those_of_the_documents(tmp_path) -> None:
    write_corpus(tmp_path / "corpus")
    heard: list[tuple[int, int]] = []
    made = prepare(Source(str(tmp_path / "corpus")), tmp_path / "out", progress=lambda *n: heard.append(n))
    tokens, held = made.load(), made.corpus().held_out
    texts = {d.name: d.text for d in Source(str(tmp_path / "corpus")).documents()}
    assert (
        made.skipped == 0
        and made.documents + len(held) == 12
        and 1 <= len(held) <= 4
        and made.documents == len(tokens.starts)
    )
    trained = [Document(name, text) for name, text in texts.items() if name not in {d.name for d in held}]
    wanted = Tokens.of(byte_tokenizer(), trained)
    assert np.array_equal(tokens.ids, wanted.ids) and np.array_equal(tokens.starts, wanted.starts)
    assert isinstance(tokens.ids, np.memmap) and tokens.ids.dtype == np.uint16
    assert heard[-1] == (made.documents, made.tokens - 1)
    assert all(texts[d.name] == d.text for d in held)


def test_another_tokenizer_in_batches(tmp_path, monkeypatch) -> None:
    write_corpus(tmp_path / "corpus")
    train_tokenizer(Source(str(tmp_path / "corpus")), tmp_path / "mine", 270)
    one = prepare(Source(str(tmp_path / "corpus")), tmp_path / "one", str(tmp_path / "mine"))
    tokenizer, held = one.load_tokenizer(), {d.name for d in one.corpus().held_out}
    wanted = Tokens.of(tokenizer, [d for d in Source(str(tmp_path / "corpus")).documents() if d.name not in held])
    assert np.array_equal(one.load().ids, wanted.ids) and np.array_equal(one.load().starts, wanted.starts)
    assert one.tokenizer_name == str(tmp_path / "mine")
    monkeypatch.setattr("atlas_memory.data.prepared.os.cpu_count", lambda: 1)
    monkeypatch.setattr("atlas_memory.data.prepared._CHUNK", 500)
    two = prepare(Source(str(tmp_path / "corpus")), tmp_path / "two", str(tmp_path / "mine"))
    assert np.array_equal(one.load().ids, two.load().ids)


def test_one_long_document_in_parts(tmp_path, monkeypatch) -> None:
    """A document is one document, however many parts it was read in; its end is held out."""
    text = "".join(f"line {i}\n" for i in range(300))
    (tmp_path / "book.txt").write_text(text)
    monkeypatch.setattr("atlas_memory.data.prepared._CHUNK", 200)
    made = prepare(Source(str(tmp_path / "book.txt")), tmp_path / "out", held_out=1e-9)
    tokens, (held,) = made.load(), made.corpus().held_out
    whole = encode(byte_tokenizer(), text)
    assert tokens.starts.tolist() == [0]
    assert tokens.ids.tolist() == [256, *whole[: -len(held.text)], 256] and text.endswith(held.text)


def test_files_without_a_last_newline(tmp_path) -> None:
    """Each is one document, also where files end alike, or begin alike."""
    for i in range(20):
        (tmp_path / "texts" / f"{i}.c").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}.c").write_text(f"same beginning\nint f{i}() {{\n}}")
    made = prepare(Source(str(tmp_path / "texts")), tmp_path / "out")
    assert made.skipped == 0 and made.documents + len(made.corpus().held_out) == 20
    texts = {d.text for d in Source(str(tmp_path / "texts")).documents()}
    tokens = made.load()
    ends = [*tokens.starts[1:], len(tokens.ids) - 1]
    read = {bytes(tokens.ids[a + 1 : b].astype("u1")).decode() for a, b in zip(tokens.starts, ends, strict=True)}
    assert read | {d.text for d in made.corpus().held_out} == texts


def test_the_end_is_held_out_where_no_document_is(tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(("a long text, " * 100, "short", "x")):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    made = prepare(Source(str(tmp_path / "texts")), tmp_path / "out", held_out=1e-9)
    assert made.corpus().held_out and made.tokens == len(made.load().ids)


def test_an_end_that_is_blank(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 10 + "\n" * 40)
    made = prepare(Source(str(tmp_path / "a.txt")), tmp_path / "out", held_out=1e-9)
    (held,) = made.corpus().held_out
    assert held.text.strip() and made.tokens == len(made.load().ids) > 2


def test_what_is_left_of_a_long_held_out_document_is_said(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(10):
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(f"{i}, line {n}\n" for n in range(100)))
    monkeypatch.setattr("atlas_memory.data.prepared._CHUNK", 100)
    monkeypatch.setattr("atlas_memory.data.prepared._HELD_OUT_AT_MOST", 500)
    prepare(Source(str(tmp_path / "texts")), tmp_path / "out", held_out=0.9)
    assert "are neither held out nor trained on" in caplog.text


def test_what_was_prepared_is_no_text(tmp_path, monkeypatch) -> None:
    """Preparing a folder into itself, and once more; nothing of the user's goes."""
    write_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "out.partial").mkdir()
    (tmp_path / "corpus" / "out.partial" / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path / "corpus")
    one = prepare(Source("."), Path("out"))
    two = prepare(Source("."), Path("again"))
    assert np.array_equal(one.load().ids, two.load().ids)
    assert (tmp_path / "corpus" / "out.partial" / "mine.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is no part of a text: name it alone"):
        list(Source(["out", "0.txt"]).documents())


def test_training_reads_it(tmp_path) -> None:
    write_corpus(tmp_path / "corpus")
    prepare(Source(str(tmp_path / "corpus")), tmp_path / "out")
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(Source(str(tmp_path / "corpus")), tokenizer, 270)
    prepared, plain = tmp_path / "prepared", tmp_path / "plain"
    outcome = train(settings(prepared, f"data.path={tmp_path / 'out'}"))
    assert outcome.steps == 6
    assert np.isfinite(outcome.loss)
    with pytest.raises(ValueError, match="was prepared with 'bytes'"):
        train(settings(plain, f"data.path={tmp_path / 'out'}", "data.tokenizer=gpt2"))
    words = prepare(Source(str(tmp_path / "corpus")), tmp_path / "words", str(tokenizer))
    with pytest.raises(ValueError, match=r"data.tokenizer='bytes', but .*: leave data.tokenizer out"):
        train(settings(plain, f"data.path={words.folder}", "data.tokenizer=bytes"))
    assert train(settings(tmp_path / "more", f"data.path={words.folder}", f"data.tokenizer={tokenizer}")).steps == 6
    assert train(settings(tmp_path / "more", f"data.path={words.folder}", "train.steps=7"), resume=True).steps == 7
    with pytest.raises(ValueError, match=r"data.held_out=0.5 was decided when .* was prepared: leave it out"):
        train(settings(plain, f"data.path={tmp_path / 'out'}", "data.held_out=0.5"))
    assert not (plain / "run").exists()


def test_a_folder_that_was_left_half_written(tmp_path) -> None:
    """By one that was killed: it is deleted at the next start; and what is made has the usual mode."""
    corpus = Source(str(write_corpus(tmp_path / "corpus")))
    left = tmp_path / ".out.atlas-partial"
    (left / "tokenizer").mkdir(parents=True)
    (left / "rest.txt").write_text("rest")
    (tmp_path / "usual").mkdir()
    made = prepare(corpus, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "usual"]
    assert not (made.folder / "rest.txt").exists() and not (made.folder / ".lock").exists()
    assert made.folder.stat().st_mode == (tmp_path / "usual").stat().st_mode
    with new_folder(tmp_path / "again"):
        with pytest.raises(ValueError, match="is being written by another process"), new_folder(tmp_path / "again"):
            pass
        assert (tmp_path / ".again.atlas-partial").is_dir()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("No space left on device (28)")])
def test_a_full_disk_is_one_line(tmp_path, error: Exception) -> None:
    says = r"new' could not be written: No space left on device.*; make room"
    with pytest.raises(OSError, match=says), new_folder(tmp_path / "new"):
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["held_out.jsonl", "starts.npy", "tokenizer"])
@pytest.mark.parametrize("damage", ["missing", "cut", "pipe"])
def test_a_damaged_file_is_named(tmp_path, name: str, damage: str) -> None:
    made = prepare(Source(str(write_corpus(tmp_path / "corpus"))), tmp_path / "out")
    path = made.folder / name
    if path.is_dir():
        path = path / "tokenizer.json"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 9)
    elif damage == "pipe" and name != "tokenizer":  # which would never end
        path.unlink()
        os.mkfifo(path)
    else:
        path.unlink()
    with pytest.raises(ValueError, match=rf"out': {name} is missing or damaged: prepare it again") as caught:
        TrainingData.load(settings(tmp_path, f"data.path={made.folder}"))
    assert "\n" not in str(caught.value)


DEEP = "[" * 20_000
DAMAGED_STARTS = (
    *(lambda s: np.r_[s[:-1], -5], lambda s: s + 1, lambda s: np.r_[s[:-1], s[-2]], lambda s: np.r_[s[:-1], 10**9]),
    *(lambda s: s[:-1], lambda s: s.astype(float), lambda s: s[None], lambda s: s[0]),
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("held_out.jsonl", line) for line in (DEEP, "[1]", '{"name": "x", "text": 5}', '{"name": 5, "text": "x"}')),
        *(("starts.npy", damage) for damage in DAMAGED_STARTS),
        *(
            (PREPARED, change)
            for change in (DEEP, "[]", {"dtype": "O"}, {"dtype": "f4"}, {"dtype": []}, {"tokens": "9"})
        ),
    ],
)
def test_what_a_prepared_folder_says_is_checked(tmp_path, name: str, content) -> None:
    made = prepare(Source(str(write_corpus(tmp_path / "corpus"))), tmp_path / "out")
    if name == "starts.npy":
        np.save(made.folder / name, content(np.load(made.folder / name)))
    elif isinstance(content, dict):
        about = json.loads((made.folder / name).read_text()) | content
        (made.folder / name).write_text(json.dumps(about))
    else:
        (made.folder / name).write_text(content)
    with pytest.raises(ValueError, match=r"out'.*: prepare it again$") as caught:
        TrainingData.load(settings(tmp_path, f"data.path={made.folder}"))
    assert "\n" not in str(caught.value)


def test_refusals(tmp_path) -> None:
    corpus = Source(str(write_corpus(tmp_path / "corpus")))
    made = prepare(corpus, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        prepare(corpus, tmp_path / "out")
    os.truncate(made.folder / "tokens.bin", 10)
    with pytest.raises(ValueError, match=r"tokens.bin is cut short: prepare it again"):
        Prepared.open(made.folder)
    (made.folder / PREPARED).write_text(json.dumps({"source": "x"}))
    with pytest.raises(ValueError, match="is a damaged prepared folder: prepare it again"):
        Prepared.open(made.folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text in"):
        prepare(Source(str(tmp_path / "empty")), tmp_path / "new")
    with pytest.raises(ValueError, match="does not exist"):
        prepare(Source(str(tmp_path / "nowhere.txt")), tmp_path / "new")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("*.partial"))
    assert Prepared.open(tmp_path / "empty") is None and Prepared.open(None) is None
