"""Results: a JSON file a benchmark, its table, and the tables of docs/results/, which join several of these files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from atlas_memory.cli.result_tables import markdown_table, study_tables
from benchmarks.machine import ROOT
from benchmarks.measure import SIZES
from benchmarks.registry import Row

PAGES = ROOT / "docs" / "results"
FOLDER = PAGES / "data"
CLAIMS = PAGES / "claims"
"""Results of `atlas bench`."""
NOTHING = "–"


def _number(value: float) -> str:
    """Three figures."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _scaled(key: str, factor: float, unit: str = "") -> Callable[[Row], str]:
    return lambda row: _number(factor * row[key]) + unit


def _spread(low: str, high: str, factor: float) -> Callable[[Row], str]:
    return lambda row: f"{_number(factor * row[low])} to {_number(factor * row[high])}"


def _profile(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * row['profile'].get(name, 0.0):.0f} %"


def _share(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.2f}"


def _right(key: str, worst: Callable[..., float] = min, digits: int = 2) -> Callable[[Row], str]:
    """The mean over the seeds and, where there are several, the worst of them in brackets."""

    def text(row: Row) -> str:
        brackets = f" ({worst(s[key] for s in row['seeds']):.{digits}f})" if row["seeds"][1:] else ""
        return f"{row[key]:.{digits}f}{brackets}"

    return text


def _value(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.2g}"


def _bits(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.3f}"


def _gain(place: str) -> Callable[[Row], str]:
    return lambda row: f"{row[f'older {place}']:.4f} ± {row[f'error {place}']:.4f}"


LATE = ("4,096-8,192", "16,384-32,768")
COLUMNS: dict[str, Callable[[Row], str]] = {
    "candidate": lambda row: row["candidate"],
    "shape": lambda row: row["shape"],
    "tokens": lambda row: f"{row['time'] + row['context']:,}",
    "context": lambda row: f"{row['context']:,}",
    "ms": _scaled("median", 1e3),
    "least ms": _scaled("min", 1e3),
    "ms, 20 to 80 %": _spread("p20", "p80", 1e3),
    "times baseline": _scaled("ratio", 1.0),
    "times, 20 to 80 %": _spread("ratio_p20", "ratio_p80", 1.0),
    "tokens/s": lambda row: _number(row["tokens"] / row["median"]),
    "µs a token": lambda row: _number(1e6 * row["median"] / row["tokens"]),
    "GFLOP": _scaled("flops", 1e-9),
    "MB moved": _scaled("bytes", 1e-6),
    "of sgemm": _scaled("of_sgemm", 100.0, " %"),
    "of tf32": _scaled("of_tf32", 100.0, " %"),
    "of batched": _scaled("of_batched", 100.0, " %"),
    "of copy": _scaled("of_copy", 100.0, " %"),
    "peak MB": _scaled("peak", 1e-6),
    "compile s": _scaled("first_call", 1.0),
    "state kB, fresh": _scaled("state_bytes_fresh", 1e-3),
    "state kB": _scaled("state_bytes", 1e-3),
    "check": lambda row: row["check"],
    "products": _profile("matrix products"),
    "element-wise": _profile("element-wise"),
    "copies": _profile("copies"),
    "reductions": _profile("reductions"),
    "fused": _profile("fused"),
    "bookkeeping": _profile("bookkeeping"),
    "overhead": _profile("overhead"),
    "head": lambda row: str(row["dim"]),
    "seeds": lambda row: str(len(row["seeds"])),
    "revision": lambda row: row["revision"],
    "own error after a write": _share("own"),
    "after 99 more": _share("older"),
    "effect at eta / 100": _value("small eta"),
    "reach": _share("reach"),
    "growth": _value("growth"),
    **{f"gradient {n:,}" if n > 999 else f"gradient {n}": _value(f"gradient {n}") for n in (256, 1024, 4096)},
    **{
        f"recall {n:,}" if n > 999 else f"recall {n}": _right(f"recall {n}")
        for n in (128, 512, 1024, 2048, 4096, 16384)
    },
    "parameters": lambda row: f"{row['parameters']:,.0f}",
    "training": _bits("training"),
    **{place: _bits(place.replace(",", "")) for place in ("0-64", "512-1,024", *LATE)},
    "held out": _bits("held out"),
    **{f"gate at {share}": _share(f"gate at {share}") for share in ("1/4", "1/2", "the end")},
    "writes save": _bits("written"),
    "alarms": _value("alarms"),
    **{name: _share(name) for name in ("memory_contribution", "branch_ratio", "readout_change")},
    "half-life": _value("half-life"),
    **{f"older, {place}": _gain(place.replace(",", "")) for place in ("512-1,024", *LATE)},
    **{f"read twice, {n}": _gain(f"again {n.replace(',', '')}") for n in ("128", "512", "4,096")},
    "512 again after 2,048": _gain("again 512 after 2048"),
    "seconds": lambda row: f"{row['seconds']:,.0f}",
}
"""What a table can show, by the head of the column; a row that lacks the number has a dash."""


