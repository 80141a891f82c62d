"""The text of a run, to train on and to evaluate on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from atlas_memory.console import progress_bar, valid_utf8
from atlas_memory.data import Corpus, Document, RandomCrops, Segments, Source, Tokens, load_tokenizer
from atlas_memory.data.prepared import Prepared, load_corpus
from atlas_memory.data.sources import is_dataset_name
from atlas_memory.data.tokenization import is_byte_tokenizer, same_tokenizer
from atlas_memory.train.config import ConfigError, DataSection, RunConfig
from atlas_memory.train.distributed import rank, world_size
from atlas_memory.train.run_folder import BYTE_TOKENS, DATA_JSON, read_data_json, read_json, replace_text

if TYPE_CHECKING:
    from atlas_memory.train.run_model import Run

Examples = RandomCrops | Segments
INTERLEAVE = 16  # the default of data.interleave; docs/results/settings.md compares it with one
HELD_OUT = "held_out.txt"  # of a model without run.yaml
LONG = 2**20  # characters, tokenised in about a second
SEGMENTS = 8  # of a row in an epoch, at least, unless data.interleave is given
logger = logging.getLogger(__name__)


def batches_per_step(config: RunConfig) -> int:
    """Forward passes of all processes in a step."""
    return config.train.gradient_accumulation_steps * world_size()


def rows_per_step(config: RunConfig) -> int:
    return config.train.batch_size * batches_per_step(config)


@dataclass(frozen=True)
class TrainingData:
    """The text of a run: in words, to train on, and to evaluate on."""

    about: str
    tokenizer: Any
    tokens: Tokens
    held_out: tuple[Document, ...]

    @classmethod
    def load(cls, config: RunConfig, console: Console | None = None) -> TrainingData:
        """Read and tokenise what `config.data` names, with progress on `console`; ValueError if it is no such text."""
        data = config.data
        prepared = Prepared.open(data.path)
        if prepared is None:
            tokenizer = load_tokenizer(data.tokens)
            _check_tokenizer(config, tokenizer, f"data.tokenizer={data.tokens!r}")
            console = console or Console(stderr=True, quiet=rank() > 0)
            found = cls(*_read_and_tokenise(data, tokenizer, console))
        else:
            _check_prepared(data, prepared)
            tokenizer = prepared.load_tokenizer()
            _check_tokenizer(config, tokenizer, f"the tokenizer of {str(prepared.folder)!r}")
            found = cls(str(prepared), tokenizer, prepared.load(), prepared.corpus().held_out)
        return found

    def examples(self, config: RunConfig) -> Examples:
        """Training examples in their order."""
        data, run, rows = config.data, config.train, rows_per_step(config)
        if data.order == "crops":
            return RandomCrops(self.tokens.ids, data.seq_len, run.last_step * rows, run.seed)
        part = len(self.tokens.ids) // (rows * max(data.longest, data.seq_len * (data.reset_every or SEGMENTS)))
        interleave, lengths = data.interleave or max(1, min(INTERLEAVE, part)), data.seq_len_schedule
        size = (self.tokens, data.seq_len, rows, run.last_step, run.seed)
        return Segments(*size, interleave, data.reset_every, data.pass_states, lengths)

    def save(self, folder: Path, config: RunConfig) -> None:
        """Write `data.json`, unless it is there: fingerprint of the text, rows a step, and settings."""
        if not (folder / DATA_JSON).is_file():
            about = self._fingerprint() | {"rows": rows_per_step(config), "settings": config.resolved().model_dump()}
            about |= {BYTE_TOKENS: is_byte_tokenizer(self.tokenizer)}
            replace_text(folder / DATA_JSON, json.dumps(about) + "\n")

    def check_ids(self, vocab_size: int) -> None:
        """ConfigError if one of a million tokens is beyond a model's vocabulary."""
        count = len(self.tokens.ids)
        found = int(self.tokens.ids[np.linspace(0, count - 1, min(count, 2**20)).astype(np.int64)].max())
        if found >= vocab_size:
            raise ConfigError(
                f"the text has the token {found:,}, and the model's vocabulary has {vocab_size:,}: prepare it again"
            )

    def check_same(self, folder: Path, config: RunConfig) -> None:
        """ConfigError if the run in `folder` began with another text or number of rows a step. The first process reads
        all tokens."""
        path, rows = folder / DATA_JSON, rows_per_step(config)
        if rank() > 0 or not path.is_file():
            return
        try:
            before = read_json(path)
            had = int(before["tokens"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{str(path)!r} is damaged: delete it, if the text is still that with which the run began"
            ) from error
        if before.get("rows", rows) != rows:
            raise ConfigError(
                f"the run in {str(folder)!r} reads {before['rows']} rows a step, and this would read {rows}: choose "
                "train.batch_size x train.gradient_accumulation_steps x processes to be as many"
            )
        now = self._fingerprint()
        changes = [name for name, value in now.items() if before.get(name) != value]
        if changes:
            how = f"it had {had:,} tokens to train on and has {now['tokens']:,}; what differs: {', '.join(changes)}"
            raise ConfigError(
                f"the text has changed since the run in {str(folder)!r} began ({how}): restore it, or train into "
                "another output_dir"
            )

    def _fingerprint(self) -> dict[str, Any]:
        """Numbers of tokens and documents, and digests of all of them and of the held-out text."""
        tokens = hashlib.blake2b(self.tokens.starts.astype("<i8").tobytes())
        for first in range(0, len(self.tokens.ids), 2**24):  # a prepared text may be larger than memory
            tokens.update(self.tokens.ids[first : first + 2**24].tobytes())
        counts = {"tokens": len(self.tokens.ids), "documents": len(self.tokens.starts)}
        return counts | {"digest": tokens.hexdigest(), "held_out": digest_of_held_out(self.held_out)}


def digest_of_held_out(documents: Sequence[Document]) -> str:
    """A digest of texts, whatever their files are called."""
    found = hashlib.blake2b()
    for document in documents:
        found.update(f"{document.text}\0".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _check_prepared(data: DataSection, prepared: Prepared) -> None:
    given, place = data.tokenizer, str(prepared.folder)
    names = (prepared.tokenizer_name, prepared.tokenizer)
    if given is not None and not any(same_tokenizer(given, name) for name in names):
        raise ConfigError(
            f"data.tokenizer={given!r}, but {place!r} was prepared with {prepared.tokenizer_name!r}: leave "
            "data.tokenizer out, or prepare the text again"
        )
    for name in ("held_out", "column", "split", "subset", "streaming", "max_documents"):
        if getattr(data, name) != DataSection.model_fields[name].default:
            raise ConfigError(
                f"data.{name}={getattr(data, name)!r} was decided when {place!r} was prepared: leave it out, or "
                "prepare the text again"
            )


def _read_and_tokenise(
    data: DataSection, tokenizer: Any, console: Console
) -> tuple[str, Any, Tokens, tuple[Document, ...]]:
    """The fields of `TrainingData`."""
    options = data.source
    share = options.pop("held_out")
    source = Source(**options)
    with progress_bar(console if console.is_terminal else Console(quiet=True), f"reading {source}") as show:
        corpus = Corpus.of(source, share, lambda documents: show(documents, f"{documents:,} documents read"))
    characters = sum(len(document.text) for document in corpus.train)
    if is_byte_tokenizer(tokenizer) or characters < LONG:
        return str(corpus), tokenizer, Tokens.of(tokenizer, corpus.train), corpus.held_out
    what = f"tokenising {characters / 1e6:.1f}M characters of {source}; `atlas data prepare` does it once for all runs"
    with progress_bar(console, what, characters if len(corpus.train) > 1 else None) as show:
        tokens = Tokens.of(tokenizer, corpus.train, lambda done: show(done, ""))
    return str(corpus), tokenizer, tokens, corpus.held_out


def _check_tokenizer(config: RunConfig, tokenizer: Any, name: str) -> None:
    """ConfigError unless `tokenizer`, of this `name`, has the tokens of the one saved with `model.init_from`."""
    if config.model.init_from is None:
        return
    folder, file = Path(config.model.init_from).expanduser(), "tokenizer_config.json"
    having = [path.parent for path in (*folder.glob(file), *folder.glob(f"checkpoint-*/{file}"))]
    if having:
        own = load_tokenizer(str(having[0])).get_vocab()
        if not own.items() <= tokenizer.get_vocab().items():
            option = "set data.tokenizer=" if name.startswith("data.") else "prepare the text with --tokenizer "
            raise ConfigError(
                f"{name} is not the tokenizer that the model in model.init_from={config.model.init_from!r} was trained "
                f"with, which has {len(own):,} tokens: {option}{having[0]}"
            )


def evaluation_text(
    run: Run, data: str | Path | None = None, column: str | None = None
) -> tuple[str, Sequence[Document]]:
    """The text to evaluate a run on, in words, and its documents: the run's own held-out text, or all of `data`.

    A folder without a run.yaml may hold the text as held_out.txt. `column` is that of tables in `data`; None: the
    run's. ValueError if the run does not name its text, `data` has no text or is a prepared folder, or a column is
    given without `data`."""
    if data is None and column is not None:
        raise ValueError(f"--column {column} is of the text that --data names: give --data too")
    if data is None:
        if run.config is None:
            if (text := run.folder / HELD_OUT).is_file():
                return f"the text {HELD_OUT} beside the model", _all_documents(text, RunConfig(), None)
            raise ValueError(f"{str(run.folder)!r} has no run.yaml to name its held-out text: give --data")
        source = run.config.data.path or "the Python standard library's source"
        try:
            held_out = load_corpus(**run.config.data.source).held_out
        except ValueError as error:
            raise ValueError(f"the text of {run.folder} cannot be read ({error}): give another by --data") from error
        known = read_data_json(run.folder).get("held_out")
        if known is not None and known != digest_of_held_out(held_out):
            logger.warning(
                f"the text of {run.folder} has changed since it was trained: some of its held-out part may have been "
                "trained on. Restore it, or give another text by --data"
            )
        return f"the held-out part of {source}", held_out
    try:
        if Prepared.open(data) is not None:
            raise ValueError(f"data.path={str(data)!r} is a prepared folder: give the text that it was made of")
        documents = _all_documents(data, run.config or RunConfig(), column)
        return valid_utf8(str(data)), documents
    except ValueError as error:  # the readers name the key of a run
        raise ValueError(str(error).replace("data.path", "--data").replace("data.column", "--column")) from error


def _all_documents(data: str | Path, config: RunConfig, column: str | None) -> list[Document]:
    """All documents of a text; of a dataset on a hub no more than the run reads."""
    options = config.data.source | {"path": str(data)} | ({} if column is None else {"column": column})
    del options["held_out"]
    if not is_dataset_name(str(data)):
        options["documents_at_most"] = None
    source = Source(**options)
    documents = list(source.documents())
    if not documents:
        raise ValueError(f"data.path={str(data)!r}: it has no non-empty UTF-8 text{source.remarks()}")
    return documents
