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

from .startup import imports

if TYPE_CHECKING:
    from atlas_memory.train.config import RunConfig
    from atlas_memory.train.plan import Plan


def si_format(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P", "E", "Z", "Y"):
        value = float(f"{value:.3g}")  # rounding may give 1000
        if value < 1000 or unit == "Y":
            break
        value /= 1000
    return f"{value:,.3g}{unit}"


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
    with imports():
        from atlas_memory.train.config import load_config
        from atlas_memory.train.plan import available_memory
        from atlas_memory.train.plan import plan as run

    if price is not None and flops is None:
        raise typer.BadParameter("--price needs --flops, from which the time is found")
    settings = load_config(config, overrides or [])
    found = run(settings, processes)
    minutes, hours, by_clock = settings.train.max_minutes, None, False
    if flops is not None:  # hours of all devices, up to train.max_minutes
        needed = math.inf if found.flops is None else found.flops / flops / 3600
        clock = math.inf if minutes is None else minutes / 60 * processes
        hours, by_clock = min(needed, clock), clock <= needed
        if by_clock:
            found = replace(found, tokens=int(hours * 3600 * flops / found.flops_per_token))
    if as_json:
        cost = None if hours is None or price is None else hours * price
        print(json.dumps(found.to_dict() | {"processes": processes, "device_hours": hours, "cost": cost}, indent=2))
        return
    table = _table(settings, found, processes, hours, price, by_clock)
    available = available_memory(settings)
    remedy = ": lower train.batch_size or data.seq_len" if found.memory > available else ""
    table.add_row("memory of a process", si_format(found.memory), f"this machine has {si_format(available)}{remedy}")
    Console().print(table)


def _table(
    settings: RunConfig, found: Plan, processes: int, hours: float | None, price: float | None, by_clock: bool
) -> Table:
    table = Table(Column("what"), Column("how much", justify="right"), Column("of that"), box=SIMPLE)
    rest = found.parameters - found.embeddings - found.initial
    parts = f"embeddings and head {si_format(found.embeddings)}, memories' M_0 {si_format(found.initial)}"
    parts += f", the rest {si_format(rest)}"
    table.add_row("parameters", si_format(found.parameters), parts)
    if found.tokens is not None and found.flops is not None:
        clock = "; the clock ends the run" if by_clock else ""
        table.add_row("tokens", si_format(found.tokens), f"{found.tokens / found.parameters:.3g} a parameter{clock}")
        table.add_row(
            "operations", si_format(found.flops), f"{si_format(found.flops_per_token)} a token, of matrix products"
        )
    else:
        table.add_row(
            "operations a token", si_format(found.flops_per_token), "of matrix products; the clock ends the run"
        )
    if hours is not None:
        money = "" if price is None else f"; at {price:g} an hour {hours * price:,.2f}"
        table.add_row("hours of a device", f"{hours:,.3g}", f"{hours / processes:,.3g} on {processes}{money}")
    table.add_section()
    table.add_row("weights, bytes", si_format(found.weights), "with gradients and the optimizer's state")
    table.add_row(
        "activations",
        si_format(found.activations),
        f"{settings.train.batch_size} rows of {settings.data.seq_len} tokens",
    )
    table.add_row("logits", si_format(found.logits), "with their gradient")
    table.add_row("memory states", si_format(found.states), "of the rows under way, at most")
    return table
