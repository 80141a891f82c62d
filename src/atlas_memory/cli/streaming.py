"""Text shown while it is written."""

import re
import sys
from typing import cast

from torch import Tensor
from transformers import TextStreamer

CONTEXT, AT_MOST = 8, 64  # tokens that are decoded again: behind the last ones, and in all


class CharacterStreamer(TextStreamer):
    """Prints every character as soon as its last token is there; transformers' own waits for the end of a word."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print `text`; on a terminal, without what would move its cursor or change its colours."""
        if sys.stdout.isatty():
            text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
        super().on_finalized_text(text, stream_end)

    def put(self, value: Tensor) -> None:
        """Print what the tokens `value` of one text add to it."""
        self.token_cache.extend(value.flatten().tolist())
        text = cast(str, self.tokenizer.decode(self.token_cache, **self.decode_kwargs))
        whole = len(text.rstrip("\ufffd"))  # the last character may be in tokens to come
        if whole > self.print_len:
            self.on_finalized_text(text[self.print_len : whole])
            self.print_len = whole
        if whole == len(text) and len(self.token_cache) > AT_MOST:
            self.token_cache = self.token_cache[-CONTEXT:]
            self.print_len = len(cast(str, self.tokenizer.decode(self.token_cache, **self.decode_kwargs)))
