"""Extents are read whole, whatever their sizes and order, or refused with a reason."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.errors import OutOfMemory, Truncated  # noqa: E402
from tpde.format.source import FileSource  # noqa: E402
from tpde.integrations import reading  # noqa: E402
from tpde.integrations.reading import Extent, read_extents  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    """Give a file of random bytes."""
    path = tmp_path / "bytes"
    path.write_bytes(random.Random(1).randbytes(300_000))
    return FileSource(path)


def test_extents(source: FileSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 4096)
    data, draw = (tmp_path / "bytes").read_bytes(), random.Random(2)
    extents = []
    for _ in range(40):
        size = draw.choice([0, 1, 4095, 4096, 4097, 50_000])
        at = draw.randrange(300_000 - size)
        extents.append(Extent(source, at, size, "x"))
    for tensor, extent in zip(read_extents(extents, CPU), extents, strict=True):
        assert tensor.numpy().tobytes() == data[extent.offset : extent.offset + extent.size]
        assert tensor.untyped_storage().nbytes() == extent.size
    assert read_extents([], CPU) == []


def test_a_file_that_is_too_short(source: FileSource, tmp_path: Path) -> None:
    with pytest.raises(Truncated, match="`w` ends at 300001"):
        read_extents([Extent(source, 0, 300_001, "w")], CPU)
    (tmp_path / "bytes").write_bytes(b"gone")  # it shrinks while it is open
    with pytest.raises(Truncated, match="needed"):
        read_extents([Extent(source, 0, 300_000, "w")], CPU)


def test_what_is_complete_is_used_while_others_are_read(
    source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last group waits here until the first one was used."""
    monkeypatch.setattr(reading, "GROUP_BYTES", 100_000)
    used, numbers, real = threading.Event(), list[int](), FileSource.read_into

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        assert offset < 200_000 or used.wait(60), "the first group is not used while the last is read"
        real(source, offset, out)

    def use(number: int, tensor: Any) -> None:
        whole = torch.empty(100_000, dtype=torch.uint8)
        real(source, extents[number].offset, whole.numpy().data)
        assert torch.equal(tensor, whole)
        numbers.append(number)
        used.set()

    monkeypatch.setattr(FileSource, "read_into", read_into)
    extents = [Extent(source, at, 100_000, "x") for at in (200_000, 0, 100_000)]
    read_extents(extents, CPU, use)
    assert numbers == [1, 2, 0]


def test_after_a_failure_nobody_reads_the_rest(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share what is read; the one that fails goes on to what is wanted next."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)
    monkeypatch.setattr(reading, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(reading, "default_threads", lambda: 2)
    held, went_on, read = threading.Event(), threading.Event(), list[int]()

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        read.append(offset)
        if offset == 0:
            held.set()
            went_on.wait(20)
        elif offset == 1000:
            assert held.wait(60)
            raise OSError("it failed")
        elif offset >= 100_000:
            went_on.set()

    monkeypatch.setattr(FileSource, "read_into", read_into)
    with pytest.raises(OSError, match="it failed"):
        read_extents([Extent(source, at, 100_000, "x") for at in (0, 100_000)], CPU)
    assert sorted(it for it in read if it < 100_000) == [0, 1000]


def test_using_that_fails(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "GROUP_BYTES", 1)

    def use(number: int, tensor: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_extents([Extent(source, at, 1000, "x") for at in range(0, 300_000, 1000)], CPU, use)
    assert not [it for it in threading.enumerate() if it.name.startswith("tpde-read")]


def test_running_out_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    from tpde.integrations.transformers import memory

    monkeypatch.setattr(memory, "free_bytes", lambda _: 1 << 29)
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."
    with (
        pytest.raises(OutOfMemory, match=r"generating needs 2\.50 GiB more on cuda:0, 0\.50 GiB are free"),
        memory.explained(torch.device("cuda", 0), "generating"),
    ):
        raise torch.cuda.OutOfMemoryError(text)
