"""The page that reads a text with a run's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from atlas_memory.viz.dashboard import charts
from atlas_memory.viz.dashboard.choice import READING, loaded, one
from atlas_memory.viz.dashboard.tables import note

if TYPE_CHECKING:
    from atlas_memory.eval.reading import Reading
    from atlas_memory.train.runs import Run

MOST = 200_000  # tokens read for a page
MARKED = 64  # tokens of a passage that is marked, at the least: `evaluation.reading.AGAIN`, which loads torch


def texts_page() -> None:
    """A text, coloured by what each token cost and what writing saved on it."""
    st.header("Reading")
    run = one()
    if run is None:
        return
    with st.form("read"):
        own = st.text_area("A text of yours; without one, held-out text of the run is read")
        left, middle, right = st.columns(3)
        most = left.number_input(
            "tokens at most", 64, MOST, 8192, help="Of the text, with the second time of a passage that is read again."
        )
        again = middle.number_input(
            "tokens of a passage to read again",
            0,
            MOST,
            0,
            help="The passage begins after a quarter of the text and is put in a second time; 0: none is. Passages of "
            f"{MARKED} tokens or more are marked.",
        )
        later = right.number_input(
            "tokens between its end and its second time",
            0,
            MOST,
            0,
            help="Tokens of the text that are read after the passage, before it is read again.",
        )
        asked = st.form_submit_button("Read")
    if asked:
        run_of, again, later = loaded(run), int(again), int(later)
        found = None if run_of is None else _read(run_of, own, int(most), again, later)
        st.session_state["reading"] = (run.folder, found, again)
    folder, found, again = st.session_state.get("reading", (None, None, 0))
    if folder != run.folder:  # of another run
        st.session_state.pop("reading", None)
    elif found is not None:
        _reading(*found)
        if 0 < again < MARKED:
            st.info(f"A passage of {again} tokens was read again; it is not marked, as those of {MARKED} or more are.")


def _read(run: Run, own: str, most: int, again: int, later: int) -> tuple[str, Reading] | None:
    from atlas_memory.data.tokenization import encode
    from atlas_memory.eval.reading import read
    from atlas_memory.train.texts import text_of

    name, text = "your text", own
    try:
        if again >= most:
            raise ValueError(
                f"a passage of {again:,} tokens that is read twice does not fit in {most:,} tokens at most"
            )
        if not own:
            documents = text_of(run)[1]
            longest = max(documents, key=lambda document: len(document.text))
            name, text = f"{longest.name} (held out)", longest.text
            if len(text) < most:  # several, one behind the other
                name, text = "held-out text", "\n".join(document.text for document in documents)[: 16 * most]
        trained = None if run.config is None else run.config.data.longest
        ids = encode(run.tokenizer, text)[: most - again]
        with st.spinner(f"Reading {len(ids) + again:,} tokens"), READING:
            ids = with_passage(ids, again, later)
            return f"{name}, read by {run.folder.name}", read(run.model, run.tokenizer, ids, recent=trained)
    except (ValueError, OSError, RuntimeError) as error:
        note(f"The text could not be read: {error}".replace("give another by --data", "paste a text"), "alarm")
        return None


def with_passage(ids: np.ndarray, again: int, later: int) -> np.ndarray:
    """Tokens ``[tokens]`` as `twice` makes them of these; ValueError where they are too few for what is asked."""
    from atlas_memory.eval.reading import twice

    begin = len(ids) // 4
    left = len(ids) - begin - again
    if len(ids) < 2:
        raise ValueError("it has less than two tokens, of which the first is given")
    if left < 0:
        raise ValueError(
            f"a passage of {again:,} tokens does not fit: without its second time {len(ids):,} tokens are read, and it "
            f"begins after a quarter of them, at token {begin:,}; ask for a shorter one, or for more tokens"
        )
    if again and later > left:
        raise ValueError(
            f"{left:,} tokens follow the passage of {again:,}, so that its second time cannot be {later:,} tokens "
            f"after its end; ask for {left:,} or less"
        )
    return twice(ids, again, later)


def _reading(name: str, reading: Reading) -> None:
    from atlas_memory.viz.report.reading import reading_page

    words = f"{np.nanmean(reading.cost):.3f} bits a token over {len(reading.cost):,} tokens of {name}"
    if reading.saved is not None:
        words += f"; what its memories wrote saved {np.nanmean(reading.saved):.3f}"
    if reading.older is not None:
        words += f", and what was more than {reading.recent:,} tokens back {np.nanmean(reading.older):.4f}"
    note(words + ".")
    st.vega_lite_chart(charts.reading_along(reading), width="stretch", theme=None)
    page = reading_page(name, reading, back=None)
    st.iframe(page, height=700)
    st.download_button("Save this page", page, "reading.html", "text/html")
