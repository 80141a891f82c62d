"""Text tokenised once: `atlas data prepare` writes a folder that training reads without loading it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from atlas_memory.data.files import PREPARED
from atlas_memory.data.folders import check_new, new_folder
from atlas_memory.data.sources import Document, Source
from atlas_memory.data.streams import Tokens
from atlas_memory.data.text import Corpus, rank
from atlas_memory.data.tokens import CONTEXT, encode, load_tokenizer, warn_of_loss
from atlas_memory.printing import printable

_PART = 2**22  # characters of a text file that are tokenised at once
_HELD_OUT_AT_MOST = 2**24  # characters
_DECODED_AT_ONCE = 2**18  # tokens
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A folder of tokens.

    Attributes:
        folder: `tokens.bin` (ids, little-endian), `starts.npy`, `held_out.jsonl`, `tokenizer/` and `prepared.json`.
        source: What was prepared.
        documents, tokens, skipped: How many.
        dtype: Of the ids.
        name_of_tokenizer: As it was given; of a folder, its whole path.
    """

    folder: Path
    source: str
    documents: int
    tokens: int
    skipped: int
    dtype: str
    name_of_tokenizer: str

    @classmethod
    def open(cls, path: Any) -> Prepared | None:
        """The prepared folder at `path`; None for anything else. ValueError if its files do not belong together."""
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
        """Around the reading of one of the files: ValueError that names it if it is missing or cut short."""
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
        """The tokens, mapped from the file: what is not asked for is not read."""
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
        """The documents that were held out, and none to train on."""
        with self._reading("held_out.jsonl") as path:
            lines = path.read_text(encoding="utf-8").splitlines()
            held_out = tuple(Document(**json.loads(line)) for line in lines)
            if not held_out or not all(isinstance(part, str) for d in held_out for part in (d.name, d.text)):
                raise ValueError("no documents")
        return Corpus(self.source, (), held_out, self.skipped)

    def __str__(self) -> str:
        return f"{self.source}, prepared in {str(self.folder)!r}: {self.documents:,} documents, {self.tokens:,} tokens"


def load_corpus(path: Any, **options: Any) -> Corpus:
    """What `Corpus.load` reads; of a prepared folder, what it holds out."""
    prepared = Prepared.open(path)
    return Corpus.load(path, **options) if prepared is None else prepared.corpus()


