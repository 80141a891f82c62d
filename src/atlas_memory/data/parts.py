"""Files of text read in parts, none of which need be the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gz, zst and zip
_WIDE = (b"\xff\xfe", b"\xfe\xff")  # UTF-16


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
    """A hash of a text given in parts; None if it is blank. UnicodeEncodeError for halves of characters."""
    found, blank = hashlib.sha256(), True
    for text in parts:
        found.update(text.encode("utf-8"))
        blank = blank and not text.strip()
    return None if blank else found.digest()[:16]


def is_packed_or_wide(path: Path) -> bool:
    """Whether a file begins as compressed files or as UTF-16 do."""
    return _beginning(path).startswith((*_PACKED, *_WIDE))


def how_to_convert(path: Path) -> str:
    """What to do about a file that is not UTF-8."""
    if path.suffix.lower() in (".gz", ".zip", ".bz2", ".xz", ".zst") or _beginning(path).startswith(_PACKED):
        return "unpack it first"
    wide = _beginning(path).startswith(_WIDE)
    convert = f"convert it first: iconv -f {'utf-16' if wide else 'latin1'} -t utf-8 {str(path)!r} > NEW"
    return convert if wide else f"{convert}, or from the encoding it has"


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
