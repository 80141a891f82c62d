"""Readers of text files, and of one column of tables and datasets; other columns are not looked at."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from atlas_memory.console import first_line

LOOK_AHEAD = 1000
"""Rows of which one must have the column."""
SPLITS = "dataset_dict.json"  # of `save_to_disk`, where there are several splits
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gz, zst and zip
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_JSON = json.JSONDecoder(parse_int=float)  # Python refuses very long integers
csv.field_size_limit(2**31 - 1)  # a field may be a book

Row = Mapping[str, Any]


class NotATable(ValueError):
    """No row of a file can be read, or none has the column."""


def read_text(path: Path, chunk: int | None = None) -> Iterator[str]:
    """The text of a file, whole or in chunks of about so many characters, cut at ends of lines; UnicodeDecodeError for
    what is not text."""
    with path.open("rb") as file:
        yield from text_of(file, chunk)


def text_of(file: BinaryIO, chunk: int | None = None) -> Iterator[str]:
    """`read_text` of an open file."""
    decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    text, first = "", True
    while True:
        more = decoded.read(-1 if chunk is None else chunk)
        if "\0" in more:
            raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a zero byte")
        text += more
        if chunk is None or len(more) < chunk:
            if text or first:
                yield text
            decoded.detach()
            return
        first, cut = False, text.rfind("\n") + 1 or len(text)
        yield text[:cut]
        text = text[cut:]


def read_column(place: str, rows: Iterable[Row], column: str) -> Iterator[Any]:
    """The values of a column; None where a row lacks it. Bytes are decoded as UTF-8, with surrogates.

    Raises:
        NotATable: None of the first thousand rows has the column, or the first cannot be read.
        ValueError: A row cannot be read, or has a list or mapping there.
    """
    iterator, names, count, missing = iter(rows), list[str](), 0, 0
    while (row := _next_row(iterator, place, count + 1)) is not None:
        count += 1
        if missing == count - 1:  # the column was not met before
            if column not in row:
                names, missing = names or list(row), count
                if count == LOOK_AHEAD:
                    break
                continue
            yield from [None] * missing
        value = row.get(column)
        if isinstance(value, list | dict):
            raise ValueError(
                f"data.path={place!r} has a {type(value).__name__} in column {column!r}, row {count}, and no text: "
                "write what is to be read into a column of its own, a text a row"
            )
        yield value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    if count and count == missing:
        raise NotATable(f"data.path={place!r} has no column {column!r}: {_other_columns(names)}")


def _next_row(rows: Iterator[Row], place: str, n: int) -> Row | None:
    try:
        return next(rows, None)
    except Exception as error:  # the readers raise a dozen different types
        reason = "its brackets are nested too deep" if isinstance(error, RecursionError) else first_line(error)
        raise (NotATable if n == 1 else ValueError)(
            f"data.path={place!r} is damaged or no table of text: row {n} cannot be read ({reason})"
        ) from error


def _other_columns(names: list[str]) -> str:
    if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), None)):
        return f"its columns are divided by {other!r}; put commas, or tabs in a file that ends in .tsv"
    said = " ".join(", ".join(names[:20]).split())[:200]
    return f"set data.column to one of {said}{', ...' if len(names) > 20 or len(said) == 200 else ''}"


def _json_rows(path: Path, column: str) -> Iterator[Row]:
    """An object a line; or, loaded whole, a list of objects or, in .json, an object of several lines."""
    with _open_table(path) as file:
        first = next((line.strip() for line in file if not line.isspace()), "")
        whole = first.startswith("[") or (path.suffix.lower() == ".json" and not first.endswith("}"))
        file.seek(0)
        for n, text in enumerate([file.read()] if whole else file):
            if text.isspace():
                continue
            try:
                found = _JSON.decode(text.rstrip())
            except json.JSONDecodeError as error:
                raise ValueError(f"line {n + error.lineno}, column {error.colno}: {error.msg}") from error
            for row in found if isinstance(found, list) else [found]:
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__} and no object with columns")
                yield row


def _csv_rows(delimiter: str, path: Path, column: str) -> Iterator[Row]:
    """Fields under a header, in quotes where they hold the delimiter or ends of lines."""
    header, line = list[str](), 0
    with _open_table(path, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            for fields in reader:
                first, line = line + 1, reader.line_num
                if not fields or (len(fields) == 1 and fields[0].isspace()):
                    continue
                if not header:
                    header = fields
                    continue
                if len(fields) != len(header):
                    raise ValueError(
                        f"line {first} has {len(fields)} fields and the header {len(header)}: put texts that have "
                        f"{'tabs' if delimiter == chr(9) else 'commas'} in quotes"
                    )
                yield {column: fields[header.index(column)]} if column in header else dict.fromkeys(header)
        except csv.Error as error:
            raise ValueError(
                f"lines {line + 1} to {reader.line_num}: {error}; a quotation mark that begins a field must end it, "
                "and those inside be doubled"
            ) from error


def _parquet_rows(path: Path, column: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    with path.open("rb") as file:
        table = pyarrow.parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            yield dict.fromkeys(table.schema_arrow.names)
            return
        for batch in table.iter_batches(batch_size=64, columns=[column]):
            values = batch.column(0)
            with suppress(pyarrow.ArrowException):  # of numbers and lists
                values = values.cast(pyarrow.large_binary())  # of text too, which need not be UTF-8
            yield from ({column: value} for value in values.to_pylist())


TABLES: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": partial(_csv_rows, ","),
    ".tsv": partial(_csv_rows, "\t"),
    ".parquet": _parquet_rows,
}
"""The reader of a table, by the ending of the file."""


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote it."""
    has = {name for name in (SPLITS, "dataset_info.json", "state.json") if os.path.isfile(folder / name)}
    return SPLITS in has or len(has) == 2


