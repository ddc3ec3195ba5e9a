"""The list of mutants is as long as it should be, and none of them is stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.lists import AREAS, MUTANTS
from mutants.mutant import ROOT, Mutant, Stale
from mutants.runner import BROKEN, HUNG, KILLED, SURVIVED, result_of

LEAST = 150


def test_there_are_enough_of_every_kind() -> None:
    assert len(MUTANTS) >= LEAST
    assert len(AREAS["core"]) >= 17
    assert len({it.name for it in MUTANTS}) == len(MUTANTS)
    assert len({(it.file, it.old, it.new) for it in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda it: it.name)
def test_no_mutant_is_stale(mutant: Mutant) -> None:
    """Its old text is in its file once, it changes something, and its tests are there."""
    assert mutant.changed(ROOT) != (ROOT / mutant.path).read_text(encoding="utf-8")
    assert mutant.breaks
    assert mutant.tests
    mutant.require_tests(ROOT)
    if mutant.path.endswith(".py"):
        compile(mutant.changed(ROOT), mutant.path, "exec")


def test_stale_mutants_are_refused(tmp_path: Path) -> None:
    (tmp_path / "src" / "tpde").mkdir(parents=True)
    (tmp_path / "src" / "tpde" / "some.py").write_text("x = 1\ny = 1\n")
    with pytest.raises(Stale, match="occurs 0 times"):
        Mutant("gone", "some.py", "z = 1", "z = 2", "", ()).changed(tmp_path)
    with pytest.raises(Stale, match="occurs 2 times"):
        Mutant("twice", "some.py", "= 1", "= 2", "", ()).changed(tmp_path)
    with pytest.raises(Stale, match=r"there is no `unit/test_none\.py`"):
        Mutant("untested", "some.py", "x", "y", "", ("unit/test_none.py",)).require_tests(tmp_path)


@pytest.mark.parametrize(
    ("code", "log", "result"),
    [
        (0, "", SURVIVED),
        (1, "FAILED tests/unit/test_some.py::test_it - assert 1 == 2", KILLED),
        (2, "ERROR tests/unit/test_some.py - ImportError", KILLED),
        (-11, "", KILLED),
        (None, "", HUNG),
        (1, "Timeout (0:02:00)!", HUNG),
        (4, "ImportError while loading conftest", BROKEN),
        (1, "pytest.PytestAssertRewriteWarning", BROKEN),
        (90, "tpde comes from elsewhere", BROKEN),
    ],
)
def test_what_a_run_comes_to(code: int | None, log: str, result: str) -> None:
    """What kills a mutant is a test that fails, or a crash; not a pytest that cannot run."""
    assert result_of(code, log) == result
