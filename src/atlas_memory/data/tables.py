"""Tables of text: rows by the reader of each format, of which one column is taken, and nothing else asked for."""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from atlas_memory.data.folders import first_line
from atlas_memory.data.parts import how_to_convert, is_packed_or_wide

_AHEAD = 1000  # rows of which one must have the column
_JSON = json.JSONDecoder(parse_int=float)  # no number is text, and Python refuses to make an int of a long one
_SPACE = re.compile(r"\s*")
csv.field_size_limit(2**31 - 1)  # a field may be a book
logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


class NoTable(ValueError):
    """A table of which no row could be read, or none has the column that is asked for."""


def column_of(place: str, rows: Iterable[Row], column: str) -> Iterator[Any]:
    """What stands in a column, row by row: text, or what else is there; None where a row has no such column. Bytes are
    taken for UTF-8, and become halves of characters where they are not, which no text has.

    Raises:
        NoTable: None of the first thousand rows has the column, or the first cannot be read.
        ValueError: A row cannot be read, or holds a list or a mapping there; it names the row, counted from 1.
    """
    iterator, names, count, without = iter(rows), list[str](), 0, 0
    while (row := _next(iterator, place, count + 1)) is not None:
        count += 1
        if without == count - 1:  # the column was not met before
            if column not in row:
                names, without = names or list(row), count
                if count == _AHEAD:
                    break
                continue
            yield from [None] * without
        value = row.get(column)
        if isinstance(value, list | dict):
            raise ValueError(
                f"data.path={place!r} has a {type(value).__name__} in column {column!r}, row {count}, and no text: "
                "write what is to be read into a column of its own, a text a row"
            )
        yield value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    if count and count == without:
        raise NoTable(f"data.path={place!r} has no column {column!r}: {_columns(names)}")


def _next(rows: Iterator[Row], place: str, n: int) -> Row | None:
    try:
        return next(rows, None)
    except Exception as error:  # the readers raise a dozen different types
        reason = "its brackets are nested too deep" if isinstance(error, RecursionError) else first_line(error)
        raise (NoTable if n == 1 else ValueError)(
            f"data.path={place!r} is damaged or no table of text: row {n} cannot be read ({reason})"
        ) from error


def _json(path: Path, column: str) -> Iterator[Row]:
    """An object a line; or, loaded whole, a list of objects, and in .json objects of several lines."""
    with _opened(path) as file:
        first = next((line.strip() for line in file if not line.isspace()), "")
        whole = first.startswith("[") or (path.suffix.lower() == ".json" and not first.endswith("}"))
        file.seek(0)
        for n, text in enumerate([file.read()] if whole else file):
            try:
                yield from _objects(text.rstrip())
            except json.JSONDecodeError as error:
                raise ValueError(f"line {n + error.lineno}, column {error.colno}: {error.msg}") from error


def _objects(text: str) -> Iterator[Row]:
    """Those of a list, or one behind the other."""

    def behind_space(at: int) -> int:
        return found.end() if (found := _SPACE.match(text, at)) else at

    at = behind_space(0)
    if listed := text.startswith("[", at):
        at = behind_space(at + 1)
    while at < len(text) and not (listed and text[at] == "]"):
        row, at = _JSON.raw_decode(text, at)
        if not isinstance(row, dict):
            raise ValueError(f"it is a {type(row).__name__} and no object with columns")
        yield row
        at = behind_space(at)
        if listed and text.startswith(",", at):
            at = behind_space(at + 1)
        elif listed and not text.startswith("]", at):
            break
    if listed and text[at:] != "]":
        raise json.JSONDecodeError("Expecting ',' or ']' and the end of the file", text, at)


def _separated(sign: str, path: Path, column: str) -> Iterator[Row]:
    """Fields between signs under a header, in quotes where they hold the sign or ends of lines."""
    header, line = list[str](), 0
    with _opened(path, newline="") as file:
        reader = csv.reader(file, delimiter=sign, strict=True)
        try:
            for fields in reader:
                first, line = line + 1, reader.line_num
                if not fields or (len(fields) == 1 and fields[0].isspace()):
                    continue
                if not header:
                    header, told = fields, False
                    continue
                if len(fields) != len(header):
                    raise ValueError(
                        f"line {first} has {len(fields)} fields and the header {len(header)}: put texts that have "
                        f"{'tabs' if sign == chr(9) else 'commas'} in quotes"
                    )
                if sign == "\t" and first < line and not told and any(sign in f and "\n" in f for f in fields):
                    told = True
                    logger.warning(
                        "%r: quotation marks hold lines %d to %d together, with the tabs in them; if marks are letters "
                        "there, write JSON lines",
                        *(str(path), first, line),
                    )
                yield {column: fields[header.index(column)]} if column in header else dict.fromkeys(header)
        except csv.Error as error:
            raise ValueError(
                f"lines {line + 1} to {reader.line_num}: {error}; a quotation mark that begins a field must end it, "
                "and those inside be doubled"
            ) from error


def _parquet(path: Path, column: str) -> Iterator[Row]:
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


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": partial(_separated, ","),
    ".tsv": partial(_separated, "\t"),
    ".parquet": _parquet,
}
"""The rows of a file, each with the column at least, where the file has one, by the file's ending."""


def _opened(path: Path, newline: str | None = None) -> TextIO:
    if is_packed_or_wide(path):
        raise ValueError(f"it is not UTF-8 text: {how_to_convert(path)}")
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _columns(names: list[str]) -> str:
    """What to do about a table that has these columns, and none of the name that is asked for."""
    if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), None)):
        return f"its columns are divided by {other!r}; put commas, or tabs in a file that ends in .tsv"
    said = " ".join(", ".join(names[:20]).split())[:200]
    return f"set data.column to one of {said}{', ...' if len(names) > 20 or len(said) == 200 else ''}"
