"""Tables and notes of the dashboard, in HTML of its own: Streamlit takes a text for Markdown, in which what stands in a
file could call another host, by a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import streamlit as st

from atlas_memory.viz.report.words import legible

# A table that is wider than its page moves in a frame of its own: the page itself never moves sideways.
FRAME = "overflow-x:auto;max-width:100%"
TABLE = "border-collapse:collapse;font-size:0.875rem"
CELL = "padding:0.3rem 0.7rem;border:1px solid #E3E3E3;text-align:left;vertical-align:top;max-width:24rem"
NOTE = "margin:0;overflow-wrap:anywhere"
COLOURS = {"alarm": ("#c00000", "#fdecec"), "warning": ("#b58100", "#fdf6e0"), "info": ("#0072B2", "#e9f2fa")}


def table(heads: Iterable[str], rows: Sequence[Iterable[str]], wrap: bool = False) -> None:
    """Rows of cells; as HTML, which is there a second before Streamlit's own table. `wrap`: long cells may have several
    lines."""
    if not rows:
        return
    cell = CELL + (";min-width:6rem;overflow-wrap:break-word" if wrap else ";white-space:nowrap")

    def line(cells: Iterable[str], kind: str) -> str:
        return "<tr>" + "".join(f'<{kind} style="{cell}">{escape(legible(text))}</{kind}>' for text in cells) + "</tr>"

    lines = [line(heads, "th"), *(line(row, "td") for row in rows)]
    st.html(f'<div style="{FRAME}"><table style="{TABLE}">{"".join(lines)}</table></div>')


def note(text: str, kind: str | None = None, of: str = "") -> None:
    """A paragraph that says what stands in files, as it stands there; behind the name of what it is `of`. `kind`: of
    `COLOURS`."""
    edge, paper = COLOURS[kind] if kind else ("", "")
    box = f";padding:0.7rem 1rem;border-left:5px solid {edge};background:{paper}" if kind else ""
    head = f"<b>{escape(legible(of))}</b>" if of else ""
    st.html(f'<p style="{NOTE}{box}">{head}{escape(legible(text))}</p>')
