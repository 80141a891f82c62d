"""Pages, and that of a text coloured by what each token cost and by what the memory saved on it."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_memory.console import valid_utf8
from atlas_memory.viz.labels import BLUE, GREEN, ORANGE, PINK, amount, average, count, duration, memory_label

if TYPE_CHECKING:  # which loads torch
    from atlas_memory.eval.token_costs import TokenCosts

LEVELS = 8
OPAQUE = 204  # opacity of full colours, of 255
MOST_COST, MOST_SAVED, MOST_OLDER = 8.0, 4.0, 1.0  # bits a token of a full colour


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("atlas_memory.viz")
    found = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    found.filters |= {of.__name__: of for of in (amount, average, count, duration, memory_label)}
    return found


def render(template: str, **values: Any) -> str:
    """A page from a file of `templates/`; all values are escaped."""
    return valid_utf8(_templates().get_template(template).render(values))


def token_page(name: str, reading: TokenCosts, back: str | None = "report.html", about: str = "") -> str:
    """The page of the document `name` in one file, with a link `back`; `about`: by which run it was read."""
    cost, saved, older = reading.cost, reading.saved, reading.older
    rows = [("cost", "c", cost, MOST_COST), ("saved", "s", saved, MOST_SAVED), ("older", "o", older, MOST_OLDER)]
    kinds = {key: (letter, values, most) for key, letter, values, most in rows if values is not None}
    tokens = []
    for n, piece in enumerate(reading.pieces):
        levels = {letter: _level(values[n], most) for letter, values, most in kinds.values()}
        classes = [f"{letter}{level}" for letter, level in levels.items() if level]
        tokens.append((" ".join(classes + ["again"] * bool(reading.before[n] >= 0)), piece))
    names = {"cost": "", "saved": "writing saved", "older": "older tokens saved"}
    figures = {names[key]: _tenths(values) for key, (_, values, _) in kinds.items()}
    return render(
        "tokens.html",
        name=name,
        back=back,
        about=about,
        again=reading.of_repeats(),
        recent=reading.recent,
        kinds={key: f"{most:g} bit{'' if most == 1 else 's'} per token" for key, (_, _, most) in kinds.items()},
        most={key: f"{most:g}" for key, (_, _, most) in kinds.items()},
        tokens=tokens,
        figures=json.dumps(figures, separators=(",", ":")),
        colours={"cost": ORANGE, "more": GREEN, "less": PINK, "again": BLUE, "opaque": f"{OPAQUE:02x}"},
        levels=[(level, f"{round(OPAQUE * level / LEVELS):02x}") for level in range(1, LEVELS + 1)],
    )


def _level(value: float, most: float) -> int:
    """The strength of a colour, from 0 to LEVELS; of negative values LEVELS more."""
    if not math.isfinite(value):
        return 0
    level = round(LEVELS * max(-1.0, min(1.0, value / most)))
    return level if level >= 0 else LEVELS - level


def _tenths(values: np.ndarray) -> list[int | None]:
    """Tenths of bits."""
    return [round(10 * float(x)) if math.isfinite(x) else None for x in values]
