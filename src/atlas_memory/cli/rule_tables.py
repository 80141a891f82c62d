"""The command `atlas rules`."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
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
    """The rules and what they cost, the blocks, the presets of model sizes; or one rule."""
    from atlas_memory.memory import RULES
    from atlas_memory.ops.flops import multiply_adds, state_bytes

    if name is not None and name not in RULES:
        raise typer.BadParameter(
            f"unknown rule {name!r}; {suggest(name, RULES)} One of your own is known to a file that "
            f"registers it and then calls the command: python mine.py rules {name} (CONTRIBUTING.md)"
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
        for table in (*_rules(described, measured), _blocks(), _presets()):
            console.print(table)
        return
    one = Table("part", "kind", "fields", title=name, box=SIMPLE)
    for part in PARTS:
        options = dict(described[name][part])
        one.add_row(part, options.pop("kind"), ", ".join(f"{key}={value!r}" for key, value in options.items()))
    console.print(one)
    state, work = _costs(described[name])
    unit = " bytes" if described[name]["state_bytes"] else ""
    print(f"{measured}: state {state}{unit}, multiply-adds a token: {work}")
    if name in REFERENCE:
        print(f"as its paper prints it: atlas_memory/reference/{REFERENCE[name]}.py")


def _costs(numbers: dict[str, Any]) -> tuple[str, str]:
    """State and multiply-adds in words. Both grow where the state does; those of a part of one's own that is read token
    by token are not counted."""
    state, work = numbers["state_bytes"], numbers["multiply_adds"]
    unknown = "grows" if state is None else "not counted"
    return "grows" if state is None else si_format(state), unknown if work is None else si_format(work)


def _changed_fields(part: Any) -> str:
    """The class of a part, and its fields that are not the default."""
    usual = {field.name: field.default for field in fields(part)}
    changed = (f"{key}={option}" for key, option in asdict(part).items() if option != usual[key])
    return " ".join((type(part).__name__, *changed))


def _rules(described: dict[str, dict[str, Any]], measured: str) -> tuple[Table, Table]:
    from atlas_memory.memory import RULES

    columns = (Column(part, overflow="fold") for part in PARTS[:4])
    parts = Table(Column("rule", min_width=max(map(len, RULES))), *columns, box=SIMPLE, padding=(0, 1, 0, 0))
    parts.title = "What a memory is made of"
    costs = Table("rule", Column("optimiser", min_width=20), "c", "b", "read", box=SIMPLE, padding=(0, 1, 0, 0))
    costs.title = f"How it is updated; what it costs in a {measured}"
    costs.caption = "c: window; b: chunk (tokens); read after a token's write, or frozen: as it was before the chunk"
    costs.add_column("state,\nbytes", justify="right")
    costs.add_column("multiply-adds\na token", justify="right")
    for key, rule in RULES.items():
        parts.add_row(key, *(_changed_fields(getattr(rule, part)) for part in PARTS[:4]))
        window = map(str, (rule.window.size, rule.window.chunk, rule.window.read))
        costs.add_row(key, _changed_fields(rule.optimiser), *window, *_costs(described[key]))
    return parts, costs


def _blocks() -> Table:
    from atlas_memory.layers.blocks import BLOCKS

    table = Table("block", "memory", "mixes over time with", title="Blocks", box=SIMPLE, padding=(0, 1, 0, 0))
    for key, mixer in BLOCKS.items():
        about = " ".join((mixer.make.__doc__ or "").split("\n\n")[0].split())
        table.add_row(key, "yes" if mixer.memory else "no", about.removeprefix(f'The mixer "{key}": '))
    return table


def _presets() -> Table:
    from atlas_memory.models.presets import PRESETS

    table = Table("preset", "layers", "width", "heads", "φ heads", "peak rate", "about", title="Presets", box=SIMPLE)
    table.caption = "φ heads: of a memory with a feature map, as in atlas and omeganet; `atlas plan` counts parameters"
    for key, preset in PRESETS.items():
        sizes = [preset.config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
        sizes.append(preset.feature_map_heads or sizes[-1])
        table.add_row(key, *map(str, sizes), f"{preset.learning_rate:g}", preset.about)
    return table
