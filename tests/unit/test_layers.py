"""What a reader may count on: names of modules and classes are their own, and no file is long.

That no module imports itself by a detour is a contract of import-linter, in `pyproject.toml`.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tpde"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")

LINES = 350
# The slow codec is read from top to bottom beside docs/format.md, in whose order it is.
LONG = {"src/tpde/codec/reference.py"}
# Named, since what is built or installed may lie beside them.
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", "fuzz", ".ci")


def scope(path: Path) -> tuple[str, ...]:
    """Within what a module's name is its own.

    The folders of `integrations` have the same parts, such as a configuration, a quantizer and what registers
    them: these are one thing, for one library each, and a reader who knows one knows the other by its name.
    """
    parts = path.relative_to(SOURCE).parts
    return parts[:-1] if parts[0] == "integrations" else ()


def test_no_two_modules_have_one_name() -> None:
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path in MODULES:
        found.setdefault((path.stem, scope(path)), []).append(str(path.relative_to(SOURCE)))
    assert len(found) > 250
    assert not [paths for paths in found.values() if len(paths) > 1]
    outside = {name for name, where in found if not where}
    assert not [name for name, where in found if where and name in outside]


def test_no_two_classes_have_one_name() -> None:
    """But those for one library each, which are one thing: `TpdeConfig` is in the `config` of each."""
    found: dict[str, list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        for it in ast.parse(path.read_text("utf-8")).body:
            if isinstance(it, ast.ClassDef) and not it.name.startswith("_"):
                found.setdefault(it.name, []).append(path)
    assert len(found) > 200
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    parts = {name: {(scope(path)[:1], path.name) for path in paths} for name, paths in several.items()}
    assert parts == {"TpdeConfig": {(("integrations",), "config.py")}}


def lines_in(*folders: Path) -> dict[str, int]:
    """How many lines each Python file has, but those of hidden folders."""
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines())
        for folder in folders
        for path in folder.rglob("*.py")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def test_no_module_is_long() -> None:
    lines = lines_in(SOURCE)
    assert {path for path, count in lines.items() if count > LINES} == LONG
    assert statistics.median(lines.values()) <= 200


def test_no_file_is_long() -> None:
    """Nor one of tests, benchmarks, examples and documentation."""
    lines = lines_in(*(ROOT / name for name in FOLDERS))
    assert len(lines) > 700
    assert {path for path, count in lines.items() if count > LINES} == LONG
    assert statistics.median(lines.values()) <= 200
