"""The command: `atlas train`, `plan`, `generate`, `read`, `chat`, `memory`, `serve`, `evaluate`, `report`, ..."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .. import __version__
from ..console import one_line, progress_lines
from .bench_commands import bench_app
from .data_commands import data_app, tokenizer_app
from .evaluate_command import ColumnOfData, evaluate
from .memory_commands import chat, memory_app, read, serve
from .planning import plan
from .rule_tables import rules
from .startup import accept_any_output, imports, interrupted, on_interrupt, report_error
from .suite_commands import make_texts, results

# Commands import what they need, so that `--help` does not wait.

app = typer.Typer(
    help="Language models with ATLAS memories: they learn while they read.",
    epilog="Errors are one line; ATLAS_TRACEBACK=1 shows where they come from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(memory_app, name="memory")
app.add_typer(bench_app, name="bench")
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `atlas train` wrote, or demo.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"atlas-memory {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Such as train.steps=500 data.path=book.txt"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file; overrides are put on top.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir.")] = False,
) -> None:
    """Train a model on text: your own, or the Python standard library's source."""
    with imports():
        from atlas_memory.train.config import load_config
        from atlas_memory.train.distributed import destroy_process_group, rank
        from atlas_memory.train.trainer import train as run

    settings = load_config(config, overrides or [])
    if resume and config is None and (saved := Path(settings.output_dir) / "run.yaml").is_file():
        settings = load_config(saved, overrides or [])
    outcome = run(settings, resume)
    destroy_process_group()
    done = f"{outcome.folder}: step {outcome.steps}, loss {outcome.loss:.3f}, {outcome.seconds:.0f} s"
    if outcome.interrupted:
        report_error(f"interrupted; {done}; continue with: atlas train --resume output_dir={outcome.folder}", 130)
        raise typer.Exit(130)
    if rank() == 0:
        print(one_line(done))


def _prompt(given: str) -> str:
    """The prompt, or standard input for -; ValueError if it is not UTF-8."""
    name = "standard input (--prompt -)" if given == "-" else "--prompt"
    if given == "-" and sys.stdin is None:
        raise ValueError(f"{name} is closed: give the text itself")
    try:
        prompt = sys.stdin.buffer.read().decode("utf-8") if given == "-" else given
        prompt.encode("utf-8")  # arguments that are not UTF-8 have surrogates
    except UnicodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: convert it first, with iconv -f ENCODING -t utf-8") from error
    return prompt


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="What the text begins with; - reads it from standard input.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=1e-6, help="See --greedy for none.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Draw from so many of the likeliest tokens,")] = 40,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="and of these from the fewest that have this share of all.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**64 - 1)] = 0,
    memory: Annotated[Path | None, typer.Option(help="What `atlas read` has read: write on from there.")] = None,
) -> None:
    """Write text with a trained model, as it comes."""
    with imports():
        from atlas_memory.eval.sampling import TerminalStreamer, sample
        from atlas_memory.models import Memory
        from atlas_memory.train.run_model import load_run

    if greedy and (temperature, top_k, top_p) != (0.8, 40, 1.0):
        raise typer.BadParameter("--greedy draws nothing: leave out --temperature, --top-k and --top-p, or --greedy")
    prompt = _prompt(prompt)
    loaded = load_run(run)
    streamer = TerminalStreamer(loaded.tokenizer, skip_special_tokens=True)
    before = None if memory is None else Memory.load(memory, loaded.model)
    choice = temperature, top_k, top_p, seed, greedy, streamer, before
    sample(loaded.model, loaded.tokenizer, prompt, max_new_tokens, *choice)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders that `atlas train` wrote.")],
    data: Annotated[Path | None, typer.Option(help="Read all of this text, not the run's own held-out part.")] = None,
    column: ColumnOfData = None,
) -> None:
    """Evaluate runs and write RUN/report/: a page, pictures and numbers; of several, a page that compares them too."""
    with imports():
        from atlas_memory.viz.labels import amount
        from atlas_memory.viz.report import write_comparison, write_report

    with progress_lines("report") as progress:
        page = write_comparison(runs, data, column=column, progress=progress) if len(runs) > 1 else None
        numbers = {} if page else write_report(runs[0], data, column=column, progress=progress)
    if page:
        print(one_line(f"comparison: {page}"))
        return
    found, margin = numbers["memory_on"]["bits_per_byte"], numbers["margin"]
    if margin is None:
        print(f"bits per byte: {found:.4f} (the model has no memory)")
    else:
        print(
            f"bits per byte: {found:.4f} with the memory on, {numbers['writes_off']['bits_per_byte']:.4f} with its "
            f"writes off (saved: {amount(margin)})"
        )
    for alarm in numbers["alarms"]:
        if alarm["until"] is None:
            print(one_line(f"alarm since step {alarm['step']:,}: {alarm['text']}"))
    print(one_line(f"report: {Path(numbers['folder']) / 'report.html'}"))


@app.command()
def dashboard(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Runs, or folders with runs in them.")],
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
    address: Annotated[str, typer.Option(help="Whom it answers: 0.0.0.0 is every machine that can reach it.")] = (
        "localhost"
    ),
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")] = True,
) -> None:
    """Show runs on a local web page while they train: curves, memories, alarms, samples, and texts as they are read."""
    from atlas_memory.viz.server import serve

    serve(runs, port, address, browser)


app.command()(evaluate)
app.command()(read)
app.command()(chat)
app.command()(serve)
app.command()(plan)
app.command()(rules)
app.command()(results)
data_app.command("suite")(make_texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (None: of `sys.argv`) and return its exit code: 2 for a wrong command line or config, 1 for other
    errors, which are one line, 130 after Ctrl-C."""
    # Read when torch is loaded. Threads spin while they wait, by default so long that with another busy core training
    # takes 80 times as long; with this twice, and a tenth longer on a quiet machine.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    accept_any_output()
    usage_error = cast(type[Exception], typer.BadParameter.__base__)  # click's, wherever this typer keeps it
    try:
        with on_interrupt(interrupted):
            return app(None if arguments is None else list(arguments), standalone_mode=False) or 0
    except usage_error as error:
        message, code = cast(Any, error).format_message(), 2
        for wrong in getattr(error.__cause__, "errors", list)():  # pydantic's, by which typer reads values
            message += "" if repr(wrong["input"]) in message else f", not {wrong['input']!r}"
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("ATLAS_TRACEBACK"):
            raise
        config = sys.modules.get("atlas_memory.train.config")  # not there if it is an import that failed
        message, code = str(error), 2 if config and isinstance(error, config.ConfigError) else 1
    except (KeyboardInterrupt, typer.Abort):  # of which has been told
        return 130
    return report_error(message, code) if message else code  # a bare `atlas` has shown the help
