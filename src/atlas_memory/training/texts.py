"""What text a trained model may read: its run's own held-out part or another; of which tokens, if it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_memory.data.prepared import Prepared, load_corpus
from atlas_memory.data.sources import Document
from atlas_memory.data.tokens import load_tokenizer
from atlas_memory.training.config import ConfigError, RunConfig
from atlas_memory.training.runs import Run

TOKENIZER = "tokenizer_config.json"


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


def check_tokenizer(config: RunConfig, tokenizer: Any, name: str) -> None:
    """ConfigError if tokens of the tokenizer that `model.init_from` has are others in `tokenizer`, which the user calls
    `name`: the model would read them as what they were. More tokens are no harm."""
    if config.model.init_from is None:
        return
    folder = Path(config.model.init_from).expanduser()
    having = [path.parent for path in (*folder.glob(TOKENIZER), *folder.glob(f"checkpoint-*/{TOKENIZER}"))]
    if not having:  # a model alone; or no model, as another check says
        return
    own = load_tokenizer(str(having[0])).get_vocab()
    if not own.items() <= tokenizer.get_vocab().items():
        remedy = f"set data.tokenizer={config.model.init_from}"
        if not name.startswith("data."):
            remedy = f"prepare the text with --tokenizer {config.model.init_from}"
        raise ConfigError(
            f"{name} is not the tokenizer that the model in model.init_from={config.model.init_from!r} was trained "
            f"with, which has {len(own):,} tokens: {remedy}"
        )
