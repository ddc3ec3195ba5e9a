"""Pages, their blocks of code, and the small models that guides name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n|\*Needs (?P<needs>[^\n]+?):\*\n\n)?"
    r"```(?P<kind>python|sh)\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\n(?P<prints>.*?)^```$)?",
    re.M | re.S,
)


class Block(NamedTuple):
    """A block of code of a page."""

    kind: str
    code: str
    line: int  # of the page
    not_run: str | None  # why
    prints: str | None  # as the page has it, right below


def blocks(page: Path) -> list[Block]:
    """The blocks of Python and of the shell, in the order of the page."""
    text = page.read_text("utf-8")
    return [
        Block(
            it["kind"],
            it["code"],
            text.count("\n", 0, it.start("code")) + 1,
            it["why"] or it["needs"],
            it["prints"],
        )
        for it in _BLOCK.finditer(text)
    ]


@pytest.fixture(scope="session")
def practice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the code of `guides/practice.md` made its models."""
    folder = tmp_path_factory.mktemp("practice")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, it in enumerate(blocks(DOCS / "guides/practice.md")):
            if it.kind == "python":
                (folder / f"{number}.py").write_text(it.code, "utf-8")
                runpy.run_path(f"{number}.py")
    return folder
