"""Host memory that is allocated or mapped is unlocked and given back, whatever happens."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from support.locking import FakeLock

from tpde.host.arena import Arena
from tpde.host.disk import ReadAhead
from tpde.host.mapped import Mapping
from tpde.host.page_lock import Refused
from tpde.host.ranges import PAGE, Range
from tpde.io.sources import BytesSource, Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """What is mapped from now on."""
    made: list[mmap.mmap] = []

    class Map(mmap.mmap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)

    monkeypatch.setattr(mmap, "mmap", Map)
    return made


def test_an_arena_is_given_back_where_locking_is_interrupted(maps: list[mmap.mmap]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fake = FakeLock()
    fake.first = interrupt
    with pytest.raises(KeyboardInterrupt):
        ReadAhead(2, 4096, 1, fake)
    assert [it.closed for it in maps] == [True]


def test_an_arena_unlocks_what_it_has_locked() -> None:
    fake, made = FakeLock(), Arena(8 * PAGE)
    made.lock(fake, 0, PAGE)
    made.lock(fake, PAGE, 2 * PAGE)
    assert len(fake.locked) == 2
    made.close()
    assert not fake.locked


def test_an_arena_outlives_the_copies_from_it(tmp_path: Path, maps: list[mmap.mmap]) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 << 10))
    source, synchronized = FileSource(path), list[bool]()

    class Copying:
        def synchronize(self) -> None:
            synchronized.append(maps[0].closed)

    ahead = ReadAhead(1, 64 << 10, 1, None)
    ticket = ahead.request(Extent(source, 0, 64 << 10, "x"))
    ticket.wait()
    ticket.copied(Copying())
    ahead.close()
    assert synchronized == [False]
    assert maps[0].closed
    source.close()


def test_what_was_mapped_is_unmapped_where_the_next_file_cannot_be(
    tmp_path: Path, maps: list[mmap.mmap]
) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    source = FileSource(tmp_path / "file")
    with pytest.raises(Refused, match="`bytes` is not a file"):
        Mapping([Range(source, 0, 8192), Range(BytesSource(bytes(10), "bytes"), 0, 10)], FakeLock())
    assert [it.closed for it in maps] == [True]
    source.close()
