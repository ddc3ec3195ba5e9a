"""What benchmarks count as memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from benchmarks.harness import memory

SIZE = 32 << 20


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps, which Linux has")
def test_private_pages_count_and_those_of_files_in_the_folder(tmp_path: Path) -> None:
    names = (tmp_path / "packed" / "a b.bin", tmp_path / "other.bin")
    names[0].parent.mkdir()
    maps = []
    for name in names:
        name.write_bytes(bytes(SIZE))
        with name.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    assert memory.mapped(names[0].parent) == 0
    resident = memory.Resident(names[0].parent)
    before = memory.said("VmRSS") - memory.said("RssFile")
    assert sum(it[at] for it in maps for at in range(0, SIZE, mmap.PAGESIZE)) == 0  # both are resident now
    assert memory.mapped(names[0].parent) == SIZE
    private = bytearray(b"x") * SIZE
    found = resident.close()
    assert -SIZE // 4 < found - (before + len(private) + SIZE) < SIZE // 4
    assert resident.all > found + SIZE // 2  # the other file, and libraries
    for it in maps:
        it.close()
