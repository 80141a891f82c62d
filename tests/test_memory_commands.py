"""`atlas read`, `chat`, `memory`, and the options --memory: what they say, and one clear line for each mistake."""

import hashlib
import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atlas_memory.cli import main, memory_commands
from atlas_memory.models import Memory
from atlas_memory.models.generation import TEXT_PIECE
from atlas_memory.models.saved_memory import read_memory_file
from atlas_memory.train.run_model import load_run
from tests.test_cli import refused


@pytest.fixture
def run(six_steps: Path) -> Path:
    return six_steps


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n} of a book, é\n" for n in range(300)), encoding="utf-8")
    return path


def read(run: Path, *arguments: object) -> Path:
    """The memory that is written."""
    assert main(["read", str(run), *map(str, arguments)]) == 0
    return Path(str(arguments[arguments.index("--out") + 1]))


def same(one: Path, other: Path) -> bool:
    """Whether two memories are equal bitwise; the order of names in the files may differ."""
    (about, tensors), (about_other, others) = read_memory_file(one), read_memory_file(other)
    equal = tensors.keys() == others.keys() and all(torch.equal(t, others[name]) for name, t in tensors.items())
    return equal and about == about_other


def given(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_read_and_ask(run: Path, book: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = read(run, book, "--out", tmp_path / "a.memory")
    size = book.stat().st_size
    assert f"a.memory: {size:,} tokens in" in capsys.readouterr().out
    loaded = load_run(run)
    memory = Memory.load(out, loaded.model)
    assert memory.tokens == size
    (text,) = memory.texts
    assert (text.name, text.bytes) == ("book.txt", size)
    assert text.sha256 == hashlib.sha256(book.read_bytes()).hexdigest()
    asked = ["generate", str(run), "--memory", str(out), "--prompt", "line", "--max-new-tokens", "9", "--greedy"]
    assert main(asked) == 0
    answer = capsys.readouterr().out
    given(monkeypatch, book.read_bytes())
    other = read(run, "-", "--out", tmp_path / "b.memory")
    capsys.readouterr()
    assert main([str(other) if a == str(out) else a for a in asked]) == 0
    assert capsys.readouterr().out == answer
    assert main(asked[:2] + asked[4:]) == 0
    assert capsys.readouterr().out != answer


def test_reading_on(run: Path, book: Path, tmp_path: Path, capsys) -> None:
    """In two commands as in one, bitwise."""
    more = tmp_path / "more.txt"
    more.write_text("and more\n" * 20)
    first = read(run, book, "--out", tmp_path / "a.memory")
    second = read(run, more, "--from", first, "--out", tmp_path / "b.memory")
    whole = read(run, book, more, "--out", tmp_path / "c.memory")
    assert same(second, whole)
    assert main(["memory", "show", str(whole)]) == 0
    shown = capsys.readouterr().out
    assert "rule deltanet" in shown and "book.txt" in shown and "more.txt, 180 bytes" in shown and "0.memory" in shown
    assert main(["memory", "check", str(whole), "--model", str(run)]) == 0
    assert "whole" in capsys.readouterr().out


def test_a_reading_that_was_interrupted_goes_on(
    run: Path, book: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_commands, "PIECE", 1000)
    monkeypatch.setattr(memory_commands, "SAVE_EVERY", 0.0)
    more = tmp_path / "more.txt"
    more.write_text("and more\n" * 20)
    whole = read(run, book, more, "--out", tmp_path / "whole.memory")
    for pieces in (1, 4, 7):
        out, saves = tmp_path / f"{pieces}.memory", []
        save = Memory.save

        def stop(memory: Memory, path: Path, saves=saves, pieces=pieces, save=save) -> None:
            save(memory, path)
            saves.append(path)
            if len(saves) == pieces:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Memory, "save", stop)
            assert main(["read", str(run), str(book), str(more), "--out", str(out)]) == 130
        main(["memory", "show", str(out)])
        assert "interrupted" in capsys.readouterr().out
        read(run, book, more, "--resume", "--out", out)
        assert same(out, whole)
    read(run, book, more, "--resume", "--out", out)  # nothing is left to read
    assert same(out, whole)
    again = tmp_path / "again.memory"
    read(run, book, "--out", again)
    read(run, more, "--from", again, "--out", tmp_path / "on.memory")
    capsys.readouterr()
    said = refused(capsys, "read", run, book, "--resume", "--out", tmp_path / "on.memory")[1]
    assert "the same --from" in said
    more.write_text("another text that is long enough to have been read\n" * 20)
    assert "same" in refused(capsys, "read", run, book, more, "--resume", "--out", out)[1]
    book.write_text("short")
    assert "same" in refused(capsys, "read", run, book, "--resume", "--out", out)[1]


def test_evaluate_from_memories(run: Path, book: Path, tmp_path: Path, capsys) -> None:
    names = [str(read(run, book, "--out", tmp_path / f"{n}.memory")) for n in "ab"]
    passage = tmp_path / "passage.txt"
    passage.write_text(book.read_text()[:900])
    capsys.readouterr()
    command = ["evaluate", str(run), "--data", str(passage), "--length", "100", "--memory", names[0]]
    assert main([*command, "--memory", names[1]]) == 0
    shown = capsys.readouterr().out
    assert "empty memory" in shown and f"{names[0]} saves" in shown and "streams" in shown
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    saved = found["empty memory"]["bits_per_byte"] - found[names[0]]["bits_per_byte"]
    assert found["saved"][names[0]]["bits_per_byte"] == pytest.approx(saved)
    assert found["saved"][names[0]]["standard_error"] > 0


def test_chat(run: Path, book: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = read(run, book, "--out", tmp_path / "a.memory")
    lines = "hello", "", "/save", f"/save {book}", f"/save {tmp_path}/b.memory", "/dance", "how are you?"
    said = "\n".join([*lines, f"/save {tmp_path}/c.memory", "/quit", "unheard\n"])
    given(monkeypatch, said.encode())
    capsys.readouterr()
    assert main(["chat", str(run), "--memory", str(out), "--max-new-tokens", "5"]) == 0
    told = capsys.readouterr().err
    assert "/save needs" in told and "exists" in told and "/dance is unknown" in told and told.count("saved:") == 2
    model = load_run(run).model
    tokens = [Memory.load(tmp_path / f"{n}.memory", model).tokens for n in "abc"]
    assert tokens[0] < tokens[1] - len("User: hello\nAssistant:") < tokens[2]
    given(monkeypatch, b"hello\n\xff\n")
    assert main(["chat", str(run), "--max-new-tokens", "5"]) == 0


def test_mistakes(run: Path, book: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = read(run, book, "--out", tmp_path / "a.memory")
    before = out.read_bytes()
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pickle.memory").write_bytes(b"\x80\x04N.")
    capsys.readouterr()
    new = tmp_path / "new.memory"
    for message, *command in (
        ("name the text files", "read", run),
        ("exists", "read", run, book, "--out", out),
        ("no text file at", "read", run, tmp_path / "none.txt", "--out", new),
        ("no text file at", "read", run, tmp_path / "pipe", "--out", new),
        ("nothing to read", "read", run, empty, "--out", new),
        ("not UTF-8", "read", run, binary, "--out", new),
        ("there is no folder", "read", run, book, "--out", tmp_path / "no" / "a.memory"),
        ("a folder", "read", run, book, "--out", tmp_path),
        ("a folder", "read", run, tmp_path, "--out", new),
        ("can be read once", "read", run, "-", "-", "--out", new),
        ("leave --writes out", "evaluate", run, "--memory", out, "--writes", "off"),
        ("no memory at", "read", run, book, "--from", tmp_path / "none", "--out", new),
        ("leave --resume out", "read", run, book, "--resume", "--out", new),
        ("no memory", "generate", run, "--memory", tmp_path / "pickle.memory"),
        ("no memory at", "memory", "show", tmp_path / "pipe"),
        ("no run at", "memory", "check", out, "--model", tmp_path / "none"),
        ("no run at", "chat", tmp_path / "none"),
    ):
        code, said = refused(capsys, *command)
        assert code in (1, 2) and message in said, said
    assert out.read_bytes() == before and not new.exists()
    monkeypatch.setattr(sys, "stdin", None)
    assert "closed" in refused(capsys, "read", run, "-", "--out", new)[1]


def test_another_model_is_named(run: Path, book: Path, tmp_path: Path, capsys) -> None:
    out = read(run, book, "--out", tmp_path / "a.memory")
    capsys.readouterr()
    model = load_run(run).model
    model.lm_head.weight.data += 1
    model.save_pretrained(tmp_path / "other")
    load_run(run).tokenizer.save_pretrained(tmp_path / "other")
    code, said = refused(capsys, "generate", tmp_path / "other", "--memory", out)
    assert code == 1 and "other weights" in said and run.name in said


def test_speed_is_told_and_saved_in_time(
    run: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save comes once half a minute has passed."""
    clock, saves = iter(range(0, 100_000, 7)), []
    monkeypatch.setattr(memory_commands, "PIECE", 500)
    monkeypatch.setattr(memory_commands, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    save = Memory.save
    monkeypatch.setattr(Memory, "save", lambda memory, path: saves.append(memory.tokens) or save(memory, path))
    read(run, book, "--out", tmp_path / "a.memory")
    assert 2 < len(saves) < 12 and saves == sorted(saves)


def test_the_command_reads_as_the_model_does(run: Path, tmp_path: Path, capsys) -> None:
    """The same pieces of a text of several, and so the same tokens and states."""
    loaded, text = load_run(run), "".join(f"line {n} of a long book\n" for n in range(9000))
    path = tmp_path / "long.txt"
    path.write_text(text)
    assert len(text) > 2.5 * TEXT_PIECE and memory_commands.PIECE == TEXT_PIECE
    out = read(run, path, "--out", tmp_path / "a.memory")
    loaded.model.read(text, loaded.tokenizer, name="long.txt").save(tmp_path / "b.memory")
    assert out.read_bytes() == (tmp_path / "b.memory").read_bytes()
