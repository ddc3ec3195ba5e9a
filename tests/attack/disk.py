"""A disk as a log of calls leaves it: its nodes, their names, and what happened to them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

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
