"""Tables: every row's text, or a word about it; and nothing but the column that was asked for."""

import gc
import gzip
import json
import os
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from atlas_memory.data import Source, readers
from atlas_memory.data.prepared import prepare


def read(path: Path, **options) -> list[str]:
    return [document.text for document in Source(str(path), **options).documents()]


CHANGES = (
    *(("null", '"s"'), ("1", "1.5"), ("1", '"s"'), ("1", "true"), ("1", str(2**63)), ("1", "9" * 5000), ("0.5", "NaN")),
    *(('"2020-01-01"', '"s"'), ("[]", '["a"]'), ('{"a": 1}', '{"a": 1, "b": 2}'), ('{"a": 1}', '"s"'), ("", "1")),
    *(("1", ""), ('"s"', r'"\ud83d"')),
)


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_fields_that_nobody_asked_for_may_change(tmp_path, ending: str) -> None:
    """Early and after more than ten megabytes, of which readers that infer types see no more."""
    lines = [
        f'{{"text": "text {i}", "pad": "{"y" * 1_000_000 * (i > 0)}"'
        + "".join(f', "{n}": {change[i in (1, 12)]}' for n, change in enumerate(CHANGES) if change[i in (1, 12)])
        + "}\n"
        for i in range(13)
    ]
    (tmp_path / f"a{ending}").write_text("".join(lines))
    assert read(tmp_path / f"a{ending}") == [f"text {i}" for i in range(13)]


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a"}\n\n{"text": "b"}\n',
        '{"text": "a"}\r\n{"text": "b"}',
        '{"text": "a"}\r{"text": "b"}\r',
        ' [{"text": "a"},\n {"text": "b"}\n] ',
        '[{"text": "a"}, {"text": "b"}]\n',
        '\ufeff{"text": "a"}\n{"x": 1}\n{"text": "b"}\n',
        '{"x": 1}\n{"text": "a"}\n{"text": "b"}\n',
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json"])
def test_forms_of_json(tmp_path, text: str, ending: str) -> None:
    (tmp_path / f"a{ending}").write_text(text, newline="")
    assert read(tmp_path / f"a{ending}") == ["a", "b"]


def test_an_object_of_several_lines(tmp_path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"text": "a", "b": [1]}, indent=2))
    assert read(tmp_path) == ["a"]


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_fields_in_quotes(tmp_path, ending: str) -> None:
    sign = "," if ending == ".csv" else "\t"
    book = "word " * 26_215  # more than 131,072 characters, which is what csv takes by itself
    texts = [book, 'the "fourth" line', f"a{sign}b\r\nc\rd", "é 語", "x"]
    lines = "".join(f'{i}{sign}"{text.replace(chr(34), chr(34) * 2)}"\r\n' for i, text in enumerate(texts))
    (tmp_path / f"a{ending}").write_text(f"\ufeffid{sign}text\n\n{lines}", newline="")
    assert read(tmp_path / f"a{ending}") == texts
    (tmp_path / f"b{ending}").write_text('text\n  \nthe "fourth" line\n', newline="")
    assert read(tmp_path / f"b{ending}") == ['the "fourth" line']


