"""The documentation: its examples and notebooks run, links lead somewhere, and the site builds without a warning."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import typer
from nbclient import NotebookClient

from atlas_memory.cli import app
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import KINDS, RULES
from atlas_memory.ops.flops import multiply_adds, state_bytes
from atlas_memory.train.config import RunConfig, keys

from .train.small import overrides

ROOT = Path(__file__).parents[1]
AT_ROOT = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES = [*AT_ROOT, *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
RULE_PAGES = sorted((ROOT / "docs" / "rules").glob("*.md"))
INDEX = (ROOT / "docs" / "rules" / "index.md").read_text(encoding="utf-8")


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def registries():
    """What a page registers is taken out again."""
    registered = [(table, dict(table)) for table in (RULES, BLOCKS, KINDS)]
    yield
    for table, before in registered:
        table.clear()
        table.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=named)
def test_examples_run(page: Path, tmp_path, monkeypatch, registries) -> None:
    """All examples of a page in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile("\n".join(blocks(page)), str(page), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=named)
def test_keys_and_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for key in re.findall(r"\b((?:data|train)\.[a-z_]+)\b(?=[=`])", text):
        assert key in set(keys(RunConfig)), key
    for line in re.findall(r"atlas ((?:data |tokenizer )?[a-z]+ [^`\n]*--[^`\n]*)", text):
        command: Any = typer.main.get_command(app)
        while (words := line.split()) and words[0] in getattr(command, "commands", ()):
            command, line = command.commands[words[0]], line.partition(" ")[2]
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<= )--[a-z-]+", f" {line}")) <= known, line


@pytest.mark.extended
@pytest.mark.parametrize("page", NOTEBOOKS, ids=named)
def test_notebooks_run(page: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # where `atlas` is
    notebook = nbformat.read(page, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


@pytest.mark.extended
def test_the_site_builds_without_a_warning(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", AT_ROOT, ids=named)
def test_links_from_the_root_lead_somewhere(page: Path) -> None:
    """Those between pages of the site are checked when it is built."""
    for file in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert file.startswith("https://") or (ROOT / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(cells)) == 1, table.splitlines()[0]


def test_the_command_knows_what_a_file_registers(tmp_path: Path, monkeypatch, capsys, registries) -> None:
    """The file `mine.py` of "Add a block"."""
    parts = blocks(ROOT / "docs" / "how-to" / "own-block.md")
    own = [part for part in parts if 'BLOCKS["mean"] = ' in part or "sys.exit(main())" in part]
    assert len(own) == 2
    (tmp_path / "mine.py").write_text("\n".join(own), encoding="utf-8")

    def command(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [*map(str, (tmp_path / "mine.py", *arguments))])
        BLOCKS.pop("mean", None)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        assert ended.value.code == 0
        return capsys.readouterr().out

    small = [option for option in overrides(tmp_path) if not option.startswith("model.rule")]
    assert "step 2" in command("train", *small, "train.steps=2", "model.block=mean", "data.order=stream")
    assert command("generate", tmp_path / "run", "--prompt", "doc", "--max-new-tokens", "4", "--greedy")


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    rows = dict(re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", INDEX, re.MULTILINE))
    assert list(rows) == list(RULES)
    assert set(rows.values()) == {page.name for page in RULE_PAGES} - {"index.md"}
    for rule, page in rows.items():
        text = (ROOT / "docs" / "rules" / page).read_text(encoding="utf-8")
        assert rule in text.splitlines()[0] and f'RULES["{Path(page).stem}"]' in text
        assert Path(page).stem in RULES


def test_the_numbers_of_the_index() -> None:
    """Bytes and multiply-adds in three figures."""
    units = {"k": 1e3, "M": 1e6, "G": 1e9}
    rows = re.findall(r"^\| \[(.+?)\]\(.+?\|.+?\| (\S+) \| (\S+) \|$", INDEX, re.MULTILINE)
    assert len(rows) == len(RULES)
    for name, state, work in rows:
        for printed, exact in ((state, state_bytes(RULES[name], 64, 4)), (work, multiply_adds(RULES[name], 64, 4))):
            if printed == "grows":
                assert exact is None
            else:
                assert exact == pytest.approx(float(printed[:-1]) * units[printed[-1]], rel=0.005)


@pytest.mark.parametrize("page", RULE_PAGES, ids=named)
def test_the_other_readings_of_a_rule_exist(page: Path) -> None:
    parts = r"`((?:features|network|bias|retention|optimiser|window)=\{[^`]*\})`"
    for options in re.findall(parts, page.read_text(encoding="utf-8")) if page.stem in RULES else ():
        RULES[page.stem].vary(**eval(f"dict({options})"))


def test_equations_are_where_the_page_says() -> None:
    page = (ROOT / "docs/explanation/notation.md").read_text(encoding="utf-8").split("## Equations")[1].split("## ")[0]
    lines = [line for line in page.splitlines() if line.startswith("|") and "`" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(rows) >= 20
    for paper, numbers, _, files in rows:
        for file in re.findall(r"`([^`]+)`", files):
            text = (ROOT / "src/atlas_memory" / file).read_text(encoding="utf-8")
            for number in numbers.split(", "):
                assert re.search(rf"Eqs?\. [^\n]{{0,40}}\b{number}\b", text), f"{paper} {number} is not in {file}"
            assert paper in text
