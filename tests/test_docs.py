"""The pages: their examples run, and they name the rules that there are."""

import re
from pathlib import Path

import pytest
import torch

from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import KINDS, RULES
from atlas_memory.ops.cost import multiply_adds, state_bytes
from atlas_memory.train.config import RunConfig, keys

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
INDEX = (ROOT / "docs" / "rules" / "index.md").read_text(encoding="utf-8")


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=named)
def test_examples_run(page: Path, tmp_path, monkeypatch) -> None:
    """All examples of a page in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    registered = [(table, dict(table)) for table in (RULES, BLOCKS, KINDS)]
    torch.manual_seed(0)
    try:
        exec(compile("\n".join(blocks(page)), str(page), "exec"), {"__name__": "page"})
    finally:
        for table, before in registered:
            table.clear()
            table.update(before)


def anchors(page: Path) -> set[str]:
    """What a link can name after the # of a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if not file.startswith("https://"):
            target = page.parent / file if file else page
            assert target.exists(), file
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{file}#{anchor}"


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    rows = dict(re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", INDEX, re.MULTILINE))
    assert list(rows) == list(RULES)
    pages = {page.name for page in (ROOT / "docs" / "rules").glob("*.md")} - {"index.md"}
    assert set(rows.values()) == pages
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


@pytest.mark.parametrize("name", RULES)
def test_the_other_readings_of_a_rule_exist(name: str) -> None:
    page = ROOT / "docs" / "rules" / dict(re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", INDEX, re.MULTILINE))[name]
    parts = r"`((?:features|network|bias|retention|optimiser|window)=\{[^`]*\})`"
    for options in re.findall(parts, page.read_text(encoding="utf-8")):
        RULES[page.stem].vary(**eval(f"dict({options})"))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(cells)) == 1, table.splitlines()[0]


def test_every_key_of_a_run_is_on_the_page() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("## The keys")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z_0-9.]+)` \|", page, re.MULTILINE)) == set(keys(RunConfig))


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