DEEP = '{"text": "b", "x": ' + "[" * 20_000 + "]" * 20_000 + "}"


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b', r"2 cannot be read \(line 3, column 10: "),
        ("a.jsonl", '{"text": "a"}\n{"text": "b\tc"}\n', r"2 cannot be read \(line 2, column 12: "),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "2 cannot be read"),
        ("a.jsonl", '{"text": "a"}\n7\n', r"2 cannot be read \(it is a float and no object"),
        ("a.jsonl", '{"text": "a"}\n' + DEEP, r"2 cannot be read \(its brackets are nested too deep"),
        ("a.json", '{"text": "a"}\n{"text": "b', r"2 cannot be read \(line 2, column 10: "),
        ("a.csv", "id,text\n1,a\n2\n", r"2 cannot be read \(line 3 has 1 fields and the header 2"),
        ("a.csv", "id,text\n1,a\n2,b,c\n", r"2 cannot be read \(line 3 has 3 fields .* commas in quotes"),
        ("a.csv", 'id,text\n1,"a\nb"\n2,"b\n3,c\n', r"2 cannot be read \(lines 4 to 5: unexpected end of data"),
        ("a.csv", 'id,text\n1,a\n2,"b" c\n', r"2 cannot be read \(lines 3 to 3: "),
        ("a.tsv", 'id\ttext\n0\tfirst\n1\t"Yes, he said\n2\tthe "fourth" line\n', r"2 .* \(lines 3 to 4: "),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, request, name: str, content: str, row: str) -> None:
    """Rows are counted from one, and lines as editors count them; alone and in a folder, and nothing is left behind."""
    gc.disable()  # what other tests have left would be finalised as deep in the brackets as Python goes
    request.addfinalizer(gc.enable)
    (tmp_path / name).write_text(content)
    for place in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match=rf"{name}' is damaged or no table of text: row {row}") as caught:
            prepare(Source(str(place)), tmp_path / "out" / "it")
        assert (
            len(str(caught.value).replace(str(tmp_path), "")) < 400
            and not list(tmp_path.glob("out/*"))
            and not list(tmp_path.glob("out/.*"))
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"}, ' + DEEP + "]", r"\(its brackets are nested too deep"),
        ('[{"text": "a"}, {"text": }]', r"\(line 1, column 26: "),
        ('[{"text": "a"},\n{"text": "b"}', r"\(line 2, column 14: "),
        ('[{"text": "a"}] more', r"\(line 1, column 17: "),
    ],
)
def test_a_damaged_list_is_named(tmp_path, caplog, content: str, said: str) -> None:
    """In a folder it is left out with a warning, as is any .json that is no table."""
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=rf"a.json' is damaged or no table of text: .*{said}"):
        read(tmp_path / "a.json")
    assert read(tmp_path) == ["b"] and "a.json' is damaged" in caplog.text


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv", ".parquet", "saved"])
def test_a_row_without_text_is_left_out_and_counted(tmp_path, caplog, ending: str) -> None:
    """Half an emoji, or bytes that are no UTF-8; nothing; blanks; a copy; a number, where a format knows numbers."""
    path = tmp_path / f"a{ending}"
    if ending == "saved" or ending == ".parquet":
        values = [b"a", b"b\xff", None, b" ", b"a", "語".encode()]
        table = pyarrow.table({"text": pyarrow.array(values, pyarrow.binary())})
        if ending == "saved":
            datasets.Dataset(table).save_to_disk(path)
        else:
            pyarrow.parquet.write_table(table, path)
    elif ending in (".csv", ".tsv"):
        sign = "," if ending == ".csv" else "\t"
        rows = [b"a", b"b\xff", b"", b" ", b"a", "語".encode()]
        path.write_bytes(b"text%sid\n" % sign.encode() + b"".join(b"%s%s1\n" % (row, sign.encode()) for row in rows))
    else:
        rows = [{"text": text} for text in ("a", "b \ud83d", None, " ", "a", 5, True, "語")] + [{"x": 1}]
        path.write_text(json.dumps(rows) if ending == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    source = Source(str(path))
    assert [d.text for d in source.documents()] == ["a", "語"]
    assert source.skipped == (7 if ending.startswith(".js") else 4)
    assert source.first_skipped == [f"a{ending}:{n}" for n in (2, 3, 4)]
    assert f"a{ending}:2 is left out, and so are others like it: it has half a character" in caplog.text


@pytest.mark.parametrize(
    ("name", "pack", "how"),
    [
        ("a.jsonl", lambda text: text.encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        ("a.csv", lambda text: text.encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        ("a.jsonl", lambda text: gzip.compress(text.encode()), "unpack it first"),
        ("a.jsonl.gz", lambda text: gzip.compress(text.encode()), "unpack it first"),
        ("a.json.zst", lambda text: b"\x28\xb5\x2f\xfd", "unpack it first"),
    ],
)
def test_tables_in_another_encoding_and_packed_ones(tmp_path, name: str, pack, how: str) -> None:
    (tmp_path / name).write_bytes(pack('{"text": "a"}\n'))
    with pytest.raises(ValueError, match=rf"{name}' .*is not UTF-8 text: .*{how}"):
        read(tmp_path / name)


TYPES = ("string", "large_string", "binary", "large_binary", "dictionary")


@pytest.mark.parametrize("kind", TYPES)
def test_parquet_holds_text_in_any_of_its_types(tmp_path, kind: str) -> None:
    texts = ["one", "two é", "three"]
    array = pyarrow.array([t.encode() for t in texts] if "binary" in kind else texts)
    array = array.dictionary_encode() if kind == "dictionary" else array.cast(getattr(pyarrow, kind)())
    table = pyarrow.table({"other": [[1]] * 3, "text": array})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet") == texts
    for column, said in (("other", "has a list in column 'other', row 1"), ("none", "set data.column to one of other")):
        with pytest.raises(ValueError, match=said):
            read(tmp_path / "a.parquet", column=column)


def test_a_damaged_row_group(tmp_path) -> None:
    table = pyarrow.table({"text": [f"{i} " * 500 for i in range(300)], "other": ["x" * 500] * 300})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=128, compression="none", use_dictionary=False)
    content = path.read_bytes()
    where = content.index(b"200 200 ")
    path.write_bytes(content[: where - 2000] + b"\xff" * 4000 + content[where + 2000 :])
    found = []
    with pytest.raises(ValueError, match=r"a.parquet' is damaged or no table of text: row 1\d\d cannot be read"):
        found.extend(d.text for d in Source(str(path)).documents())
        list(map(found.append, read(path)))
    path.write_bytes(content.replace(b"x" * 500, b"\xff" * 500))  # a column that nobody asked for
    assert len(read(path)) == 300


def test_saved_datasets(tmp_path) -> None:
    """An empty one is no error of datasets; other columns, such as damaged pictures, and other splits are not read."""
    rows, empty = datasets.Dataset.from_dict({"text": ["a", "b"]}), datasets.Dataset.from_dict({"text": []})
    empty.save_to_disk(tmp_path / "empty")
    datasets.DatasetDict({"train": rows, "test": empty}).save_to_disk(tmp_path / "[both]")
    pictures = datasets.Dataset.from_dict({"text": ["a", "b"], "x": [{"bytes": b"junk", "path": None}] * 2})
    features = datasets.Features({"text": datasets.Value("string"), "x": datasets.Image()})
    pictures.cast(features).save_to_disk(tmp_path / "pictures")
    assert read(tmp_path / "empty") == [] == read(tmp_path / "[both]", split="test")
    assert read(tmp_path / "[both]") == ["a", "b"] == read(tmp_path / "pictures")
    with pytest.raises(ValueError, match="no text in"):
        prepare(Source(str(tmp_path / "empty")), tmp_path / "out")
    with pytest.raises(ValueError, match=r"has no column 'body': set data.column to one of text"):
        read(tmp_path / "[both]", column="body")
    damaged = next((tmp_path / "pictures").glob("*.arrow"))
    damaged.unlink()
    os.mkfifo(damaged)  # which would never end
    with pytest.raises(ValueError, match=rf"pictures' cannot be read \({damaged.name} is missing, or no file"):
        read(tmp_path / "pictures")
    (tmp_path / "empty" / "state.json").write_text("[" * 20_000)
    with pytest.raises(ValueError, match=r"empty' cannot be read \(maximum recursion depth"):
        read(tmp_path / "empty")


def test_the_column_may_come_late_but_not_too_late(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "LOOK_AHEAD", 5)
    for early in range(1, 8):
        rows = [{"x": i} for i in range(early)] + [{"text": "a"}]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = Source(str(tmp_path / "a.jsonl"))
        if early < 5:
            assert [d.name for d in source.documents()] == [f"a.jsonl:{early}"] and source.skipped == early
        else:
            with pytest.raises(ValueError, match=r"has no column 'text': set data.column to one of x"):
                list(source.documents())


def test_a_table_of_ten_thousand_columns_is_not_listed_whole(tmp_path) -> None:
    (tmp_path / "a.csv").write_text(",".join(f"column{i}" for i in range(10_000)) + "\n" + "," * 9999 + "\n")
    with pytest.raises(ValueError, match=r"one of column0, column1, .*, \.\.\.$") as caught:
        read(tmp_path / "a.csv")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_files_are_read_without_datasets(tmp_path, monkeypatch, ending: str) -> None:
    """Which makes a cache folder when it is imported, and cannot everywhere."""
    rows = datasets.Dataset.from_dict({"text": ["a"], "id": [0]})
    write = {".csv": rows.to_csv, ".parquet": rows.to_parquet}.get(ending, rows.to_json)
    write(tmp_path / f"a{ending}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read(tmp_path / f"a{ending}") == ["a"]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_damaged_files_are_read_or_refused_in_words(tmp_path, ending: str) -> None:
    """A hundred files of each kind with bytes changed, put in, taken out and cut off."""
    random, path = np.random.default_rng(0), tmp_path / f"a{ending}"
    rows = datasets.Dataset.from_dict({"text": [f'{i} é "q" 🙂\n' for i in range(30)], "x": list(range(30))})
    write = {".csv": rows.to_csv, ".parquet": rows.to_parquet, ".tsv": partial(rows.to_csv, sep="\t")}
    write.get(ending, rows.to_json)(path)
    whole = path.read_bytes()
    for _ in range(100):
        content = bytearray(whole)
        for at, size, new in zip(*random.integers(0, (len(content), 20, 4), (3, 3)).T, strict=True):
            content[at : at + size * (new < 2)] = random.choice(list(b'"\n\\[]{},\t\xff\0'), new).tolist()
        path.write_bytes(content if random.random() < 0.8 else content[: len(content) // 2])
        try:
            read(path)
        except ValueError as error:
            assert str(error).startswith("data.path=") and "\n" not in str(error) and len(str(error)) < 1500
