"""Text tokenised once: `atlas data prepare` writes a folder that training reads without loading it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from atlas_memory.console import printable
from atlas_memory.data.atomic_folder import check_new, new_folder
from atlas_memory.data.corpus import Corpus
from atlas_memory.data.segments import Tokens
from atlas_memory.data.sources import PREPARED, Document, Source
from atlas_memory.data.tokenization import encode_batch, load_tokenizer

_CHUNK = 2**22  # characters of a text file that are tokenised at once
_HELD_OUT_AT_MOST = 2**24  # characters
_END_AT_MOST = 2**22  # tokens, of the end of a text, which are decoded at once
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A folder of tokens: `tokens.bin` (ids, little-endian, of `dtype`), `starts.npy`, `held_out.jsonl`, `tokenizer/`
    and `prepared.json`. `source` and `tokenizer_name` are as given; a tokenizer's folder by its absolute path."""

    folder: Path
    source: str
    documents: int
    tokens: int
    skipped: int
    dtype: str
    tokenizer_name: str

    @classmethod
    def open(cls, path: Any) -> Prepared | None:
        """The prepared folder at `path`; None for anything else. ValueError if it is damaged."""
        if not isinstance(path, str | Path) or not os.path.isfile(Path(path).expanduser() / PREPARED):
            return None
        folder = Path(path).expanduser()
        try:
            found = cls(folder, **json.loads((folder / PREPARED).read_text(encoding="utf-8")))
            whole = (folder / "tokens.bin").stat().st_size == found.tokens * {"<u2": 2, "<u4": 4}[found.dtype]
        except (OSError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise ValueError(f"data.path={str(path)!r} is a damaged prepared folder: prepare it again") from error
        if not whole:
            raise ValueError(f"data.path={str(path)!r}: tokens.bin is cut short: prepare it again")
        return found

    @contextmanager
    def _reading(self, name: str) -> Iterator[Path]:
        """ValueError that names the file if it is missing or damaged."""
        try:
            path = self.folder / name
            if not (path.is_file() or path.is_dir()):
                raise FileNotFoundError(name)  # or a pipe, which may never end
            yield path
        except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"data.path={str(self.folder)!r}: {name} is missing or damaged: prepare it again"
            ) from error

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer that made the ids."""
        return str(self.folder / "tokenizer")

    def load(self) -> Tokens:
        """The tokens, memory-mapped."""
        with self._reading("tokens.bin") as path:
            ids = np.memmap(path, dtype=self.dtype, mode="r")
        with self._reading("starts.npy") as path:
            starts = np.load(path)
            if starts.dtype != np.int64 or starts.shape != (self.documents,):
                raise ValueError(f"{starts.shape} documents of {self.documents}")
            if starts[0] != 0 or starts[-1] >= self.tokens or (np.diff(starts) <= 0).any():
                raise ValueError("documents that do not ascend from 0")
        return Tokens(ids, starts)

    def load_tokenizer(self) -> Any:
        """The tokenizer that made the ids."""
        with self._reading("tokenizer"):
            return load_tokenizer(self.tokenizer)

    def corpus(self) -> Corpus:
        """The held-out documents, without any to train on."""
        with self._reading("held_out.jsonl") as path:
            lines = path.read_text(encoding="utf-8").splitlines()
            held_out = tuple(Document(**json.loads(line)) for line in lines)
            if not held_out or not all(isinstance(part, str) for d in held_out for part in (d.name, d.text)):
                raise ValueError("no documents")
        return Corpus(self.source, (), held_out, self.skipped)

    def __str__(self) -> str:
        return f"{self.source}, prepared in {str(self.folder)!r}: {self.documents:,} documents, {self.tokens:,} tokens"


def load_corpus(path: Any, **options: Any) -> Corpus:
    """`Corpus.load`; of a prepared folder, its held-out documents."""
    prepared = Prepared.open(path)
    return Corpus.load(path, **options) if prepared is None else prepared.corpus()


def prepare(
    source: Source,
    folder: Path,
    tokenizer: str = "bytes",
    held_out: float = 0.1,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Prepared:
    """Tokenise all documents of `source` into `folder`, in bounded memory.

    About the share `held_out` of the documents, by a hash of their names, is held out, at most 16 million characters.
    The first document is always trained on; where none is held out, the end of the text is. `progress` is called with
    how many documents and tokens have been written.

    Raises:
        ValueError: The folder is not empty; there is no text; what `Source.documents` raises.
    """
    folder = check_new(folder)
    known = load_tokenizer(tokenizer)
    if tokenizer != "bytes" and (home := Path(tokenizer).expanduser()).is_dir():
        tokenizer = str(home.resolve())
    dtype = np.dtype("<u2" if len(known) <= 2**16 else "<u4")
    end = np.asarray([known.eos_token_id], dtype)
    source.chunk = _CHUNK
    starts: list[int] = []
    written = kept = left = 0
    with new_folder(folder) as partial:
        with (partial / "tokens.bin").open("wb") as file, (partial / "held_out.jsonl").open("w") as held:
            holding = False
            for document, ids in _tokenised(source, known):
                if not document.continues:
                    room = kept + len(document.text) <= _HELD_OUT_AT_MOST
                    holding = bool(starts) and room and document.rank() < held_out
                    if not holding:
                        starts.append(written)
                        file.write(end.tobytes())
                        written += 1
                if holding:
                    if kept + len(document.text) <= _HELD_OUT_AT_MOST:
                        held.write(json.dumps({"name": document.name, "text": document.text}) + "\n")
                    else:
                        left += len(document.text)
                    kept += len(document.text)
                    continue
                file.write(ids.astype(dtype).tobytes())
                written += len(ids)
                progress(len(starts), written)
            if not starts:
                raise ValueError(source.without_text())
            file.write(end.tobytes())
        if left:
            logger.warning(
                f"{printable(str(source))}: the last {left:,} characters of a long held-out document are neither held "
                "out nor trained on: cut it into several files"
            )
        if not kept:
            written = _hold_out_the_end(partial, known, starts, written, held_out, dtype)
        np.save(partial / "starts.npy", np.asarray(starts, np.int64))
        known.save_pretrained(partial / "tokenizer")
        about: dict[str, Any] = {
            "source": str(source),
            "documents": len(starts),
            "tokens": written + 1,
            "skipped": source.skipped,
            "dtype": dtype.str,
            "tokenizer_name": tokenizer,
        }
        (partial / PREPARED).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Prepared(folder, **about)


def _hold_out_the_end(
    folder: Path, tokenizer: Any, starts: list[int], written: int, share: float, dtype: np.dtype[Any]
) -> int:
    """Hold out the end of the text; returns how many tokens are left."""
    ids = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r+")
    size = min(max(16, int(written * share)), _END_AT_MOST)
    while size < written and not _decode(tokenizer, ids[written - size : written]).strip():
        size *= 2  # the end is blank
    cut = written - size
    if cut < 2:
        raise ValueError("the text is too short to train on and to hold out from")
    edges = [cut, *(s for s in starts if s > cut), written]
    with (folder / "held_out.jsonl").open("w", encoding="utf-8") as held:
        for n, (first, last) in enumerate(pairwise(edges)):
            if (text := _decode(tokenizer, ids[first:last])).strip():
                held.write(json.dumps({"name": f"the end, {n}", "text": text}) + "\n")
    starts[:] = [s for s in starts if s < cut]
    ids[cut] = tokenizer.eos_token_id
    ids.flush()
    del ids
    os.truncate(folder / "tokens.bin", (cut + 1) * dtype.itemsize)
    return cut


def _decode(tokenizer: Any, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _tokenised(source: Source, tokenizer: Any) -> Iterator[tuple[Document, np.ndarray]]:
    """Every document with its ids, in order, tokenised in batches of a chunk a core."""
    batch: list[Document] = []
    room = most = _CHUNK * min(8, os.cpu_count() or 1)
    for document in source.documents():
        batch.append(document)
        room -= len(document.text)
        if room <= 0:
            yield from zip(batch, encode_batch(tokenizer, [d.text for d in batch]), strict=True)
            batch, room = [], most
    yield from zip(batch, encode_batch(tokenizer, [d.text for d in batch]), strict=True)
