"""Where documents come from: text files, tables, folders of these, saved datasets and those of a hub."""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas_memory.console import first_line, printable, valid_utf8
from atlas_memory.data.readers import (
    TABLES,
    NotATable,
    how_to_convert,
    is_saved_dataset,
    read_column,
    read_dataset,
    read_text,
)

PREPARED = "prepared.json"  # in a folder of `atlas data prepare`
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_NAMED = 3  # of the files that were skipped
# Folders of the standard library with tests, third-party code or generated tables.
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "pydoc_data", "encodings"}
)
logger = logging.getLogger(__name__)


def is_dataset_name(place: str) -> bool:
    """Whether it looks like the name of a dataset on a hub, and is no path here."""
    ending = Path(place).suffix.lower() in {*TABLES, ".txt", ".md", ".py", ".gz", ".zip"}
    return bool(_HUB.fullmatch(place)) and not ending and not Path(place).parent.exists()


@dataclass(frozen=True)
class Document:
    """One text and its name: a path relative to the corpus, and the row of a table."""

    name: str
    text: str
    continues: bool = False
    """Whether it is a further part of the document before it."""

    def rank(self) -> float:
        """A uniform number in [0, 1), by a hash of the name."""
        number = int.from_bytes(hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()[:8], "big")
        return (number % 10 + number // 10 % 10_000 / 10_000) / 10


@dataclass
class Source:
    """Documents of one or several places, read one after the other when they are asked for.

    Args:
        path: A file, a folder, a pattern such as ``"books/*.txt"``, a dataset's name on a hub, or a list of these;
            None: the Python standard library's source. Files that end in .jsonl, .ndjson, .json, .parquet, .csv or .tsv
            are tables of documents, all others one document each.
        column: The column of tables that holds the text.
        split: Of a dataset.
        subset: Of a dataset on a hub that has several, its "configuration".
        streaming: Read a dataset on a hub without downloading it first.
        documents_at_most: Of all places together; None: all.
        chunk: Cut text files into parts of about so many characters, at the ends of lines; None: never.

    Attributes:
        skipped: Files and rows that were not text, empty, unreadable or copies.
        first_skipped: The names of the first of them.
    """

    path: str | Path | Sequence[str] | None = None
    column: str = "text"
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    documents_at_most: int | None = None
    chunk: int | None = None
    skipped: int = 0
    first_skipped: list[str] = field(default_factory=list)
    _digests: set[bytes] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return "the Python standard library's source" if self.path is None else ", ".join(self._places())

    def _places(self) -> list[str]:
        return [str(self.path)] if isinstance(self.path, str | Path) else list(self.path or [])

    def remarks(self) -> str:
        """The skipped, as the end of a sentence; empty for none."""
        if not self.skipped:
            return ""
        names = ", ".join(self.first_skipped)
        more = f" and {self.skipped - _NAMED} more" if self.skipped > _NAMED else ""
        return f"; {self.skipped} skipped (not text, empty or copies): {names}{more}"

    def without_text(self) -> str:
        """The message where there is no document."""
        return f"no text in {str(self)!r}: it has no non-empty UTF-8 text{self.remarks()}"

    def documents(self) -> Iterator[Document]:
        """Every document, or the first so many. ValueError for a place that does not exist or cannot be read, and for a
        table that lacks the column or is damaged."""
        count = 0
        for document in self._documents():
            count += not document.continues
            if self.documents_at_most is not None and count > self.documents_at_most:
                return
            yield document

    def _documents(self) -> Iterator[Document]:
        self.skipped, self.first_skipped, self._digests = 0, [], set()
        if self.path is None:
            root = Path(sysconfig.get_path("stdlib"))
            yield from self._folder(root, [*_library_files(root)])
            return
        places = self._places()
        if not places:
            raise ValueError("data.path is an empty list: name a file, a folder or a dataset")
        for n, place in enumerate(places):
            # names, which decide what is held out, must not depend on where a folder is
            yield from self._place(place, "" if len(places) == 1 else f"{n}/")

    def _place(self, place: str, prefix: str) -> Iterator[Document]:
        root = _checked_path(place)
        if os.path.isfile(root / PREPARED):
            raise ValueError(f"data.path: {place!r} is a prepared folder, which is no part of a text: name it alone")
        if os.path.isfile(root / "tokens.bin") and os.path.isfile(root / "starts.npy"):
            raise ValueError(f"data.path={place!r} is a prepared folder without its {PREPARED}: prepare it again")
        if root.is_dir() and not is_saved_dataset(root):
            found = self._folder(root, [*_files_under(root, self._leave_out)])
        elif root.is_dir():
            found = self._rows(place, read_dataset(root, self.column, self.split), root.name)
        elif root.is_file():
            found = self._file(root, root.name, alone=True)
        elif root.exists():
            raise ValueError(f"data.path={place!r} is neither a file nor a folder: name one that holds the text")
        elif root.is_symlink():
            raise ValueError(f"data.path={place!r} is a link to {os.readlink(root)!r}, and nothing is there")
        elif matching := _matching(root):
            found = (document for path, inside in matching for document in self._place(str(path), inside))
        elif any(c in place for c in "*?["):
            raise ValueError(f"data.path={place!r}: no file fits this pattern")
        elif is_dataset_name(place):
            rows = read_dataset(place, self.column, self.split, self.subset, self.streaming)
            found = self._rows(place, rows, place)
        else:
            remedy = "" if root.suffix else f"; prepared text is made by: atlas data prepare TEXT --out {root}"
            raise ValueError(f"data.path={place!r} does not exist{remedy}")
        for document in found:
            yield Document(valid_utf8(prefix + document.name), document.text, document.continues)

    def _folder(self, root: Path, names: Iterable[str]) -> Iterator[Document]:
        for name in names:
            yield from self._file(root / name, name, alone=False)

    def _file(self, path: Path, name: str, alone: bool) -> Iterator[Document]:
        """`alone`: the user named it, so that faults are errors; other files are skipped."""
        try:
            is_table = path.suffix.lower() in TABLES and path.stat().st_size
            yield from self._table(path, name, alone) if is_table else self._text(path, name, alone)
        except OSError as error:
            if alone:
                raise ValueError(f"data.path={str(path)!r} cannot be read: {error.strerror}") from error
            self._skip(name)
            self._leave_out(error)

    def _table(self, path: Path, name: str, alone: bool) -> Iterator[Document]:
        path.open("rb").close()  # OSErrors after this are of damaged rows
        try:
            rows = TABLES[path.suffix.lower()](path, self.column)
            yield from self._rows(str(path), rows, name)
        except ValueError as error:
            if alone:
                raise
            if isinstance(error, NotATable) and path.suffix.lower() == ".json" and self.column == "text":
                self._skip(name)  # a .json file may be anything
                self._warn_once(".json", f"{error}: it is left out, and so are others like it")
                return
            raise ValueError(
                f"{error}; or leave the file out: name the others, or a pattern such as "
                f"data.path={str(path.parent / '*.txt')!r}"
            ) from error

    def _text(self, path: Path, name: str, alone: bool) -> Iterator[Document]:
        try:
            parts: Iterable[str] = read_text(path, self.chunk)
            whole: Iterable[str] = read_text(path, self.chunk)
            if self.chunk is None or path.stat().st_size < self.chunk:  # a single part, which is read once
                parts = whole = [*parts]
            digest = _digest(whole)  # of all parts, before any of them is given
            for i, text in enumerate(parts):
                if i == 0 and not self._is_new(digest, name):  # a copy of another file, or of nothing
                    if isinstance(self.path, str | Path) and path == Path(self.path).expanduser():
                        raise ValueError(f"data.path={str(path)!r} is empty")
                    if alone and self.skipped <= _NAMED:
                        logger.warning("%s is left out: it is empty, or a copy of another", printable(str(path)))
                    return
                yield Document(name, text, i > 0)
        except UnicodeDecodeError as error:
            if alone:
                raise ValueError(f"data.path={str(path)!r} is not UTF-8 text: {how_to_convert(path)}") from error
            self._skip(name)

    def _rows(self, place: str, rows: Iterable[Any], name: str) -> Iterator[Document]:
        for i, text in enumerate(read_column(place, rows, self.column)):
            row = f"{name}:{i + 1}"  # people count from one
            if not isinstance(text, str):
                self._skip(row)
                continue
            try:
                new = self._is_new(_digest([text]), row)
            except UnicodeEncodeError:
                self._skip(row)
                words = "is left out, and so are others like it: it has half a character, or bytes that are not UTF-8"
                self._warn_once("half", f"{row} {words} (convert what has another encoding first)")
                continue
            if new:
                yield Document(f"{name}:{i}", text)  # the name decides what is held out

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", printable(message))

    def _leave_out(self, error: OSError) -> None:
        self._warn_once(str(error.filename), f"{error.filename} cannot be read ({error.strerror}): it is left out")

    def _skip(self, name: str) -> None:
        self.skipped += 1
        if len(self.first_skipped) < _NAMED:
            self.first_skipped.append(name)

    def _is_new(self, digest: bytes | None, name: str) -> bool:
        if digest is None or digest in self._digests:
            self._skip(name)
            return False
        self._digests.add(digest)
        return True


def _digest(parts: Iterable[str]) -> bytes | None:
    """A hash of a text; None if it is blank. UnicodeEncodeError for surrogates."""
    found, blank = hashlib.sha256(), True
    for text in parts:
        found.update(text.encode("utf-8"))
        blank = blank and not text.strip()
    return None if blank else found.digest()[:16]


def _checked_path(place: str) -> Path:
    """The path of a place, which need not exist; ValueError where that cannot be asked."""
    root = Path(place).expanduser()
    try:
        root.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        if getattr(error, "errno", None) not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            reason = getattr(error, "strerror", None) or first_line(error)
            raise ValueError(f"data.path={place!r} cannot be read: {reason}") from error
    return root


def _matching(pattern: Path) -> list[tuple[Path, str]]:
    """The paths that fit a pattern, with the prefix of their documents' names. Existing folders are not patterns."""
    fixed = next(folder for folder in pattern.parents if folder.exists())
    names = sorted(glob.glob(str(pattern.relative_to(fixed)), root_dir=fixed, recursive=True))
    folders = ((fixed / name, Path(name) if (fixed / name).is_dir() else Path(name).parent) for name in names)
    return [(path, "" if folder == Path() else f"{folder.as_posix()}/") for path, folder in folders]


def _files_under(
    root: Path, unreadable: Callable[[OSError], None] | None = None, without: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Relative paths of the files under `root`, sorted, without hidden ones, prepared folders, runs and `without`.
    Links are followed, each folder once. `unreadable` is called with errors of unreadable folders."""
    entered = {os.path.realpath(root)}

    def enters(path: Path) -> bool:
        if path.name.startswith((".", "__pycache__")) or path.name in without or _is_prepared_or_run(path):
            return False
        real = os.path.realpath(path)
        new = real not in entered
        entered.add(real)
        return new

    for folder, subfolders, files in os.walk(root, onerror=unreadable, followlinks=True):
        subfolders[:] = [name for name in sorted(subfolders) if enters(Path(folder) / name)]
        for path in (Path(folder) / name for name in sorted(files) if not name.startswith(".")):
            if os.path.isfile(path) or not os.path.exists(path):  # no pipe and no device, which may never end
                yield path.relative_to(root).as_posix()


def _is_prepared_or_run(folder: Path) -> bool:
    """A run's logs would be read as tables of text."""
    has = {name for name in (PREPARED, "run.yaml", "data.json") if os.path.isfile(folder / name)}
    return PREPARED in has or len(has) == 2


def _library_files(root: Path) -> Iterator[str]:
    """Relative paths of the Python standard library's own source."""
    names = _files_under(root, without=_NOT_LIBRARY)
    return (n for n in names if n.endswith(".py") and not n.rpartition("/")[2].startswith("_sysconfigdata"))