def prepare(
    source: Source,
    folder: Path,
    tokenizer: str = "bytes",
    held_out: float = 0.1,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Prepared:
    """Tokenise all documents of `source` into `folder`, in bounded memory, with so many processes.

    About the share `held_out` of the documents, by a hash of their names, is held out, but no more than 16 million
    characters. The first document is always trained on; where none is held out, the end of the text is. `progress` is
    told how many documents and tokens have been written.

    Raises:
        ValueError: The folder is not empty; there is no text to read; what `Source.documents` raises.
    """
    folder = check_new(folder)
    known = load_tokenizer(tokenizer)
    if tokenizer != "bytes" and (home := Path(tokenizer).expanduser()).is_dir():
        tokenizer = str(home.resolve())  # so that a run anywhere knows it again
    dtype = np.dtype("<u2" if len(known) <= 2**16 else "<u4")
    end = np.asarray([known.eos_token_id], dtype)
    source.largest = _PART
    starts: list[int] = []
    written = kept = left = trained = 0
    with new_folder(folder) as partial:
        with (partial / "tokens.bin").open("wb") as file, (partial / "held_out.jsonl").open("w") as held:
            holding = False
            for document, ids in _tokenised(source, tokenizer, dtype.str, workers):
                if not document.continues:
                    if not starts:
                        warn_of_loss(known, [document.text])
                    room = kept + len(document.text) <= _HELD_OUT_AT_MOST
                    holding = bool(starts) and room and rank(document) < held_out
                    if not holding:
                        starts.append(written)
                        file.write(end.tobytes())
                        written += 1
                if holding:  # of one longer than that, as much as may be held out; the rest is left out
                    if kept + len(document.text) <= _HELD_OUT_AT_MOST:
                        held.write(json.dumps({"name": document.name, "text": document.text}) + "\n")
                    else:
                        left += len(document.text)
                    kept += len(document.text)
                    continue
                file.write(ids.tobytes())
                written += len(ids)
                trained += len(document.text)
                progress(len(starts), written)
            if not starts:
                raise ValueError(source.without_text())
            file.write(end.tobytes())
        if left:
            logger.warning(
                "%s: the last document held out is longer than is held out in all; its last %s characters are neither "
                "held out nor trained on. Cut it into several files to train on most of it",
                printable(str(source)),
                f"{left:,}",
            )
        elif kept > trained:
            logger.warning(
                "%s: %s characters are held out, more than the %s to train on, since a long document is among them: "
                "rename it, or cut it into several files",
                printable(str(source)),
                f"{kept:,}",
                f"{trained:,}",
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
            "name_of_tokenizer": tokenizer,
        }
        (partial / PREPARED).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Prepared(folder, **about)


def _hold_out_the_end(
    folder: Path, tokenizer: Any, starts: list[int], written: int, share: float, dtype: np.dtype[Any]
) -> int:
    """Where no document was held out, hold out the end of the text: how many tokens are left."""
    ids = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r+")
    size = min(max(16, int(written * share)), _HELD_OUT_AT_MOST)
    while size < written and not any(map(str.strip, _decoded(tokenizer, ids[written - size : written]))):
        size *= 2  # the end is blank
    cut = written - size
    if cut < 2:
        raise ValueError("the text is too short to train on and to hold out from")
    edges = [cut, *(s for s in starts if s > cut), written]
    with (folder / "held_out.jsonl").open("w", encoding="utf-8") as held:
        for n, (first, last) in enumerate(pairwise(edges)):
            text = "".join(_decoded(tokenizer, ids[first:last]))
            if text.strip():
                held.write(json.dumps({"name": f"the end, {n}", "text": text}) + "\n")
    starts[:] = [s for s in starts if s < cut]
    ids[cut] = tokenizer.eos_token_id
    ids.flush()
    del ids
    os.truncate(folder / "tokens.bin", (cut + 1) * dtype.itemsize)
    return cut


def _decoded(tokenizer: Any, ids: np.ndarray) -> Iterator[str]:
    """The text of the ids in pieces, which add up to what it is at once; a list of all would take a hundred bytes each.

    Each is decoded behind a few tokens before it, as what a tokenizer makes of the first of them is not what it makes
    of others, and ends where no character does not."""
    first = 0
    while first < len(ids):
        last = min(first + _DECODED_AT_ONCE, len(ids))
        behind = ids[max(0, first - CONTEXT) : first].tolist()
        before = tokenizer.decode(behind, skip_special_tokens=True)
        for _ in range(CONTEXT):  # of which the last one ends a character
            piece = tokenizer.decode(behind + ids[first:last].tolist(), skip_special_tokens=True)
            if not piece.endswith("\ufffd") or last == len(ids):
                break
            last += 1
        yield piece[len(before) :]
        first = last


_worker: Any = None


def _start(tokenizer: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = load_tokenizer(tokenizer)


def _encode(work: tuple[Document, str]) -> tuple[Document, np.ndarray]:
    document, dtype = work
    return document, encode(_worker, document.text).astype(dtype)


def _tokenised(source: Source, tokenizer: str, dtype: str, workers: int) -> Iterator[tuple[Document, np.ndarray]]:
    """Every document with its ids, in order; never more than a few documents a worker are under way."""
    work = ((document, dtype) for document in source.documents())
    if workers == 1 or tokenizer == "bytes":  # bytes are encoded faster than they are sent to another process
        _start(tokenizer)
        yield from map(_encode, work)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (tokenizer,))
    try:
        pending: deque[Future[tuple[Document, np.ndarray]]] = deque()
        for item in work:
            pending.append(_submitted(pool, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} processes that tokenise was killed or could not be started, perhaps for want of memory: "
            "take fewer (--workers)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submitted(pool: ProcessPoolExecutor, item: tuple[Document, str]) -> Future[tuple[Document, np.ndarray]]:
    try:
        return pool.submit(_encode, item)  # which may start a process
    except (OSError, ValueError) as error:  # ValueError: the pool closes the pipes of one that was killed meanwhile
        raise BrokenProcessPool(str(error)) from error
