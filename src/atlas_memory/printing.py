"""Text from outside, such as a file's name or a value, on a terminal: nothing in it may steer the terminal, and nothing
is longer than anybody reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

LONGEST = 2000
"""Characters of a line."""
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a cursor, changes colours or turns the direction of writing; and halves of characters."""


def printable(text: str) -> str:
    """The text for a terminal, on as many lines: characters that would steer it are escaped."""
    return _STEERS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def one_line(text: Any) -> str:
    """The text on one line, `printable`; of a long one the middle is left out, since a remedy stands at the end."""
    line = " ".join(filter(None, map(str.strip, str(text).splitlines())))
    if len(line) > LONGEST:
        head, tail = LONGEST * 2 // 3, LONGEST // 3
        line = f"{line[:head]} ... ({len(line) - head - tail:,} characters left out) ... {line[-tail:]}"
    return printable(line)


def tell(console: Console, text: str, style: str | None = None) -> None:
    """A line on a console, as it stands: brackets are no markup, numbers have no colours."""
    console.print(one_line(text), style=style, markup=False, highlight=False, soft_wrap=True)
