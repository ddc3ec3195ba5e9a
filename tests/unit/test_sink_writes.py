"""Bytes are where they were written, in a file or in memory, in any order, however little a call takes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpde.io.sinks import BytesSink, FileSink, ValueSink


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_writes_may_come_in_any_order_and_number(kind: str, tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "x") if kind == "file" else BytesSink()
    sink.write(5, [b"", b"fg", bytearray(b"h"), memoryview(b"ij")])
    sink.write(0, [bytes([97 + i]) for i in range(5)])
    sink.write(12, [b"m"])
    sink.write(20, [bytes([i % 256]) for i in range(3000)])  # more buffers than one call takes
    sink.write(3, [])
    sink.commit()
    found = (tmp_path / "x").read_bytes() if isinstance(sink, FileSink) else bytes(sink.data)
    assert found == b"abcdefghij\0\0m".ljust(20, b"\0") + bytes(i % 256 for i in range(3000))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, []

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(offset)
        assert len(calls) <= 30  # of 200 bytes
        first = next(memoryview(b) for b in buffers if len(b))
        return real(fd, [first[:7]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    sink = FileSink(tmp_path / "x")
    sink.write(0, [bytes(range(100)), bytes(range(100, 200))])
    sink.commit()
    assert (tmp_path / "x").read_bytes() == bytes(range(200))


def test_writing_goes_on_where_the_last_call_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, offsets = os.pwritev, []

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        offsets.append(offset)
        assert 0 < len(buffers) <= 512
        return real(fd, buffers[:2], offset)

    monkeypatch.setattr(os, "pwritev", short)
    made = FileSink(tmp_path / "x")
    made.write(10, [b"ab", b"", b"cd", b"ef", b"gh", b"i"])
    made.write(30, [b"", b""])  # nothing: the system is not asked
    made.commit()
    assert offsets == [10, 14, 18]
    assert (tmp_path / "x").read_bytes() == bytes(10) + b"abcdefghi"


def test_a_system_that_writes_nothing_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def nothing(*_: Any) -> int:
        assert len(asked) < 10
        asked.append(0)
        return 0

    monkeypatch.setattr(os, "pwritev", nothing)
    made = FileSink(tmp_path / "x")
    with pytest.raises(OSError, match="writing failed at byte 7: the system writes nothing") as caught:
        made.write(7, [b"abc"])
    assert caught.value.errno == errno.EIO
    made.abort()
    assert not list(tmp_path.iterdir())


# ---- bytes in memory


def test_what_is_skipped_is_zero_whatever_was_in_the_buffer() -> None:
    for capacity in (4, 64):
        made = BytesSink(buffer=np.full(capacity, 7, np.uint8))
        made.write(3, [b"ab"])
        made.write(9, [b"c"])
        made.write(1, [b"x"])
        assert bytes(made.data) == b"\0x\0ab\0\0\0\0c"
        made.abort()
        assert bytes(made.data) == b""


def test_a_buffer_grows_by_as_much_as_is_skipped() -> None:
    made = BytesSink(4)
    made.write(1000, [b"x" * 500])
    assert bytes(made.data) == bytes(1000) + b"x" * 500


def test_a_buffer_that_is_large_enough_is_kept() -> None:
    buffer = np.zeros(10, np.uint8)
    made = BytesSink(buffer=buffer)
    room = made.room(2, 8)
    assert room.size == 8
    room[:] = 5
    made.write(2, [room])  # was written there directly
    assert bytes(made.data) == b"\0\0" + b"\5" * 8
    assert np.shares_memory(np.frombuffer(made.data, np.uint8), buffer)
    made.write(10, [b"y"])
    assert bytes(made.data) == b"\0\0" + b"\5" * 8 + b"y"
    assert not np.shares_memory(np.frombuffer(made.data, np.uint8), buffer)


def test_growing_doubles_so_that_few_copies_are_made() -> None:
    made, grown = BytesSink(8), set()
    for at in range(4096):
        made.write(at, [bytes([at % 251])])
        grown.add(made.data.obj.size)  # type: ignore[attr-defined]
    assert bytes(made.data) == bytes(at % 251 for at in range(4096))
    assert len(grown) <= 11


def test_values_grow_and_are_not_copied_again() -> None:
    sink, first = ValueSink(), np.arange(5, dtype=np.uint8)
    sink.write(8, [first, b"", memoryview(b"xyz")])
    first[0] = 9  # it has been taken
    sink.write(0, [b"0123"])
    assert sink.room(3, 4) is None
    sink.commit()
    assert sink.value() == b"0123" + bytes(4) + bytes(range(5)) + b"xyz"
    sink.abort()
    assert sink.value() == b""
