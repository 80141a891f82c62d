"""The structure: who may ask for a type, and that a file name stands once."""

import ast
from pathlib import Path

import pytest

import atlas_memory

SOURCE = Path(atlas_memory.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PARTS = {"network", "bias", "retention", "optimiser", "features", "muon"}
TABLES = {"ops/dispatch.py", "ops/triton/kernel_support.py"}
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
    if str(path.relative_to(SOURCE)) not in TABLES:
        found = PARTS.intersection(asked(ast.parse(text)))
        assert not found, f"asks for the type of {found}: give the part a method, or the table a line"


def test_a_file_name_stands_once() -> None:
    names = [p.name for p in FILES if p.name != "__init__.py" and p.parent.name != "reference"]
    assert sorted(names) == sorted(set(names))
