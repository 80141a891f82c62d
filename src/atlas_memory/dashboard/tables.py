"""Tables of the dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import streamlit as st

# A table that is wider than its page moves in a frame of its own: the page itself never moves sideways.
FRAME = "overflow-x:auto;max-width:100%"
TABLE = "border-collapse:collapse;font-size:0.875rem"
CELL = "padding:0.3rem 0.7rem;border:1px solid #E3E3E3;text-align:left;vertical-align:top;max-width:24rem"


def table(rows: list[dict[str, str]], wrap: bool = False) -> None:
    """Rows under the names of their cells; as HTML, which is there a second before Streamlit's own table. `wrap`: long
    cells may have several lines."""
    if not rows:
        return
    cell = CELL + (";min-width:6rem;overflow-wrap:break-word" if wrap else ";white-space:nowrap")

    def line(cells: Iterable[str], kind: str) -> str:
        return "<tr>" + "".join(f'<{kind} style="{cell}">{escape(text)}</{kind}>' for text in cells) + "</tr>"

    lines = [line(rows[0], "th"), *(line(row.values(), "td") for row in rows)]
    st.html(f'<div style="{FRAME}"><table style="{TABLE}">{"".join(lines)}</table></div>')
