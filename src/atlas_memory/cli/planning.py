"""The command `atlas plan`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from .loading import loading

if TYPE_CHECKING:
    from atlas_memory.train.config import RunConfig
    from atlas_memory.train.plan import Plan

UNITS = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def brief(value: float) -> str:
    """Three digits and a unit, of a thousand each."""
    value = float(f"{value:.3g}")  # which may be a thousand of the unit below
    power, unit = next(((p, u) for p, u in UNITS if value >= p), UNITS[-1])
    return f"{value / power:,.3g}{unit}"


def plan(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As `atlas train` takes them.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file; overrides are put on top.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That train together; with train.fsdp they share weights.")] = 1,
    flops: Annotated[
        float | None, typer.Option(min=1.0, help="Operations a second that one device really reaches, such as 1e14.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Of one device for an hour; with --flops.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a run will need, before it is run: parameters, tokens, operations, memory; with --flops, its time."""
    with loading():
        from atlas_memory.train.config import load_config
        from atlas_memory.train.plan import available
        from atlas_memory.train.plan import plan as run

    if price is not None and flops is None:
        raise typer.BadParameter("--price needs --flops, from which the time is found")
    settings = load_config(config, overrides or [])
    found = run(settings, processes)
    hours = _hours(settings, found, flops, processes)
    if hours is not None and flops is not None and hours == _on_the_clock(settings, processes):
        found = replace(found, tokens=int(hours * 3600 * flops / found.flops_per_token))
    if as_json:
        cost = None if hours is None or price is None else hours * price
        print(json.dumps(found.to_dict() | {"processes": processes, "device_hours": hours, "cost": cost}, indent=2))
    else:
        Console().print(_table(settings, found, processes, hours, price, available(settings)))


def _hours(settings: RunConfig, found: Plan, flops: float | None, processes: int) -> float | None:
    """The hours of a run, of all devices together: by its operations or, where the clock ends it before, by the clock.
    None without `flops`."""
    if flops is None:
        return None
    needed = math.inf if found.flops is None else found.flops / flops / 3600
    return min(needed, _on_the_clock(settings, processes))


def _on_the_clock(settings: RunConfig, processes: int) -> float:
    """The hours that the clock leaves all devices together."""
    minutes = settings.train.max_minutes
    return math.inf if minutes is None else minutes / 60 * processes


def _table(
    settings: RunConfig, found: Plan, processes: int, hours: float | None, price: float | None, there: int
) -> Table:
    """The plan of a run; `there` are the bytes that this machine has."""
    table = Table(Column("what"), Column("how much", justify="right"), Column("of that"), box=SIMPLE)
    rest = found.parameters - found.embeddings - found.initial
    parts = (
        f"embeddings and head {brief(found.embeddings)}, memories' M_0 {brief(found.initial)}, the rest {brief(rest)}"
    )
    table.add_row("parameters", brief(found.parameters), parts)
    if found.tokens is not None and found.flops is not None:
        clock = "; the clock ends the run" if hours == _on_the_clock(settings, processes) else ""
        table.add_row("tokens", brief(found.tokens), f"{found.tokens / found.parameters:.3g} a parameter{clock}")
        table.add_row("operations", brief(found.flops), f"{brief(found.flops_per_token)} a token, of matrix products")
    else:
        table.add_row("operations a token", brief(found.flops_per_token), "of matrix products; the clock ends the run")
    if hours is not None:
        money = "" if price is None else f"; at {price:g} an hour {hours * price:,.2f}"
        table.add_row("hours of a device", f"{hours:,.3g}", f"{hours / processes:,.3g} on {processes}{money}")
    table.add_section()
    table.add_row("weights, bytes", brief(found.weights), "with gradients and the optimiser's state")
    table.add_row(
        "activations", brief(found.activations), f"{settings.train.batch_size} rows of {settings.data.seq_len} tokens"
    )
    table.add_row("logits", brief(found.logits), "with their gradient")
    table.add_row("carried states", brief(found.carried), "of the rows under way, at most")
    table.add_row("memory of a process", brief(found.memory), f"this machine has {brief(there)}")
    return table
