"""What a loss of power may leave of a disk: POSIX keeps what was synced.

What a call did to names (an *entry*) is kept once one of its folders is synced, since a rename happens as a
whole; what it did to a file's bytes, size or mode (a *change*) once the file is. All else may be kept or not,
in any order, but what touches one name happens in its order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .disk import ROOT, Change, Disk, Entry, Event, Key, Node, Sync
from .operations import Picture


@dataclass
class Left:
    """What is on the disk after a loss of power."""

    names: dict[Key, int]
    nodes: dict[int, Node]

    def picture(self, name: str) -> Picture:
        """Everything at a name in the root."""
        found: Picture = {}
        if (ROOT, name) in self.names:
            self._draw(self.names[ROOT, name], ".", found)
        return found

    def _draw(self, number: int, name: str, found: Picture) -> None:
        node = self.nodes[number]
        content: object = None if node.kind == "folder" else node.data
        found[name] = node.kind, node.mode, os.fsdecode(node.data) if node.kind == "link" else content
        if node.kind == "folder":
            for it, inner in self.children(number):
                self._draw(inner, it if name == "." else f"{name}/{it}", found)

    def children(self, number: int) -> Iterator[tuple[str, int]]:
        """What is in a folder."""
        yield from ((it, inner) for (at, it), inner in self.names.items() if at == number)


def _kept(events: list[Event]) -> tuple[set[int], set[int]]:
    """Numbers of the events that must be there, and of those that may be: all but syncs."""
    synced: set[int] = set()
    must, may = set(), set()
    for number in range(len(events) - 1, -1, -1):
        event = events[number]
        if isinstance(event, Sync):
            synced.add(event.node)
        elif isinstance(event, Change):
            (must if event.node in synced else may).add(number)
        else:
            (must if any(at in synced for at, _ in event.names) else may).add(number)
    return must, may


def _closed(events: list[Event], chosen: set[int]) -> set[int]:
    """With these, everything that happened before to the same names, or in a folder that is removed."""
    found = set(chosen)
    wanted: set[Key] = set()
    emptied: set[int] = set()
    gone: dict[int, list[int]] = {}
    names: dict[Key, int] = {}
    for number, event in enumerate(events):  # which folder each removed name was
        if isinstance(event, Entry):
            for key, node in event.names.items():
                if node is not None:
                    names[key] = node
                elif key in names:
                    gone.setdefault(number, []).append(names[key])
    for number in range(len(events) - 1, -1, -1):
        event = events[number]
        if not isinstance(event, Entry):
            continue
        if number in found or any(key in wanted or key[0] in emptied for key in event.names):
            found.add(number)
            wanted.update(event.names)
            if len(event.names) == 1:
                emptied.update(gone.get(number, []))
    return found


def states(disk: Disk, draw: random.Random, per_moment: int) -> Iterator[tuple[int, Left]]:
    """What may be left after a loss of power at any moment, and how many events there were then.

    Of each moment all and nothing of what was not synced, and `per_moment` draws.
    """
    for end in range(len(disk.events) + 1):
        events = disk.events[:end]
        must, may = _kept(events)
        for number in range(2 + per_moment if may else 1):
            yield end, _left(disk, events, must, may, number, draw)


def _left(
    disk: Disk, events: list[Event], must: set[int], may: set[int], number: int, draw: random.Random
) -> Left:
    chosen = set(must)
    way = min(number, 2) if number < 2 else draw.choice((2, 2, 3, 4, 5))
    if way == 1:
        chosen |= may
    elif way == 2:  # any of them
        share = draw.choice((0.1, 0.5, 0.9))
        chosen |= {it for it in may if draw.random() < share}
    elif way == 3:  # in order, as journals do, but without bytes that were not synced
        last = draw.randrange(len(events) + 1)
        chosen |= {it for it in may if it < last and isinstance(events[it], Entry)}
    elif way == 4:  # all but one
        chosen |= may - {draw.choice(sorted(may))}
    elif way == 5:  # one alone
        chosen.add(draw.choice(sorted(may)))
    chosen = _closed(events, chosen)
    names = dict(disk.names)
    nodes: dict[int, Node] = {}
    touched = {it.node for it in events if isinstance(it, Change)}
    for key, node in disk.nodes.items():
        nodes[key] = Node(**vars(node)) if key in touched else node
    for it, event in enumerate(events):
        if it not in chosen:
            continue
        if isinstance(event, Change):
            torn = it in may and event.data is not None and draw.random() < 0.3
            _apply(
                nodes[event.node], event, draw.randrange(len(event.data) + 1) if torn and event.data else None
            )
        elif isinstance(event, Entry):
            for key, value in event.names.items():
                if value is None:
                    names.pop(key, None)
                else:
                    names[key] = value
    return Left(names, nodes)


def _apply(node: Node, change: Change, torn: int | None) -> None:
    if change.mode is not None:
        node.mode = change.mode
    if change.size is not None:
        node.data = node.data[: change.size].ljust(change.size, b"\0")
    if change.data is not None:
        data = change.data if torn is None else change.data[:torn]
        before = node.data.ljust(change.offset, b"\0")
        node.data = before[: change.offset] + data + before[change.offset + len(data) :]


def write_out(left: Left, folder: Path) -> dict[int, int]:
    """Write what is left into an empty folder; returns the new inodes by the old ones."""
    made: dict[int, int] = {}
    places: dict[int, Path] = {}

    def put(number: int, path: Path) -> None:
        node = left.nodes[number]
        if number in places and node.kind != "folder":
            os.link(places[number], path, follow_symlinks=False)
            return
        places[number] = path
        if node.kind == "folder":
            if path != folder:
                path.mkdir()
            for name, inner in left.children(number):
                put(inner, path / name)
            path.chmod(node.mode | 0o700)
        elif node.kind == "link":
            path.symlink_to(os.fsdecode(node.data))
        else:
            path.write_bytes(node.data)
            path.chmod(node.mode)
        if node.inode:
            made[node.inode] = path.lstat().st_ino
            if node.kind != "folder":
                os.utime(path, ns=(node.mtime, node.mtime), follow_symlinks=False)

    put(ROOT, folder)
    return made
