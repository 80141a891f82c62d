"""Checks of sizes, numbers and names. The limits are far beyond what anybody trains: a size above them is a slip."""

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

LARGEST = 2**20  # a width, a vocabulary, the features of a key, the rows of a matrix
LONGEST = 2**16  # tokens in a window, a chunk, a segment or a shard
DEEPEST = 2**10  # layers of a model
MOST = 2**6  # iterations, degrees, levels, memories of a hierarchy
UNBOUNDED = sys.maxsize  # a number of steps or chunks


def check_size(name: str, value: Any, most: int = LARGEST) -> None:
    """Raise ValueError unless ``value`` is an integer from 1 to ``most``; ``name`` is what the user calls it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value!r}")


def check_heads(dim: Any, heads: Any) -> None:
    """Raise ValueError unless ``dim`` is divided evenly among ``heads``."""
    check_size("heads", heads)
    check_size("dim", dim)
    if dim % heads:
        raise ValueError(f"dim must be a positive multiple of heads, got dim={dim} and heads={heads}")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a finite number above 0."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def check_like(name: str, value: Any, present: Any) -> None:
    """Raise ValueError unless ``value`` is a bool, a number or a string as ``present``, the value now, is."""
    wrong = {
        "true or false": isinstance(present, bool) and not isinstance(value, bool),
        "a finite number": isinstance(present, float) and not _is_finite(value),
        f"a word such as {present!r}": isinstance(present, str) and not isinstance(value, str),
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"{name} must be {found[0]}, got {value!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def suggest(name: object, known: Iterable[str], aliases: Mapping[str, Iterable[str]] | None = None) -> str:
    """A question with the known name that has this alias or is close, or else all names. Of a dotted name the last part
    may be an alias, or the last part of another name."""
    known, name = list(known), str(name)[:64].lower()
    section, _, last = name.rpartition(".")
    close = [key for key, others in (aliases or {}).items() if last in others]
    others = [key for key in known if key.rpartition(".")[2] == last]
    inside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    words, word = (inside, last) if section and inside else ({key: key for key in known}, name)
    close += [words[found] for found in difflib.get_close_matches(word, words, n=1)] + others
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(words.values())}."
