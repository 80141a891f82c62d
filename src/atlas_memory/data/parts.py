"""Files of text read in parts, none of which need be the whole."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path


def parts_of(path: Path, largest: int | None) -> Iterator[str]:
    """The text of a file, whole or in parts that end with lines, without the mark that Windows puts before UTF-8;
    UnicodeDecodeError for what is not text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        text, began = "", False
        while True:
            more = file.read(-1 if largest is None else largest)
            if "\0" in more:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a zero byte")
            text += more
            if largest is None or len(more) < largest:
                if text or not began:
                    yield text
                return
            began = True
            cut = text.rfind("\n") + 1 or len(text)
            yield text[:cut]
            text = text[cut:]


def digest_of(parts: Iterable[str]) -> bytes | None:
    """A hash of a text given in parts; None if it is blank."""
    found, blank = hashlib.sha256(), True
    for text in parts:
        found.update(text.encode("utf-8", "surrogatepass"))
        blank = blank and not text.strip()
    return None if blank else found.digest()[:16]


def how_to_convert(path: Path) -> str:
    """What to do about a file that is not UTF-8."""
    if path.suffix.lower() in (".gz", ".zip", ".bz2", ".xz", ".zst"):
        return "unpack it first"
    with path.open("rb") as file:
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    convert = f"convert it first: iconv -f {'utf-16' if wide else 'latin1'} -t utf-8 {str(path)!r} > NEW"
    return convert if wide else f"{convert}, or from the encoding it has"


def check_fields(path: Path, sign: str) -> None:
    """ValueError where the first row of a table has more fields than its header: pandas would take the first of them
    for a row's name, and each column for the one before."""
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        rows = (row for row in csv.reader(file, delimiter=sign) if row)
        header, first = next(rows, []), next(rows, [])
    if len(first) > len(header):
        raise ValueError(
            f"its first row has {len(first)} fields and its header {len(header)}: put texts that have "
            f"{'tabs' if sign == chr(9) else 'commas'} in quotes"
        )
