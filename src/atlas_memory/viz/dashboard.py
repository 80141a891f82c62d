"""The pages of the dashboard. Streamlit runs this file when a page is opened or something chosen, and fragments every
two seconds. Modules that load torch are imported when a model is needed. Tables and notes are our own HTML: Streamlit
reads text as Markdown, in which a file's content could load a picture from another host."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from atlas_memory.monitor.logs import MEASURES, ProbeRecord, StepRecord
from atlas_memory.viz import charts
from atlas_memory.viz.labels import count, differing, legible, loss_unit
from atlas_memory.viz.token_page import token_page
from atlas_memory.viz.watched_runs import WatchedRun, WatchedRuns, newest

if TYPE_CHECKING:
    from atlas_memory.eval.token_costs import TokenCosts
    from atlas_memory.train.run_model import Run

EVERY = 2.0  # seconds between readings of the logs
MANY = 10  # runs shown at first
RUNNING = 60.0  # seconds after its last line for which a run counts as running
SAMPLE = 20_000  # characters of a sample
MOST = 200_000  # tokens read for a page
READING = threading.Lock()  # pages share models, whose writes are turned off and on
FRAME = "overflow-x:auto;max-width:100%"
TABLE = "border-collapse:collapse;font-size:0.875rem"
CELL = "padding:0.3rem 0.7rem;border:1px solid #E3E3E3;text-align:left;vertical-align:top;max-width:24rem"
NOTE = "margin:0;overflow-wrap:anywhere"
COLOURS = {"alarm": ("#c00000", "#fdecec"), "warning": ("#b58100", "#fdf6e0"), "info": ("#0072B2", "#e9f2fa")}


def table(heads: Iterable[str], rows: Sequence[Iterable[str]], wrap: bool = False) -> None:
    """Rows of cells; `wrap`: long cells have several lines."""
    if not rows:
        return
    cell = CELL + (";min-width:6rem;overflow-wrap:break-word" if wrap else ";white-space:nowrap")

    def line(cells: Iterable[str], kind: str) -> str:
        return "<tr>" + "".join(f'<{kind} style="{cell}">{escape(legible(text))}</{kind}>' for text in cells) + "</tr>"

    lines = "".join([line(heads, "th"), *(line(row, "td") for row in rows)])
    st.html(f'<div style="{FRAME}"><table style="{TABLE}">{lines}</table></div>')


def note(text: str, kind: str | None = None, of: str = "") -> None:
    """A paragraph of plain text after the name that it is `of`; `kind`: of `COLOURS`."""
    edge, paper = COLOURS[kind] if kind else ("", "")
    box = f";padding:0.7rem 1rem;border-left:5px solid {edge};background:{paper}" if kind else ""
    head = f"<b>{escape(legible(of))}</b>" if of else ""
    st.html(f'<p style="{NOTE}{box}">{head}{escape(legible(text))}</p>')


def side_by_side(drawn: Iterable[tuple[charts.Spec | None, str]]) -> None:
    """Charts, two in a row, each above its description."""
    present = [(chart, text) for chart, text in drawn if chart is not None]
    for i in range(0, len(present), 2):
        for column, (chart, text) in zip(st.columns(2), present[i : i + 2], strict=False):
            with column:
                st.vega_lite_chart(chart, width="stretch", theme=None)
                st.caption(text)


@st.cache_resource
def _places(places: tuple[str, ...]) -> WatchedRuns:
    return WatchedRuns(places)


def find() -> None:
    """Find the runs; new ones are chosen, up to `MANY`."""
    places = _places(tuple(sys.argv[1:]))
    runs = places.all()
    before: dict[str, Path] = st.session_state.get("folders", {})
    now = {run.name: run.folder for run in runs}
    if now != before:
        chosen = {before[name] for name in st.session_state.get("runs", ()) if name in before}
        new = [folder for folder in now.values() if folder not in before.values()]
        selected = chosen | {*new[: max(0, MANY - len(chosen & {*now.values()}))]}
        st.session_state["runs"] = [name for name, folder in now.items() if folder in selected]
    st.session_state.update({"all": runs, "folders": now, "missing": places.missing})


def choose() -> None:
    """The choice of runs, and places without any."""
    st.sidebar.multiselect("Runs", list(st.session_state["folders"]), key="runs")
    for line in st.session_state["missing"]:
        note(f"There is {line}", "warning")
    _follow()


@st.fragment(run_every=EVERY)
def _follow() -> None:
    places = _places(tuple(sys.argv[1:]))
    now = {run.name: run.folder for run in places.all(due=True)}
    if now != st.session_state["folders"] or places.missing != st.session_state["missing"]:
        st.rerun()


def chosen_runs() -> list[WatchedRun]:
    """The chosen runs, read anew."""
    chosen = [run for run in st.session_state["all"] if run.name in st.session_state["runs"]]
    for run in chosen:
        run.read()
    return chosen


def some() -> list[WatchedRun]:
    """The chosen runs; without any, a hint."""
    runs = chosen_runs()
    if not runs:
        st.info("Choose a run on the left." if st.session_state["all"] else "There is no run to choose.")
    return runs


def one() -> WatchedRun | None:
    """The run chosen on the page."""
    by_name = {run.name: run for run in some()}
    return by_name[st.selectbox("run", list(by_name), key="run of the page")] if by_name else None


@st.cache_resource(max_entries=2, show_spinner="Loading the model")
def _load(folder: str, written: float) -> Run:
    from atlas_memory.train.run_model import load_run

    return load_run(folder)


def loaded(run: WatchedRun) -> Run | None:
    saved = [*run.folder.glob("*.safetensors"), *run.folder.glob("checkpoint-*")]
    try:
        return _load(str(run.folder), newest(saved))
    except (ValueError, OSError, RuntimeError) as error:
        note(f"The model could not be loaded: {error}", "alarm")
        return None


def runs_page() -> None:
    """All chosen runs, side by side."""
    st.header("Runs")
    if some():
        _alarms_and_curves()


@st.fragment(run_every=EVERY)
def _alarms_and_curves() -> None:
    runs = chosen_runs()
    for run in runs:
        for reason in run.unreadable:
            note(f": {reason}", "warning", run.name)
        for alarm in run.alarms:
            steps = f"after step {alarm['step']:,}"
            steps += "" if alarm["until"] is None else f" until {alarm['until']:,}, not seen since"
            note(f", {steps}: {alarm['text']}", "alarm" if alarm["until"] is None else "info", run.name)
        if run.damaged:
            note(f": {count(run.damaged, 'damaged line')} of its logs skipped", "warning", run.name)
    rows = [_row(run) for run in runs]
    table(rows[0], [row.values() for row in rows])
    names = ["loss", "held_out_bits_per_byte", "memory_contribution", "effective_remembrance"]
    side_by_side(_curve(runs, name) for name in names)
    if st.toggle("learning rate and gradients"):
        side_by_side(_curve(runs, name) for name in ("learning_rate", "grad_norm"))


def _curve(runs: Sequence[WatchedRun], name: str) -> tuple[charts.Spec | None, str]:
    """A field of the logs over steps, with its description."""
    about = (StepRecord.model_fields | ProbeRecord.model_fields | MEASURES)[name]
    title, description = about.title or "", about.description or ""
    if name == "loss":
        of_bytes = {run.of_bytes for run in runs}
        unit = "bits per byte, of words nats per token" if len(of_bytes) > 1 else loss_unit(all(of_bytes))[1]
        title, description = f"{title} ({unit})", description.replace(", in nats", "")
    series = {}
    for run in runs:
        if name == "memory_contribution":
            series[run.name] = [point[:2] for point in charts.contributions(run.probes)]
        else:
            by = loss_unit(run.of_bytes)[0] if name == "loss" else 1.0
            records: list[Any] = [*run.steps, *run.probes]
            found = [(record.step, getattr(record, name, None)) for record in records]
            series[run.name] = [(step, by * value) for step, value in found if value is not None]
    return charts.curves(series, title), description


def _row(run: WatchedRun) -> dict[str, str]:
    last = run.steps[-1] if run.steps else None
    held_out = [e.held_out_bits_per_byte for e in run.steps if e.held_out_bits_per_byte is not None]
    shares = run.probes[-1].contributions if run.probes else []
    by, unit = loss_unit(run.of_bytes)
    running = last and time.time() - run.written < RUNNING and last.step != run.last_step
    done = f"{last.step:,}" if last else "none"
    return {
        "run": run.name,
        "rule": run.rule if run.has_memory else run.block,
        "steps": done + (f" of {run.last_step:,}" if run.last_step else "") + (" (running)" if running else ""),
        "loss": f"{by * float(np.mean([e.loss for e in run.steps[-20:]])):.3f} {unit.split()[0]}" if last else "",
        "held out": f"{held_out[-1]:.3f} bits" if held_out else "",
        "memory contribution": f"{np.mean(shares):.0%}" if shares else "",
        "alarms": str(sum(alarm["until"] is None for alarm in run.alarms)),
        "minutes": f"{last.elapsed / 60:.1f}" if last else "",
    }


def memories_page() -> None:
    """Every head of every memory of a run, over its steps."""
    st.header("Memories")
    run = one()
    if run is not None:
        _heat_maps(run)


@st.fragment(run_every=EVERY)
def _heat_maps(run: WatchedRun) -> None:
    chosen_runs()
    if not run.has_memory:
        note(f"This model has no memory (model.block={run.block}).", "info")
        return
    if not run.probes:
        every = run.config.get("train.probe_every", 100)
        note(f"Its memories have not been probed yet (train.probe_every={every} steps; 0: never).", "info")
        return
    known = {charts.described(name)[0]: name for name in charts.measures(run.probes)}
    first = [title for title, name in known.items() if name in ("half_life", "readout_change", "eta", "norm")]
    chosen = [known[title] for title in st.pills("measures", known, selection_mode="multi", default=first)]
    last = run.probes[-1]
    st.caption(f"Last probe after step {last.step:,}, in {last.seconds:.2f} s.")
    side_by_side((charts.heat_map(run.probes, name), charts.described(name)[1]) for name in chosen)


def settings_page() -> None:
    """How the settings of the chosen runs differ."""
    st.header("Settings")
    runs = some()
    if not runs:
        return
    settings = [run.config | ({"model.rule": run.rule} if run.rule else {}) for run in runs]
    heads = ["setting", *(run.name for run in runs)]
    if len(runs) > 1:
        st.subheader("What differs")
        table(heads, differing(settings), wrap=True)
    with st.expander("All settings", expanded=len(runs) == 1):
        table(heads, differing(settings, all_keys=True), wrap=True)


def samples_page() -> None:
    """Texts that a run wrote during training and writes now."""
    st.header("Samples")
    run = one()
    if run is None:
        return
    _written_samples(run)
    with st.form("write"):
        prompt = st.text_area("Continue this text", "def ")
        length = st.number_input("tokens", 1, 2000, 200)
        temperature = st.number_input("temperature", 0.05, 2.0, 0.8)
        asked = st.form_submit_button("Write")
    model = loaded(run) if asked else None
    if model is None:
        return
    from atlas_memory.eval.sampling import sample

    try:
        with READING:
            text = sample(model.model, model.tokenizer, prompt, int(length), temperature)
        st.code(legible(text, SAMPLE), language=None, wrap_lines=True)
    except (ValueError, RuntimeError) as error:
        note(f"Nothing could be written: {error}", "alarm")


@st.fragment(run_every=EVERY)
def _written_samples(run: WatchedRun) -> None:
    chosen_runs()
    if not run.samples:
        st.info("No sample has been written yet (train.sample_tokens, whenever held-out text is read).")
        return
    by_step = {record.step: record for record in run.samples}
    steps = list(by_step)
    step = st.select_slider("after step", steps, value=steps[-1]) if len(steps) > 1 else steps[0]
    st.code(legible(by_step[step].prompt + by_step[step].text, SAMPLE), language=None, wrap_lines=True)


def reading_page() -> None:
    """A text coloured by the cost of each token and what writing saved."""
    st.header("Reading")
    run = one()
    if run is None:
        return
    with st.form("read"):
        own = st.text_area("Your text; if empty, held-out text of the run is read")
        most = st.number_input("tokens at most", 64, MOST, 8192)
        asked = st.form_submit_button("Read")
    if asked:
        model = loaded(run)
        st.session_state["reading"] = (run.folder, model and _read(model, own, int(most)))
    folder, found = st.session_state.get("reading", (None, None))
    if folder == run.folder and found is not None:
        _show_reading(*found)


def _read(run: Run, own: str, most: int) -> tuple[str, TokenCosts] | None:
    from atlas_memory.data.tokenization import encode
    from atlas_memory.eval.token_costs import token_costs
    from atlas_memory.train.training_data import evaluation_text

    name, text = "your text", own
    try:
        if not own:
            documents = evaluation_text(run)[1]
            longest = max(documents, key=lambda document: len(document.text))
            name, text = f"{longest.name} (held out)", longest.text
            if len(text) < most:  # several, one behind the other
                name, text = "held-out text", "\n".join(document.text for document in documents)[: 16 * most]
        trained = None if run.config is None else run.config.data.longest
        ids = encode(run.tokenizer, text)[:most]
        if len(ids) < 2:
            raise ValueError("it has fewer than two tokens, of which the first is given")
        with st.spinner(f"Reading {len(ids):,} tokens"), READING:
            return f"{name}, read by {run.folder.name}", token_costs(run.model, run.tokenizer, ids, recent=trained)
    except (ValueError, OSError, RuntimeError) as error:
        note(f"The text could not be read: {error}".replace("give another by --data", "paste a text"), "alarm")
        return None


def _show_reading(name: str, reading: TokenCosts) -> None:
    words = f"{np.nanmean(reading.cost):.3f} bits per token over {len(reading.cost):,} tokens of {name}"
    if reading.saved is not None:
        words += f"; the memory's writes saved {np.nanmean(reading.saved):.3f}"
    if reading.older is not None:
        words += f"; tokens more than {reading.recent:,} back {np.nanmean(reading.older):.4f}"
    note(words + ".")
    st.vega_lite_chart(charts.along_text(reading), width="stretch", theme=None)
    page = token_page(name, reading, back=None)
    st.iframe(page, height=700)
    st.download_button("Save this page", page, "reading.html", "text/html")


def main() -> None:
    st.set_page_config("Atlas memories", layout="wide")
    find()
    others = {"Memories": memories_page, "Settings": settings_page, "Samples": samples_page, "Reading": reading_page}
    pages = [st.Page(page, title=title, url_path=title.lower()) for title, page in others.items()]
    page = st.navigation([st.Page(runs_page, title="Runs", default=True), *pages])
    choose()
    page.run()


if __name__ == "__main__":
    main()
