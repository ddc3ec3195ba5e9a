"""Losses of power at any moment: what was not synced may be gone; there is the old or the new, complete."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .crash_states import Left, states, write_out
from .disk import Disk, Replay, disk_of
from .field import TEMPORARY, Field, Finding
from .kills import arming_of, at_changes
from .operations import OPERATIONS, PLACE, THERE, Picture, picture
from .server import NEXT_RUN, Outcome
from .shim import Arming

PER_MOMENT = 6  # draws of what is kept, besides all and nothing
_RECOVERED = 0.01  # share of the states in which the next run is tried


def cases(field: Field) -> Iterator[str]:
    """Every operation, undisturbed, and interrupted or killed at any change; then, what sets it right."""
    yield from OPERATIONS
    yield from (it for it in at_changes(field) if not it.endswith("SIGTERM"))


def _follow(field: Field, replay: Replay, name: str, arming: Arming) -> Outcome:
    for it in (field.log, Path(f"{field.log}.data")):
        it.unlink(missing_ok=True)
    replay.begin()
    outcome = field.run(name, arming, log=True)
    replay.follow(field.log.read_bytes(), Path(f"{field.log}.data").read_bytes())
    return outcome


def attack(field: Field, case: str, seed: int, tried: list[int]) -> list[Finding]:
    """Try a case; adds the number of states to `tried`."""
    draw = random.Random(f"{seed}:{case}")
    name = case.partition(":")[0]
    arming = Arming(flags=OPERATIONS[name].flags) if name == case else arming_of(case)[1]
    known = field.known(name)
    field.prepare(name)
    disk = disk_of(field.root / PLACE)
    replay = Replay(disk, field.root / PLACE)
    outcome = _follow(field, replay, name, arming)
    if outcome.how == "killed":
        _follow(field, replay, NEXT_RUN, Arming(flags=arming.flags))
    now = Left(replay.names, disk.nodes)
    assert {it for at, it in now.names if at == 0} == {it.name for it in (field.root / PLACE).iterdir()}
    found: dict[str, Finding] = {}
    number = 0
    for end, left in states(disk, draw, PER_MOMENT):
        number += 1
        there = _view(field, name, left)
        text = ""
        if there not in (known.old, known.new) and not (not there and not arming.flags):
            text = "neither old nor new"
        elif outcome.how == "done" and end == len(disk.events) and there != known.new:
            text = "it was done, and is not there"
        elif draw.random() < _RECOVERED or there not in (known.old, known.new):
            text = _recovered(field, name, left, arming.flags)
        if text:
            found.setdefault(text, Finding(case, f"{text} (after {_last(disk, end)})"))
    tried.append(number)
    return list(found.values())


def _view(field: Field, name: str, left: Left) -> Picture:
    """What an operation's destination is, as power left it."""
    view = OPERATIONS[name].view
    if view is picture:
        return left.picture(THERE)
    with tempfile.TemporaryDirectory(dir=field.root) as folder:
        write_out(left, Path(folder))
        return view(Path(folder) / THERE)


def _last(disk: Disk, end: int) -> str:
    """The last events before a moment, in a few words."""
    return f"event {end} of {len(disk.events)}: " + "; ".join(
        str(it)[:120] for it in disk.events[max(0, end - 3) : end]
    )


def _recovered(field: Field, name: str, left: Left, flags: bool) -> str:
    """What is wrong after the next run in a folder that is as power left it."""
    place, known = field.root / PLACE, field.known(name)
    shutil.rmtree(place)
    place.mkdir()
    inodes = write_out(left, place)
    for journal in place.glob(f".*{TEMPORARY}/journal"):  # which tells files by their inodes
        value = json.loads(journal.read_bytes())
        value["old"] = inodes.get(value["old"], 0)
        for identity in value["removable"].values():
            identity[0] = inodes.get(identity[0], 0)
        journal.write_text(json.dumps(value))
    outcome = field.run(NEXT_RUN, Arming(flags=flags))
    if outcome.how != "done":
        return f"the next run fails: {outcome.text}"
    found = field.view(name)
    if found not in (known.old, known.new):
        return "neither old nor new after the next run"
    return f"the next run leaves {field.left()[0].rpartition('.')[2]}" if field.left() else ""
