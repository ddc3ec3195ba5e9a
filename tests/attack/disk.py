"""A disk as a log of calls leaves it, and as a loss of power may leave it: POSIX keeps what was synced.

What a call did to names (an *entry*) is kept once one of its folders is synced, since a rename happens as a
whole; what it did to a file's bytes, size or mode (a *change*) once the file is. All else may be kept or not,
in any order, but what touches one name happens in its order.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .operations import Picture

_EXCHANGE = 2  # flag of renameat2
Key = tuple[int, str]  # a folder's number, and a name in it


@dataclass
class Node:
    """A file, folder or link."""

    kind: str
    mode: int
    data: bytes = b""  # of a link what it says
    inode: int = 0  # where it is from, 0 if it was made later
    mtime: int = 0


@dataclass(frozen=True)
class Entry:
    """What a call did to names: None where one went."""

    names: dict[Key, int | None]


@dataclass(frozen=True)
class Change:
    """What a call did to a node: bytes at an offset, or a new size, or a new mode."""

    node: int
    offset: int = 0
    data: bytes | None = None
    size: int | None = None
    mode: int | None = None


@dataclass(frozen=True)
class Sync:
    """A node is on the disk."""

    node: int


Event = Entry | Change | Sync


@dataclass
class Disk:
    """Nodes, names, and what happened to them.

    Attributes
    ----------
    nodes : dict of int to Node
        As they were in the beginning, or are made.
    names : dict of Key to int
        As they were in the beginning.
    events : list of Event
        What happened.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    names: dict[Key, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


ROOT = 0


def disk_of(folder: Path) -> Disk:
    """What is in a folder, all of it on the disk."""
    disk = Disk({ROOT: Node("folder", folder.stat().st_mode & 0o7777)})
    known: dict[int, int] = {}

    def add(at: int, here: Path) -> None:
        for it in sorted(here.iterdir()):
            info = it.lstat()
            number = known.setdefault(info.st_ino, len(disk.nodes))
            disk.names[at, it.name] = number
            if number in disk.nodes:
                continue
            node = Node("file", info.st_mode & 0o7777, b"", info.st_ino, info.st_mtime_ns)
            disk.nodes[number] = node
            if stat.S_ISLNK(info.st_mode):
                node.kind, node.data = "link", os.fsencode(os.readlink(it))
            elif stat.S_ISDIR(info.st_mode):
                node.kind = "folder"
                add(number, it)
            else:
                node.data = it.read_bytes()

    add(ROOT, folder)
    return disk


class Replay:
    """Follows a log of the shim from a disk's beginning on.

    Parameters
    ----------
    disk : Disk
        Whose events are filled.
    root : Path
        The folder that it is of.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk, self.root = disk, str(root)
        self.names = dict(disk.names)
        self.open: dict[int, int | None] = {}

    def node_of(self, path: str, at: int) -> int | None:
        """The node that a path names, which leads through no links."""
        key = self.key_of(path, at)
        if key is None:
            return ROOT if path.rstrip("/") == self.root else None
        return self.names.get(key)

    def key_of(self, path: str, at: int) -> Key | None:
        """Folder and name of a path; None outside of the root."""
        here: int | None
        if path.startswith("/"):
            if not path.startswith(f"{self.root}/"):
                return None
            parts, here = path[len(self.root) + 1 :].split("/"), ROOT
        else:
            parts, here = path.split("/"), self.open.get(at)
        for part in parts[:-1]:
            here = self.names.get((here, part)) if here is not None else None
        return (here, parts[-1]) if here is not None else None

    def begin(self) -> None:
        """A new process."""
        self.open = {}

    def entry(self, names: dict[Key, int | None]) -> None:
        """Note what happened to names."""
        for key, number in names.items():
            if number is None:
                self.names.pop(key, None)
            else:
                self.names[key] = number
        self.disk.events.append(Entry(names))

    def make(self, key: Key, node: Node) -> int:
        """A new node."""
        number = len(self.disk.nodes)
        self.disk.nodes[number] = node
        self.entry({key: number})
        return number

    def follow(self, log: bytes, data: bytes) -> None:
        """Follow a process's log; `data` are the bytes of its writes."""
        at = 0
        for line in log.decode().splitlines():
            if line.startswith("#"):
                continue
            call, *rest = line.split("\t")
            result, one, other, a, b = map(int, rest[:5])
            piece = b""
            if call == "write":
                piece, at = data[at : at + b], at + b
            self.step(call, result, one, other, a, b, piece, rest[5], rest[6])

    def step(
        self, call: str, result: int, one: int, other: int, a: int, b: int, piece: bytes, path: str, to: str
    ) -> None:
        """Follow a call."""
        node = self.open.get(one)
        if call == "open":
            self.opened(result, a, b, path, one)
        elif call == "close":
            self.open.pop(one, None)
        elif call == "dup":
            self.open[result] = node
        elif call in ("write", "ftruncate", "fchmod", "fsync"):
            if node is None:
                return
            event: Event = Sync(node)
            if call == "write":
                event = Change(node, a, piece)
            elif call != "fsync":
                event = Change(node, mode=a) if call == "fchmod" else Change(node, size=a)
            self.disk.events.append(event)
        elif call == "chmod":
            found = self.node_of(path, one)
            if found is not None:
                self.disk.events.append(Change(found, mode=a))
        elif call in ("rename", "renameat2", "link", "symlink"):
            self.moved(call, self.key_of(path, one), self.key_of(to, other), a, path)
        elif call in ("mkdir", "unlink", "rmdir"):
            key = self.key_of(path, one)
            if key is None:
                return
            if call == "mkdir":
                self.make(key, Node("folder", a))
            else:
                self.entry({key: None})

    def opened(self, descriptor: int, flags: int, mode: int, path: str, at: int) -> None:
        """Follow an `open`."""
        key, found = self.key_of(path, at), self.node_of(path, at)
        if found is None and key is not None and flags & os.O_CREAT:
            found = self.make(key, Node("file", mode))
        elif found is not None and flags & os.O_TRUNC:
            self.disk.events.append(Change(found, size=0))
        self.open[descriptor] = found

    def moved(self, call: str, here: Key | None, there: Key | None, flags: int, text: str) -> None:
        """Follow a call with two paths."""
        if there is None:
            return
        if call == "symlink":
            self.make(there, Node("link", 0o777, text.encode()))
            return
        if here is None:
            return
        names: dict[Key, int | None] = {there: self.names[here]}
        if call == "renameat2" and flags == _EXCHANGE:
            names[here] = self.names[there]
        elif call != "link":
            names[here] = None
        self.entry(names)


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
