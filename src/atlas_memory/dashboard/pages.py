"""The pages of the dashboard. Streamlit runs this file from the top whenever a page is opened or something chosen, and
what is marked as a fragment every two seconds besides."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from atlas_memory.dashboard import charts
from atlas_memory.dashboard.runs import Runs, Watched

if TYPE_CHECKING:
    from atlas_memory.evaluation.reading import Reading
    from atlas_memory.training.runs import Run

# What reads a model is imported when one is asked for: the logs are shown without torch.

EVERY = 2.0  # seconds between looks at the logs
MANY = 10  # runs that are shown unasked
MOST = 200_000  # tokens read for a page
LIVE = 60.0  # seconds after its last line for which a run counts as under way


@st.cache_resource
def _places(places: tuple[str, ...]) -> Runs:
    return Runs(places)


def _runs() -> list[Watched]:
    """The chosen runs, with all that they have written by now."""
    chosen = [run for run in st.session_state["all"] if run.name in st.session_state["runs"]]
    for run in chosen:
        run.read()
    return chosen


def _show(chart: charts.Spec | None) -> None:
    if chart is not None:
        st.vega_lite_chart(chart, width="stretch", theme=None)


def _table(rows: list[dict[str, str]]) -> None:
    """Rows under the names of their cells: in Markdown, which is there a second before Streamlit's own table."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('_', chr(92) + '_') for cell in cells)} |"

    if rows:
        st.markdown("\n".join([line(rows[0]), "|---" * len(rows[0]) + "|", *(line(row.values()) for row in rows)]))


def _each(lines: str, key: str, scale: bool = False) -> Callable[[Watched], Iterable[tuple[int, float | None]]]:
    """The points of a curve: a key of the lines of a log; with `scale`, nats of bytes become bits."""

    def points(run: Watched) -> Iterable[tuple[int, float | None]]:
        by = 1 / np.log(2) if scale and run.bytes else 1.0
        for line in getattr(run, lines):
            value = line.get(key)
            yield line["step"], None if value is None else by * value

    return points


def _share(run: Watched) -> Iterable[tuple[int, float | None]]:
    for look in run.looks:
        known = [memory["share"] for memory in look["memories"] if memory["share"] is not None]
        yield look["step"], float(np.mean(known)) if known else None


@st.fragment(run_every=EVERY)
def _alarms_and_curves() -> None:
    runs = _runs()
    for run in runs:
        for step, text in run.alarms:
            st.error(f"**{run.name}**, after step {step:,}: {text}", icon=":material/notifications_active:")
        if run.damaged:
            lines = "line" if run.damaged == 1 else "lines"
            st.warning(f"**{run.name}**: {run.damaged} damaged {lines} of its logs left out")
    _table([_row(run) for run in runs])
    left, right = st.columns(2)
    unit = "bits per byte" if all(run.bytes for run in runs) else "nats per token, bits per byte of bytes"
    with left:
        _show(charts.curves(runs, f"training loss ({unit})", _each("steps", "loss", scale=True)))
        _show(charts.curves(runs, "share of the output that hangs on what is written", _share))
    with right:
        _show(charts.curves(runs, "held out (bits per byte)", _each("steps", "held_out_bits_per_byte")))
        _show(charts.curves(runs, "effective remembrance", _each("looks", "remembrance")))
    if st.toggle("learning rate and gradients"):
        with left:
            _show(charts.curves(runs, "learning rate", _each("steps", "learning_rate")))
        with right:
            _show(charts.curves(runs, "norm of the gradient", _each("steps", "grad_norm")))


def _row(run: Watched) -> dict[str, str]:
    """A run in the table."""
    last = run.steps[-1] if run.steps else {}
    held_out = [line["held_out_bits_per_byte"] for line in run.steps if "held_out_bits_per_byte" in line]
    share = [value for _, value in _share(run) if value is not None]
    by, unit = (1 / np.log(2), "bits") if run.bytes else (1.0, "nats")
    done = f"{last['step']:,}" if last else "none"
    live = last and time.time() - _written(run) < LIVE and last["step"] != run.goal
    row = {
        "run": run.name,
        "rule": str(run.config.get("model.rule") or run.config.get("model.preset") or ""),
        "steps": done + (f" of {run.goal:,}" if run.goal else "") + (" (running)" if live else ""),
        "loss": f"{by * float(np.mean([line['loss'] for line in run.steps[-20:]])):.3f} {unit}" if last else "",
        "held out": f"{held_out[-1]:.3f} bits" if held_out else "",
        "memory's share": f"{share[-1]:.0%}" if share else "",
        "alarms": str(len(run.alarms)),
        "minutes": f"{last['elapsed'] / 60:.1f}" if last else "",
    }
    return {key: value.replace(" ", "\u00a0") for key, value in row.items()}  # a cell is one line


