"""The page of a report, from its numbers."""

from __future__ import annotations

import html
from typing import Any

from atlas_memory.console import valid_utf8
from atlas_memory.viz.report.names import short
from atlas_memory.viz.report.words import amount, count, duration, far_fewer, headline, size

MEANING = {
    "alpha": "retention: what share of the old memory is kept at a token",
    "eta": "step size: how strongly a token is written",
    "theta": "momentum: what share of earlier updates goes on acting",
    "gamma": "how many tokens of its window a write takes in",
    "delta": "the error beyond which a token counts less",
}
STYLE = """
body { font: 17px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  overflow-wrap: break-word }
img { max-width: 100% } pre { background: #f5f5f5; padding: 1rem; white-space: pre-wrap; font-size: 14px }
.wide { overflow-x: auto; background: linear-gradient(to left, #fff 2rem, #fff0) right / 4rem 100% no-repeat local,
  linear-gradient(to left, #0003, #0000) right / 1rem 100% no-repeat scroll }
.wide img { display: block; max-width: none; width: 100%; min-width: 56rem }
table { border-collapse: collapse } td, th { white-space: nowrap }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; font-variant-numeric: tabular-nums }
.hint { display: none } @media (max-width: 58rem) { .hint { display: block; margin: 0; color: #555; font-size: 14px } }
.alarm { border-left: 5px solid #c00000; background: #fdecec; padding: .5rem 1rem } .was { color: #555 }
.raised { color: #c00000 }
summary { cursor: pointer; font-weight: 600 }
.big { font-size: 1.3rem } .given { color: #777 } .about { color: #555; font-size: 15px }
"""


def page(numbers: dict[str, Any], has_log: bool, has_looks: bool) -> str:
    """The page, next to its pictures; whether the run has a log, and looks at its memories."""
    parts = [
        f"<h1>{headline(numbers)}</h1>",
        "".join(map(_alarm, numbers["alarms"])),
        f'<p class="about">{_about(numbers)}</p>',
        f'<p class="big">{_result(numbers)}</p>',
        f"<p>{html.escape(' '.join(filter(None, (far_fewer(numbers), _other_held_out(numbers)))))}</p>",
        _training(has_looks) if has_log else "",
        _positions(numbers),
        _gates(numbers) if numbers["gates"]["memories"] else "",
        f'<h2>Token by token</h2><p><a href="reading.html">{html.escape(numbers["gates"]["document"])}</a>, coloured '
        f"by what each token cost{', by what writing saved on it' if numbers['margin'] else ''} and by what older "
        "tokens saved.</p>",
        f"<h2>A sample</h2><p>The grey text was given, the rest is the model's.</p>"
        f'<pre><span class="given">{html.escape(numbers["prompt"])}</span>{html.escape(numbers["sample"])}</pre>',
    ]
    return document(f"Report: {numbers['run']}", "".join(parts))


def document(title: str, body: str, style: str = STYLE) -> str:
    """A whole page of HTML, of characters that can be written."""
    return valid_utf8(
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n{body}\n</html>\n"
    )


def _alarm(alarm: dict[str, Any]) -> str:
    """What a look at the memories has found, and since when."""
    text = html.escape(alarm["text"])
    if alarm["until"] is not None:
        return f'<p class="was">Alarm of steps {alarm["step"]:,} to {alarm["until"]:,}, not seen since: {text}.</p>'
    return f'<p class="alarm"><b>Alarm since step {alarm["step"]:,}:</b> {text}.</p>'


def _about(numbers: dict[str, Any]) -> str:
    steps = ""
    if numbers["steps"] is not None:
        of = f" of {numbers['tokens_per_step']:,} tokens" if numbers["tokens_per_step"] else ""
        steps = f"{count(numbers['steps'], 'step')}{of} in {duration(numbers['training_seconds'])}, "
    trained = f"trained on {numbers['training_length']:,} tokens at a time"
    if not numbers["training_length_is_known"]:
        trained = f"its folder does not say on how many tokens at a time: {numbers['training_length']:,} are assumed"
    return html.escape(
        f"{numbers['run']}: {size(numbers)}; {steps}{trained}. "
        f"Read: {numbers['text']}, {numbers['read']}. Made {numbers['date']} on {numbers['machine']}."
    )


def _result(numbers: dict[str, Any]) -> str:
    on, off, margin = numbers["memory_on"], numbers["writes_off"], numbers["margin"]
    older, trained = numbers["beyond_training_length"], numbers["training_length"]
    said = f"<b>{on['bits_per_byte']:.3f}</b> bits a byte"
    if margin is not None:
        said += (
            f" with the memory on, <b>{off['bits_per_byte']:.3f}</b> with its writes off: what it writes saves "
            f"{amount(margin)}" + (f" (standard error over {on['streams']} streams)" if on["streams"] > 1 else "")
        )
    if older is not None:
        said += f". Beyond the training length, tokens more than {trained:,} back save {amount(older)}"
    return said + "."


def _other_held_out(numbers: dict[str, Any]) -> str:
    """Why the log has another figure for the same text; "" where it has none."""
    logged = numbers["held_out_in_training"]
    if logged is None:
        return ""
    on = numbers["memory_on"]
    return (
        f"The log's last figure for held-out text, {logged['bits_per_byte']:.3f} bits a byte after step "
        f"{logged['step']:,}, is not to be compared with the one above: during training {logged['streams']} streams of "
        f"at most {logged['length']:,} tokens are read, from the beginnings of the longest documents; here there are "
        f"{on['streams']} of at most {on['by_position'][-1]['to']:,}, from anywhere in the text."
    )


