"""Tables of results: of suites, and of the studies of `atlas bench`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..console import one_line


def print_suites(results: Sequence[dict[str, Any]], markdown: bool = False) -> None:
    """A row for each model and suite, a column for each length: the first score, and its standard error."""
    lengths = sorted({length for result in results for length in result["lengths"]})
    head = ["model", "suite", "score", *(f"{length:,}" for length in lengths)]
    whole = any(not result["lengths"] for result in results)  # lm-eval has no lengths
    rows = []
    for result in results:
        of_length: dict[str, dict[int | None, str]] = {}
        for row in result["summary"]:
            score = next(name for name in row if name not in ("length", "items", "from", "task"))
            error = f" ± {row[f'{score} error']:.2f}" if f"{score} error" in row else ""
            suite = row.get("task", result["suite"] + " strict" * result["strict"])
            suite += ", by position" * ("from" in row)
            of_length.setdefault(f"{suite}\t{score}", {})[row["length"]] = f"{row[score]:.2f}{error}"
        for named, cells in of_length.items():
            of_all = [cells.get(None, "")] * whole
            rows.append([result["model"]["name"], *named.split("\t"), *(cells.get(n, "") for n in lengths), *of_all])
    head += ["all"] * whole
    _print(head, rows, markdown)


def print_study(result: dict[str, Any], markdown: bool = False) -> None:
    """The tables of a study."""
    for title, head, rows in study_tables(result):
        if title:
            print(f"\n{one_line(title)}:\n")
        _print(head, rows, markdown)


def study_tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, heads and rows: a row for each of the study's row keys, a column for each number, with the mean over
    seeds and its standard error; or a table for each number that the study has `across`."""
    from atlas_memory.bench.grid import means

    found = means(result)
    if result["across"]:
        return [(number, *_across(found, result["rows_by"], number)) for number in result["across"]]
    names = list(dict.fromkeys(name for row in found for name in row["numbers"]))
    rates = any("learning_rate" in row for row in found)
    head = [*result["rows_by"], *names, *(["learning rate"] * rates), "seeds"]
    rows = []
    for row in found:
        failed = f" ({row['failed']} failed)" if row["failed"] else ""
        cells = [_cell(row["numbers"].get(name)) for name in names]
        cells += [f"{row['learning_rate']:g}"] if rates else []
        rows.append([*(str(row[key]) for key in result["rows_by"]), *cells, f"{row['seeds']}{failed}"])
    return [("", head, rows)]


def _across(rows: Sequence[dict[str, Any]], keys: Sequence[str], number: str) -> tuple[list[str], list[list[str]]]:
    """A table of one number: the last key across, and the slope over it."""
    from atlas_memory.bench.capacity import slope

    across = keys[-1]
    places = sorted({row[across] for row in rows})
    lines: dict[tuple[str, ...], dict[int, tuple[float, float]]] = {}
    for row in rows:
        if number in row["numbers"]:
            lines.setdefault(tuple(str(row[key]) for key in keys[:-1]), {})[row[across]] = row["numbers"][number]
    body = []
    for names, cells in lines.items():
        found = slope(list(cells), [mean for mean, _ in cells.values()])
        body.append(
            [*names, *(_cell(cells.get(place)) for place in places), "" if math.isnan(found) else f"{found:.2f}"]
        )
    return [*keys[:-1], *(f"{across} {place}" for place in places), "slope"], body


def _cell(number: tuple[float, float] | None) -> str:
    if number is None:
        return ""
    mean, error = number
    digits = 0 if abs(mean) >= 100 else 1 if abs(mean) >= 10 else 2
    return f"{mean:,.{digits}f}" + ("" if math.isnan(error) or error == 0 else f" ± {error:,.{digits}f}")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    return "\n".join(one_line(f"| {' | '.join(line)} |") for line in (head, ["---"] * len(head), *rows))


def _print(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    if markdown:
        print(markdown_table(head, rows))
        return
    table = Table()
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    Console().print(table)
