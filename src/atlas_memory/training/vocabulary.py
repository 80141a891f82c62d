"""Whether a text is in the tokens of the model that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atlas_memory.data.tokens import load_tokenizer
from atlas_memory.training.config import ConfigError, RunConfig

TOKENIZER = "tokenizer_config.json"


def check_tokenizer(config: RunConfig, tokenizer: Any, name: str) -> None:
    """ConfigError if tokens of the tokenizer that `model.init_from` has are others in `tokenizer`, which the user calls
    `name`: the model would read them as what they were. More tokens are no harm."""
    if config.model.init_from is None:
        return
    folder = Path(config.model.init_from).expanduser()
    having = [path.parent for path in (*folder.glob(TOKENIZER), *folder.glob(f"checkpoint-*/{TOKENIZER}"))]
    if not having:  # a model alone; or no model, as another check says
        return
    own = load_tokenizer(str(having[0]))
    if not knows(tokenizer, own):
        option = "set data.tokenizer=" if name.startswith("data.") else "prepare the text with --tokenizer "
        raise ConfigError(
            f"{name} is not the tokenizer that the model in model.init_from={config.model.init_from!r} was trained "
            f"with, which has {len(own.get_vocab()):,} tokens: {option}{having[0]}"
        )


def knows(tokenizer: Any, own: Any) -> bool:
    """Whether every token of the tokenizer `own` is the same in `tokenizer`."""
    return bool(own.get_vocab().items() <= tokenizer.get_vocab().items())