def _training(has_looks: bool) -> str:
    said = (
        f"<h2>Training</h2>{picture('loss.png', 'Training loss against steps')}"
        "<p>The loss of each training step, faint, and its running mean.</p>"
    )
    if has_looks:
        said += (
            f"{_broad('training.png', 'Every head of every memory over the steps of training')}"
            "<p>Looks at every head of every memory while it read the same held-out text. Half-life: tokens after "
            "which half is forgotten. Answers moved by writing: 0 where nothing is written, or nothing kept for 16 "
            "tokens. Error before the write: 1 where the memory knows nothing of a token that comes. Effective rank: "
            "in how many directions its matrix differs, what training left in it included. Below, how much of each "
            "layer's output hangs on what was written.</p>"
        )
    return said


def _positions(numbers: dict[str, Any]) -> str:
    on, off, recent = numbers["memory_on"], numbers["writes_off"], numbers["recent_only"]
    trained, rows = numbers["training_length"], []
    for j, bucket in enumerate(on["by_position"]):
        older = numbers["older_by_position"][j]
        texts = [
            f"{bucket['from']:,}–{bucket['to']:,}",
            f"{bucket['bits_per_byte']:.3f}",
            f"{recent['by_position'][j]['bits_per_byte']:.3f}",
            amount(older),
        ]
        texts += [] if off is None else [f"{off['by_position'][j]['bits_per_byte']:.3f}"]
        rows.append(cells(*texts))
    heads = ["tokens", "bits a byte", f"last {trained:,} only", "older tokens save"]
    heads += [] if off is None else ["writes off"]
    without = (
        ""
        if off is None
        else ", and how it is with memories that stay as they are before they have read anything (writes off)"
    )
    return (
        f"<h2>By position</h2>{picture('position.png', 'Bits per byte by position')}"
        "<p>Bits a byte of text at each distance from the beginning, as the model reads; how it is with a memory that "
        f"is emptied so often that only the last {trained // 2:,} to {trained:,} tokens are in it{without}. "
        "Lower is better. Below, shaded: twice the standard error over streams, where more than one is so long.</p>"
        f"{table(heads, rows)}"
    )


def _gates(numbers: dict[str, Any]) -> str:
    rows, used = [], set()
    for memory in numbers["gates"]["memories"]:
        for name, g in memory["gates"].items():
            used.add(name)
            middle = f"{g['q05']:.3f} / {g['q50']:.3f} / {g['q95']:.3f}"
            spread = f"{g['std']:.3f}", f"{g['over_time']:.3f}"
            rows.append(cells(short(memory["name"]), name, f"{g['mean']:.3f}", *spread, middle))
    lives = [
        cells(short(memory["name"]), ", ".join(f"{x:,.0f}" for x in sorted(memory["half_life"])))
        for memory in numbers["gates"]["memories"]
        if memory["half_life"]
    ]
    meaning = "; ".join(f"<b>{name}</b>: {text}" for name, text in MEANING.items() if name in used)
    forget = (
        "<p>Tokens after which a head has forgotten half of what it wrote, by its mean alpha:</p>"
        + table(["memory", "half-lives of its heads"], lives)
        if lives
        else ""
    )
    return (
        f"<h2>What the memories hold</h2>{_broad('contents.png', 'Errors of each memory over a document')}"
        "<p>An error of 0 means that the memory answers a key with its value, of 1 that it knows nothing of it. Before "
        "a token is written the error is its surprise; what is remembered has less later. The last columns: how far "
        "writing moves the answers to keys, and how much of the layer's output hangs on what was written (0: nothing, "
        f"1: all of it).</p>{_broad('geometry.png', 'The path of each memory over a document')}"
        f"<p>{_unwritten(numbers['gates']['memories'])}The path of a memory as it reads: in how many directions its "
        "matrix M differs (effective rank), how far it has come from M_0, which is the memory before it has read "
        "anything, and by how much its path bends from one piece of 256 tokens to the "
        "next. 0 degrees: it goes straight on; 90: each piece is written in another direction; 120: what one piece "
        "wrote is forgotten in the next; 180: it takes back what the piece before had written.</p>"
        f"<details><summary>Gates</summary>{_broad('gates.png', 'Gates of each memory over a document')}"
        f"<p>{meaning}.</p>"
        + table(["memory", "gate", "mean", "std", "std over time", "5% / 50% / 95%"], rows)
        + f"{forget}</details>"
    )


def _unwritten(memories: list[dict[str, Any]]) -> str:
    """Which memories wrote nothing, in a sentence; "" where all did."""
    names = [short(memory["name"]) for memory in memories if not memory["wrote"]]
    if not names:
        return ""
    return (
        f"<b>Nothing was written in {html.escape(', '.join(names))}</b>: the effective rank there is that of what "
        "training left, and a path that stays where it is has no bend. "
    )


def picture(name: str, alt: str) -> str:
    """A picture that fits the page, and can be seen larger."""
    return f'<a href="{name}"><img src="{name}" alt="{alt}"></a>'


def _broad(name: str, alt: str) -> str:
    """A picture of many panels, which a narrow page shows by and by."""
    return (
        f'<p class="hint">The picture goes on to the right: scroll it →</p><div class="wide">{picture(name, alt)}</div>'
    )


def cells(*texts: str) -> str:
    """Cells of a row, in their tags."""
    return "".join(f"<td>{html.escape(text)}</td>" for text in texts)


def table(heads: list[str], rows: list[str]) -> str:
    """A table; rows are cells in their tags."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'
