"""The text of a run and the examples that are made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import default_data_collator

from atlas_memory.console import progress_bar
from atlas_memory.data import Corpus, Document, RandomCrops, Segments, Source, Tokens, load_tokenizer
from atlas_memory.data.prepared import Prepared
from atlas_memory.data.tokenization import is_byte_tokenizer, same_tokenizer, warn_of_lost_characters
from atlas_memory.train.config import ConfigError, DataSection, RunConfig
from atlas_memory.train.processes import process, processes
from atlas_memory.train.settings import ABOUT, BYTES
from atlas_memory.train.vocabulary import check_tokenizer

Examples = RandomCrops | Segments
LANES = 16  # against one: docs/settings.md
LONG = 2**20  # characters, which take a tokenizer about a second
SEGMENTS = 8  # of a row in an epoch, at least, where lanes are not given


@dataclass(frozen=True)
class Text:
    """What a run trains on and what it is tested on.

    Attributes:
        about: In words.
        tokens: To train on.
        held_out: To test on.
    """

    about: str
    tokenizer: Any
    tokens: Tokens
    held_out: tuple[Document, ...]

    @classmethod
    def load(cls, config: RunConfig, console: Console | None = None) -> Text:
        """Read and tokenise what `config.data` names; `console` shows how far that is. ValueError if something is wrong
        with it."""
        data = config.data
        prepared = Prepared.open(data.path)
        if prepared is None:
            tokenizer = load_tokenizer(data.tokens)
            check_tokenizer(config, tokenizer, f"data.tokenizer={data.tokens!r}")
            console = console or Console(stderr=True, quiet=process() > 0)
            return cls(*_read_and_tokenise(data, tokenizer, console)).warned()
        names, given = (prepared.tokenizer_name, prepared.tokenizer), data.tokenizer
        if given is not None and not any(same_tokenizer(given, name) for name in names):
            raise ConfigError(
                f"data.tokenizer={given!r}, but {str(prepared.folder)!r} was prepared with "
                f"{prepared.tokenizer_name!r}: leave data.tokenizer out, or prepare the text again"
            )
        usual = DataSection()
        for name in ("held_out", "column", "split", "subset", "streaming", "documents"):
            if getattr(data, name) != getattr(usual, name):
                raise ConfigError(
                    f"data.{name}={getattr(data, name)!r} was decided when {str(prepared.folder)!r} was prepared: "
                    "leave it out, or prepare the text again"
                )
        tokenizer, held_out = prepared.load_tokenizer(), prepared.corpus().held_out
        check_tokenizer(config, tokenizer, f"the tokenizer of {str(prepared.folder)!r}")
        return cls(str(prepared), tokenizer, prepared.load(), held_out).warned()

    def warned(self) -> Text:
        """Itself, after a warning where the tokenizer loses text."""
        if process() == 0:
            warn_of_lost_characters(self.tokenizer, (document.text for document in self.held_out))
        return self

    def examples(self, config: RunConfig) -> Examples:
        """Training examples in the order in which they are read."""
        data, run = config.data, config.train
        rows = _rows(config)
        if data.order == "crops":
            return RandomCrops(self.tokens.ids, data.seq_len, run.last_step * rows, run.seed)
        part = len(self.tokens.ids) // (rows * max(data.longest, data.seq_len * (data.carry or SEGMENTS)))
        lanes = data.lanes or max(1, min(LANES, part))
        return Segments(
            self.tokens,
            data.seq_len,
            rows,
            run.last_step,
            run.seed,
            lanes,
            data.carry,
            data.pass_states,
            data.lengths,
        )

    def save(self, folder: Path, config: RunConfig) -> None:
        """Write which text the run in `folder` reads, with how many rows a step, and the settings that it begins with;
        once."""
        if not (folder / ABOUT).is_file():
            partial = folder / f"{ABOUT}.partial"
            noted = {"rows": _rows(config), "settings": config.resolved().model_dump()}
            about = self._mark() | noted | {BYTES: is_byte_tokenizer(self.tokenizer)}
            partial.write_text(json.dumps(about) + "\n", encoding="utf-8")
            partial.replace(folder / ABOUT)

    def check_ids(self, vocab_size: int) -> None:
        """ConfigError if one of a million tokens from everywhere is beyond a model's vocabulary."""
        count = len(self.tokens.ids)
        check_ids(self.tokens.ids[np.linspace(0, count - 1, min(count, 2**20)).astype(np.int64)], vocab_size)

    def check_same(self, folder: Path, config: RunConfig) -> None:
        """ConfigError if the run in `folder` began with another text, or another number of rows a step. It reads all
        tokens: the first process does so for all."""
        path = folder / ABOUT
        if process() > 0 or not path.is_file():
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            had = before["tokens"]
            for name in ("settings", BYTES):  # the first is compared by check_folder
                before.pop(name, None)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{str(path)!r} is damaged: delete it, if the text is still that with which the run began"
            ) from error
        if (rows := before.pop("rows", _rows(config))) != _rows(config):
            raise ConfigError(
                f"the run in {str(folder)!r} reads {rows} rows a step, and this would read {_rows(config)}: choose "
                "train.batch_size x train.gradient_accumulation_steps x processes to be as many"
            )
        if before != (mark := self._mark()):
            changes = [name for name in ("documents", "digest", "held_out") if before.get(name) != mark.get(name)]
            how = f"it had {had:,} tokens to train on and has {mark['tokens']:,}"
            if had == mark["tokens"]:
                how = "other held-out text" if changes == ["held_out"] else f"other text in the same {had:,} tokens"
            raise ConfigError(
                f"the text has changed since the run in {str(folder)!r} began ({how}): restore it, or train into "
                "another output_dir"
            )

    def _mark(self) -> dict[str, Any]:
        """How many tokens and documents there are, and digests of all of them, and of the text that is held out."""
        tokens = hashlib.blake2b(self.tokens.starts.astype("<i8").tobytes())
        for first in range(0, len(self.tokens.ids), 2**24):  # of a prepared text, which may be larger than memory
            tokens.update(self.tokens.ids[first : first + 2**24].tobytes())
        counts = {"tokens": len(self.tokens.ids), "documents": len(self.tokens.starts)}
        return counts | {"digest": tokens.hexdigest(), "held_out": digest_of_held_out(self.held_out)}


