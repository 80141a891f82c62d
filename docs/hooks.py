"""Pages of the site that are made from the code when it is built, and so cannot get stale: configuration keys, log
files and the command line. mkdocs calls ``on_files`` (see mkdocs.yml)."""

from __future__ import annotations

import inspect
import json
import logging
import posixpath
import re
import typing
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def cell(text: object) -> str:
    """A cell of a table: one line, without a bar."""
    return " ".join(str(text).split()).replace("|", r"\|")


def type_name(annotation: Any) -> str:
    """The type of a field as a reader would write it: ``int``, ``"cosine"``, ``list of str``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (list, dict):
        return f"{origin.__name__} of {' to '.join(type_name(part) for part in arguments)}"
    if arguments:  # a union
        return " or ".join(type_name(part) for part in arguments)
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def table(model: Any, prefix: str = "", defaults: bool = True) -> str:
    """The fields of a pydantic model, a row each."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows = rows if defaults else ["| field | type | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        cells = [f"`{prefix}{name}`", type_name(field.annotation)] + [default] * defaults + [field.description or ""]
        rows.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(rows)


def config_page() -> str:
    """Every key of a run."""
    from atlas_memory.train.config import RunConfig

    parts = ["# Configuration keys\n", (ROOT / "docs" / "reference" / "_config.md").read_text(encoding="utf-8")]
    for name, field in RunConfig.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            section: Any = field.annotation
            parts.append(f"## {name}\n\n{section.__doc__}\n\n{table(section, f'{name}.')}\n")
            parts += [f"### Fields of AtlasConfig\n\n{model_table()}\n"] * (name == "model")
    rest = RunConfig.model_fields["output_dir"]
    parts.append(f"## output_dir\n\n{rest.description} Default: `{rest.default}`.\n")
    return "\n".join(parts)


def model_table() -> str:
    """The fields of AtlasConfig, with their descriptions in its docstring."""
    from atlas_memory import AtlasConfig

    arguments = inspect.cleandoc(AtlasConfig.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE):
        for name in names.split(", "):
            default = f"`{json.dumps(getattr(AtlasConfig, name))}`"
            cells = [f"`model.{name}`", type_name(AtlasConfig.__annotations__[name]), default, meaning]
            rows.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(rows)


def logs_page() -> str:
    """Every field of a run's logs."""
    from atlas_memory.monitor import logs

    pages = (
        ("log.jsonl", "StepRecord"),
        ("memory.jsonl", "ProbeRecord"),
        ("memory.jsonl: an entry of memories", "MemoryRecord"),
        ("memory.jsonl: a gate", "GateRecord"),
        ("memory.jsonl: an alarm", "Alarm"),
        ("samples.jsonl", "SampleRecord"),
    )
    parts = [
        "# Log files\n\nA run writes three files of JSON lines into its folder. Fields that are not finite are null. "
        "Read the files while they grow; the [dashboard](../how-to/watch.md) does.\n"
    ]
    for title, name in pages:
        record = getattr(logs, name)
        parts.append(f"## {title}\n\n{record.__doc__}\n\n{table(record, defaults=False)}\n")
    return "\n".join(parts)


def cli_page() -> str:
    """The help of every command, by typer."""
    import typer
    from typer.cli import get_docs_for_click

    from atlas_memory.cli import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="atlas")
    return text.replace("# `atlas`", "# The atlas command", 1)


def from_root(name: str) -> str:
    """A page at the root of the repository; its links into docs/ are the site's."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text).replace("](SECURITY.md)", "](security.md)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/config.md": config_page(),
        "reference/logs.md": logs_page(),
        "reference/cli.md": cli_page(),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "security.md": from_root("SECURITY.md"),
        "changelog.md": from_root("CHANGELOG.md"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of notebooks to pages, which mkdocs follows in Markdown alone."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[1]))
        if (file := files.get_file_from_path(path)) is None:
            logging.getLogger("mkdocs.hooks").warning(
                "%s has a link to %s, which is not there", page.file.src_uri, link[1]
            )
            return link[0]
        return f'href="{file.url_relative_to(page.file)}{link[2] or ""}"'

    return re.sub(r'href="(?!\w+:)([^"#]+\.(?:md|ipynb))(#[^"]*)?"', target, html)
