"""The command `atlas rules`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from ..rules.validation import suggest
from .planning import si_format

REFERENCE = {
    rule: page
    for page, rules_of_page in {
        "atlas": "atlas atlas++ omeganet atlas-linear atlas-identity atlas-c1 dla swla deeptransformer swdt dot",
        "titans": "titans",
        "tnt": "tnt",
        "miras": "moneta yaad memora",
        "nested_learning": "hope",
        "deltanet": "deltanet gated-deltanet",
        "ttt": "ttt-linear ttt-mlp",
        "lact": "lact",
    }.items()
    for rule in rules_of_page.split()
}
"""The page of each rule's paper, by its name in atlas_memory.reference."""
PARTS = ("features", "network", "bias", "retention", "optimiser", "window")


def rules(
    name: Annotated[str | None, typer.Argument(metavar="RULE", help="Only this rule, every field of it.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Width of the layer whose state and cost are shown.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Its heads.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; of all rules or of one.")] = False,
) -> None:
    """The rules and what they cost; or one rule."""
    from atlas_memory.memory import RULES
    from atlas_memory.ops.flops import multiply_adds, state_bytes

    if name is not None and name not in RULES:
        raise typer.BadParameter(
            f"unknown rule {name!r}; {suggest(name, RULES)} One of your own is known to a file that "
            f"registers it and then calls the command: python mine.py rules {name}"
        )
    if dim % heads:
        raise typer.BadParameter(f"--dim must be a multiple of --heads, got {dim} and {heads}")
    described: dict[str, dict[str, Any]] = {}
    for key in RULES if name is None else [name]:
        parts = {part: getattr(RULES[key], part) for part in PARTS}
        described[key] = {part: {"kind": type(value).__name__, **asdict(value)} for part, value in parts.items()}
        described[key]["state_bytes"] = state_bytes(RULES[key], dim // heads, heads)
        described[key]["multiply_adds"] = multiply_adds(RULES[key], dim // heads, heads)
    if as_json:
        print(json.dumps(described if name is None else described[name], indent=2))
        return
    console, measured = Console(markup=False, highlight=False), f"layer of width {dim}, {heads} heads, float32"
    if name is None:
        _print_table(console, described, measured)
        return
    _print_rule(console, name, described[name], measured)


def _print_table(console: Console, described: dict[str, dict[str, Any]], measured: str) -> None:
    table = Table(Column("rule", no_wrap=True), ", ".join(PARTS[:5]), "c", "b", box=SIMPLE, padding=(0, 1, 0, 0))
    table.title, table.caption = f"Rules, in a {measured}", "c: window; b: chunk (tokens); fields: atlas rules RULE"
    table.add_column("state,\nbytes", justify="right")
    table.add_column("multiply-adds\na token", justify="right")
    for key, numbers in described.items():
        window = (str(numbers["window"][field]) for field in ("size", "chunk"))
        kinds = ", ".join(numbers[part]["kind"] for part in PARTS[:5])
        table.add_row(key, kinds, *window, *_costs(numbers))
    console.print(table)


def _print_rule(console: Console, name: str, described: dict[str, Any], measured: str) -> None:
    table = Table("part", "kind", "fields", title=name, box=SIMPLE)
    for part in PARTS:
        options = dict(described[part])
        table.add_row(part, options.pop("kind"), ", ".join(f"{key}={value!r}" for key, value in options.items()))
    console.print(table)
    state, work = _costs(described)
    unit = " bytes" if described["state_bytes"] else ""
    print(f"{measured}: state {state}{unit}, multiply-adds a token: {work}")
    if name in REFERENCE:
        print(f"as its paper prints it: atlas_memory/reference/{REFERENCE[name]}.py")


def _costs(numbers: dict[str, Any]) -> tuple[str, str]:
    """State and multiply-adds in words: both may grow with the tokens, and a part of your own may not be counted."""
    state, work = numbers["state_bytes"], numbers["multiply_adds"]
    unknown = "grows" if state is None else "not counted"
    return "grows" if state is None else si_format(state), unknown if work is None else si_format(work)
