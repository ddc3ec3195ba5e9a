"""Pages are there when they are wanted: those of files, and new ones before they are read to."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpde.codec import native
from tpde.errors import NativeError
from tpde.host.arena import Arena, ArenaPart, fill
from tpde.host.ranges import PAGE, Range

SIZE = 16 << 20
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="counts faults of a thread, as Linux tells them"
)


def faults() -> int:
    """Of this thread, so far, for pages that were in memory."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_pages_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    handle = os.open(path, os.O_RDWR)
    made = [mmap.mmap(handle, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) for _ in range(2)]
    found = []
    for i, it in enumerate(made):
        data = np.frombuffer(it, np.uint8)
        if i:
            code = native.populate(data.ctypes.data, SIZE)
            if code == errno.EINVAL:
                pytest.skip("MADV_POPULATE_READ is of Linux 5.14")
            assert code == 0
        before = faults()
        assert data[::PAGE].sum() == 0
        found.append(faults() - before)
    assert 2 * found[1] < found[0], "what is left are the interpreter's own"
    os.truncate(path, SIZE // 2 + 1)
    assert native.populate(data.ctypes.data, SIZE // 2 + PAGE) == 0, "to the end of the page"
    assert native.populate(data.ctypes.data, SIZE) == errno.EFAULT
    os.close(handle)
    del data
    for it in made:
        it.close()


def test_new_pages_are_touched_before_they_are_read_to() -> None:
    """Faults of `read` would hold up whoever maps memory meanwhile."""
    content = bytes(range(256)) * (SIZE // 256)
    found: list[int] = []

    class Counting:
        name = "counting"

        def read_into(self, offset: int, room: memoryview) -> None:
            before = faults()
            room[:] = content
            found.append(faults() - before)

    arena, source = Arena(SIZE), Counting()
    of: Any = Range(source, 0, SIZE)  # type: ignore[arg-type]
    fill(arena, ArenaPart(of, 0, 0, SIZE))
    assert arena.view == content
    other = Arena(SIZE)
    source.read_into(0, other.view)
    assert found[0] < found[1], "one for each page, huge or not, is what the other takes"
    arena.close()
    other.close()


def flags(address: int) -> list[str]:
    """What the system says of the memory at an address: two letters each."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            begin, end = (int(it, 16) for it in head[0].split("-"))
            found = begin <= address < end
        elif found and head[0] == "VmFlags:":
            return head[1:]
    raise AssertionError("nothing is there")


def test_an_arena_is_of_huge_pages_and_not_for_processes_that_are_forked() -> None:
    """Those would copy pages that are locked."""
    arena = Arena(4 << 20)
    assert "dc" in flags(arena.address), "not copied"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags(arena.address)
    arena.close()


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_an_arena_has_whole_pages(size: int, pages: int) -> None:
    arena = Arena(size)
    assert arena.size == len(arena.view) == pages * PAGE
    assert arena.address % PAGE == 0
    arena.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_core_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused by its number, whatever it lacks."""
    source, library = tmp_path / "old.c", tmp_path / "libold.so"
    source.write_text("int tpde_abi(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    old = ctypes.CDLL(str(library))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: old)
    with pytest.raises(NativeError, match="has ABI 1, this package needs"):
        native.core.__wrapped__()
