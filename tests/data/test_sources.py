"""Places that documents come from, and what is said of those that cannot be read."""

import json
import os
from pathlib import Path

import datasets
import pytest

from atlas_memory.cli import main
from atlas_memory.data import Corpus, Source

TEXTS = [f"document {i} " * 5 for i in range(12)]


@pytest.fixture
def tables(tmp_path) -> Path:
    """The same documents in every form."""
    rows = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(12))})
    rows.to_json(tmp_path / "a.jsonl")
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    rows.to_csv(tmp_path / "a.tsv", sep="\t")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([3])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.tsv", "saved", "splits", "texts", "texts/*.txt"])
def test_every_form_holds_the_same(tables, name: str) -> None:
    source = Source(str(tables / name))
    assert [d.text for d in source.documents()] == TEXTS
    assert len({d.name for d in source.documents()}) == 12 and source.skipped == 0


def test_a_folder_of_mixed_files_and_a_list(tables) -> None:
    (tables / "texts" / "more.jsonl").write_text(json.dumps({"text": "one more"}) + "\n")
    assert {d.text for d in Source(str(tables / "texts")).documents()} == {*TEXTS, "one more"}
    both = Source([str(tables / "texts" / "03.txt"), str(tables / "a.jsonl")])
    assert [d.text for d in both.documents()] == [TEXTS[3], *TEXTS[:3], *TEXTS[4:]] and both.skipped == 1  # a copy
    assert len({d.name for d in both.documents()}) == 12


def test_the_split_does_not_depend_on_how_a_place_is_written(tables, monkeypatch) -> None:
    monkeypatch.chdir(tables)
    for relative in (["texts", "saved"], "text*", ["texts", "a.jsonl"]):
        given = [relative] if isinstance(relative, str) else relative
        absolute = [str(tables / place) for place in given]
        one, two = Corpus.load(relative), Corpus.load(absolute[0] if isinstance(relative, str) else absolute)
        assert one.train == two.train and one.held_out == two.held_out


def test_json_without_rows_of_text_is_left_out_of_a_folder(tables, caplog) -> None:
    """What ends in .json may be anything; whatever it is, it is never read as raw JSON, and that is said."""
    others = {
        "options": '{"name": "x", "version": 1}',
        "list": "[1, 2\n",
        "first": '{"text": "cut\n{"text": "a"}\n',
        "table": '[{"content": "x"}]',
    }
    for name, text in others.items():
        (tables / "texts" / f"{name}.json").write_text(text)
    source = Source(str(tables / "texts"))
    assert [d.text for d in source.documents()] == TEXTS and source.skipped == 4
    assert source.first_skipped == ["first.json", "list.json", "options.json"]
    assert caplog.text.count("it is left out, and so are others like it") == 1


def test_a_table_without_the_column_that_is_asked_for_is_no_text(tables) -> None:
    (tables / "texts" / "table.json").write_text('[{"content": "x"}]')
    assert len(list(Source(str(tables / "texts"), column="content").documents())) == 13
    with pytest.raises(ValueError, match=r"no column 'body': set data.column to one of content"):
        list(Source(str(tables / "texts"), column="body").documents())


def test_names_in_capitals_marks_of_windows_and_links_to_folders(tables) -> None:
    """A table is one whatever the letters of its name; a text begins with its text; a folder may be elsewhere; nobody
    waits for a pipe or reads a device to its end."""
    corpus = tables / "corpus"
    corpus.mkdir()
    (corpus / "A.JSONL").write_text(json.dumps({"text": "in a table"}) + "\n")
    (corpus / "b.txt").write_bytes(b"\xef\xbb\xbfbehind a mark")
    (corpus / "linked").symlink_to(tables / "texts")
    (corpus / "round").symlink_to(corpus)
    (corpus / "zeros").symlink_to("/dev/zero")
    os.mkfifo(corpus / "pipe")
    source = Source(str(corpus))
    assert [d.text for d in source.documents()] == ["in a table", "behind a mark", *TEXTS] and source.skipped == 0


def test_splits_and_columns(tables) -> None:
    assert [d.text for d in Source(str(tables / "splits"), split="test").documents()] == [TEXTS[3]]
    (tables / "b.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    assert [d.text for d in Source(str(tables / "b.jsonl"), "content").documents()] == TEXTS


def test_rows_without_text_are_skipped(tables) -> None:
    (tables / "c.jsonl").write_text('{"text": "a b"}\n{"text": null}\n{"text": " "}\n{"text": "a b"}\n{"text": "c"}\n')
    source = Source(str(tables / "c.jsonl"))
    assert [d.text for d in source.documents()] == ["a b", "c"] and source.skipped == 3
    assert source.first_skipped == ["c.jsonl:2", "c.jsonl:3", "c.jsonl:4"]  # lines, as an editor counts them


@pytest.mark.parametrize("path", ["texts/*.*", ["texts/03.txt", "texts/empty.txt", "texts", "texts/03.txt"]])
def test_files_of_several_that_are_empty_or_named_twice_are_left_out(tables, monkeypatch, caplog, path) -> None:
    monkeypatch.chdir(tables)
    for name in ("empty.txt", "empty.jsonl"):
        (tables / "texts" / name).touch()
    assert sorted(d.text for d in Source(path).documents()) == sorted(TEXTS)
    assert "texts/empty.txt is left out: it is empty, or a copy of another" in caplog.text


def test_large_files_in_parts(tmp_path) -> None:
    text = "".join(f"line {i}\n" for i in range(100)) + "x" * 100
    (tmp_path / "book.txt").write_text(text)
    parts = list(Source(str(tmp_path / "book.txt"), chunk=50).documents())
    assert "".join(d.text for d in parts) == text and len(parts) > 10
    assert [d.continues for d in parts] == [False] + [True] * (len(parts) - 1)
    assert all(d.text.endswith("\n") for d in parts[:-3])
    assert [d.text for d in Source(str(tmp_path / "book.txt")).documents()] == [text]


def test_long_files_that_begin_alike_are_no_copies(tmp_path) -> None:
    """Nor is one whose first line is blank; a true copy, and a file with a bad byte late in it, are left out whole."""
    texts = {name: first + name * 200 for name, first in (("a", "<xml>\n"), ("b", "<xml>\n"), ("c", "\n"))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "copy").write_text(texts["a"])
    (tmp_path / "bad").write_bytes(b"bad " * 100 + b"\xff")
    source, found = Source(str(tmp_path), chunk=50), {}
    for document in source.documents():
        found[document.name] = found.get(document.name, "") + document.text
    assert found == texts and source.first_skipped == ["bad", "copy"]


def test_files_of_a_pattern_are_named_by_where_they_lie(tmp_path) -> None:
    for i in range(20):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "text.txt").write_text(f"text {i}")
    names = [d.name for d in Source(str(tmp_path / "*" / "text.txt")).documents()]
    assert sorted(names) == sorted(f"{i}/text.txt" for i in range(20))
    assert len(Corpus.load(str(tmp_path / "*" / "text.txt")).train) > 10


def test_rows_of_csv_are_texts_whatever_they_look_like(tmp_path) -> None:
    texts = ["NA", "null", "None", *(str(i) for i in range(50)), "1.50", "words"]
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
    source = Source(str(tmp_path / "a.csv"))
    assert [d.text for d in source.documents()] == texts and source.skipped == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.txt", "nothing.txt' does not exist"),
        ("*.md", "no file fits this pattern"),
        ("splits", "has no split 'dev': set data.split to one of train, test"),
        ("a.jsonl", "has no column 'content': set data.column to one of text, id"),
        ("b.csv", "has no column 'text': set data.column to one of body, id"),
        ("c.csv", "has no column 'text': its columns are divided by ';'; put commas, or tabs in a file"),
        ("d.csv", "row 1 .* has 3 fields and the header 2: put texts that have commas in quotes"),
        ("notes", r"notes/sums.csv' has no column 'text': set data.column to one of day, sum; or leave the file out: "),
        ("more", r"more/sums.csv' is damaged .* row 2 cannot be read .*; or leave the file out: name the others, or a"),
        ("/dev/null", "is neither a file nor a folder"),
        ("broken.jsonl", r"is damaged or no table of text: row 2 cannot be read \(line 2, column 9: "),
        ("turns.jsonl", "has a list in column 'text', row 2, and no text: write what is to be read into a column"),
        ("broken.parquet", "is damaged or no table of text"),
        ("broken", "broken' is a link to 'nowhere', and nothing is there"),
        ("round", "round' is a link to 'round', and nothing is there"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: embedded null byte"),
    ],
)
def test_refusals(tables, path: str, message: str) -> None:
    (tables / "b.csv").write_text("body,id\nfine,1\n")
    (tables / "d.csv").write_text("text,id\nhello, world,1\nhello, again,2\n")
    (tables / "c.csv").write_text("id;text\n1;fine\n")
    for name, table in (("notes", "day,sum\n1,2\n"), ("more", "day,text\n1,a\n1,2,3,4\n")):
        (tables / name).mkdir()
        (tables / name / "note.md").write_text("a note")
        (tables / name / "sums.csv").write_text(table)
    (tables / "turns.jsonl").write_text('{"text": null}\n{"text": [{"role": "user", "content": "a question"}]}\n')
    (tables / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tables / "broken.parquet").write_bytes((tables / "a.parquet").read_bytes()[:-50])
    (tables / "broken").symlink_to("nowhere")
    (tables / "round").symlink_to("round")
    options = {"column": "content"} if path == "a.jsonl" else {}
    with pytest.raises(ValueError, match=message) as caught:
        list(Source(str(tables / path), split="dev", **options).documents())
    assert "\n" not in str(caught.value)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="is an empty list"):
        Corpus.load([])


def test_the_share_that_is_held_out(tables) -> None:
    sizes = [len(Corpus.load(tables / "texts", held_out=share).held_out) for share in (0.01, 0.5, 0.99)]
    assert sizes[0] == 1 and 2 <= sizes[1] <= 10 and sizes[2] >= 10


def test_a_dataset_of_a_hub(tables, monkeypatch) -> None:
    """What is asked of `datasets`; nothing here reaches a hub."""
    rows, asked, read = datasets.Dataset.from_dict({"text": TEXTS}), [], []

    def load(place, subset, split, streaming):
        asked.append((place, subset, split, streaming))
        return rows.to_iterable_dataset().map(lambda row: read.append(row) or row) if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [d.text for d in Source("owner/name").documents()] == TEXTS
    some = Source("owner/name", subset="large", split="dev", streaming=True, documents_at_most=3)
    assert [d.text for d in some.documents()] == TEXTS[:3] and len(read) <= 4
    assert asked == [("owner/name", None, "train", False), ("owner/name", "large", "dev", True)]


def test_only_the_first(tables) -> None:
    found = Source([str(tables / "texts"), str(tables / "a.jsonl")], documents_at_most=5).documents()
    assert [d.text for d in found] == TEXTS[:5]
    (tables / "book.txt").write_text("a line\n" * 50)
    parts = list(Source([str(tables / "book.txt"), str(tables / "texts")], documents_at_most=1, chunk=64).documents())
    assert len(parts) > 3 and "".join(d.text for d in parts) == "a line\n" * 50
    assert len(Corpus.load(str(tables / "texts"), documents_at_most=4).train) == 3


def test_what_is_skipped_is_named(tables) -> None:
    for i in range(5):
        (tables / "texts" / f"a{i}.bin").write_bytes(b"a\0b")
    assert str(Corpus.load(tables / "texts")).endswith(
        "; 5 skipped (not text, empty or copies): a0.bin, a1.bin, a2.bin and 2 more"
    )


def test_folders_and_files_that_cannot_be_read_are_left_out_by_name(tables, monkeypatch, caplog) -> None:
    """And what cannot be read does not end the reading of what can."""
    corpus = tables / "corpus"
    for name in ("locked", "open"):
        (corpus / name).mkdir(parents=True)
        (corpus / name / "text.txt").write_text(f"in {name}")
    (corpus / "open" / "secret.jsonl").write_text('{"text": "secret"}')
    (corpus / "open" / "broken.txt").symlink_to("nowhere")
    scandir, opened = os.scandir, Path.open

    def refused(path) -> None:
        if Path(path).name in ("locked", "secret.jsonl"):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: refused(path) or scandir(path))
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: refused(path) or opened(path, *a, **k))
    source = Source(str(corpus))
    assert [d.text for d in source.documents()] == ["in open"]
    assert caplog.text.count("locked cannot be read (Permission denied): it is left out") == 1
    assert source.first_skipped == ["open/broken.txt", "open/secret.jsonl"]
    with pytest.raises(ValueError, match=r"secret.jsonl' cannot be read: Permission denied"):
        list(Source(str(corpus / "open" / "secret.jsonl")).documents())


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet", ".txt"])
@pytest.mark.parametrize("place", ["data[1]{}", "a*{}", "[EN] books", "[EN] books/*{}", "[ab]*"])
def test_names_are_names_where_they_exist_and_patterns_elsewhere(tmp_path, ending: str, place: str) -> None:
    names = [f"data[1]{ending}", f"data1{ending}", f"a*{ending}", f"ab{ending}", f"[EN] books/x{ending}"]
    names.append(f"E books/x{ending}")
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if ending == ".txt":
            (tmp_path / name).write_text(name)
            continue
        rows = datasets.Dataset.from_dict({"text": [name], "id": [i]})
        {".jsonl": rows.to_json, ".csv": rows.to_csv, ".parquet": rows.to_parquet}[ending](tmp_path / name)
    wanted = {"data[1]{}": names[:1], "a*{}": names[2:3], "[ab]*": names[2:4]}.get(place, names[4:5])
    source = Source(str(tmp_path / place.format(ending)))
    assert [d.text for d in source.documents()] == wanted


def test_names_that_would_steer_a_terminal_are_shown_escaped(tmp_path, capsys) -> None:
    odd = "a\x1b[31m\u202e\udcff"
    (tmp_path / odd).mkdir()
    (tmp_path / odd / f"{odd}.txt").write_text("a text " * 9)
    (tmp_path / odd / f"{odd}.bin").write_bytes(b"\0")
    (tmp_path / odd / f"{odd}.jsonl").write_text('{"text": "\\ud83d"}\n{"text": "more"}')
    assert main(["data", "prepare", str(tmp_path / odd), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / odd / f"{odd}.csv").write_text(f"{odd[:-1]},b\n1,2\n")
    assert main(["data", "prepare", str(tmp_path / odd), "--out", str(tmp_path / "more")]) == 1
    said = "".join(capsys.readouterr())
    assert said.replace("\n", "").isprintable() and said.count("\\x1b[31m\\u202e") > 6
