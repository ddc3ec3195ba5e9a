"""The writer refuses misuse, commits once, and leaves no trace where it does not end well."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contents import fill, spec_of

from tpde.errors import DestinationExists, InvalidDestination
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

SPEC = spec_of("BF16", 20_000)


class _Sink(BytesSink):
    """Notes what becomes of it."""

    ended = ""

    def commit(self) -> None:
        self.ended += "commit "

    def abort(self) -> None:
        self.ended += "abort "


def test_a_sink_is_committed_once_or_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = _Sink()
    with FileWriter(sink, {"w": SPEC}) as writer:
        writer.write("w", fill("normal", SPEC))
    assert sink.ended == "commit "
    for error in (OSError, KeyboardInterrupt, MemoryError):
        sink = _Sink()

        def fail(error: type[BaseException] = error) -> None:
            raise error

        writer = FileWriter(sink, {"w": SPEC})
        writer.write("w", fill("normal", SPEC))
        monkeypatch.setattr(sink, "commit", fail)
        with pytest.raises(error):
            writer.close()
        assert sink.ended == "abort "


def test_a_file_goes_even_if_its_thread_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FileWriter(tmp_path / "x", {"w": SPEC}, threads=2)
    pools: list[Executor] = []

    def fail(pool: Executor, *_: Any, **__: Any) -> None:
        pools.append(pool)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", fail)
        with pytest.raises(KeyboardInterrupt):
            writer.abort()
    (pool,) = pools
    pool.shutdown()
    assert list(tmp_path.iterdir()) == []


def _misuse(error: type[Exception], match: str, *writes: tuple[str, int], **options: object) -> None:
    sink = BytesSink()
    specs = {"a": TensorSpec("U8", (10,)), "b": TensorSpec("U8", (10,))}

    def write_all() -> None:
        with FileWriter(sink, specs, **options) as writer:
            for name, size in writes:
                writer.write(name, bytes(size))

    with pytest.raises(error, match=match):
        write_all()
    assert not sink.data


def test_misuse_is_refused_and_leaves_nothing() -> None:
    _misuse(KeyError, "`c` was not announced", ("c", 1))
    _misuse(ValueError, "has 10 bytes, 11 were given", ("a", 11))
    _misuse(ValueError, "has 10 bytes, 12 were given", ("a", 9), ("a", 3))
    _misuse(ValueError, "complete it before `b` begins", ("a", 9), ("b", 10))
    _misuse(ValueError, "was written already", ("a", 10), ("a", 1))
    _misuse(ValueError, "is not complete", ("a", 10))
    _misuse(ValueError, "is not complete", ("a", 10), ("b", 9))
    _misuse(ValueError, "at least 1", threads=0)
    _misuse(ValueError, "no codec `lzma`", codec="lzma")


def test_places_where_no_file_can_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"theirs")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DestinationExists, match="taken"):
        FileWriter(tmp_path / "taken", {"w": SPEC})
    for name in ("folder", "none/x", "taken/x"):
        for force in (False, True):
            with pytest.raises(InvalidDestination):
                FileWriter(tmp_path / name, {"w": SPEC}, force=force)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "taken").read_bytes() == b"theirs"


@pytest.mark.parametrize("how", ["abort", "exception", "incomplete"])
def test_a_writer_that_does_not_end_well_leaves_no_trace(how: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"before")
    writer = FileWriter(tmp_path / "x", {"w": SPEC}, force=True)
    writer.write("w", fill("normal", SPEC)[:-1])
    if how == "abort":
        writer.abort()
    elif how == "exception":
        with pytest.raises(ValueError, match="complete it before `other`"), writer:
            writer.write("other", b"")
    else:
        with pytest.raises(ValueError, match="is not complete"):
            writer.close()
    assert (tmp_path / "x").read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("piece", [1 << 20, 16])
def test_a_writer_that_failed_is_given_up(
    threads: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on after a full disk gets no file, even if there is room again."""
    path, spec = tmp_path / "x", TensorSpec("U8", (piece,))
    path.write_bytes(b"before")
    names = [f"{i:06}" for i in range(max(2, (256 << 10) // piece))]
    writer = FileWriter(path, dict.fromkeys(names, spec), force=True, threads=threads)
    data = np.random.default_rng(0).integers(0, 256, piece, np.uint8)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="No space left"):  # noqa: PT012 - some are gathered
            for name in names:
                writer.write(name, data)
    assert list(tmp_path.iterdir()) == [path]
    for _ in range(2):
        with pytest.raises(InvalidDestination, match=r"x` was given up when a write failed .*No space left"):
            writer.write(names[0], data)
        with pytest.raises(InvalidDestination, match="write all of it anew") as caught:
            writer.close()
    assert caught.value.where == str(path)
    assert isinstance(caught.value.__cause__, OSError)
    writer.abort()
    assert path.read_bytes() == b"before"


def test_blobs_that_cannot_be_written_are_given_up() -> None:
    sink = _Sink()
    with FileWriter(sink, {"w": SPEC}) as made:
        made.write("w", fill("normal", SPEC))
    entry = PackedFile(bytes(sink.data)).container
    (place,) = entry.places(entry.entries)
    blob = np.frombuffer(bytes(sink.data), np.uint8)[place[0] : sum(place)]
    failing = _Sink()
    writer = FileWriter(failing, {"w": SPEC})

    def full(*_: Any) -> None:
        raise MemoryError

    failing.write = full  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        writer.write_blob("w", blob)
    assert failing.ended == "abort "
    with pytest.raises(InvalidDestination, match=r"given up when a write failed \(MemoryError\)"):
        writer.write_blob("w", blob)
    with pytest.raises(InvalidDestination, match="given up"):
        writer.close()


def test_what_is_refused_may_be_given_right() -> None:
    """Nothing of it was written."""
    sink = BytesSink()
    with FileWriter(sink, {"w": SPEC}) as writer:
        data = fill("normal", SPEC)
        writer.write("w", data[:100])
        with pytest.raises(ValueError, match="were given"):
            writer.write("w", data)
        with pytest.raises(ValueError, match="complete it before"):
            writer.write("v", data)
        writer.write("w", data[100:])
    assert bytes(PackedFile(bytes(sink.data)).read("w", 1)) == bytes(data)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_writer_that_nobody_ends_leaves_no_trace(threads: int, tmp_path: Path) -> None:
    descriptors = len(os.listdir("/dev/fd"))
    writer = FileWriter(tmp_path / "x", {"w": SPEC}, threads=threads)
    writer.write("w", fill("normal", SPEC)[:-1])
    assert len(list(tmp_path.iterdir())) == 1
    del writer
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == descriptors


_ENDS = """
import gc, os, sys
from tpde import PackedWriter, TensorSpec
writer = PackedWriter(sys.argv[1] + "/x", {"w": TensorSpec("U8", (1 << 20,))})
writer.write("w", bytes(1000))
child = os.fork()
if not child:
    del writer
    gc.collect()
    sys.exit()
os.waitpid(child, 0)
print(len(os.listdir(sys.argv[1])))
if sys.argv[2] == "closed":
    writer.write("w", bytes((1 << 20) - 1000))
    writer.close()
"""


@pytest.mark.parametrize(("how", "left"), [("open", []), ("closed", ["x"])])
def test_a_process_that_ends_leaves_no_trace(how: str, left: list[str], tmp_path: Path) -> None:
    """But one that is forked leaves its parent's file."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ENDS, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert os.listdir(tmp_path) == left
