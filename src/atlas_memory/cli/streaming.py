"""Text shown while it is written."""

import sys
from typing import cast

from torch import Tensor
from transformers import TextStreamer

from atlas_memory.console import printable
from atlas_memory.data.tokenization import DECODING_CONTEXT

AT_MOST = 64  # tokens that are decoded again and again


class CharacterStreamer(TextStreamer):
    """Prints every character as soon as its last token is there; transformers' own waits for the end of a word."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print `text`; on a terminal, nothing that would steer it."""
        if sys.stdout.isatty():
            text = printable(text)
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
            self.token_cache = self.token_cache[-DECODING_CONTEXT:]
            self.print_len = len(cast(str, self.tokenizer.decode(self.token_cache, **self.decode_kwargs)))
