"""Which text a trained model is read on: its run's own held-out part, or another."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from atlas_memory.console import valid_utf8
from atlas_memory.data.prepared import Prepared, load_corpus
from atlas_memory.data.sources import Document, Source, is_dataset_name
from atlas_memory.data.tokenization import warn_of_lost_characters
from atlas_memory.train.config import RunConfig
from atlas_memory.train.examples import digest_of_held_out
from atlas_memory.train.runs import Run
from atlas_memory.train.settings import noted

logger = logging.getLogger(__name__)


def text_of(run: Run, data: str | Path | None = None, column: str | None = None) -> tuple[str, Sequence[Document]]:
    """The held-out part of the text that `run` was trained on, or another text, `data`, with nothing held out of it:
    which it is, in words, and its documents. `column` is that of tables in `data`; None: as the run reads its own.
    ValueError if the run does not name its text, or `data` has no text or is a prepared folder; or for a column of the
    run's own text."""
    if data is None and column is not None:
        raise ValueError(f"--column {column} is of the text that --data names: give --data too")
    if data is None:
        if run.config is None:
            raise ValueError(f"{str(run.folder)!r} has no run.yaml to name its held-out text: give --data")
        source = run.config.data.path or "the Python standard library's source"
        try:
            held_out = load_corpus(**run.config.data.source).held_out
        except ValueError as error:
            raise ValueError(f"the text of {run.folder} cannot be read ({error}): give another by --data") from error
        _warn_of_change(run, held_out)
        warn_of_lost_characters(run.tokenizer, (document.text for document in held_out))
        return f"the held-out part of {source}", held_out
    try:
        if Prepared.open(data) is not None:
            raise ValueError(
                f"data.path={str(data)!r} is a prepared folder, which keeps held-out text only: give the text"
            )
        documents = _documents(data, run.config or RunConfig(), column)
        warn_of_lost_characters(run.tokenizer, (document.text for document in documents))
        return valid_utf8(str(data)), documents
    except ValueError as error:  # the readers name the key of a run
        raise ValueError(str(error).replace("data.path", "--data").replace("data.column", "--column")) from error


def _warn_of_change(run: Run, held_out: Sequence[Document]) -> None:
    """Warn where what is held out is not what was held out in training, as the run has noted it."""
    then = noted(run.folder).get("held_out")  # a run may be copied without it
    if then is not None and then != digest_of_held_out(held_out):
        logger.warning(
            "the text of %s has changed since it was trained: what is held out of it now may have been trained on. "
            "Restore it, or give another text by --data",
            run.folder,
        )


def _documents(data: str | Path, config: RunConfig, column: str | None) -> list[Document]:
    """All documents of a text, read as the run reads its own: from the same column, unless there is another, and split,
    and of a dataset on a hub no more than the run does."""
    options = config.data.source | {"path": str(data)} | ({} if column is None else {"column": column})
    del options["held_out"]
    if not is_dataset_name(str(data)):
        options["documents_at_most"] = None
    source = Source(**options)
    documents = list(source.documents())
    if not documents:
        raise ValueError(f"data.path={str(data)!r}: it has no non-empty UTF-8 text{source.remarks()}")
    return documents
