"""Garbage waits while a model is loaded, and is collected first where there is some that matters."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from support.garbage import uncollected

from tpde.loading.collection import collect_first, collecting_later


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """One entry for each collection; there is nothing to be collected first."""
    found: list[Any] = []
    assert gc.isenabled()
    with collecting_later():
        pass
    monkeypatch.setattr(gc, "collect", lambda: found.append(None))
    yield found
    assert gc.isenabled()


def test_once(passes: list[Any]) -> None:
    for expected in (0, 0):
        with collecting_later():
            assert len(passes) == expected
    collect_first()
    for expected in (1, 1):
        with collecting_later():
            assert len(passes) == expected
            assert not gc.isenabled()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_failure(error: type[BaseException], passes: list[Any]) -> None:
    """What was loaded so far may be in cycles, and would count against the next budget."""
    with pytest.raises(error), collecting_later():
        raise error
    assert not passes
    with collecting_later():
        assert len(passes) == 1


def test_not_where_the_user_has_switched_it_off(passes: list[Any]) -> None:
    collect_first()
    with uncollected():
        with collecting_later():
            assert not passes
        assert not gc.isenabled()
    with collecting_later():
        assert len(passes) == 1
