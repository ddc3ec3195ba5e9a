"""A destination appears whole or not at all, whatever fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import DestinationExists, InvalidDestination
from tpde.format import sink
from tpde.format.sink import BytesSink, FileSink
from tpde.packing.api import pack, unpack
from tpde.packing.writer import PackedWriter

SPEC = spec_of("BF16", 30_000)
DATA = fill("normal", SPEC)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_bytes({"w": (SPEC, DATA), "v": (SPEC, DATA)}))
    pack(path, folder / "packed.safetensors")
    return path


def _fail(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0, module: Any = os) -> None:
    """Let a system call fail as on a full disk, after some calls that do not."""
    real: Callable[..., Any] = getattr(module, name)
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize(
    ("call", "after"), [("pwritev", 0), ("pwritev", 1), ("pwritev", 2), ("fsync", 0), ("replace", 0)]
)
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("action", [pack, unpack])
def test_a_full_disk_leaves_what_was_there(
    call: str, after: int, exists: bool, action: Any, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    if exists:
        (out / "file").write_text("old")
    path = source if action is pack else source.with_name("packed.safetensors")
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with monkeypatch.context() as patch:
        if call == "replace" and not exists:
            _fail(patch, "rename_new", module=sink)
        else:
            _fail(patch, call, after)
        with pytest.raises(OSError, match="No space left"):
            action(path, out / "file", force=exists)
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [p.name for p in out.iterdir()] == (["file"] if exists else [])
    if exists:
        assert (out / "file").read_text() == "old"
        action(path, out / "file", force=True)
        assert (out / "file").stat().st_size > 3


def _write(path: Path, data: bytes, error: BaseException | None = None) -> None:
    with PackedWriter(path, {"w": SPEC}) as writer:
        writer.write("w", data)
        if error is not None:
            raise error


def test_an_exception_between_pieces_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError, match="mine"):
        _write(path, DATA[:1000], RuntimeError("mine"))
    with pytest.raises(KeyboardInterrupt):
        _write(path, DATA, KeyboardInterrupt())
    with pytest.raises(ValueError, match="not complete"):
        _write(path, DATA[:1000])
    assert not list(tmp_path.iterdir())


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with PackedWriter(path, {"w": SPEC}) as writer:
        writer.write("w", DATA)
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_what_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    sink = FileSink(path)
    sink.write(0, [b"mine"])
    path.write_text("theirs")
    with pytest.raises(DestinationExists):
        sink.commit()
    sink.abort()
    assert path.read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_destinations_that_cannot_be_say_why(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    with pytest.raises(DestinationExists, match=r"there.*--force"):
        FileSink(tmp_path / "there")
    with pytest.raises(InvalidDestination, match="is a folder"):
        FileSink(tmp_path, force=True)
    with pytest.raises(InvalidDestination, match="create the folder first"):
        FileSink(tmp_path / "no" / "file")
    with pytest.raises(InvalidDestination):
        FileSink(tmp_path / "there" / "file")


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
    real = os.pwritev

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        first = next(memoryview(b) for b in buffers if len(b))
        return real(fd, [first[:7]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    sink = FileSink(tmp_path / "x")
    sink.write(0, [bytes(range(100)), bytes(range(100, 200))])
    sink.commit()
    assert (tmp_path / "x").read_bytes() == bytes(range(200))
