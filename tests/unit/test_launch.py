"""Launches: what they put on a device, which stream they go to, what they report. Kernels are simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.kernels import Card, memory

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.errors import Corrupt  # noqa: E402
from tpde.weights import launch as launches  # noqa: E402
from tpde.weights.launch import Damage, Launch, on_device  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> Card:
    return Card(monkeypatch, launch_on)


class Work:
    """Notes how it is launched, and what it finds at the addresses; reports what it is told to."""

    def __init__(self, name: bytes, report: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        self.descriptors = np.frombuffer(name, np.uint8)
        self.report, self.given = report, list[Any]()

    def launch(self, descriptors: int, status: int, stream: int, *rest: Any, **named: Any) -> str:
        assert descriptors % 16 == 0
        assert status % 16 == 0
        found = memory(descriptors, self.descriptors.size).tobytes()
        self.given.append((found, stream, rest, named))
        if any(self.report):
            memory(status, 16).view("<u4")[:] = self.report
        return found.decode()


def reports(count: int) -> torch.Tensor:
    """Stand in for page-locked memory."""
    return torch.zeros(count, 4, dtype=torch.int32)


@pytest.mark.parametrize("locked", [False, True])
def test_works_share_one_copy_and_report_side_by_side(locked: bool, card: Card) -> None:
    works = [Work(b"one"), Work(b"", (1, 0, 7, 0)), Work(b"a longer list of things", (1, 2, 5, 3))]
    there = Launch(works, card, reports(3) if locked else None)
    assert card.uploads == 1
    assert [there(number, 10, b=number) for number in (2, 0, 1)] == ["a longer list of things", "one", ""]
    assert works[0].given == [(b"one", 70, (10,), {"b": 0})]
    assert card.uploads == 1
    assert there.damage() == Damage(1, 0, 7)
    assert there.damage() == Damage(2, 2, 3 << 32 | 5)
    assert there.damage() is None


def test_a_launch_of_nothing(card: Card) -> None:
    assert Launch[..., None]([], card, reports(0)).damage() is None
    assert Launch[..., None]([], card).damage() is None


def test_the_other_device_is_current_meanwhile(card: Card) -> None:
    seen = []
    work = SimpleNamespace(descriptors=np.zeros(0, np.uint8), launch=lambda *_: seen.append(card.current))
    there = Launch([work], card)
    card.current = 3
    there(0)
    assert (seen, card.current) == ([0], 3)


@pytest.mark.parametrize("locked", [False, True])
def test_a_report_that_is_being_written_is_not_read(locked: bool, card: Card) -> None:
    """A kernel puts it into memory that the host may look at meanwhile."""
    work = Work(b"", (2, 0, 7, 0))
    there = Launch([work], card, reports(1) if locked else None)
    there(0)
    there.report(["w"])
    assert there._reports.tolist() == [[2, 0, 7, 0]]
    work.report = (1, 0, 7, 0)
    there(0)
    with pytest.raises(Corrupt, match="`w`, chunk 7: its checksum does not match") as caught:
        there.report(["w"])
    assert (caught.value.tensor, caught.value.chunk) == ("w", 7)
    assert there._reports.tolist() == [[0, 0, 0, 0]]
    there.report(["w"])


def test_the_device_is_made_current_if_it_is_not(card: Card) -> None:
    seen = []
    for current in (0, 3):
        card.current = current
        with on_device(torch.device("cuda", 0)):
            seen.append(card.current if current else 0)
        assert card.current == current
    assert [str(it) for it in seen] == ["0", "cuda:0"]


def test_reports_that_nobody_waits_for_are_in_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made.append((args, kwargs)))
    launches.locked_reports(3)
    assert made == [(((3, 4),), {"dtype": torch.int32, "device": "cpu", "pin_memory": True})]


def test_what_is_put_on_a_device_has_an_address() -> None:
    for size in (0, 1, 16, 17):
        data = np.arange(size, dtype=np.uint8)
        made = launches.upload(data, torch.device("cpu"))
        assert made.numel() == max(size, 16)
        assert made[:size].tolist() == data.tolist()
        assert not made[size:].any()
