"""The runs of a page: those that there are, and those that were chosen."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from atlas_memory.viz.dashboard.runs import Runs, Watched, newest
from atlas_memory.viz.dashboard.tables import note

if TYPE_CHECKING:
    from atlas_memory.train.runs import Run

# What reads a model is imported when one is asked for: the logs are shown without torch.

EVERY = 2.0  # seconds between looks at the logs
MANY = 10  # runs that are shown unasked
READING = threading.Lock()  # pages share models, whose memories are told not to write while a text is read


@st.cache_resource
def _places(places: tuple[str, ...]) -> Runs:
    return Runs(places)


def find() -> None:
    """See which runs there are, for all that follows; those that are new are chosen, up to `MANY`."""
    places = _places(tuple(sys.argv[1:]))
    runs = places.all()
    before: dict[str, Path] = st.session_state.get("folders", {})
    now = {run.name: run.folder for run in runs}
    if now != before:
        chosen = {before[name] for name in st.session_state.get("runs", ()) if name in before}
        new = [folder for folder in now.values() if folder not in before.values()]
        shown = chosen | {*new[: max(0, MANY - len(chosen & {*now.values()}))]}
        st.session_state["runs"] = [name for name, folder in now.items() if folder in shown]
    st.session_state.update({"all": runs, "folders": now, "missing": places.missing})


def choose() -> None:
    """Let people choose, and say which places have no run (any more)."""
    st.sidebar.multiselect("Runs", list(st.session_state["folders"]), key="runs")
    for line in st.session_state["missing"]:
        note(f"There is {line}", "warning")
    _follow()


@st.fragment(run_every=EVERY)
def _follow() -> None:
    """Draw the page anew when a run begins or is taken away."""
    places = _places(tuple(sys.argv[1:]))
    now = {run.name: run.folder for run in places.all(due=True)}
    if now != st.session_state["folders"] or places.missing != st.session_state["missing"]:
        st.rerun()


def chosen_runs() -> list[Watched]:
    """The chosen runs, with all that they have written by now."""
    chosen = [run for run in st.session_state["all"] if run.name in st.session_state["runs"]]
    for run in chosen:
        run.read()
    return chosen


def some() -> list[Watched]:
    """The chosen runs; where there are none, what to do is said."""
    runs = chosen_runs()
    if not runs:
        st.info("Choose a run on the left." if st.session_state["all"] else "There is no run to choose.")
    return runs


def one() -> Watched | None:
    """One of the chosen runs, as chosen on the page."""
    runs = some()
    if not runs:
        return None
    name = st.selectbox("run", [run.name for run in runs], key="run of the page")
    return next(run for run in runs if run.name == name)


@st.cache_resource(max_entries=2, show_spinner="Loading the model")
def _load(folder: str, written: float) -> Run:
    from atlas_memory.train.runs import load_run

    return load_run(folder)


def loaded(run: Watched) -> Run | None:
    """The model of a run as last saved."""
    saved = [*run.folder.glob("*.safetensors"), *run.folder.glob("checkpoint-*")]
    try:
        return _load(str(run.folder), newest(saved))
    except (ValueError, OSError, RuntimeError) as error:
        note(f"The model could not be loaded: {error}", "alarm")
        return None