def save(result: dict[str, Any], folder: Path) -> Path:
    """Write ``folder/<benchmark>.json``.

    Raises:
        ValueError: a quick result, and the folder is that of the documentation.
        OSError: the folder cannot be written.
    """
    if result["quick"] and folder.resolve().is_relative_to(PAGES):
        raise ValueError("quick results do not go into docs/results/: leave --quick out, or give another --out")
    path = folder / f"{result['benchmark']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def writable(folder: Path) -> Path:
    """The folder, made if need be.

    Raises:
        OSError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror}; give another --out") from error
    return folder


def load(path: Path) -> dict[str, Any]:
    """A result.

    Raises:
        ValueError: the file is none.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        result["rows"], result["columns"], result["quick"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of `python -m benchmarks run`: run the benchmark again") from error
    return result


def table(result: dict[str, Any]) -> str:
    """A result in Markdown: how it was made, the table, the remarks. Columns that no row fills are left out."""
    columns = [(name, COLUMNS[name]) for name in result["columns"]]
    body = _drawn(
        [name for name, _ in columns], [[_cell(column, row) for _, column in columns] for row in result["rows"]]
    )
    remarks = "".join(f"\n- {remark}" for remark in [_rates(result), *result["remarks"]] if remark)
    return f"    {result['command']}\n\n{_made(result)}\n\n{body}\n{remarks}\n"


def _drawn(heads: list[str], cells: list[list[str]]) -> str:
    kept = [i for i in range(len(heads)) if any(row[i] != NOTHING for row in cells)]
    lines = [[heads[i] for i in kept], ["---"] * len(kept), *[[row[i] for i in kept] for row in cells]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


class Joined(NamedTuple):
    """A column of a joined table: the column ``name`` of a result, of the rows ``candidate + suffix``. A figure of one
    seed has a star."""

    head: str
    result: str
    name: str
    suffix: str = ""


SUMMARIES: dict[str, tuple[str, tuple[Joined, ...]]] = {
    "learning": (
        "rule",
        (
            Joined("recall, 1,024", "recall", "recall 1,024"),
            Joined("recall, 4,096", "recall", "recall 4,096"),
            Joined("rewritten keys", "rewriting", "recall 1,024"),
        ),
    ),
    "performance": (
        "layer",
        (
            Joined("step, ms", "mixers", "ms"),
            Joined("times attention", "mixers", "times baseline"),
            Joined("compiled", "mixers", "times baseline", ", compiled"),
            Joined("peak MB", "mixers", "peak MB"),
            Joined("peak MB, compiled", "mixers", "peak MB", ", compiled"),
        ),
    ),
}
"""The tables of docs/results/: the head of the first column, and the others. A row is a candidate."""
LEFT_OUT = (": values begin short", " (highest degree)")
"""Ends of the names of candidates that these tables do not have: trials of how a layer could begin."""


def joined(name: str, folder: Path) -> str:
    """The table ``name`` of ``SUMMARIES`` in Markdown, and below it how its figures were made.

    Raises:
        ValueError: a quick result.
        OSError: a result is missing.
    """
    first, columns = SUMMARIES[name]
    found = {column.result: load(folder / f"{column.result}.json") for column in columns}
    for result in found.values():
        if result["quick"]:
            raise ValueError(f"{result['benchmark']} was made with --quick, which shows nothing: run it without")
    no_row = (*LEFT_OUT, *({column.suffix for column in columns} - {""}))
    named = [row["candidate"] for result in found.values() for row in result["rows"]]
    candidates = [c for c in dict.fromkeys(named) if not c.endswith(no_row)]
    cells = [[candidate, *[_joined(column, candidate, found) for column in columns]] for candidate in candidates]
    made = "".join(f"\n- {_short(result)}" for result in found.values())
    return f"{_drawn([first, *[column.head for column in columns]], cells)}\n\nHow the figures were made:\n{made}\n"


def _joined(column: Joined, candidate: str, found: dict[str, dict[str, Any]]) -> str:
    for row in found[column.result]["rows"]:
        if row["candidate"] == candidate + column.suffix:
            one = len(row.get("seeds", (0, 0))) == 1
            return _cell(COLUMNS[column.name], row) + ("*" if one else "")
    return NOTHING


def _short(result: dict[str, Any]) -> str:
    """A line on a result: command, machine and days."""
    rows = [row for row in result["rows"] if "cpu" in row] or [
        {"cpu": result["machine"]["cpu"], "date": result["date"]}
    ]
    days = sorted({row["date"].split()[0] for row in rows})
    cpus = " and ".join(sorted({row["cpu"] for row in rows}))
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{result['benchmark']}: `{result['command']}`; {cpus}, torch {result['versions']['torch']}, {when}"


def rewrite(page: Path, folder: Path) -> list[str]:
    """Put the tables of ``SUMMARIES`` that a page has marks for, ``<!-- NAME -->`` and ``<!-- end NAME -->``, between
    these marks.

    Returns:
        the names of the tables.

    Raises:
        ValueError: a quick result, or a page without marks.
        OSError: no page, or a result is missing.
    """
    text, written = page.read_text(encoding="utf-8"), []
    for name in SUMMARIES:
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if found := marks.search(text):
            text = f"{text[: found.start()]}{found[1]}\n{joined(name, folder)}\n{found[2]}{text[found.end() :]}"
            written.append(name)
    for path in sorted(CLAIMS.glob("*.json")):
        marks = re.compile(rf"(<!-- claims/{path.stem} -->\n).*?(<!-- end claims/{path.stem} -->)", re.DOTALL)
        if found := marks.search(text):
            text = f"{text[: found.start()]}{found[1]}\n{study(path)}\n{found[2]}{text[found.end() :]}"
            written.append(path.stem)
    if not written:
        raise ValueError(
            f"{page} has no marks <!-- NAME --> and <!-- end NAME --> of {' or '.join(SUMMARIES)}: add them"
        )
    page.write_text(text, encoding="utf-8")
    return written


def study(path: Path) -> str:
    """The tables of a study of `atlas bench` in Markdown, and below them how it was made."""
    result = json.loads(path.read_text(encoding="utf-8"))
    tables = [(f"{title}:\n\n" if title else "") + markdown_table(h, rows) for title, h, rows in study_tables(result)]
    runs = result["runs"]
    days, machines = (" and ".join(sorted({run[key] for run in runs})) for key in ("date", "machine"))
    hours = sum(run["seconds"] for run in runs) / 3600
    settings = "".join(f"; {name} {value}" for name, value in result["settings"].items())
    commands = " and ".join(f"`{command}`" for command in sorted({run["command"] for run in runs}))
    made = f"{commands}; {machines}, {days}, {hours:.1f} hours of one core{settings}"
    return "\n\n".join([result["shows"], *tables, f"*{made}.*"]) + "\n"


def _cell(column: Callable[[Row], str], row: Row) -> str:
    try:
        return column(row)
    except (KeyError, TypeError):  # not measured, or None
        return NOTHING


def _made(result: dict[str, Any]) -> str:
    at, versions = result["machine"], result["versions"]
    threads, cores = _count(result["threads"], "thread"), _count(at["cores"], "core")
    flags = ", ".join(at["flags"])
    named = ("triton", "flash-linear-attention") if "gpu" in at else ("titans-pytorch",)
    peers = "".join(f", {name} {versions[name]}" for name in named if versions.get(name))
    gpu = f"{at['gpu']}; " if "gpu" in at else ""
    loads = "load_before" in result
    load = f", load {result['load_before']:.1f} before, {result['load_after']:.1f} after" if loads else ""
    return (
        f"{gpu}{at['cpu']}, {cores} ({flags}), {threads}{load}; torch {versions['torch']}{peers}; "
        f"{result['date']}, revision {result['revision']}.{_earlier(result)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _earlier(result: dict[str, Any]) -> str:
    """Where and on which days rows were made that come from earlier runs of a study."""
    days: dict[tuple[str, str], set[str]] = {}
    for row in result["rows"]:
        if "cpu" in row and row["revision"] != result["revision"]:
            days.setdefault((row["revision"], row["cpu"]), set()).add(row["date"].split()[0])
    made = [f"revision {revision}, {cpu}, {' and '.join(sorted(on))}" for (revision, cpu), on in sorted(days.items())]
    return f" Other rows: {'; '.join(made)}." if made else ""


def _rates(result: dict[str, Any]) -> str:
    """What the machine gave meanwhile: the range over the shapes."""
    rates = [row["rates"] for row in result["rows"] if "rates" in row]
    if not rates:
        return ""

    def span(name: str) -> str:
        low, high = (_number(1e-9 * pick(r[name] for r in rates)) for pick in (min, max))
        return low if low == high else f"{low} to {high}"

    least = min(row["cpu_share"] for row in result["rows"] if "cpu_share" in row)
    counts = sorted({row["rounds"] for row in result["rows"] if "rounds" in row})
    turns = f"rounds: {counts[0]}" if len(counts) == 1 else f"rounds: {counts[0]} to {counts[-1]}"
    side, (count, rows, inner, columns), _ = SIZES[result.get("device", "cpu")]
    more = f" ({span('tf32')} in TF32, {span('bf16')} in bfloat16)" if "tf32" in rates[0] else ""
    return (
        f"Measured in the same rounds: {span('sgemm')} GFLOP/s in products of {side}^3{more}, {span('batched')} in "
        f"[{count}, {rows}, {inner}] x [{count}, {inner}, {columns}], {span('copy')} GB/s of copying; {turns}; the "
        f"process had at least "
        f"{100 * least:.0f} % of its core{'s' if result['threads'] > 1 else ''}."
    )
