"""Corpora: the standard library's source, a text file or a folder, with a held-out part."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Folders of the standard library that hold tests, other people's code or generated tables.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "pydoc_data", "encodings"}
)
_HELD_OUT_SHARE = 10  # one file in ten, or the last tenth of a single file


@dataclass(frozen=True)
class Document:
    """One text and where it came from (a path relative to the corpus)."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, never sharing a file (or, for one file, a position).

    `skipped` counts the files of a folder that were left unread: binary, not UTF-8, empty, or an exact copy
    of another file (a copy could sit on the other side of the split).
    """

    source: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: int = 0

    @classmethod
    def load(cls, path: str | Path | None = None) -> Corpus:
        """Read a text file, every text file under a folder, or (None) the Python standard library's own
        source.

        A folder is split by file, by a hash of each relative path, so that the split is the same on every
        machine and does not change for the other files when one is added. ValueError if there is no text to
        read.
        """
        if path is None:
            source = "the Python standard library's source"
            root = Path(sysconfig.get_path("stdlib"))
            names = [name for name in _walk(root, _LEFT_OUT) if _is_library_source(name)]
        else:
            source, root = str(path), Path(path).expanduser()
            if not root.exists():
                raise ValueError(f"data.path={source!r} does not exist")
            if not root.is_dir():
                return cls(source, *_split_by_position(_read_one(root)))
            names = list(_walk(root, frozenset()))
        documents, skipped = _read_all(root, names)
        if not documents:
            raise ValueError(f"no text in {source!r}: {skipped} files, none of them non-empty UTF-8 text")
        if len(documents) == 1:
            return cls(source, *_split_by_position(documents[0]), skipped)
        return cls(source, *_split_by_file(documents), skipped)

    def __str__(self) -> str:
        megabytes = [sum(len(d.text) for d in part) / 1e6 for part in (self.train, self.held_out)]
        text = (
            f"{self.source}: {len(self.train)} documents ({megabytes[0]:.2f}M characters) to train on, "
            f"{len(self.held_out)} ({megabytes[1]:.2f}M) held out"
        )
        return text + (f"; {self.skipped} files skipped (not text, empty or copies)" if self.skipped else "")


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[str]:
    """Relative paths of the files under `root`, sorted; hidden names and folders in `left_out` are not
    entered."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if not n.startswith((".", "__pycache__")) and n not in left_out)
        for name in sorted(files):
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_library_source(name: str) -> bool:
    return name.endswith(".py") and not name.rpartition("/")[2].startswith("_sysconfigdata")


def _decode(data: bytes) -> str | None:
    """The text, or None for what is not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_one(path: Path) -> Document:
    try:
        text = _decode(path.read_bytes())
    except OSError as error:
        raise ValueError(f"data.path={str(path)!r} cannot be read: {error.strerror}") from error
    if text is None:
        raise ValueError(f"data.path={str(path)!r} is not UTF-8 text")
    if not text.strip():
        raise ValueError(f"data.path={str(path)!r} is empty")
    return Document(path.name, text)


def _read_all(root: Path, names: list[str]) -> tuple[list[Document], int]:
    documents: list[Document] = []
    seen: set[bytes] = set()
    for name in names:
        try:
            data = (root / name).read_bytes()
        except OSError:
            continue
        text, digest = _decode(data), hashlib.sha256(data).digest()
        if text is not None and text.strip() and digest not in seen:
            seen.add(digest)
            documents.append(Document(name, text))
    return documents, len(names) - len(documents)


def _rank(document: Document) -> int:
    return int.from_bytes(hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _split_by_file(documents: list[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    held = {d.name for d in documents if _rank(d) % _HELD_OUT_SHARE == 0}
    by_rank = sorted(documents, key=_rank)
    if not held:
        held = {by_rank[0].name}
    elif len(held) == len(documents):
        held.discard(by_rank[-1].name)
    return tuple(d for d in documents if d.name not in held), tuple(d for d in documents if d.name in held)


def _split_by_position(document: Document) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    cut = len(document.text) - max(1, len(document.text) // _HELD_OUT_SHARE)
    if cut == 0:
        raise ValueError(f"{document.name!r} holds one character: too short to train on and to hold out from")
    return (Document(document.name, document.text[:cut]),), (Document(document.name, document.text[cut:]),)
