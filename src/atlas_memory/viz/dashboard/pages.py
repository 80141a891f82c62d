"""The pages of the dashboard. Streamlit runs this file from the top whenever a page is opened or something chosen, and
what is marked as a fragment every two seconds besides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import streamlit as st

from atlas_memory.viz.dashboard import charts
from atlas_memory.viz.dashboard.choice import EVERY, READING, choose, chosen_runs, find, loaded, one, some
from atlas_memory.viz.dashboard.figures import CURVES, MEASURES
from atlas_memory.viz.dashboard.runs import Watched
from atlas_memory.viz.dashboard.tables import note, table
from atlas_memory.viz.dashboard.texts import texts_page
from atlas_memory.viz.report.words import legible

_UNITS = {True: "bits per byte", False: "nats per token"}
LIVE = 60.0  # seconds after its last line for which a run counts as under way
SAMPLE = 20_000  # characters of a sample that are shown


def _side_by_side(drawn: Sequence[tuple[charts.Spec | None, str]]) -> None:
    """Charts, two in a row, each above what it shows."""
    there = [(chart, says) for chart, says in drawn if chart is not None]
    for i in range(0, len(there), 2):
        for column, (chart, says) in zip(st.columns(2), there[i : i + 2], strict=False):
            with column:
                st.vega_lite_chart(chart, width="stretch", theme=None)
                st.caption(says)


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
        known = [share for memory in look["memories"] if (share := memory["share"]) is not None and np.isfinite(share)]
        yield look["step"], float(np.mean(known)) if known else None


@st.fragment(run_every=EVERY)
def _alarms_and_curves() -> None:
    runs = chosen_runs()
    for run in runs:
        for reason in run.unreadable:
            note(f": {reason}", "warning", run.name)
        for step, until, text in run.alarms:
            if until is None:
                note(f", after step {step:,}: {text}", "alarm", run.name)
            else:
                note(f", steps {step:,} to {until:,}, not seen since: {text}", "info", run.name)
        if run.damaged:
            lines = "line" if run.damaged == 1 else "lines"
            note(f": {run.damaged} damaged {lines} of its logs left out", "warning", run.name)
    rows = [_row(run) for run in runs]
    table(rows[0], [row.values() for row in rows])
    of_bytes = {run.bytes for run in runs}
    unit = "bits per byte, of words nats per token" if len(of_bytes) > 1 else _UNITS[all(of_bytes)]
    shown = {
        "loss": (f"training loss ({unit})", _each("steps", "loss", scale=True)),
        "held out": ("held out (bits per byte)", _each("steps", "held_out_bits_per_byte")),
        "share": ("share of the output that hangs on what is written", _share),
        "remembrance": ("effective remembrance", _each("looks", "remembrance")),
    }
    more = {
        "learning rate": ("learning rate", _each("steps", "learning_rate")),
        "gradient": ("norm of the gradient", _each("steps", "grad_norm")),
    }
    _side_by_side([(charts.curves(runs, *curve), CURVES[name]) for name, curve in shown.items()])
    if st.toggle("learning rate and gradients"):
        _side_by_side([(charts.curves(runs, *curve), CURVES[name]) for name, curve in more.items()])


def _row(run: Watched) -> dict[str, str]:
    """A run in the table."""
    last = run.steps[-1] if run.steps else {}
    held_out = [line["held_out_bits_per_byte"] for line in run.steps if "held_out_bits_per_byte" in line]
    share = [value for _, value in _share(run) if value is not None]
    by, unit = (1 / np.log(2), "bits") if run.bytes else (1.0, "nats")
    done = f"{last['step']:,}" if last else "none"
    live = last and time.time() - run.written < LIVE and last["step"] != run.goal
    return {
        "run": run.name,
        "rule": run.rule if run.remembers else run.block,
        "steps": done + (f" of {run.goal:,}" if run.goal else "") + (" (running)" if live else ""),
        "loss": f"{by * float(np.mean([line['loss'] for line in run.steps[-20:]])):.3f} {unit}" if last else "",
        "held out": f"{held_out[-1]:.3f} bits" if held_out else "",
        "memory's share": f"{share[-1]:.0%}" if share else "",
        "alarms": str(sum(until is None for _, until, _ in run.alarms)),
        "minutes": f"{last['elapsed'] / 60:.1f}" if last else "",
    }


def runs_page() -> None:
    """All chosen runs, side by side."""
    st.header("Runs")
    if some():
        _alarms_and_curves()


def memories_page() -> None:
    """Every head of every memory of a run, over its steps."""
    st.header("Memories")
    run = one()
    if run is not None:
        _heat_maps(run)


@st.fragment(run_every=EVERY)
def _heat_maps(run: Watched) -> None:
    chosen_runs()
    if not run.remembers:
        note(f"This model has no memory (model.block={run.block}).", "info")
        return
    if not run.looks:
        every = run.config.get("train.watch_every", 100)
        note(
            f"There is no look at its memories yet; one is taken every {every} steps (train.watch_every)."
            if every
            else "Nothing looks at its memories (train.watch_every=0).",
            "info",
        )
        return
    known = charts.measures(run.looks)
    default = [name for name in ("half_life", "written", "eta", "norm") if name in known]
    chosen = st.pills(
        "figures", known, selection_mode="multi", default=default, format_func=lambda name: MEASURES[name].label
    )
    last = run.looks[-1]
    remembered = last.get("remembrance")
    st.caption(
        f"Last look after step {last['step']:,}, in {last['seconds']:.2f} s. "
        + (
            f"What is more than {last['back']} tokens back moves predictions by {remembered:.3f} "
            "(effective remembrance, 0 to 1)."
            if remembered is not None and "back" in last
            else ""
        )
    )
    _side_by_side([(charts.heads_over_steps(run.looks, name), MEASURES[name].says) for name in chosen])


def settings_page() -> None:
    """How the settings of the chosen runs differ."""
    st.header("Settings")
    runs = some()
    if not runs:
        return
    found = {run.name: run.config | ({"model.rule": run.rule} if run.rule else {}) for run in runs}
    keys = list(dict.fromkeys(key for of_run in found.values() for key in of_run))

    def row(key: str) -> list[str]:
        return [key, *(legible(of_run.get(key, "")) for of_run in found.values())]

    differ = [key for key in keys if len({legible(of_run.get(key)) for of_run in found.values()}) > 1]
    if len(runs) > 1:
        st.subheader("What differs")
        table(["setting", *found], [row(key) for key in differ], wrap=True)
    with st.expander("All settings", expanded=len(runs) == 1):
        table(["setting", *found], [row(key) for key in keys], wrap=True)


def samples_page() -> None:
    """What a run wrote during its training, and what it writes now."""
    st.header("Samples")
    run = one()
    if run is None:
        return
    _written_samples(run)
    with st.form("write"):
        prompt = st.text_area("Write on from", "def ")
        count = st.number_input("tokens", 1, 2000, 200)
        temperature = st.number_input("temperature", 0.05, 2.0, 0.8)
        asked = st.form_submit_button("Write")
    model = loaded(run) if asked else None
    if model is not None:
        from atlas_memory.eval.sampling import sample

        try:
            with READING:
                text = sample(model.model, model.tokenizer, prompt, int(count), temperature)
        except (ValueError, RuntimeError) as error:
            note(f"Nothing could be written: {error}", "alarm")
            return
        st.code(legible(text, SAMPLE), language=None, wrap_lines=True)


@st.fragment(run_every=EVERY)
def _written_samples(run: Watched) -> None:
    chosen_runs()
    if not run.samples:
        st.info("No sample was written yet (train.sample_tokens, whenever held-out text is read).")
        return
    by_step = {line["step"]: line for line in run.samples}
    steps = list(by_step)
    step = st.select_slider("after step", steps, value=steps[-1]) if len(steps) > 1 else steps[0]
    st.code(legible(by_step[step]["prompt"] + by_step[step]["text"], SAMPLE), language=None, wrap_lines=True)


def main() -> None:
    """Draw the page that was asked for."""
    st.set_page_config("Atlas memories", layout="wide")
    find()
    page = st.navigation(
        [
            st.Page(runs_page, title="Runs", default=True),
            st.Page(memories_page, title="Memories", url_path="memories"),
            st.Page(settings_page, title="Settings", url_path="settings"),
            st.Page(samples_page, title="Samples", url_path="samples"),
            st.Page(texts_page, title="Reading", url_path="reading"),
        ]
    )
    choose()
    page.run()


main()
