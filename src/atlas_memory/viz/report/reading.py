"""A page on which a text is coloured, token by token, by what it cost the model and by what its memory saved."""

from __future__ import annotations

import html
import json
import math

import numpy as np

from atlas_memory.eval.reading import Reading
from atlas_memory.viz.report.names import BLUE, GREEN, ORANGE, PINK
from atlas_memory.viz.report.page import document

LEVELS = 8
FULL = 204  # opacity of full colours, of 255
MOST_COST, MOST_SAVED, MOST_OLDER = 8.0, 4.0, 1.0  # bits a token, from which on colours are full


def reading_page(name: str, reading: Reading, back: str | None = "report.html", about: str = "") -> str:
    """The page of the document `name`, whole in one file, with a link `back`; `about` says what read it, and when.

    What a token cost is shown where the pointer is, or the finger.
    """
    cost, saved, older = reading.cost, reading.saved, reading.older
    spans = []
    for n, piece in enumerate(reading.pieces):
        classes = [f"c{_level(cost[n], MOST_COST)}"]
        classes += [] if saved is None else [f"s{_level(saved[n], MOST_SAVED)}"]
        classes += [] if older is None else [f"o{_level(older[n], MOST_OLDER)}"]
        classes += ["again"] if reading.before[n] >= 0 else []
        shown = " ".join(name for name in classes if name[1:] != "0")
        spans.append(f'<i class="{shown}">{html.escape(piece)}</i>' if shown else f"<i>{html.escape(piece)}</i>")
    chosen = {"cost": ("by cost: what it took to predict a token", _scale(MOST_COST, ORANGE))}
    if saved is not None:
        words = "by what writing saved: green where the same model needs more with memories that stay at M_0, as they "
        words += "are before they have read anything; pink where it needs less"
        chosen["saved"] = words, _scale(MOST_SAVED, GREEN, PINK)
    if older is not None:
        words = f"by what older tokens saved: green where a memory of the last {reading.recent:,} tokens at the most "
        chosen["older"] = words + "needs more, pink where it needs less", _scale(MOST_OLDER, GREEN, PINK)
    inputs = "".join(
        f'<input type="radio" name="by" id="{key}"{" checked" if key == list(chosen)[-1] else ""}>'
        f'<label for="{key}"> {text} {scale}</label><br>'
        for key, (text, scale) in chosen.items()
    )
    figures = {"": cost, "writing saved": saved, "older tokens saved": older}
    link = f'<p><a href="{html.escape(back)}">the report</a></p>' if back else ""
    return document(
        f"Reading {name}",
        f"{link}<h1>Reading {html.escape(name)}</h1>"
        f"{f'<p class=about>{html.escape(about)}</p>' if about else ''}<p>{_again(reading)}</p>{inputs}"
        "<p>Colours are full from the ends of the scales on. Point at a token, or tap it, to see its figures.</p>"
        f'<pre id="text">{"".join(spans)}</pre><p id="said"></p>\n'
        f"<script>{_script(figures)}</script>",
        _style(),
    )


def _scale(most: float, colour: str, below: str | None = None) -> str:
    """A legend: from nothing, or from as much below nothing, to where colours are full."""
    left = f"{below}{FULL:02x}, #fff" if below else "#fff"
    full = f"{most:g} bit{'' if most == 1 else 's'} a token"
    ends = (f"−{most:g}", full) if below else ("0", full)
    bar = f"linear-gradient(90deg, {left}, {colour}{FULL:02x})"
    return f'<span class="scale">{ends[0]} <b style="background: {bar}"></b> {ends[1]}</span>'


def _again(reading: Reading) -> str:
    """What the passages that are read a second time cost then, in a sentence; "" where there are none."""
    again = reading.again()
    if again is None:
        return ""
    count, first, second = again
    return (
        f"{count:,} tokens are of passages that had been read before (underlined): {first:.2f} bits a token the first "
        f"time, {second:.2f} the second."
    )


def _level(value: float, most: float) -> int:
    """How strong a colour is, from 0 to LEVELS; of what is negative LEVELS more, since a class's name has no sign."""
    if not math.isfinite(value):
        return 0
    level = round(LEVELS * max(-1.0, min(1.0, value / most)))
    return level if level >= 0 else LEVELS - level


def _script(figures: dict[str, np.ndarray | None]) -> str:
    """What shows the figures of the token under the pointer; tenths of bits, as integers."""

    def tenths(values: np.ndarray) -> list[int | None]:
        return [round(10 * float(x)) if math.isfinite(x) else None for x in values]

    known = {name: tenths(values) for name, values in figures.items() if values is not None}
    return (
        f"const known={json.dumps(known, separators=(',', ':'))},"
        "text=document.getElementById('text'),said=document.getElementById('said');"
        "const place=new Map([...text.children].map((e,n)=>[e,n]));"
        "text.addEventListener('pointerover',e=>{const n=place.get(e.target);if(n===undefined)return;"
        "const parts=Object.entries(known).filter(([_,x])=>x[n]!==null)"
        ".map(([name,x])=>`${name} ${(x[n]/10).toFixed(1)}${name?'':' bits'}`.trim());"
        "said.textContent=`token ${n.toLocaleString()}: ${parts.join(', ')||'given'}`;});"
    )


def _style() -> str:
    rules = [
        "body { font: 17px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }",
        "pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; line-height: 1.6 }",
        "i { font-style: normal } .about { color: #555; font-size: 15px; overflow-wrap: anywhere }",
        ".scale { white-space: nowrap; color: #555; font-size: 14px }",
        ".scale b { display: inline-block; width: 6rem; height: .8rem; vertical-align: -.1rem }",
        f".again {{ border-bottom: 2px solid {BLUE} }}",
        "#said { position: fixed; left: 0; bottom: 0; margin: 0; padding: .2rem 1rem; background: #fff;"
        " border-top: 1px solid #ccc; border-right: 1px solid #ccc; font-size: 14px }",
        "#said:empty { display: none }",
    ]
    for level in range(1, LEVELS + 1):
        strength = round(FULL * level / LEVELS)
        for key, name, number, colour in (
            ("cost", "c", level, ORANGE),
            ("saved", "s", level, GREEN),
            ("saved", "s", LEVELS + level, PINK),
            ("older", "o", level, GREEN),
            ("older", "o", LEVELS + level, PINK),
        ):
            rules.append(f"#{key}:checked ~ pre .{name}{number} {{ background: {colour}{strength:02x} }}")
    return "\n".join(rules)
