"""The text of a run and the examples that are made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import default_data_collator

from atlas_memory.data import Corpus, Document, RandomCrops, Segments, Tokens, load_tokenizer
from atlas_memory.data.prepared import Prepared
from atlas_memory.training.config import ConfigError, DataSection, RunConfig
from atlas_memory.training.processes import processes

Examples = RandomCrops | Segments
ABOUT = "data.json"
LANES = 16  # against one: docs/training.md
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
    def load(cls, config: RunConfig) -> Text:
        """Read and tokenise what `config.data` names. ValueError if something is wrong with it."""
        data = config.data
        prepared = Prepared.open(data.path)
        if prepared is None:
            tokenizer = load_tokenizer(data.tokenizer)
            corpus = Corpus.load(**data.source)
            return cls(str(corpus), tokenizer, Tokens.of(tokenizer, corpus.train), corpus.held_out)
        if data.tokenizer not in ("bytes", prepared.name_of_tokenizer, prepared.tokenizer):
            raise ConfigError(
                f"data.tokenizer={data.tokenizer!r}, but {str(prepared.folder)!r} was prepared with "
                f"{prepared.name_of_tokenizer!r}: leave data.tokenizer out, or prepare the text again"
            )
        usual = DataSection()
        for name in ("held_out", "column", "split", "subset", "streaming", "documents"):
            if getattr(data, name) != getattr(usual, name):
                raise ConfigError(
                    f"data.{name}={getattr(data, name)!r} was decided when {str(prepared.folder)!r} was prepared: "
                    "leave it out, or prepare the text again"
                )
        held_out = prepared.corpus().held_out
        return cls(str(prepared), load_tokenizer(prepared.tokenizer), prepared.load(), held_out)

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
        """Write which text the run in `folder` reads, and with how many rows a step; once."""
        if not (folder / ABOUT).is_file():
            partial = folder / f"{ABOUT}.partial"
            partial.write_text(json.dumps(self._mark() | {"rows": _rows(config)}) + "\n", encoding="utf-8")
            partial.replace(folder / ABOUT)

    def check_ids(self, vocab_size: int) -> None:
        """ConfigError if a token is beyond a model's vocabulary, as far as `_mark` looks."""
        check_ids(self._marked(), vocab_size)

    def check_same(self, folder: Path, config: RunConfig) -> None:
        """ConfigError if the run in `folder` began with another text, or another number of rows a step."""
        path, mark = folder / ABOUT, self._mark()
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else mark
        if (rows := before.pop("rows", _rows(config))) != _rows(config):
            raise ConfigError(
                f"the run in {str(folder)!r} reads {rows} rows a step, and this would read {_rows(config)}: choose "
                "train.batch_size x train.gradient_accumulation_steps x processes to be as many"
            )
        if before != mark:
            raise ConfigError(
                f"the text has changed since the run in {str(folder)!r} began (it had {before['tokens']:,} tokens to "
                f"train on and has {mark['tokens']:,}): restore it, or train into another output_dir"
            )

    def _mark(self) -> dict[str, Any]:
        """How many tokens and documents there are, and a digest of tokens from everywhere (of all, up to a million)."""
        starts = self.tokens.starts
        digest = hashlib.sha256(self._marked().astype("<i8").tobytes() + starts.astype("<i8").tobytes()).hexdigest()
        return {"tokens": len(self.tokens.ids), "documents": len(starts), "digest": digest}

    def _marked(self) -> np.ndarray:
        count = len(self.tokens.ids)
        return self.tokens.ids[np.linspace(0, count - 1, min(count, 2**20)).astype(np.int64)]


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
