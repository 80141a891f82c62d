"""The house keeps its shape: who may ask for a type, how long a file is, how short the definition."""

import ast
from pathlib import Path

import pytest

import atlas_memory

SOURCE = Path(atlas_memory.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PARTS = {"network", "bias", "retention", "optimiser", "features", "muon"}
TABLES = {"ops/counterparts.py", "ops/triton/dispatch.py"}
"""What has a fast counterpart: the one place for the forms, and the one for the kernels."""


def asked(tree: ast.AST) -> list[str]:
    """What ``isinstance`` and ``type`` are asked of, but for ``type(x).__name__``: the last name of the argument."""
    names = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "__name__"}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in names)
    of = [c.args[0] for c in calls if getattr(c.func, "id", "") in ("isinstance", "type") and c.args]
    return [getattr(node, "attr", getattr(node, "id", "")) for node in of]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_file_asks_for_the_type_of_a_part(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350
    if str(path.relative_to(SOURCE)) not in TABLES:
        found = PARTS.intersection(asked(ast.parse(text)))
        assert not found, f"asks for the type of {found}: give the part a method, or the table a line"


def test_the_definition_is_read_in_five_minutes() -> None:
    path = SOURCE / "rules" / "definition.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loop = next(node for node in ast.walk(tree) if isinstance(node, ast.For))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno < 30