def read_dataset(
    place: Path | str, column: str, split: str, subset: str | None = None, streaming: bool = False
) -> Iterable[Any]:
    """Rows of a folder of `save_to_disk` (a Path) or of a dataset on a hub (a name), the column alone if there is one.
    ValueError where it cannot be read or has no such split."""
    try:
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(logging.CRITICAL)  # what it reports, the error says
        if isinstance(place, str):
            found = datasets.load_dataset(place, subset, split=split, streaming=streaming)
        else:
            if (place / SPLITS).is_file():
                splits = json.loads((place / SPLITS).read_text(encoding="utf-8"))["splits"]
                if split not in splits:
                    raise ValueError(f"it has no split {split!r}: set data.split to one of {', '.join(splits)}")
            folder = place / split if (place / SPLITS).is_file() else place
            files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
            for name in (file["filename"] for file in files):
                if not os.path.isfile(folder / name):  # or a pipe, which may never end
                    raise ValueError(f"{name} is missing, or no file")
            found = datasets.load_from_disk(str(folder)) if files else []  # an error of `datasets`
        # Pictures and sounds in other columns would be decoded.
        return found.select_columns(column) if column in (getattr(found, "column_names", None) or ()) else found
    except Exception as error:  # the loader raises a dozen different types
        what = "cannot be read" if isinstance(place, Path) else "does not exist here nor as a dataset by name"
        if isinstance(error, ModuleNotFoundError):
            what = f"is read by {error.name}, which is missing: pip install {error.name}"
        raise ValueError(f"data.path={str(place)!r} {what} ({first_line(error)})") from error


def _open_table(path: Path, newline: str | None = None) -> TextIO:
    if _first_bytes(path).startswith((*_COMPRESSED, *_UTF16)):
        raise ValueError(f"it is not UTF-8 text: {how_to_convert(path)}")
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def how_to_convert(path: Path) -> str:
    """The remedy for a file that is not UTF-8."""
    begins = _first_bytes(path)
    if path.suffix.lower() in (".gz", ".zip", ".bz2", ".xz", ".zst") or begins.startswith(_COMPRESSED):
        return "unpack it first"
    utf16 = begins.startswith(_UTF16)
    convert = f"convert it first: iconv -f {'utf-16' if utf16 else 'latin1'} -t utf-8 {str(path)!r} > NEW"
    return convert if utf16 else f"{convert}, or from the encoding it has"


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
