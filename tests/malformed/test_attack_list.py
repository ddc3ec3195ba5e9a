"""docs/reference/attacks.md and the tests name the same attacks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "docs" / "reference" / "attacks.md"


def _tests() -> dict[str, str]:
    """Every test of an attack, with its file."""
    return {
        node.name: path.name
        for path in HERE.glob("test_attacks_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and re.match(r"test_a\d", node.name)
    }


def _documented() -> list[tuple[str, str, str]]:
    """Number, file and test of every attack in the document."""
    pattern = r"^\| A(\d+) \|.*\| `(\w+\.py)::(\w+)` \|$"
    return re.findall(pattern, DOCUMENT.read_text(), re.MULTILINE)


def test_every_attack_in_the_document_has_its_test() -> None:
    rows = _documented()
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == len(re.findall(r"^\| A\d", DOCUMENT.read_text(), re.MULTILINE))
    for number, file, name in rows:
        assert name.startswith(f"test_a{int(number):02}_")
        assert _tests().get(name) == file


def test_every_test_of_an_attack_is_in_the_document() -> None:
    assert set(_tests()) == {name for _, _, name in _documented()}
