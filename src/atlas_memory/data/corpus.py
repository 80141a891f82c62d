"""Corpora: documents to train on, and documents held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_memory.data.sources import Document, Source


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, never sharing a document (or, for one document, a position).

    `skipped` counts what was left out (see `Source`); `remarks` names the first of them.
    """

    source: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: int = 0
    remarks: str = ""

    @classmethod
    def load(cls, path: str | Path | Sequence[str] | None = None, held_out: float = 0.1, **options: Any) -> Corpus:
        """Read what `Source(path, **options)` names, and hold out about the share `held_out` of it; see `of`."""
        return cls.of(Source(path, **options), held_out)

    @classmethod
    def of(cls, source: Source, held_out: float, progress: Callable[[int], None] = lambda documents: None) -> Corpus:
        """Read a source, and hold out about the share `held_out` of it; `progress` is called with the documents so far.

        Documents are held out by a hash of their names: the split does not depend on the machine or on other documents.
        Of a document that is more than half of the text, the end is held out. ValueError if there is no text.
        """
        documents = []
        for document in source.documents():
            documents.append(document)
            progress(len(documents))
        if not documents:
            raise ValueError(source.without_text())
        return cls(str(source), *_split(documents, held_out), source.skipped, source.remarks())

    def __str__(self) -> str:
        megabytes = [sum(len(d.text) for d in part) / 1e6 for part in (self.train, self.held_out)]
        return (
            f"{self.source}: {len(self.train)} documents ({megabytes[0]:.2f}M characters) to train on, "
            f"{len(self.held_out)} ({megabytes[1]:.2f}M) held out{self.remarks}"
        )


def _split(documents: list[Document], share: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    half = sum(len(d.text) for d in documents) / 2
    large = next((d for d in documents if len(d.text) > half), None)
    held = {d.name for d in documents if d is not large and d.rank() < share}
    by_rank = sorted(documents, key=Document.rank)
    if not held and large is None:
        held = {by_rank[0].name}
    elif len(held) == len(documents):
        held.discard(by_rank[-1].name)
    train, held_out = [], []
    for document in documents:
        if document is large:
            cut = len(document.text) - max(1, int(len(document.text) * share))
            if cut == 0:
                raise ValueError(f"the text is one character, {document.text!r}: too short to hold a part of it out")
            train.append(Document(document.name, document.text[:cut]))
            held_out.append(Document(document.name, document.text[cut:]))
        else:
            (held_out if document.name in held else train).append(document)
    return tuple(train), tuple(held_out)
