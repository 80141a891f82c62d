"""Where documents come from: text files, tables, folders of these, saved datasets and those of a hub."""

from __future__ import annotations

import glob
import logging
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from atlas_memory.data.files import PREPARED, files_under, library_files, shown
from atlas_memory.data.folders import first_line
from atlas_memory.data.parts import check_fields, digest_of, how_to_convert, parts_of

_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".json": ("json", {}),
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
}
_NAMED = 3  # of the files that were skipped
logger = logging.getLogger(__name__)


def is_dataset_name(place: str) -> bool:
    """Whether it can only be the name of a dataset on a hub: nothing here has it, and it looks like one."""
    ending = Path(place).suffix.lower() in {*_BUILDERS, ".txt", ".md", ".py", ".gz", ".zip"}
    return bool(_HUB.fullmatch(place)) and not ending and not Path(place).parent.exists()


@dataclass(frozen=True)
class Document:
    """One text and where it came from (a path relative to the corpus; of a table, with the number of its row)."""

    name: str
    text: str
    continues: bool = False
    """Whether it goes on with the document before it, of which it is a part."""


class _NoColumn(ValueError):
    """A table without text in the column that is asked for."""


@dataclass
class Source:
    """Documents of one or several places, read one after the other when they are asked for.

    Args:
        path: A file, a folder, a pattern such as ``"books/*.txt"``, a dataset's name on a hub, or a list of these;
            None: the Python standard library's own source. Files that end in .jsonl, .ndjson, .json, .parquet, .csv or
            .tsv are tables of documents, all others texts of one document each.
        column: The column of tables that holds the text.
        split: Of a dataset.
        subset: Of a dataset on a hub that has several, its "configuration".
        streaming: Read a dataset on a hub row by row as it comes, instead of downloading it whole first.
        documents_at_most: Of all places together; None: all.
        largest: Cut text files into parts of about so many characters, at the ends of lines; None: never.

    Attributes:
        skipped: Of the files of folders and the rows of tables, how many were not text, empty or exact copies of
            another (a copy could sit on the other side of a split).
        first_skipped: The names of the first of them.
        read: Bytes of files that have been read.
    """

    path: str | Path | Sequence[str] | None = None
    column: str = "text"
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    documents_at_most: int | None = None
    largest: int | None = None
    skipped: int = 0
    first_skipped: list[str] = field(default_factory=list)
    read: int = 0
    _seen: set[bytes] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)  # options that had an effect
    _tags: bool = False  # whether a page was met, of which people were told

    def __str__(self) -> str:
        if self.path is None:
            return "the Python standard library's source"
        return str(self.path) if isinstance(self.path, str | Path) else ", ".join(self.path)

    def remarks(self) -> str:
        """How many were skipped, the names of the first of them, and which options nothing that was read asked for, as
        the end of a sentence; empty if there is nothing to say."""
        names = ", ".join(self.first_skipped)
        more = f" and {self.skipped - _NAMED} more" if self.skipped > _NAMED else ""
        said = f"; {self.skipped} skipped (not text, empty or copies): {names}{more}" if self.skipped else ""
        for name in ("column", "split", "subset", "streaming"):
            if name not in self._asked and getattr(self, name) != getattr(Source, name):
                said += f"; data.{name}={getattr(self, name)!r} has no effect on such text"
        return said

    def without_text(self) -> str:
        """What to say where nothing that was read is a document."""
        return f"no text in {str(self)!r}: it has no non-empty UTF-8 text{self.remarks()}"

    def size(self) -> int | None:
        """Bytes of the files that will be read; None where that is not known, as of datasets."""
        if self.documents_at_most is not None:
            return None
        if self.path is None:
            root = Path(sysconfig.get_path("stdlib"))
            return sum(_size(root / name) for name in library_files(root))
        files: list[Path] = []
        for place in [str(self.path)] if isinstance(self.path, str | Path) else self.path:
            found = [Path(name) for name in glob.glob(str(Path(place).expanduser()), recursive=True)]
            if any(map(_is_saved_dataset, found)) or (not found and is_dataset_name(place)):
                return None
            for root in found:
                files += [root / name for name in files_under(root)] if root.is_dir() else [root]
        packed = any(path.suffix.lower() == ".parquet" for path in files)  # of which more is read than there is
        return None if packed else sum(map(_size, files))

    def documents(self) -> Iterator[Document]:
        """Every document, or the first so many.

        Raises:
            ValueError: A place that does not exist or cannot be read; a table without the column.
        """
        count = 0
        for document in self._documents():
            count += not document.continues
            if self.documents_at_most is not None and count > self.documents_at_most:
                return
            yield document

    def _documents(self) -> Iterator[Document]:
        self.skipped, self.first_skipped, self.read, self._seen = 0, [], 0, set()
        if self.path is None:
            root = Path(sysconfig.get_path("stdlib"))
            yield from self._files(root, library_files(root))
            return
        places = [self.path] if isinstance(self.path, str | Path) else list(self.path)
        if not places:
            raise ValueError("data.path is an empty list: name a file, a folder or a dataset")
        for n, place in enumerate(places):
            # Not the place's own name: documents are held out by their names, wherever the folder stands.
            yield from self._place(str(place), "" if len(places) == 1 else f"{n}/")

    def _place(self, place: str, prefix: str) -> Iterator[Document]:
        root = Path(place).expanduser()
        if (root / PREPARED).is_file():
            raise ValueError(f"data.path: {place!r} is a prepared folder, which is no part of a text: name it alone")
        if (root / "tokens.bin").is_file() and (root / "starts.npy").is_file():
            raise ValueError(f"data.path={place!r} is a prepared folder without its {PREPARED}: prepare it again")
        if root.is_dir() and not _is_saved_dataset(root):
            found = self._files(root, files_under(root))
        elif root.is_dir():
            found = self._rows(str(root), root.name)
        elif root.is_file():
            found = self._file(root, root.name, alone=True)
        elif root.exists():
            raise ValueError(f"data.path={place!r} is neither a file nor a folder: name one that holds the text")
        elif names := sorted(glob.glob(str(root), recursive=True)):
            fixed = Path(*takewhile(lambda part: not glob.has_magic(part), root.parts))
            found = (d for name in names for d in self._place(name, _folder(Path(name), fixed)))
        elif any(c in place for c in "*?["):
            raise ValueError(f"data.path={place!r}: no file fits this pattern")
        elif is_dataset_name(place):
            found = self._rows(place, place)
        else:
            raise ValueError(f"data.path={place!r} does not exist{_how_to_make(root)}")
        for document in found:
            yield Document(shown(prefix + document.name), document.text, document.continues)

    def _files(self, root: Path, names: list[str]) -> Iterator[Document]:
        for name in names:
            yield from self._file(root / name, name, alone=False)

    def _file(self, path: Path, name: str, alone: bool) -> Iterator[Document]:
        before = self.read
        yield from self._documents_of(path, name, alone)
        self.read = before + _size(path)

    def _documents_of(self, path: Path, name: str, alone: bool) -> Iterator[Document]:
        ending = path.suffix.lower()
        if ending in _BUILDERS and _size(path):
            try:
                rows = self._rows(str(path), name, ending)
                yield from rows if alone or ending != ".json" else list(rows)
                return
            except ValueError as error:
                if alone:
                    raise
                if ending != ".json" or (isinstance(error, _NoColumn) and self.column != "text"):
                    raise ValueError(
                        f"{error}; or leave the file out: name the others, or a pattern such as "
                        f"data.path='{path.parent / '*.txt'}'"
                    ) from error
                # What ends in .json may be anything, such as a list of options: then it is a text.
        yield from self._text(path, name, alone)

    def _text(self, path: Path, name: str, alone: bool) -> Iterator[Document]:
        """A text in its parts. `alone`: the user named it, so that what is wrong with it is said and not skipped."""
        try:
            parts: Iterable[str] = parts_of(path, self.largest)
            whole: Iterable[str] = parts_of(path, self.largest)
            if self.largest is None or _size(path) < self.largest:  # a single part, which is read once
                parts = whole = [*parts]
            digest = digest_of(whole)  # of all parts, before any of them is read from
            for i, text in enumerate(parts):
                self.read += len(text)
                self._say_if_it_has_tags(path)
                if i == 0 and not self._is_new(digest, name):  # a copy of another file, or of nothing
                    if alone and path == Path(str(self)).expanduser():
                        raise ValueError(f"data.path={str(path)!r} is empty")
                    if alone and self.skipped <= _NAMED:
                        logger.warning("%s is left out: it is empty, or a copy of another", path)
                    return
                yield Document(name, text, i > 0)
        except UnicodeDecodeError as error:
            if alone:
                raise ValueError(f"data.path={str(path)!r} is not UTF-8 text: {how_to_convert(path)}") from error
            self._skip(name)
        except OSError as error:
            if alone:
                raise ValueError(f"data.path={str(path)!r} cannot be read: {error.strerror}") from error
            self._skip(name)

    def _rows(self, place: str, name: str, ending: str | None = None) -> Iterator[Document]:
        self._asked.add("column")
        size = 0 if ending is None else self.read + _size(Path(place))
        for i, row in enumerate(_each(self._dataset(place, ending), place)):
            if self.column not in row:
                raise _NoColumn(f"data.path={place!r} has no column {self.column!r}: {_columns(row)}")
            text = row[self.column]
            if isinstance(text, list | dict):
                raise _NoColumn(
                    f"data.path={place!r} has a {type(text).__name__} in column {self.column!r}, row {i + 1}, and no "
                    "text: write what is to be read into a column of its own, a text a row"
                )
            if not isinstance(text, str):
                self._skip(f"{name}:{i + 1}")
                continue
            self.read = min(size, self.read + len(text))
            if self._is_new(digest_of([text]), f"{name}:{i + 1}"):  # people count from one
                yield Document(f"{name}:{i}", text)  # the name decides what is held out

    def _dataset(self, place: str, ending: str | None) -> Any:
        """A dataset of Hugging Face: rows of a table file, one at a time; a folder of `save_to_disk`; a hub's."""
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ValueError(
                f"data.path={place!r} is read by datasets, which is missing: pip install datasets"
            ) from error
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(logging.CRITICAL)  # what it reports, the error says
        here = Path(place).is_dir()
        try:
            if ending is not None:
                builder, options = _BUILDERS[ending]
                if builder == "csv":
                    check_fields(Path(place), options.get("sep", ","))
                    # Or pandas would make numbers of rows, and nothing of "NA" and "null".
                    options = {**options, "keep_default_na": False, "converters": {self.column: str}}
                return datasets.load_dataset(builder, data_files=place, split="train", streaming=True, **options)
            if here:
                found = datasets.load_from_disk(place)
            else:
                self._asked |= {"split", "subset", "streaming"}
                found = datasets.load_dataset(place, self.subset, split=self.split, streaming=self.streaming)
            if not isinstance(found, datasets.DatasetDict):
                return found
            self._asked.add("split")
            if self.split not in found:
                raise ValueError(f"it has no split {self.split!r}: set data.split to one of {', '.join(found)}")
            return found[self.split]
        except Exception as error:  # the loader raises a dozen different types
            where = "cannot be read" if ending or here else "does not exist here nor as a dataset by name"
            raise ValueError(f"data.path={place!r} {where} ({first_line(error)})") from error

    def _say_if_it_has_tags(self, path: Path) -> None:
        if path.suffix.lower() in (".html", ".htm") and not self._tags:
            self._tags = True
            logger.warning(
                "%s is read as it is, with its tags, and so are others like it: take their text out before if that is "
                "not wanted",
                path,
            )

    def _skip(self, name: str) -> None:
        self.skipped += 1
        if len(self.first_skipped) < _NAMED:
            self.first_skipped.append(name)

    def _is_new(self, digest: bytes | None, name: str) -> bool:
        if digest is None or digest in self._seen:
            self._skip(name)
            return False
        self._seen.add(digest)
        return True


def _columns(row: dict[str, Any]) -> str:
    """What to do about a table whose rows are like this one, and have no column of the name that is asked for."""
    if len(row) == 1 and (other := next((sign for sign in ";\t|" if sign in next(iter(row))), None)):
        return f"its columns are divided by {other!r}; put commas, or tabs in a file that ends in .tsv"
    return f"set data.column to one of {', '.join(row)}"


def _folder(path: Path, fixed: Path) -> str:
    """What the names of documents of a path that fitted a pattern begin with; ``fixed`` is the pattern's beginning."""
    inside = (path if path.is_dir() else path.parent).relative_to(fixed).as_posix()
    return "" if inside == "." else f"{inside}/"


def _each(rows: Any, place: str) -> Iterator[dict[str, Any]]:
    """The rows of a dataset; ValueError where one cannot be read."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # the readers raise a dozen different types
            raise ValueError(f"data.path={place!r} is damaged or no table of text ({first_line(error)})") from error
        yield row


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def _how_to_make(root: Path) -> str:
    """The command that would have made a folder that is not there; nothing of a file."""
    return "" if root.suffix else f"; prepared text is made by: atlas data prepare TEXT --out {root}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
