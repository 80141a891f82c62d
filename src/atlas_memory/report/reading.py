"""A page on which a text is coloured, token by token, by what it cost the model and by what writing saved on it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_memory.report.pictures import GREEN, ORANGE, PINK

LEVELS = 8
MOST_COST, MOST_SAVED = 8.0, 4.0  # bits a token, from which on colours are full


def reading_page(name: str, pieces: Sequence[str], cost: np.ndarray, saved: np.ndarray | None) -> str:
    """The page of a document, next to the report's.

    Args:
        name: of the document.
        pieces: what each token is in the text.
        cost: bits of each token, ``[tokens]``; NaN where it was not predicted.
        saved: how many more without what the memories wrote; None: there are no memories.
    """
    spans = []
    for n, piece in enumerate(pieces):
        bits, less = float(cost[n]), None if saved is None else float(saved[n])
        if not math.isfinite(bits):
            spans.append(html.escape(piece))
            continue
        said = f"{bits:.1f} bits" + ("" if less is None else f", saved {less:.1f}")
        classes = f"c{_level(bits, MOST_COST)}" + ("" if less is None else f" s{_level(less, MOST_SAVED)}")
        spans.append(f'<span class="{classes}" title="{said}">{html.escape(piece)}</span>')
    chosen = {"cost": "by cost: what it took to predict a token, orange up to 8 bits"}
    if saved is not None:
        chosen["saved"] = "by what writing saved: green where memories that stay at M_0 need more, pink where less"
    inputs = "".join(
        f'<input type="radio" name="by" id="{key}"{" checked" if key == list(chosen)[-1] else ""}>'
        f'<label for="{key}">{text}</label><br>'
        for key, text in chosen.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Reading {html.escape(name)}</title>\n<style>{_style()}</style>\n"
        f'<p><a href="report.html">the report</a></p><h1>Reading {html.escape(name)}</h1>'
        f"{inputs}<pre>{''.join(spans)}</pre>\n</html>\n"
    )


def _level(value: float, most: float) -> int:
    """How strong a colour is, from 0 to LEVELS; of what is negative 2 LEVELS more, since a class's name has no sign."""
    level = round(LEVELS * max(-1.0, min(1.0, value / most)))
    return level if level >= 0 else 2 * LEVELS - level


def _style() -> str:
    rules = [
        "body { font: 17px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }",
        "pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; line-height: 1.6 }",
    ]
    for level in range(1, LEVELS + 1):
        strength = round(0.8 * 255 * level / LEVELS)
        for key, name, number, colour in (
            ("cost", "c", level, ORANGE),
            ("saved", "s", level, GREEN),
            ("saved", "s", 2 * LEVELS + level, PINK),
        ):
            rules.append(f"#{key}:checked ~ pre .{name}{number} {{ background: {colour}{strength:02x} }}")
    return "\n".join(rules)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens stands with the last of them."""
    found: list[str] = []
    held: list[int] = []
    for token in ids:
        held.append(int(token))
        text = tokenizer.decode(held, clean_up_tokenization_spaces=False)
        whole = not text.endswith("\ufffd") or len(held) > 8
        found.append(text if whole else "")
        held = [] if whole else held
    return found