def _written(run: Watched) -> float:
    return max((p.stat().st_mtime for p in run.folder.glob("*.jsonl")), default=0.0)


def runs_page() -> None:
    """All chosen runs, side by side."""
    st.header("Runs")
    _alarms_and_curves()


def _one() -> Watched | None:
    runs = _runs()
    if not runs:
        st.info("Choose a run on the left.")
        return None
    name = st.selectbox("run", [run.name for run in runs], key="run of the page")
    return next(run for run in runs if run.name == name)


def memories_page() -> None:
    """Every head of every memory of a run, over its steps."""
    st.header("Memories")
    run = _one()
    if run is None:
        return
    known = charts.measures(run.looks)
    default = [name for name in ("half_life", "written", "eta", "norm") if name in known]
    chosen = st.pills(
        "figures", known, selection_mode="multi", default=default, format_func=lambda name: charts.MEASURES[name][0]
    )
    _heat_maps(run, list(chosen))


@st.fragment(run_every=EVERY)
def _heat_maps(run: Watched, chosen: list[str]) -> None:
    _runs()
    if not run.looks:
        every = run.config.get("train.watch_every", 100)
        st.info(
            f"There is no look at its memories yet; one is taken every {every} steps (train.watch_every)."
            if every
            else "Nothing looks at its memories (train.watch_every=0)."
        )
        return
    last = run.looks[-1]
    remembered = last.get("remembrance")
    st.caption(
        f"Last look after step {last['step']:,}, in {last['seconds']:.2f} s. "
        + (
            f"What is more than {last['back']} tokens back moves predictions by {remembered:.3f} "
            "(effective remembrance, 0 to 1)."
            if remembered is not None
            else ""
        )
    )
    columns = st.columns(2)
    for i, measure in enumerate(name for name in chosen if name in charts.measures(run.looks)):
        with columns[i % 2]:
            _show(charts.heads_over_steps(run.looks, measure))


def settings_page() -> None:
    """How the settings of the chosen runs differ."""
    st.header("Settings")
    runs = _runs()
    if not runs:
        st.info("Choose a run on the left.")
        return
    keys = list(dict.fromkeys(key for run in runs for key in run.config))

    def row(key: str) -> dict[str, str]:
        return {"setting": key} | {run.name: str(run.config.get(key, "")) for run in runs}

    differ = [key for key in keys if len({str(run.config.get(key)) for run in runs}) > 1]
    if len(runs) > 1:
        st.subheader("What differs")
        _table([row(key) for key in differ])
    with st.expander("All settings", expanded=len(runs) == 1):
        _table([row(key) for key in keys])


@st.cache_resource(max_entries=2, show_spinner="Loading the model")
def _load(folder: str, written: float) -> Run:
    from atlas_memory.training.runs import load_run

    return load_run(folder)


def _loaded(run: Watched) -> Run | None:
    """The model of a run as last saved."""
    saved = [*run.folder.glob("*.safetensors"), *run.folder.glob("checkpoint-*")]
    try:
        return _load(str(run.folder), max((p.stat().st_mtime for p in saved), default=0.0))
    except (ValueError, OSError, RuntimeError) as error:
        st.error(f"The model could not be loaded: {error}")
        return None


def samples_page() -> None:
    """What a run wrote during its training, and what it writes now."""
    st.header("Samples")
    run = _one()
    if run is None:
        return
    _written_samples(run)
    with st.form("write"):
        prompt = st.text_area("Write on from", "def ")
        count = st.number_input("tokens", 1, 2000, 200)
        temperature = st.number_input("temperature", 0.05, 2.0, 0.8)
        asked = st.form_submit_button("Write")
    loaded = _loaded(run) if asked else None
    if loaded is not None:
        from atlas_memory.evaluation.sampling import sample

        try:
            text = sample(loaded.model, loaded.tokenizer, prompt, int(count), temperature)
        except (ValueError, RuntimeError) as error:
            st.error(f"Nothing could be written: {error}")
            return
        st.code(text, language=None, wrap_lines=True)


