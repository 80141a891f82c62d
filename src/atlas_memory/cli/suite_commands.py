"""`atlas evaluate --suite` and `atlas results`: benchmarks of long context, of any causal language model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import one_line, progress_lines
from .result_tables import print_study, print_suites
from .startup import imports


def evaluate_suites(
    name: str,
    suites: str,
    lengths: str | None,
    count: int | None,
    seed: int,
    haystack: Sequence[Path],
    babi: Path | None,
    tasks: Path | None,
    strict: bool,
    out: Path | None,
) -> None:
    """Score a model, a run or one that transformers loads, on suites; print the table."""
    with imports():
        from atlas_memory.eval.suites.evaluation import evaluate_suite
        from atlas_memory.eval.suites.harness import HARNESS, evaluate_harness
        from atlas_memory.eval.suites.language import LANGUAGE, evaluate_language

    names = list(dict.fromkeys(suites.split(",")))
    others = LANGUAGE, "lm-eval:TASK"
    asked = {suite: find_suite(suite, others) for suite in names if suite != LANGUAGE and not suite.startswith(HARNESS)}
    if strict and len(asked) < len(names):
        raise ValueError(f"--strict is for questions about a text, not for {LANGUAGE} and {HARNESS}")
    numbers = None if lengths is None else _numbers(lengths)
    if tasks is not None and not tasks.is_dir():
        raise ValueError(f"--tasks: there is no folder {str(tasks)!r}")
    sources = find_sources(haystack, babi)
    if LANGUAGE in names and not sources.haystack:
        raise ValueError(f"the suite {LANGUAGE} reads a text of yours: name it, --haystack FILE")
    model, tokenizer, about = _load(name)
    folder = out or (Path(name) / "evaluation" if Path(name).is_dir() else Path("evaluation") / name.replace("/", "--"))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {str(folder)!r} is a file, and a folder is needed")
    folder.mkdir(parents=True, exist_ok=True)
    results, items = [], count or 100
    with progress_lines("evaluate") as progress:
        for suite in names:
            path = folder / f"{suite.replace(':', '-')}{'-strict' if strict else ''}.json"
            if suite == LANGUAGE:
                options = max(numbers or [8192]), items, about, progress
                results.append(evaluate_language(model, tokenizer, [sources.haystack], path, *options))
            elif suite.startswith(HARNESS):
                task = suite.removeprefix(HARNESS)
                results.append(evaluate_harness(model, tokenizer, task, path, count, seed, tasks, about))
            else:
                asks = numbers, items, seed, sources, strict, about, progress
                results.append(evaluate_suite(model, tokenizer, asked[suite], path, *asks))
    print_suites(results)
    print(one_line(f"answers: {folder}"))


def make_texts(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Such as s-niah-1.")],
    out: Annotated[Path, typer.Option(help="The file to write: data.path of a run.")] = Path("suite.jsonl"),
    tokenizer: Annotated[str, typer.Option(help="By which lengths count: data.tokenizer of the run.")] = "bytes",
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 1024,
    count: Annotated[int, typer.Option(min=1, help="Texts.")] = 1000,
    seed: Annotated[int, typer.Option(help="Not the one of the evaluation.")] = 0,
    haystack: Annotated[list[Path] | None, typer.Option(help="A text to hide things in.")] = None,
    babi: Annotated[Path | None, typer.Option(help="Of BABILong: the folder of bAbI's files.")] = None,
) -> None:
    """Texts of a benchmark with their answers, to train on."""
    with imports():
        from atlas_memory.data.tokenization import load_tokenizer

    sources = replace(find_sources(haystack or [], babi), split="train")
    items = find_suite(suite).items(load_tokenizer(tokenizer), length, count, seed, sources)
    with out.open("w", encoding="utf-8") as file:
        for item in items:
            text = f"{item.context}{item.question}{item.answered}\n"
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    print(one_line(f"{out}: {count:,} texts of up to {length:,} tokens"))


def find_suite(name: str, others: Sequence[str] = ()) -> Any:
    """A suite by name; ValueError where there is none, which suggests these and `others`."""
    from atlas_memory.eval.suites import SUITES
    from atlas_memory.rules.validation import suggest

    if name not in SUITES:
        raise ValueError(f"the suite {name!r} is unknown; {suggest(name, [*SUITES, *others])}")
    return SUITES[name]


def find_sources(haystack: Sequence[Path], babi: Path | None) -> Any:
    """`Sources` of files; ValueError where one is missing or empty."""
    from atlas_memory.data.readers import read_text
    from atlas_memory.eval.suites.suite import Sources

    for path in haystack:
        if not path.is_file():
            raise ValueError(f"--haystack: there is no text file at {str(path)!r}")
    text = "\n".join(text for path in haystack for text in read_text(path))
    if haystack and not text.strip():
        raise ValueError(f"--haystack: there is no text in {', '.join(map(str, haystack))}")
    return Sources(text, babi)


def results(
    folders: Annotated[list[Path], typer.Argument(metavar="PATHS...", help="Results, or folders with results.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a page.")] = False,
) -> None:
    """Results of suites in one table, and of each study of `atlas bench` in its own."""
    found, studies = [], []
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"there is no folder or file {str(folder)!r}")
        for path in sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]:
            try:
                result = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, OSError):
                continue
            if isinstance(result, dict) and {"suite", "items", "summary", "lengths"} <= result.keys():
                found.append(result)
            elif isinstance(result, dict) and {"suite", "runs", "rows_by"} <= result.keys():
                studies.append(result)
    if not (found or studies):
        raise ValueError(
            f"no results in {', '.join(map(str, folders))}: atlas evaluate RUN --suite NAME and atlas bench make them"
        )
    if found:
        print_suites(found, markdown)
    for study in studies:
        print(f"\n{one_line(study['suite'])}: {one_line(study['shows'])} ({one_line(study['source'])})\n")
        print_study(study, markdown)


def _numbers(given: str) -> list[int]:
    try:
        found = [int(number) for number in given.split(",")]
    except ValueError as error:
        raise ValueError(f"--lengths={given!r} must be whole numbers with commas between, such as 1024,4096") from error
    if min(found) < 1 or len(set(found)) < len(found):
        raise ValueError(f"--lengths={given!r} must be different numbers of at least 1")
    return found


def _load(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model and its tokenizer: of a run, or what transformers loads by that name; and what a result says of them."""
    from transformers import AutoModelForCausalLM

    from atlas_memory.data.tokenization import read_tokenizer
    from atlas_memory.models import AtlasConfig
    from atlas_memory.models.saved_memory import identity, weights_hash
    from atlas_memory.train.run_folder import read_json
    from atlas_memory.train.run_model import load_run, model_folder

    folder = model_folder(name)
    try:
        foreign = read_json(folder / "config.json").get("model_type") != AtlasConfig.model_type
    except (OSError, ValueError, AttributeError):
        foreign = not folder.exists()
    if not foreign:
        run = load_run(folder)
        of = identity(run.model)
        return run.model, run.tokenizer, of | {"name": folder.resolve().name}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
        tokenizer = read_tokenizer(name)
    except Exception as error:  # of a dozen types
        raise ValueError(f"{name!r} is no run, and transformers loads no model by that name ({error})") from error
    about = {"name": name, "config": model.config.to_json_string(), "weights": weights_hash(model)}
    return model.eval(), tokenizer, about
