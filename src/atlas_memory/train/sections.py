"""The sections of a run's description: every key with its type and its limits.

Limits are far beyond what anybody trains, and keep what cannot be meant from asking for gigabytes or for years.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from atlas_memory.train.settings import UNASKED_STEPS

MANY = 10**9
"""The most of what costs nothing by being counted, such as steps."""
LONGEST = 2**20
"""Tokens of a segment, at most."""
Tokens = Annotated[int, Field(ge=2, le=LONGEST)]
Count = Annotated[int, Field(ge=1, le=MANY)]
CountOrNone = Annotated[int, Field(ge=0, le=MANY)]
Minutes = Annotated[float, Field(gt=0, le=MANY)]


def _programs(names: Any) -> Any:
    return [] if names in ("none", ["none"]) else [names] if isinstance(names, str) else names


class Section(BaseModel):
    """Keys with values of exactly their types: a whole number is not 3.0, and true is not 1."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):  # halves: bytes that are no UTF-8
                raise PydanticCustomError("text", "input should be UTF-8 text without the character NUL")
        return value


class ModelSection(Section):
    """A preset's name, and any field of `AtlasConfig` that is to differ from it (checked when the model is
    made).

    `init_from`, the folder of a run or of `save_pretrained`: begin with that model's weights. Its options take the
    place of the preset's, of which the learning rate remains; those given here change them, within a mapping key by
    key, as long as the weights fit.
    """

    model_config = ConfigDict(extra="allow")

    preset: str = "tiny"
    init_from: str | None = Field(default=None, min_length=1)

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataSection(Section):
    """Which text, cut how.

    `path`: a text file, a folder, a pattern, JSON lines, Parquet, a saved dataset, a dataset's name on a hub, a list of
    these, or a folder of `atlas data prepare`; None: the standard library's source. `column`: where tables have the
    text; `split`, `subset`: of a dataset; `streaming`: read a hub's dataset as it comes, not downloading it first;
    `documents`: read only the first so many; `held_out`: the share of documents that is not trained on. `tokenizer`:
    "bytes", a name or a folder; null: that of a prepared text, of any other "bytes".

    `lengths`: steps, and the tokens of a segment from that step on, such as {500: 512, 800: 2048}. A step reads as many
    tokens as before, so that as many times fewer rows. Each is a multiple of the one before, the first of `seq_len`.

    `order`, how examples of `seq_len` tokens are taken from the documents:

    * "stream": every row reads documents in order, a segment a step, and keeps what it remembers from one step to the
      next; gradients stay within a segment. `lanes`: so many steps pass until the same rows are read again, so that
      steps one after the other learn from other documents; null: 16, or fewer where the text is short. `carry`: after
      so many segments a row goes on in another place, with an empty memory; null: at the document's end.
      `pass_states`: the share of such beginnings at which the row keeps what it remembers of the place before.
    * "packed": the same segments, each of which begins with an empty memory.
    * "crops": segments at random places, over the ends of documents, each with an empty memory.
    """

    path: str | Annotated[list[str], Field(max_length=1000)] | None = None
    column: str = "text"
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    documents: Count | None = None
    held_out: float = Field(default=0.1, gt=0, lt=1)
    tokenizer: str | None = Field(default=None, min_length=1)
    seq_len: Tokens = 256
    lengths: Annotated[dict[int, Tokens], Field(max_length=64)] = {}
    order: Literal["stream", "packed", "crops"] = "stream"
    lanes: int | None = Field(default=None, ge=1, le=2**16)
    carry: Count | None = None
    pass_states: float = Field(default=0.0, ge=0, le=1)

    @property
    def tokens(self) -> str:
        """What `tokenizer` says of a text that is not prepared."""
        return self.tokenizer or "bytes"

    @property
    def longest(self) -> int:
        """Tokens in the longest segments of the run."""
        return max([self.seq_len, *self.lengths.values()])

    @property
    def source(self) -> dict[str, Any]:
        """The arguments of `load_corpus`."""
        names = ("path", "column", "split", "subset", "streaming", "held_out")
        return {name: getattr(self, name) for name in names} | {"documents_at_most": self.documents}


class TrainSection(Section):
    """How to train. The learning rate follows `schedule` over the steps or over `max_minutes`, whichever ends first:
    "cosine" down to zero, or "wsd", its peak but for a linear way to zero in the last fifth, which a run that is to be
    made longer later should take. `report_to`: programs that draw curves, by transformers' names, such as
    ["tensorboard"]; "none" is none, as there."""

    steps: Count | None = None  # None: 1,000, or as many as `max_minutes` hold
    max_minutes: Minutes | None = None
    batch_size: int = Field(default=16, ge=1, le=2**16)  # rows of one process in one pass
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=2**12)  # passes a step
    optimizer: Literal["adamw", "muon", "m3"] = "adamw"
    learning_rate: float | None = Field(default=None, gt=0)  # None: the preset's
    gate_rate: float = Field(default=1.0, ge=0)  # the gates' learning rate, as a share of the others'
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: CountOrNone = 50
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    evaluate_every: CountOrNone = 200  # steps between readings of held-out text; 0: none
    sample_tokens: int = Field(default=100, ge=0, le=10**5)  # written after held-out text is read; 0: none
    prompt: str | None = None  # what they follow; None: the beginning of the held-out text
    watch_every: CountOrNone = 100  # steps between looks at the memories; 0: none
    alarm_webhook: str | None = Field(default=None, pattern=r"^https?://[^\s/?#]+\S*$")  # told of bad memories
    save_every: Count = 200  # steps between checkpoints
    save_minutes: Minutes | None = 10.0  # and at most so long between them; None: by steps alone
    keep_checkpoints: Count = 2
    gradient_checkpointing: bool = False
    compiled: bool = False  # what happens in a memory's chunk, when training begins
    graphed: bool | None = None  # record memories as CUDA graphs; None: on a GPU, if nothing is sharded or recomputed
    fsdp: bool = False  # shard weights and optimiser among the processes of torchrun
    report_to: Annotated[list[str], Field(max_length=16), BeforeValidator(_programs)] = []
    seed: int = Field(default=0, ge=0, lt=2**32)
    threads: int | None = Field(default=None, ge=1, le=1024)  # None: PyTorch's default
    device: Literal["auto", "cpu", "cuda"] = "auto"
    bf16: bool | None = None  # None: on a CUDA device that has it

    @property
    def last_step(self) -> int:
        """The step at which the run ends, if it is not ended before."""
        return self.steps or (UNASKED_STEPS if self.max_minutes is None else 10_000_000)