def digest_of_held_out(documents: Sequence[Document]) -> str:
    """By which a run knows the text that is held out again, whatever its files are called now."""
    found = hashlib.blake2b()
    for document in documents:
        found.update(f"{document.text}\0".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _read_and_tokenise(
    data: DataSection, tokenizer: Any, console: Console
) -> tuple[str, Any, Tokens, tuple[Document, ...]]:
    """The fields of `Text`. What is done is shown; without a terminal, what may take long."""
    options = data.source
    source, share = Source(**{n: v for n, v in options.items() if n != "held_out"}), options["held_out"]
    with progress_bar(console if console.is_terminal else Console(quiet=True), f"reading {source}") as show:
        corpus = Corpus.of(source, share, lambda documents: show(documents, f"{documents:,} documents read"))
    characters = sum(len(document.text) for document in corpus.train)
    if is_byte_tokenizer(tokenizer) or characters < LONG:
        return str(corpus), tokenizer, Tokens.of(tokenizer, corpus.train), corpus.held_out
    what = f"tokenising {characters / 1e6:.1f}M characters of {source}; `atlas data prepare` does it once for all runs"
    with progress_bar(console, what, characters if len(corpus.train) > 1 else None) as show:
        tokens = Tokens.of(tokenizer, corpus.train, lambda done: show(done, ""))
    return str(corpus), tokenizer, tokens, corpus.held_out


def check_ids(ids: Any, vocab_size: int) -> None:
    """ConfigError if a token is beyond a model's vocabulary, of which an embedding's own error says little."""
    if (found := int(ids.max())) >= vocab_size:
        raise ConfigError(
            f"the text has the token {found:,}, and the model's vocabulary has {vocab_size:,}: a prepared folder whose "
            "tokens are not those of its tokenizer is damaged: prepare it again"
        )


def collate(vocab_size: int) -> Callable[[list[Any]], dict[str, Any]]:
    """What makes a batch of examples. They are of one length: nothing is padded, and the tokenizer needs no token for
    it."""

    def batch(examples: list[Any]) -> dict[str, Any]:
        made = default_data_collator(examples)
        check_ids(made["input_ids"], vocab_size)
        return made

    return batch


def _rows(config: RunConfig) -> int:
    """Rows read in a step."""
    return config.train.batch_size * batches(config)


def batches(config: RunConfig) -> int:
    """How many batches of `batch_size` rows a step is made of."""
    return config.train.gradient_accumulation_steps * processes()