@st.fragment(run_every=EVERY)
def _written_samples(run: Watched) -> None:
    _runs()
    if not run.samples:
        st.info("No sample was written yet (train.sample_tokens, whenever held-out text is read).")
        return
    by_step = {line["step"]: line for line in run.samples}
    steps = list(by_step)
    step = st.select_slider("after step", steps, value=steps[-1]) if len(steps) > 1 else steps[0]
    st.code(by_step[step]["prompt"] + by_step[step]["text"], language=None, wrap_lines=True)


def texts_page() -> None:
    """A text, coloured by what each token cost and what writing saved on it."""
    st.header("Reading")
    run = _one()
    if run is None:
        return
    with st.form("read"):
        own = st.text_area("A text of yours; without one, held-out text of the run is read")
        left, middle, right = st.columns(3)
        most = left.number_input("tokens at most", 64, MOST, 8192)
        again = middle.number_input("tokens of a passage to read again", 0, MOST, 0)
        later = right.number_input("so many tokens later", 0, MOST, 0)
        asked = st.form_submit_button("Read")
    if asked:
        loaded = _loaded(run)
        if loaded is not None:
            st.session_state["reading"] = _read(loaded, own, int(most), int(again), int(later))
    found = st.session_state.get("reading")
    if found is not None:
        _reading(*found)


def _read(run: Run, own: str, most: int, again: int, later: int) -> tuple[str, Reading] | None:
    from atlas_memory.data.tokens import encode
    from atlas_memory.evaluation.reading import read, twice
    from atlas_memory.training.texts import text_of

    name, text = "your text", own
    try:
        if not own:
            documents = text_of(run)[1]
            longest = max(documents, key=lambda document: len(document.text))
            name, text = f"{longest.name} (held out)", longest.text
            if len(text) < most:  # several, one behind the other
                name, text = "held-out text", "\n".join(document.text for document in documents)[: 16 * most]
        trained = None if run.config is None else run.config.data.longest
        ids = encode(run.tokenizer, text)[: max(1, most - again)]
        if len(ids) < 2:
            raise ValueError("it has less than two tokens, of which the first is given")
        with st.spinner(f"Reading {len(ids) + again:,} tokens"):
            return f"{name}, read by {run.folder.name}", read(
                run.model, run.tokenizer, twice(ids, again, later), recent=trained
            )
    except (ValueError, OSError, RuntimeError) as error:
        st.error(f"The text could not be read: {error}")
        return None


def _reading(name: str, reading: Reading) -> None:
    from atlas_memory.report.reading import reading_page

    words = f"{np.nanmean(reading.cost):.3f} bits a token over {len(reading.cost):,} tokens of {name}"
    if reading.saved is not None:
        words += f"; what its memories wrote saved {np.nanmean(reading.saved):.3f}"
    if reading.older is not None:
        words += f", and what was more than {reading.recent:,} tokens back {np.nanmean(reading.older):.4f}"
    st.write(words + ".")
    _show(charts.reading_along(reading))
    page = reading_page(name, reading, back=None)
    st.iframe(page, height=700)
    st.download_button("Save this page", page, "reading.html", "text/html")


def main() -> None:
    """Draw the page that was asked for."""
    st.set_page_config("Atlas memories", layout="wide")
    st.session_state["all"] = _places(tuple(sys.argv[1:])).all()
    names = [run.name for run in st.session_state["all"]]
    page = st.navigation(
        [
            st.Page(runs_page, title="Runs", default=True),
            st.Page(memories_page, title="Memories", url_path="memories"),
            st.Page(settings_page, title="Settings", url_path="settings"),
            st.Page(samples_page, title="Samples", url_path="samples"),
            st.Page(texts_page, title="Reading", url_path="reading"),
        ]
    )
    st.sidebar.multiselect("Runs", names, names[:MANY], key="runs")
    page.run()


main()
