"""A few seconds of the campaign, with a fixed seed; `make attack SECONDS=...` goes on with others."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack import calls, kills, mutants, power, shim
from attack.campaign import KINDS, run
from attack.crash_states import states
from attack.disk import ROOT, Change, Disk, Entry, Event, Node, Sync
from attack.field import Field
from attack.server import Server
from attack.shim import FAIL, Arming

pytestmark = pytest.mark.skipif(shim.missing() is not None, reason=str(shim.missing()))


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """Give a place where operations are attacked."""
    with Server(tmp_path) as server:
        yield Field(tmp_path / "field", server)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_seconds_of_the_campaign_find_nothing(kind: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    tally = run(kind, tmp_path / "folder", tmp_path / "keep", seed=22, seconds=3)
    assert tally.findings == []
    assert tally.tried > 3


# ---- what it found


@pytest.mark.parametrize("name", ["pack-folder-force-renames", "unpack-folder-force-renames"])
def test_the_old_folder_is_never_moved_into_one_that_may_be_lost(name: str, field: Field) -> None:
    assert power.attack(field, name, 1, []) == []


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_the_old_folder_is_kept_until_the_exchange_is_on_the_disk(how: str, field: Field) -> None:
    name = "pack-folder-force"
    calls_of = field.known(name).changes
    exchange = calls_of.index("renameat2", calls_of.index("rename")) + 1  # behind that of the journal
    assert power.attack(field, f"{name}:{exchange}:after:{how}", 1, []) == []


@pytest.mark.parametrize("call", ["stat", "opendir", "readdir"])
def test_a_disk_that_fails_is_no_reason_to_leave_a_file_out(call: str, field: Field) -> None:
    """A file that may not be read is left out and named; an error of the disk ends the packing."""
    made = [i for i, it in enumerate(field.known("pack-folder").calls, 1) if it == call]
    assert made
    for number in made[:40]:
        assert calls.attack(field, f"pack-folder:{number}:EIO") == []


def test_a_folder_that_cannot_be_synced_keeps_the_old(field: Field) -> None:
    name = "pack-folder-force"
    made = [i for i, it in enumerate(field.known(name).calls, 1) if it == "fsync"]
    for number in made:
        field.prepare(name)
        outcome = field.run(name, Arming(FAIL, number, errno.EIO))
        assert outcome.how == "error", number
        assert "Input/output error" in outcome.text
        assert field.state(name) in ("old", "new")


# ---- that it finds


def test_calls_that_fail_are_noticed(field: Field) -> None:
    known = field.known("save")
    assert {"open", "pwrite", "fsync", "rename", "close"} <= {*known.calls}
    field.prepare("save")
    outcome = field.run("save", Arming(FAIL, known.calls.index("fsync") + 1, errno.ENOSPC))
    assert outcome.how == "error"
    assert "No space left" in outcome.text
    field.there.write_bytes(b"half of a file")
    assert ["neither old nor new" in it for it in field.problems("save", outcome)] == [True]


def test_kills_are_kills(field: Field) -> None:
    field.prepare("save")
    number = field.known("save").changes.index("fsync") + 1
    assert field.run("save", kills.arming_of(f"save:{number}:before:SIGKILL")[1]).how == "killed"
    assert len(field.left()) == 1
    assert field.run("save", kills.arming_of(f"save:{number}:before:SIGINT")[1]).how == "interrupted"
    assert field.left() == []  # that of the first one, too


def _lost(*events: Event) -> set[tuple[bytes | None, bytes | None]]:
    """What a loss of power may leave of two files in a folder, `new` made and written beside `old`."""
    nodes = {ROOT: Node("folder", 0o755), 1: Node("file", 0o644, b"old"), 2: Node("file", 0o644)}
    disk = Disk(nodes, {(ROOT, "old"): 1}, list(events))
    found = set()
    for _, left in states(disk, random.Random(1), 50):
        content = [
            left.nodes[left.names[ROOT, it]].data if (ROOT, it) in left.names else None
            for it in ("old", "new")
        ]
        found.add((content[0], content[1]))
    return found


def test_what_was_not_synced_may_be_lost() -> None:
    make, write = Entry({(ROOT, "new"): 2}), Change(2, 0, b"new!")
    rename = Entry({(ROOT, "old"): 2, (ROOT, "new"): None})
    careless = _lost(make, write, rename)
    assert {(b"", None), (b"new!", None), (b"old", None), (b"old", b"new!"), (b"old", b"")} <= careless
    assert any(it[0] in (b"n", b"ne", b"new") for it in careless)  # torn
    careful = _lost(make, write, Sync(2), rename, Sync(ROOT))
    assert (b"", None) not in careful
    assert {it[0] for it in careful} == {b"old", b"new!"}
    assert _lost(make, write, Sync(2), Sync(ROOT)) >= {(b"old", b"new!"), (b"old", None)}


def test_a_process_that_ends_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mutants._Workshop.try_one

    def ending(self: mutants._Workshop, seed: int, number: int) -> Iterator[str]:
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 5:
            yield f"{len(bytes(2 * mutants.MEMORY))} bytes were to be had"
        if number == 6:
            yield "this is wrong"
        yield from real(self, seed, number)

    monkeypatch.setattr(mutants._Workshop, "try_one", ending)
    (tmp_path / "folder").mkdir()
    tried, found = mutants.run(tmp_path / "folder", tmp_path / "keep", 1, range(8), 60)
    assert tried == 8
    assert [it.case for it in found] == ["3", "5", "6"]
    assert "code -11" in found[0].text
    assert "ended with code" in found[1].text
    assert "this is wrong" in found[2].text
    assert [it.name for it in (tmp_path / "keep").iterdir()] == ["mutant-6"]
