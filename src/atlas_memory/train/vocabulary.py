"""Whether a text is in the tokens of the model that a run begins with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from atlas_memory.data.tokenization import load_tokenizer
from atlas_memory.train.config import ConfigError, RunConfig
from atlas_memory.train.processes import process
from atlas_memory.train.yaml_files import read_json

TOKENIZER = "tokenizer_config.json"
logger = logging.getLogger(__name__)


def check_tokenizer(config: RunConfig, tokenizer: Any, name: str) -> None:
    """ConfigError if tokens of the tokenizer that `model.init_from` has are others in `tokenizer`, which the user calls
    `name`: the model would read them as what they were. More tokens are no harm."""
    if config.model.init_from is None:
        return
    folder = Path(config.model.init_from).expanduser()
    having = [path.parent for path in (*folder.glob(TOKENIZER), *folder.glob(f"checkpoint-*/{TOKENIZER}"))]
    if not having:  # a model alone; or no model, as another check says
        _warn_of_another_end(folder, tokenizer, name)
        return
    own = load_tokenizer(str(having[0]))
    if not knows(tokenizer, own):
        option = "set data.tokenizer=" if name.startswith("data.") else "prepare the text with --tokenizer "
        raise ConfigError(
            f"{name} is not the tokenizer that the model in model.init_from={config.model.init_from!r} was trained "
            f"with, which has {len(own.get_vocab()):,} tokens: {option}{having[0]}"
        )


def _warn_of_another_end(folder: Path, tokenizer: Any, name: str) -> None:
    """Warn where a model without a tokenizer beside it says that texts end with another token than `tokenizer` does."""
    try:
        end = read_json(folder / "config.json").get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return
    if isinstance(end, int) and end != tokenizer.eos_token_id and process() == 0:
        logger.warning(
            "the model in %s has no tokenizer beside it, and texts end with token %d there and with %d in %s: if they "
            "differ otherwise too, set data.tokenizer to that which the model was trained with",
            folder,
            end,
            tokenizer.eos_token_id,
            name,
        )


def knows(tokenizer: Any, own: Any) -> bool:
    """Whether every token of the tokenizer `own` is the same in `tokenizer`."""
    return bool(own.get_vocab().items() <= tokenizer.get_vocab().items())
