"""The command `atlas rules`."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from ..rules.names import meant
from .planning import brief

PARAMETER_RULES = ("gated-deltanet", "titans", "omeganet", "atlas")
PARAMETERS = {
    "nano": (141_764, 150_086, 210_718, 210_978),
    "tiny": (513_288, 530_188, 653_814, 654_846),
    "mini": (3_629_088, 3_698_736, 4_211_788, 4_220_012),
    "50m": (50_066_560, 51_934_400, 86_259_352, 86_292_184),
    "170m": (170_353_344, 173_597_568, 218_020_068, 218_167_716),
    "340m": (345_091_328, 356_494_976, 563_820_872, 564_214_472),
    "400m": (396_995_840, 408_399_488, 615_725_384, 616_118_984),
    "760m": (768_901_632, 794_264_448, 1_485_098_568, 1_485_688_776),
    "1.3b": (1_311_869_728, 1_378_225_072, 6_231_150_550, 6_231_445_606),
}
"""Of the presets with each of these rules; to count them anew would be to make 36 models."""
REFERENCE = {
    rule: page
    for page, of in {
        "atlas": "atlas atlas++ omeganet atlas-linear atlas-identity atlas-c1 dla swla deeptransformer swdt dot",
        "titans": "titans",
        "tnt": "tnt",
        "miras": "moneta yaad memora",
        "nested_learning": "hope",
        "deltanet": "deltanet gated-deltanet",
        "ttt": "ttt-linear ttt-mlp",
        "lact": "lact",
    }.items()
    for rule in of.split()
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

    if name is not None and name not in RULES:
        raise typer.BadParameter(
            f"unknown rule {name!r}; {meant(name, RULES)} One of your own is known to a file that "
            f"registers it and then calls the command: python mine.py rules {name} (CONTRIBUTING.md)"
        )
    if dim % heads:
        raise typer.BadParameter(f"--dim must be a multiple of --heads, got {dim} and {heads}")
    described = {key: _described(rule, dim // heads, heads) for key, rule in RULES.items() if name in (None, key)}
    if as_json:
        print(json.dumps(described if name is None else described[name], indent=2))
        return
    console = Console(markup=False, highlight=False)
    measured = f"layer of width {dim}, {heads} heads, float32"
    if name is None:
        for table in (*_rules(described, measured), _blocks(), _sizes(), _parameters()):
            console.print(table)
        return
    one, numbers = Table("part", "kind", "fields", title=name, box=SIMPLE), described[name]
    for part in PARTS:
        options = dict(numbers[part])
        one.add_row(part, options.pop("kind"), ", ".join(f"{key}={value!r}" for key, value in options.items()))
    console.print(one)
    state, work = _costs(numbers)
    print(f"{measured}: state {state}{' bytes' if numbers['state_bytes'] else ''}, multiply-adds a token: {work}")
    if name in REFERENCE:
        print(f"as its paper prints it: atlas_memory/reference/{REFERENCE[name]}.py")


def _described(rule: Any, size: int, heads: int) -> dict[str, Any]:
    """A rule's parts with their fields, and what it costs with so many heads of this size."""
    from atlas_memory.ops.cost import multiply_adds, state_bytes

    parts = {part: getattr(rule, part) for part in PARTS}
    found: dict[str, Any] = {part: {"kind": type(value).__name__, **asdict(value)} for part, value in parts.items()}
    return found | {"state_bytes": state_bytes(rule, size, heads), "multiply_adds": multiply_adds(rule, size, heads)}


def _costs(numbers: dict[str, Any]) -> tuple[str, str]:
    """The state and the multiply-adds in words: both grow where the state does; work may besides not be counted, where
    a part of one's own is read token by token."""
    state, work = numbers["state_bytes"], numbers["multiply_adds"]
    unknown = "grows" if state is None else "not counted"
    return "grows" if state is None else brief(state), unknown if work is None else brief(work)


def _part(value: Any) -> str:
    """The name of a part, and what is not its default."""
    usual = {field.name: field.default for field in fields(value)}
    changed = (f"{key}={option}" for key, option in asdict(value).items() if option != usual[key])
    return " ".join((type(value).__name__, *changed))


def _rules(described: dict[str, dict[str, Any]], measured: str) -> tuple[Table, Table]:
    """What memories are made of; how they move and what that costs."""
    from atlas_memory.memory import RULES

    columns = (Column(part, overflow="fold") for part in PARTS[:4])
    made = Table(Column("rule", min_width=max(map(len, RULES))), *columns, box=SIMPLE, padding=(0, 1, 0, 0))
    made.title = "What a memory is made of"
    costs = Table("rule", Column("optimiser", min_width=20), "c", "b", "read", box=SIMPLE, padding=(0, 1, 0, 0))
    costs.title = f"How it moves; what it costs in a {measured}"
    costs.caption = (
        "c: tokens of a window; b: of a chunk; read after a token's write, or frozen: as it was before the chunk"
    )
    costs.add_column("state,\nbytes", justify="right")
    costs.add_column("multiply-adds\na token", justify="right")
    for key, rule in RULES.items():
        made.add_row(key, *(_part(getattr(rule, part)) for part in PARTS[:4]))
        window = map(str, (rule.window.size, rule.window.chunk, rule.window.read))
        costs.add_row(key, _part(rule.optimiser), *window, *_costs(described[key]))
    return made, costs


def _blocks() -> Table:
    from atlas_memory.layers.blocks import BLOCKS

    blocks = Table("block", "memory", "mixes over time with", title="Blocks", box=SIMPLE, padding=(0, 1, 0, 0))
    for key, mixer in BLOCKS.items():
        about = " ".join((mixer.make.__doc__ or "").split("\n\n")[0].split())
        blocks.add_row(key, "yes" if mixer.memory else "no", about.removeprefix(f'The mixer "{key}": '))
    return blocks


def _sizes() -> Table:
    from atlas_memory.models.presets import PRESETS

    sizes = Table("preset", "layers", "width", "heads", "φ heads", "peak rate", "about", title="Presets", box=SIMPLE)
    sizes.caption = "φ heads: of a memory with a feature map, as in atlas and omeganet"
    for key, preset in PRESETS.items():
        layers, width, heads = (
            preset.config[field] for field in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        many = preset.feature_map_heads or heads
        sizes.add_row(key, *map(str, (layers, width, heads, many)), f"{preset.learning_rate:g}", preset.about)
    return sizes


def _parameters() -> Table:
    """What the presets hold depends on the rule: feature maps make large M_0."""
    table = Table("preset", box=SIMPLE, title="Parameters of the presets, by rule")
    for rule in PARAMETER_RULES:
        table.add_column(rule, justify="right")
    for key, counts in PARAMETERS.items():
        table.add_row(key, *map(brief, counts))
    return table
