"""Which text a trained model is read on: its run's own held-out part, or another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atlas_memory.data.prepared import Prepared, load_corpus
from atlas_memory.data.sources import Document
from atlas_memory.training.config import RunConfig
from atlas_memory.training.runs import Run


def text_of(run: Run, data: str | Path | None = None) -> tuple[str, Sequence[Document]]:
    """The held-out part of the text that `run` was trained on, or all of `data`: which it is, in words, and its
    documents. ValueError if the run does not name its text, or `data` is a prepared folder."""
    if data is None:
        if run.config is None:
            raise ValueError(f"{str(run.folder)!r} has no run.yaml to name its held-out text: give --data")
        source = run.config.data.path or "the Python standard library's source"
        return f"the held-out part of {source}", load_corpus(**run.config.data.source).held_out
    if Prepared.open(data) is not None:
        raise ValueError(f"--data={str(data)!r} is a prepared folder, which keeps held-out text only: give the text")
    corpus = load_corpus(**(run.config or RunConfig()).data.source | {"path": str(data)})
    return f"{data}, all of it", corpus.train + corpus.held_out
